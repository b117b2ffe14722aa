"""Nodes and devices as they will be, worked out before any device exists."""

from __future__ import annotations

import dataclasses

from amsp_jax.errors import UserError
from amsp_jax.runtime.launch.rendezvous import Facts

MOST_SIMULATED = 1024
"""Simulated devices of a run: a host runs out of threads and memory soon after."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Nodes of equal size, and the node, among the real ones, that each process belongs to."""

    num_nodes: int
    devices_per_node: int
    node_of_process: tuple[int, ...]


def simulated_share(simulated: tuple[int, int], num_processes: int) -> int:
    """How many of `simulated` nodes x devices each process has.

    Raises:
      UserError: they are too many, or do not divide over the processes.
    """
    nodes, per_node = simulated
    if min(simulated) < 1:
        raise UserError(
            f"SIMULATED_NODES={nodes}, SIMULATED_DEVICES_PER_NODE={per_node}: both count from 1. Correct them."
        )
    if nodes * per_node > MOST_SIMULATED:
        raise UserError(
            f"SIMULATED_NODES={nodes} x SIMULATED_DEVICES_PER_NODE={per_node} are {nodes * per_node:,} simulated "
            f"devices, more than the {MOST_SIMULATED:,} that one host can run. Simulate fewer."
        )
    if nodes * per_node % num_processes:
        raise UserError(
            f"SIMULATED_NODES={nodes} x SIMULATED_DEVICES_PER_NODE={per_node} = {nodes * per_node} devices do not "
            f"divide over {num_processes} processes. Choose a multiple of {num_processes}."
        )
    return nodes * per_node // num_processes


def share_gpus(everyone: list[Facts], index: int) -> tuple[list[int] | None, list[Facts]]:
    """The GPUs of process `index` among those it sees, None for all; and everyone with their own numbers.

    Raises:
      UserError: the GPUs of a node do not divide over the processes that see them.
    """
    ids, shared = [], []
    for facts in everyone:
        sharers = [other.index for other in everyone if (other.node, other.gpus) == (facts.node, facts.gpus)]
        share, rest = divmod(facts.num_devices, len(sharers))
        if rest:
            raise UserError(
                f"{facts.num_devices} visible GPUs do not divide over the {len(sharers)} processes on {facts.host} "
                "that see them. Start one process a node, or one a GPU."
            )
        first = sharers.index(facts.index) * share
        ids.append(list(range(first, first + share)) if len(sharers) > 1 else None)
        shared.append(dataclasses.replace(facts, num_devices=share))
    return ids[index], shared


def simulated_grid(simulated: tuple[int, int], everyone: list[Facts]) -> Grid:
    """Devices are dealt to nodes in order, so the processes' own nodes do not matter."""
    return Grid(num_nodes=simulated[0], devices_per_node=simulated[1], node_of_process=(0,) * len(everyone))


def real_grid(everyone: list[Facts], devices_per_node: int | None) -> Grid:
    """Nodes in the order of their first process, split into logical ones if asked.

    Raises:
      UserError: nodes of different size, a size that `devices_per_node` does not divide, or no device at all.
    """
    names = list(dict.fromkeys(facts.node for facts in everyone))
    sizes = [sum(facts.num_devices for facts in everyone if facts.node == name) for name in names]
    hosts = {facts.node: facts.host for facts in everyone}
    if len(set(sizes)) > 1:
        counts = ", ".join(f"{hosts[name]} {size}" for name, size in zip(names, sizes, strict=True))
        raise UserError(f"nodes have different numbers of devices: {counts}. Use the same number on each.")
    size = sizes[0]
    per_node = devices_per_node or size
    if per_node < 1 or size < 1 or size % per_node:
        raise UserError(
            f"DEVICES_PER_NODE={per_node} does not divide the {size} devices of a node. Choose a divisor of {size}, "
            "or leave it out."
        )
    return Grid(
        num_nodes=len(names) * size // per_node,
        devices_per_node=per_node,
        node_of_process=tuple(names.index(facts.node) for facts in everyone),
    )
