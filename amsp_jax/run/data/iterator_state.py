"""The state of an iterator as JSON text and back, without pickle: reading a checkpoint runs no code."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np

from amsp_jax.errors import UserError

_TUPLE, _BYTES, _ARRAY, _DICT = "tuple", "bytes", "ndarray", "dict"


def encode(state: Any, name: str) -> str:
    """Writes a state of JSON values, tuples, bytes and numpy arrays as one line.

    Args:
      state: the state.
      name: of the iterator, for the message.

    Raises:
      UserError: it holds something else.
    """
    try:
        return json.dumps(_plain(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"data=from_iterator({name}): its state cannot be saved: {error}. A state is made of JSON values, tuples, "
            "bytes and numpy arrays."
        ) from None


def decode(text: str) -> Any:
    """The state that `encode` wrote."""
    return _state(json.loads(text))


def _plain(value: Any) -> Any:
    # Lists stay; what JSON does not know is [kind, value] inside an object, so that no list is taken for it.
    if isinstance(value, np.generic):
        return _plain(np.asarray(value)) | {"scalar": True}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(x) for x in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(x) for x in value]}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        file = io.BytesIO()
        np.lib.format.write_array(file, value, allow_pickle=False)
        return {_ARRAY: base64.b64encode(file.getvalue()).decode()}
    if isinstance(value, dict):
        # Pairs, since keys may be numbers, which JSON would make texts.
        return {_DICT: [[_plain(key), _plain(x)] for key, x in value.items()]}
    raise TypeError(f"it holds a {type(value).__name__}")


def _state(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_state(x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    kind, value = next(iter(plain.items()))
    if kind == _TUPLE:
        return tuple(_state(x) for x in value)
    if kind == _BYTES:
        return base64.b64decode(value)
    if kind == _DICT:
        return {_state(key): _state(x) for key, x in value}
    array = np.lib.format.read_array(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
    return array[()] if plain.get("scalar") else array
