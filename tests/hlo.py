"""Reads the collectives out of a compiled program's text."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
ITEM_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f16": 2}
Groups = frozenset[frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: its kind, who takes part, the shape and bytes of its result, and whether a loop repeats it;
    results of one combined operation share its number `op`."""

    kind: str
    groups: Groups
    shape: tuple[int, ...]
    num_bytes: int
    in_loop: bool
    op: int

    @property
    def is_scalar(self) -> bool:
        return math.prod(self.shape) == 1


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program; a combined one counts once for each of its results."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    found, computation = [], ""
    for number, line in enumerate(text.splitlines()):
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = header.group(1)
        match = re.search(rf" = (.*?) ({'|'.join(KINDS)})(?:-start)?\(", line)
        if not match:
            continue
        groups = _groups(line)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1)):
            shape = tuple(int(d) for d in dims.split(",") if d)
            num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
            found.append(Collective(match.group(2), groups, shape, num_bytes, computation in bodies, number))
    return found


def _groups(line: str) -> Groups:
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line):
        return frozenset(frozenset(map(int, g.split(","))) for g in re.findall(r"\{([\d, ]+)\}", listed.group(1)))
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}", line):
        return _mesh_groups(*named.groups())
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota, line
    rows, columns = int(iota.group(1)), int(iota.group(2))
    ids = _iota(iota.group(3), iota.group(4)).reshape(rows, columns)
    return frozenset(frozenset(row) for row in ids.tolist())


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = [int(n) for n in dims.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """The named form that the partitioner writes: mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids) if device_ids else None
    ids = _iota(*order.groups()) if order else np.arange(math.prod(sizes.values()))
    assert ":" not in axes, axes
    return _along(ids.reshape(tuple(sizes.values())), list(sizes), re.findall(r"'([^']+)'", axes))


def _along(ids: np.ndarray, names: list[str], axes: list[str] | tuple[str, ...]) -> Groups:
    """The groups of ids that differ along `axes` alone."""
    order = [i for i, name in enumerate(names) if name not in axes]
    inner = [i for i, name in enumerate(names) if name in axes]
    size = math.prod(ids.shape[i] for i in inner)
    return frozenset(frozenset(row) for row in ids.transpose(order + inner).reshape(-1, size).tolist())


def mesh_groups(mesh, axes: tuple[str, ...]) -> Groups:
    """Positions in the mesh of the devices that a collective over `axes` brings together."""
    ids = np.arange(math.prod(mesh.shape.values())).reshape(tuple(mesh.shape.values()))
    return _along(ids, list(mesh.axis_names), axes)
