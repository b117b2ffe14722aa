"""What the processes of a run do in turn: process 0 first, and what it found is told to the others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from amsp_jax.errors import UserError
from amsp_jax.runtime.output import spelled

T = TypeVar("T")

# Collectives give up on a late process within a minute; tokenising a large corpus takes longer.
_PATIENCE_S = 2 * 60 * 60
_barriers = itertools.count()


def from_process_0(make: Callable[[], Any]) -> Any:
    """What `make` returns in process 0, a JSON value, in every process; the others wait and do not call it.

    Raises:
      UserError: in every process, where `make` raised it in process 0.
    """
    if jax.process_count() == 1:
        return make()
    # Imported here, so that a single process needs no orbax to start.
    from orbax.checkpoint import multihost

    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            answer = {"value": make()}
        except UserError as error:
            answer = {"error": str(error)}
    multihost.get_barrier_sync_fn()(key=f"amsp_jax {next(_barriers)}", timeout_ms=_PATIENCE_S * 1000)
    answer = json.loads(_broadcast(json.dumps(answer)))
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def process_0_first(make: Callable[[], T]) -> T:
    """Calls `make` in process 0 and then in all others at once: they find what it left in a cache.

    Raises:
      UserError: in every process, where `make` raised it in process 0.
    """
    made: list[T] = []
    from_process_0(lambda: made.append(make()))
    return made[0] if made else make()


def say(*lines: str) -> None:
    """Prints lines in process 0 alone."""
    if lines and jax.process_index() == 0:
        print(*map(spelled, lines), sep="\n", flush=True)


def add_up(devices: Sequence[jax.Device]) -> None:
    """A sum over all devices, which shows whether they reach one another; it returns when this process has it.

    Raises:
      UserError: the sum is wrong.
    """
    mesh = Mesh(np.array(devices), ("device",))
    each, everywhere = NamedSharding(mesh, P("device")), NamedSharding(mesh, P())
    ones = jax.make_array_from_callback((len(devices),), each, lambda index: np.ones(1, np.int32))
    total = int(jax.jit(jnp.sum, out_shardings=everywhere)(ones))
    if total != len(devices):
        raise UserError(
            f"the sum of ones over {len(devices)} devices is {total}. Check the driver and the network, one node at a "
            "time."
        )


def _broadcast(text: str) -> str:
    """Process 0's text; an array must have one length everywhere, so the length goes first."""
    data = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    own = data if jax.process_index() == 0 else np.zeros(length, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).astype(np.uint8).tobytes().decode()
