"""What each operation of the compiled step is: its class of work, its FLOPs, and a collective's kind and mesh axes."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence

from amsp_jax.compile import hlo
from amsp_jax.compile.hlo.collectives import HasMeshShape, Operation, operations, reachable
from amsp_jax.compile.hlo.text import Instruction, Program, parse

_CONTAINERS = ("while", "call", "conditional")
_COPIES = frozenset(
    {"copy", "copy-start", "dynamic-update-slice", "dynamic-slice", "slice", "concatenate", "transpose", "pad"}
)
_MOVES = _COPIES | {"parameter", "bitcast", "constant", "tuple", "get-tuple-element", "reshape", "broadcast"}
_OP_NAME = re.compile(r'op_name="(jit\([^"]*)"')
# The step's own mathematics is inside shard_map; what optax does is outside (docs/design/step.md). One device has no
# shard_map, and there it is what is differentiated or repeated for each microbatch.
_INSIDE, _INSIDE_ONE_DEVICE = ("shard_map",), ("jvp(", "transpose(", "while", "closed_call", "checkpoint")
_KERNEL_KINDS = {
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "AllReduce": "all-reduce",
    "AllToAll": "all-to-all",
    "SendRecv": "collective-permute",
}


class Work(enum.StrEnum):
    """Classes of work."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer update"
    OTHER = "elementwise, reductions"
    COPIES = "copies"


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation of the program.

    Attributes:
      work: its class.
      kind, axes: of a collective, `all-gather` and `inter_opt+intra_param`.
      flops: of one run.
    """

    work: Work
    kind: str = ""
    axes: str = ""
    flops: hlo.Flops = dataclasses.field(default_factory=hlo.Flops)


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A compiled step.

    Attributes:
      module: its name, `jit_step`.
      ops: what can appear in a trace, by name.
      containers: loops and calls, whose time is that of what they run.
    """

    module: str
    ops: Mapping[str, Op]
    containers: frozenset[str]

    def find(self, op: str, kernel: str, starts: Mapping[str, str]) -> Op:
        """What a kernel does: by its operation, by the asynchronous start that launched it, then by its own name."""
        found = self.ops.get(op) or self.ops.get(starts.get(op, ""))
        if found is None and kernel.startswith(("nccl", "rccl")):
            found = self._collective(kernel)
        found = found or Op(Work.OTHER)
        is_copy = kernel.startswith(("Memcpy", "Memset")) and found.work in (Work.OTHER, Work.OPTIMIZER)
        return Op(Work.COPIES) if is_copy else found

    def _collective(self, kernel: str) -> Op:
        """By the name of NCCL's or RCCL's kernel; over the axes of that kind where there is one choice."""
        kind = next((kind for word, kind in _KERNEL_KINDS.items() if word in kernel), "collective")
        axes = {op.axes for op in self.ops.values() if op.kind == kind}
        return Op(Work.COMMUNICATION, kind, axes.pop() if len(axes) == 1 else "unknown axes")


def read_program(text: str, mesh: HasMeshShape) -> StepProgram:
    """Reads `Compiled.as_text()` of a step on this mesh."""
    program = parse(text)
    module = re.match(r"HloModule ([\w.\-]+)", text)
    lines = [line for name, _, _ in reachable(program) for line in program.computations[name]]
    flops = hlo.op_flops(program)
    inside = _INSIDE if "/shard_map/" in text else _INSIDE_ONE_DEVICE
    ops = {line.name: Op(_work(program, line, flops[line.name], inside), flops=flops[line.name]) for line in lines}
    return StepProgram(
        module=module[1] if module else "",
        ops={**ops, **_collectives(program, mesh)},
        containers=frozenset(line.name for line in lines if line.opcode in _CONTAINERS),
    )


def _collectives(program: Program, mesh: HasMeshShape) -> dict[str, Op]:
    """By the names of their starts, or of the fusions that they are in."""
    found: dict[str, Op] = {}
    axes_of = hlo.axes_of(mesh)
    for name, _, _ in reachable(program):
        lines = program.computations[name]
        named = [(operation.start.name, operation) for operation in operations(program, lines)]
        named += [(operation.collective.name, operation) for operation in operations(program, lines)]
        named += [(line.name, operation) for line in lines for operation in _fused(program, line)]
        for op, operation in named:
            axes = axes_of(operation.kind, operation.groups)
            found[op] = Op(Work.COMMUNICATION, operation.kind, axes)
    return found


def _fused(program: Program, line: Instruction) -> list[Operation]:
    """The collectives that a fusion computes in its own kernel."""
    if line.opcode.removesuffix("-start") != "fusion":
        return []
    return [operation for name in line.called() for operation in operations(program, program.computations[name])]


def _work(program: Program, line: Instruction, flops: hlo.Flops, inside: tuple[str, ...]) -> Work:
    """The class; operations outside the optimizer have a part in their names that begins with one of `inside`."""
    fused = [one for name in line.called() for one in program.computations.get(name, ())]
    names = [found[1] for one in (line, *fused) if (found := _OP_NAME.search(one.attributes))]
    if flops.attention or (line.opcode == "custom-call" and _is_attention(line, names)):
        return Work.ATTENTION
    if flops.matmul:
        return Work.MATMUL
    outside = [not any(part.startswith(inside) for part in name.split("/")) for name in names]
    if sum(outside) > len(outside) / 2:
        return Work.OPTIMIZER
    opcodes = {one.opcode for one in fused} or {line.opcode}
    return Work.COPIES if opcodes <= _MOVES and opcodes & _COPIES else Work.OTHER


def _is_attention(line: Instruction, names: Sequence[str]) -> bool:
    """cuDNN's, and a kernel of Pallas, of which the step has no other."""
    return "__cudnn$fmha" in line.attributes or any("pallas_call" in name or "attention" in name for name in names)
