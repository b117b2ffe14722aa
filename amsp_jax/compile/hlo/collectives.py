"""The collectives of a compiled program: who takes part, what arrives, how often, and whether they overlap anything.

XLA writes one in three forms: `all-gather`; `all-gather-start` with its `all-gather-done`; and `async-start`, which
calls a computation that holds the first form. Each collective is listed once, whatever its form.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from amsp_jax.compile.hlo.text import Array, Instruction, Program, parse

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")

Groups = frozenset[frozenset[int]]
"""The positions of devices that a collective brings together."""

AxesOf = Callable[[str, Groups], str]
"""From a collective's kind and groups to the mesh axes that it runs over."""

_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    rf"(\{{\{{[\d,{{}} ]*\}}\}}|\[[\d,]+\]<={_IOTA}|mesh\[[^\]]*\](?:, device_ids=\({_IOTA}\))? \{{[^}}]*\}})"
)


class HasMeshShape(Protocol):
    """A jax `Mesh` or `AbstractMesh`."""

    @property
    def shape(self) -> Mapping[str, int]:
        """Its axes with their sizes, outer to inner."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One result of a collective operation.

    Attributes:
      kind: one of `KINDS`.
      groups: who takes part.
      dtype: as XLA writes it, `bf16`.
      shape: of the result on one device.
      num_bytes: of that.
      in_loop: whether a loop repeats it.
      num_runs: how often it runs in one call of the program; a loop whose trips XLA does not know counts once.
      is_sync: nothing runs beside it.
      op: the operation's name; results of a combined one share it.
    """

    kind: str
    groups: Groups
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    in_loop: bool
    num_runs: int
    is_sync: bool
    op: str

    @property
    def is_scalar(self) -> bool:
        """Whether it is one value."""
        return math.prod(self.shape) == 1


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective operation: where it starts, the collective itself, and where its results are complete.

    `start`, `collective` and `done` are one instruction where it is not asynchronous.
    """

    start: Instruction
    collective: Instruction
    done: Instruction

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.collective.opcode.removesuffix("-start")

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Its results on one device."""
        return self.done.arrays

    @property
    def groups(self) -> Groups:
        """Who takes part."""
        return _groups(self.collective.attributes)

    @property
    def is_sync(self) -> bool:
        """Whether nothing runs beside it."""
        return self.start is self.done or '"is_sync":true' in self.start.attributes


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program; a combined one counts once for each of its results."""
    program = parse(text)
    return [
        Collective(
            kind=operation.kind,
            groups=operation.groups,
            dtype=array.dtype,
            shape=array.shape,
            num_bytes=array.num_bytes,
            in_loop=in_loop,
            num_runs=num_runs,
            is_sync=operation.is_sync,
            op=operation.start.name,
        )
        for computation, num_runs, in_loop in reachable(program)
        for operation in operations(program, program.computations[computation])
        for array in operation.arrays
    ]


def reachable(program: Program) -> Iterator[tuple[str, int, bool]]:
    """`(computation, how often it runs, whether in a loop)` of the entry and of what loops, calls and branches run."""
    waiting = [(program.entry, 1, False)]
    while waiting:
        name, num_runs, in_loop = waiting.pop()
        yield name, num_runs, in_loop
        for line in program.computations[name]:
            if line.opcode in ("while", "call", "conditional"):
                looped = in_loop or line.opcode == "while"
                waiting += [(called, num_runs * line.num_trips(), looped) for called in line.called()]


def operations(program: Program, computation: Sequence[Instruction]) -> list[Operation]:
    """The collective operations of one computation, in the order of their starts."""
    ends = {line.operands[0]: line for line in computation if line.opcode.endswith("-done") and line.operands}
    found = []
    for line in computation:
        collective = _collective(program, line)
        if collective is not None:
            done = ends[line.name] if line.opcode.endswith("-start") else line
            found.append(Operation(line, collective, done))
    return found


def _collective(program: Program, line: Instruction) -> Instruction | None:
    """The collective that begins with this instruction."""
    if line.opcode.removesuffix("-start") in KINDS:
        return line
    if line.opcode == "async-start":
        called = (one for name in line.called() for one in program.computations[name])
        return next((one for one in called if one.opcode in KINDS), None)
    return None


def _groups(attributes: str) -> Groups:
    found = _GROUPS.search(attributes)
    assert found, attributes
    return _parse_groups(found[1])


@functools.lru_cache(maxsize=256)
def _parse_groups(text: str) -> Groups:
    """Of lists (a permutation's pairs are written like them), an iota, or mesh axes."""
    if text.startswith("{"):
        return frozenset(frozenset(map(int, g.split(","))) for g in re.findall(r"\{([\d, ]+)\}", text))
    if named := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text):
        return _named_groups(*named.groups())
    groups, iota = text.split("<=")
    return frozenset(frozenset(row) for row in _iota(iota).reshape(_numbers(groups)).tolist())


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: consecutive numbers in this shape, then transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _named_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """The form that the partitioner writes: mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = _iota(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    assert ":" not in axes, axes
    return _along(ids.reshape(tuple(sizes.values())), list(sizes), re.findall(r"'([^']+)'", axes))


def _along(ids: np.ndarray, names: Sequence[str], axes: Sequence[str]) -> Groups:
    """The groups of ids that differ along `axes` alone."""
    order = [i for i, name in enumerate(names) if name not in axes]
    inner = [i for i, name in enumerate(names) if name in axes]
    size = math.prod(ids.shape[i] for i in inner)
    return frozenset(frozenset(row) for row in ids.transpose(order + inner).reshape(-1, size).tolist())


def mesh_groups(mesh: HasMeshShape, axes: Sequence[str]) -> Groups:
    """Positions in the mesh of the devices that a collective over `axes` brings together."""
    sizes = tuple(mesh.shape.values())
    return _along(np.arange(math.prod(sizes)).reshape(sizes), list(mesh.shape), axes)


def axes_of(mesh: HasMeshShape) -> AxesOf:
    """A function from a collective's kind and groups to the mesh axes it runs over; it keeps what it found."""
    return functools.cache(functools.partial(_axes, mesh))


def joined(axes: Iterable[str]) -> str:
    """`inter_opt+intra_param`: axes as `axes_of` names them."""
    return "+".join(sorted(axes))


def _axes(mesh: HasMeshShape, kind: str, groups: Groups) -> str:
    """The fewest axes along which these devices differ; a permutation's pairs are a part of those groups."""
    for count in range(1, len(mesh.shape) + 1):
        for axes in itertools.combinations(mesh.shape, count):
            whole = mesh_groups(mesh, axes)
            is_part = kind == "collective-permute" and all(any(pair <= group for group in whole) for pair in groups)
            if groups == whole or is_part:
                return joined(axes)
    return f"groups of {len(next(iter(groups)))}"
