"""The models that a config can name. A new one is a function from a config to a `Model`, and a line here."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.models.config import TransformerConfig
from amsp_jax.models.gpt import GPTConfig, gpt
from amsp_jax.models.llama import LlamaConfig, llama


@dataclasses.dataclass(frozen=True)
class Entry:
    """A named model: `build(config, name)` makes it."""

    build: Callable[[Any, str], Model]
    config: TransformerConfig


def _llama(num_layers: int, hidden: int, ffn: int, num_heads: int, **others: Any) -> Entry:
    sizes: dict[str, Any] = {"num_kv_heads": num_heads, "vocab_size": 32000, **others}
    return Entry(llama, LlamaConfig(num_layers=num_layers, hidden=hidden, ffn=ffn, num_heads=num_heads, **sizes))


def _gpt(num_layers: int, hidden: int, num_heads: int) -> Entry:
    sizes: dict[str, Any] = {"ffn": 4 * hidden, "vocab_size": 51200, "max_seq_len": 2048}
    return Entry(gpt, GPTConfig(num_layers=num_layers, hidden=hidden, num_heads=num_heads, **sizes))


MODELS: dict[str, Entry] = {
    "llama-tiny": _llama(4, 192, 512, 4, vocab_size=2048),
    "llama-125m": _llama(12, 768, 2560, 12, tied=True),
    "llama-1b": _llama(16, 2048, 8192, 16),
    "llama-7b": _llama(32, 4096, 11008, 32),
    "llama-13b": _llama(40, 5120, 13824, 40),
    # As in the AMSP paper (arXiv 2311.00257), whose 30B has 27.57B parameters.
    "llama-30b": _llama(60, 6144, 16384, 48),
    "llama-65b": _llama(80, 8192, 22016, 64),
    # The three of "Optimizing Distributed Training on Frontier", arXiv 2312.12705.
    "gpt-22b": _gpt(48, 6144, 48),
    "gpt-175b": _gpt(96, 12288, 96),
    "gpt-1t": _gpt(128, 25600, 128),
}


def model_config(name: str, overrides: Mapping[str, Any] | None = None) -> TransformerConfig:
    """The configuration of a named model with some fields replaced.

    Raises:
      UserError: no such model or field, a value of the wrong type, or sizes that do not divide.
    """
    if name not in MODELS:
        raise UserError(f"model={name!r} is not known. {_suggest(name, MODELS)}")
    config = MODELS[name].config
    fields = [field.name for field in dataclasses.fields(config)]
    for key in overrides or {}:
        if key not in fields:
            raise UserError(f"{name} has no setting {key!r}. {_suggest(key, fields)}")
    return dataclasses.replace(config, **(overrides or {}))


def build_model(name: str, overrides: Mapping[str, Any] | None = None, **runtime: Any) -> Model:
    """A named model.

    Args:
      name: a key of `MODELS`.
      overrides: fields of its configuration that the user replaces.
      runtime: fields that the program sets (`attention="cudnn"`); an override of the same field wins.

    Raises:
      UserError: as `model_config`.

    Example:
      >>> build_model("llama-7b", {"num_layers": 8}, attention="xla").numbers.num_layers
      8
    """
    config = model_config(name, {**runtime, **(overrides or {})})
    return MODELS[name].build(config, name)


def _suggest(word: object, choices: Iterable[str]) -> str:
    """The nearest choice, and all of them."""
    choices = list(choices)
    nearest = difflib.get_close_matches(str(word), choices, n=1)
    hint = f"Did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}Choose one of: {', '.join(choices)}."
