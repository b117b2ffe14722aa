"""How much work a scheduled program does between the start and the end of each collective: what can hide it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

from amsp_jax.compile.hlo.collectives import Groups, Operation, operations, reachable
from amsp_jax.compile.hlo.text import Array, Instruction, Program, parse

Definitions = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one device in matrix products and in cuDNN's attention; XLA's own attention is matrix products."""

    matmul: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.matmul + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(self.matmul - other.matmul, self.attention - other.attention)

    def __mul__(self, times: int) -> Flops:
        return Flops(self.matmul * times, self.attention * times)


@dataclasses.dataclass(frozen=True)
class Span:
    """One collective operation, whatever the number of arrays that it carries, and what runs beside it.

    Attributes:
      op: the operation's name.
      kind: `all-gather`, `reduce-scatter`, ...
      groups: who takes part.
      num_arrays: combined into it.
      num_bytes: of the whole message: a reduce-scatter's input, any other's result.
      num_runs: how often it runs in one call of the program.
      is_sync: nothing runs beside it.
      flops: scheduled between its start and its end, each time it runs.
    """

    op: str
    kind: str
    groups: Groups
    num_arrays: int
    num_bytes: int
    num_runs: int
    is_sync: bool
    flops: Flops


def analyse(text: str) -> list[Span]:
    """The collective operations of a compiled program, with the work between start and end.

    A loop counts with all its trips, so that what starts before a loop and ends after it spans them all.
    """
    program = parse(text)
    work = _Work(program)
    return [span for name, num_runs, _ in reachable(program) for span in _spans(program, name, num_runs, work)]


def op_flops(program: Program) -> dict[str, Flops]:
    """FLOPs of one run of each operation of the computations that are `reachable`; of a loop, with all its trips."""
    work = _Work(program)
    return {
        line.name: flops
        for name, _, _ in reachable(program)
        for line, flops in zip(program.computations[name], work.of_lines(name), strict=True)
    }


def _spans(program: Program, name: str, num_runs: int, work: _Work) -> Iterator[Span]:
    computation = program.computations[name]
    before = list(itertools.accumulate(work.of_lines(name), initial=Flops()))
    position = {line.name: i for i, line in enumerate(computation)}
    for operation in operations(program, computation):
        start, done = position[operation.start.name], position[operation.done.name]
        yield Span(
            op=operation.start.name,
            kind=operation.kind,
            groups=operation.groups,
            num_arrays=len(operation.arrays),
            num_bytes=_message_bytes(operation),
            num_runs=num_runs,
            is_sync=operation.is_sync,
            flops=Flops() if operation.is_sync else before[done] - before[start],
        )


def _message_bytes(operation: Operation) -> int:
    scale = len(next(iter(operation.groups))) if operation.kind == "reduce-scatter" else 1
    return scale * sum(array.num_bytes for array in operation.arrays)


class _Work:
    """FLOPs of instructions and computations of a program, each computation counted once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.totals: dict[str, Flops] = {}

    def of_lines(self, name: str) -> list[Flops]:
        """Of each instruction of a computation, in order."""
        definitions = {line.name: line for line in self.program.computations[name]}
        return [self._of_line(line, definitions) for line in definitions.values()]

    def _of_computation(self, name: str) -> Flops:
        if name not in self.totals:
            self.totals[name] = sum(self.of_lines(name), Flops())
        return self.totals[name]

    def _of_line(self, line: Instruction, definitions: Definitions) -> Flops:
        if line.opcode in ("fusion", "while", "call", "conditional"):
            return sum(map(self._of_computation, line.called()), Flops()) * line.num_trips()
        if line.opcode == "dot":
            return _product(line, definitions, r"lhs_contracting_dims=\{([\d,]*)\}")
        if line.opcode == "custom-call":
            return _custom_call(line, definitions)
        return Flops()


def _custom_call(line: Instruction, definitions: Definitions) -> Flops:
    found = re.search(r'custom_call_target="([^"]*)"', line.attributes)
    target = found[1] if found else ""
    if target.startswith(("__cublas", "__cudnn$gemm")):
        return _product(line, definitions, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    if target.startswith("__cudnn$fmha"):
        return _attention(line, definitions, num_products=5 if "Backward" in target else 2)
    return Flops()


def _product(line: Instruction, definitions: Definitions, contracting: str) -> Flops:
    dims = re.search(contracting, line.attributes)
    left = definitions[line.operands[0]].arrays[0]
    inner = math.prod(left.shape[int(dim)] for dim in re.findall(r"\d+", dims[1])) if dims else 1
    return Flops(matmul=2 * line.arrays[0].size * inner)


def _attention(line: Instruction, definitions: Definitions, num_products: int) -> Flops:
    """Products over the scores, [batch, heads, queries, keys]; a causal mask leaves half of them."""
    found = re.search(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]', line.attributes)
    scores = Array("f32", tuple(int(n) for n in re.findall(r"\d+", found[1]))) if found else Array("f32", (0,))
    head_dim = definitions[line.operands[0]].arrays[0].shape[-1]
    flops = num_products * 2 * scores.size * head_dim
    return Flops(attention=flops // 2 if re.search(r'"mask_type": ?"CAUSAL"', line.attributes) else flops)
