"""JSON values that the processes of a run exchange without a collective, as collectives are what may be broken."""

from __future__ import annotations

import json
import time
from typing import Any

import jax
from jax._src import distributed


class KeyValueStore:
    """Values by name and process, in the store that jax's coordinator keeps; a process alone reads its own."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._own: dict[str, str] = {}

    def put(self, name: str, value: Any) -> None:
        """Publishes a JSON value under this process's number."""
        text = json.dumps(value)
        self._own[name] = text
        if self.count > 1:
            self._client.key_value_set(self._key(name, self.index), text)

    def get(self, name: str, process: int, timeout_s: float) -> Any:
        """Returns the value that this process has put.

        Raises:
          TimeoutError: the process put nothing within `timeout_s`.
        """
        if process == self.index:
            return json.loads(self._own[name])
        try:
            text = self._client.blocking_key_value_get(self._key(name, process), max(int(1000 * timeout_s), 1))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(f"process {process} put no '{name}' within {timeout_s:.3g} s") from error
        return json.loads(text)

    def get_all(self, name: str, timeout_s: float) -> dict[int, Any]:
        """Returns the values by process; processes that put nothing are left out after `timeout_s` for all together."""
        deadline, found = time.monotonic() + timeout_s, {}
        for process in range(self.count):
            try:
                found[process] = self.get(name, process, deadline - time.monotonic())
            except TimeoutError:
                continue
        return found

    def wait_for_all(self, name: str, timeout_s: float) -> None:
        """Returns at about the same moment in every process.

        Raises:
          TimeoutError: not all came.
        """
        if self.count == 1:
            return
        try:
            self._client.wait_at_barrier(f"amsp_jax doctor {name}", int(1000 * timeout_s))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(f"not every process came to '{name}' within {timeout_s:g} s") from error

    @property
    def _client(self) -> Any:
        # jax has no public name for its key-value store.
        return distributed.global_state.client

    @staticmethod
    def _key(name: str, process: int) -> str:
        return f"amsp_jax doctor/{name}/{process}"
