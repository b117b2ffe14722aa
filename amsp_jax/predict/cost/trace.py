"""The work and the memory of a model's parts, read off abstract traces of one microbatch on one device.

Each part runs through the step's own code (`block_backward.run_blocks`) with whole parameters, so what a remat policy
saves and recomputes is what the step will. No device is touched. FLOPs are exact; bytes moved are an estimate
(`program`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

from amsp_jax.engine.block_backward import run_blocks
from amsp_jax.engine.collectives import Reduction
from amsp_jax.engine.parts import Gather, PartState
from amsp_jax.engine.plan import plan_parameters
from amsp_jax.engine.rematerialization import Remat, policy
from amsp_jax.model import Params
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.program import (
    Operation,
    Program,
    Value,
    flatten,
    peak_bytes,
    products_into,
    pruned,
    traffic_bytes,
)
from amsp_jax.strategy import DataRanks


class Matmul(NamedTuple):
    """`repeats` times a batch of products [m, k] x [k, n]."""

    batch: int
    m: int
    k: int
    n: int
    repeats: int

    @property
    def flops(self) -> int:
        """2 m k n each."""
        return 2 * self.batch * self.m * self.k * self.n * self.repeats


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device computes.

    Attributes:
      matmuls: matrix products.
      attention_flops: of fused attention, forward and backward kernels; a causal mask's half is no work, and a backward
        kernel counts as twice a forward one, though it computes the scores again.
      memory_bytes: that all other kernels read and write, estimated.
    """

    matmuls: tuple[Matmul, ...]
    attention_flops: tuple[int, int]
    memory_bytes: int

    @property
    def flops(self) -> int:
        """Of products and attention; unfused attention is products, its masked half included."""
        return sum(matmul.flops for matmul in self.matmuls) + sum(self.attention_flops)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartTrace:
    """One part on one microbatch.

    Attributes:
      forward, backward: the work; the backward pass with what it recomputes.
      saved_bytes: kept from forward to backward, the part's input included; parameters, batch and keys are not.
      backward_bytes: the most that the backward pass has alive at once, what was saved included, while the operands
        of the parameters' gradients wait for their products; the gradients themselves are not in it. Of embedding and
        head: of forward and backward together.
      pending_bytes: those operands, all of which a scheduler may keep until the products are run.
      output_bytes: of what flows to the next part.
      attended_bytes: of the keys and values that its attention reads.
      params_bytes: what of backward_bytes and of pending_bytes is as large as parameters, however few the tokens: sums
        of gradients, and those that wait to be reduced.
    """

    forward: Work
    backward: Work
    saved_bytes: int
    backward_bytes: int
    pending_bytes: int
    output_bytes: int
    attended_bytes: int = 0
    params_bytes: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Traces of a model's parts, each distinct block once, and `batch_bytes` of a device's microbatch."""

    embed: PartTrace
    blocks: tuple[PartTrace, ...]
    head: PartTrace
    batch_bytes: int


def trace_model(
    distinct: DistinctBlocks, microbatch: int, seq_len: int, remat: Remat, compute_dtype: Any
) -> ModelTrace:
    """Traces each distinct part of a model.

    Args:
      distinct: of a model that was built with the attention of the device that will run it.
      microbatch: rows on one device.
      seq_len: tokens of a row.
      remat: what blocks keep.
      compute_dtype: of gathered parameters.
    """
    model, tracer = distinct.model, _Tracer(distinct, microbatch, seq_len, remat, jnp.dtype(compute_dtype))
    with cudnn_assumed():
        embed, x = tracer.embed()
        blocks = []
        for index in range(len(model.blocks)):
            block, x = tracer.block(index, x)
            blocks.append(block)
        head = tracer.head(x)
    return ModelTrace(embed=embed, blocks=tuple(blocks), head=head, batch_bytes=tracer.batch_bytes)


def extrapolated(few: ModelTrace, more: ModelTrace, steps: int) -> ModelTrace:
    """The trace at a larger microbatch, `steps` times as far from `few` as `more` is, as if all numbers were linear.

    From two sequences on work is. The most that is alive at once is the largest of such numbers, and never below what
    is returned here.
    """
    found: ModelTrace = _linear(few, more, steps)
    return found


def _linear(few: Any, more: Any, steps: int) -> Any:
    """`few + steps (more - few)` of the integers of equal trees of dataclasses and tuples."""
    if isinstance(few, int):
        return few + steps * (more - few)
    if isinstance(few, Matmul):
        return Matmul(*(a + steps * (b - a) for a, b in zip(few, more, strict=True)))
    if isinstance(few, tuple):
        return tuple(_linear(a, b, steps) for a, b in zip(few, more, strict=True))
    fields = dataclasses.fields(few)
    return type(few)(**{f.name: _linear(getattr(few, f.name), getattr(more, f.name), steps) for f in fields})


_ASSUMED: dict[str, Callable[..., Any]] = {
    "check_cudnn_version": lambda: 92800,
    # The answers would start a backend. The one bounds the version from below, the other the head dim, and a model
    # that is built with this attention is for a device that has it.
    "is_cuda_compute_capability_equal": lambda capability: False,
    "check_compute_capability": lambda capability: True,
}


@contextlib.contextmanager
def cudnn_assumed() -> Iterator[None]:
    """While it lasts, jax traces and lowers cuDNN's attention where there is no cuDNN, and starts no backend for it.

    The version is asked for only to tell whether it is recent enough; 9.28 is.
    """
    original = {name: getattr(fused_attention_stablehlo, name) for name in _ASSUMED}
    for name, answer in _ASSUMED.items():
        setattr(fused_attention_stablehlo, name, answer)
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(fused_attention_stablehlo, name, function)


class _Tracer:
    """Abstract arguments of the distinct parts, and their traces."""

    def __init__(self, distinct: DistinctBlocks, microbatch: int, seq_len: int, remat: Remat, dtype: jnp.dtype) -> None:
        self.model, self.remat, self.gather = distinct.model, remat, Gather(dtype, Reduction.of(jnp.float32))
        params = self.model.abstract_params()
        # One device: gathers are the identity, and keep the names that policies look at.
        leaves = plan_parameters("ddp", params, DataRanks(1), compute_dtype=dtype).leaves
        self.leaves = self.model.split(leaves)
        self.sinks = self.model.split(params)
        self.shards = self.model.split(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params))
        rows = (microbatch, seq_len)
        self.batch = {name: jax.ShapeDtypeStruct(rows, jnp.int32) for name in ("tokens", "targets")}
        self.batch["weights"] = jax.ShapeDtypeStruct(rows, jnp.float32)
        self.keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), microbatch))

    @property
    def batch_bytes(self) -> int:
        """Of a microbatch."""
        return sum(x.size * x.dtype.itemsize for x in self.batch.values())

    def embed(self) -> tuple[PartTrace, Any]:
        """The embedding, and what flows out of it."""
        leaves, apply = self.leaves[0], self.model.embed.apply

        def run(sinks: Params, shards: Params, batch: Any, keys: Any) -> Any:
            return apply(self.gather(PartState.of(leaves, shards, sinks)), batch, keys)

        return _trace(run, (self.sinks[0],), (self.shards[0], self.batch, self.keys), has_barrier=False)

    def block(self, index: int, x: Any) -> tuple[PartTrace, Any]:
        """A block as the stack runs it, and what flows out of it."""
        part, leaves = self.model.blocks[index], self.leaves[1][index]

        def run(sinks: Params, x: Any, shards: Params, batch: Any, keys: Any) -> Any:
            state = PartState.of(leaves, shards, sinks)
            return run_blocks([part], [state], self.gather, self.remat, x, batch, [keys])

        inputs, constants = (self.sinks[1][index], x), (self.shards[1][index], self.batch, self.keys)
        return _trace(run, inputs, constants, has_barrier=True)

    def head(self, x: Any) -> PartTrace:
        """The head, up to the sum of losses; a tied table is differentiated, too."""
        leaves, apply = self.leaves[2], self.model.head.apply
        embed = self.shards[0] if self.model.tied else None

        def run(params: Any, x: Any, shards: Params, batch: Any, keys: Any) -> Any:
            sinks, embed = params
            return apply(self.gather(PartState.of(leaves, shards, sinks)), embed, x, batch, keys)[0][0]

        if not self.model.blocks:
            kept = policy(Remat.FULL if self.remat is Remat.FULL else Remat.NONE)
            run = jax.checkpoint(run, policy=kept, prevent_cse=False)
        inputs, constants = ((self.sinks[2], embed), x), (self.shards[2], self.batch, self.keys)
        return _trace(run, inputs, constants, has_barrier=not self.model.blocks)[0]


class _Counts(NamedTuple):
    """How many arrays: parameters or sinks, which come first; these and other inputs; results."""

    params: int
    inputs: int
    results: int

    def borrowed(self, program: Program) -> set[Value]:
        """Parameters, sinks and constants among a program's inputs: what the part does not own."""
        return {*program.inputs[: self.params], *program.inputs[self.inputs :]}


def _trace(
    run: Callable[..., Any], inputs: tuple[Any, ...], constants: tuple[Any, ...], has_barrier: bool
) -> tuple[PartTrace, Any]:
    """`run(*inputs, *constants)` and its gradient in `inputs`, the first of which are parameters or their sinks.

    Args:
      has_barrier: what the forward pass keeps is in memory. Else the compiler may compute cheap values again.

    Returns:
      The trace, and the abstract result.
    """

    def forward(inputs: Any, constants: Any) -> Any:
        return jax.vjp(lambda *inputs: run(*inputs, *constants), *inputs)

    def both(inputs: Any, constants: Any, cotangent: Any) -> Any:
        output, vjp = forward(inputs, constants)
        return vjp(cotangent), output

    closed, (output, vjp) = jax.make_jaxpr(forward, return_shape=True)(inputs, constants)
    ahead, counts = flatten(closed), _Counts(*(len(jax.tree.leaves(tree)) for tree in (inputs[0], inputs, output)))
    results, kept, borrowed = ahead.outputs[: counts.results], ahead.outputs[counts.results :], counts.borrowed(ahead)
    if has_barrier:
        back = flatten(jax.make_jaxpr(lambda vjp, cotangent: vjp(cotangent))(vjp, output))
        ignored = {inside for outside, inside in zip(kept, back.inputs, strict=False) if outside in borrowed}
        forward_work, backward_work = _work(ahead), _work(back)
    else:
        back = flatten(jax.make_jaxpr(both)(inputs, constants, output))
        ignored = counts.borrowed(back)
        forward_work = _work(pruned(dataclasses.replace(ahead, outputs=results)))
        backward_work = _minus(_work(back), forward_work)
    part = PartTrace(
        forward=forward_work,
        backward=backward_work,
        saved_bytes=_sum_bytes(set(kept) - borrowed),
        output_bytes=_sum_bytes(results),
        attended_bytes=_attended_bytes(ahead),
        **_backward_memory(back, back.outputs[: counts.params], ignored),
    )
    return part, output


def _backward_memory(program: Program, gradients: Iterable[Value], ignored: set[Value]) -> dict[str, Any]:
    """The fields of a `PartTrace` about memory in a backward pass; `ignored` inputs are not counted."""
    results, operands = products_into(program, gradients)
    operands -= ignored
    sums = {value for op in program.operations for value in op.outputs if value in op.inputs}
    waiting = (operands & program.barred).difference(program.inputs)
    return {
        "backward_bytes": peak_bytes(program, operands, {*ignored, *results, *gradients} - operands),
        "pending_bytes": _sum_bytes(operands),
        "params_bytes": (_sum_bytes(sums), _sum_bytes(waiting)),
    }


def _sum_bytes(values: Iterable[Value]) -> int:
    """Two views of one array are one value."""
    return sum(value.num_bytes for value in set(values))


def _minus(whole: Work, part: Work) -> Work:
    """The work of a program without that of `part`, which it does, too."""
    forward, backward = (w - p for w, p in zip(whole.attention_flops, part.attention_flops, strict=True))
    matmuls = list(whole.matmuls)
    for matmul in part.matmuls:
        matmuls.remove(matmul)
    return Work(tuple(matmuls), (forward, backward), whole.memory_bytes - part.memory_bytes)


def _work(program: Program) -> Work:
    matmuls = tuple(_matmul(op) for op in program.operations if op.name == "dot_general")
    forward, backward = (
        sum(_attention_flops(op) for op in program.operations if op.attention == way) for way in ("forward", "backward")
    )
    return Work(matmuls, (forward, 2 * backward), traffic_bytes(program))


def _attended_bytes(program: Program) -> int:
    """The second operand of scores and of their product with the values: products with batch dimensions; or a kernel's
    keys and values, before they are repeated for it."""
    total, producers = 0, {value: op for op in program.operations for value in op.outputs}
    for op in program.operations:
        if op.name == "dot_general" and op.params["dimension_numbers"][1][0]:
            total += op.repeats * min(value.num_bytes for value in op.inputs[:2])
        elif op.attention:
            total += op.repeats * sum(_unrepeated(value, producers).num_bytes for value in op.inputs[1:3])
    return total


def _unrepeated(value: Value, producers: dict[Value, Operation]) -> Value:
    producer = producers.get(value)
    return producer.inputs[0] if producer and producer.name == "broadcast_in_dim" else value


def _matmul(operation: Operation) -> Matmul:
    (contract, _), (batch_dims, _) = operation.params["dimension_numbers"]
    left, result = operation.inputs[0].shape, operation.outputs[0].shape
    batch, k = (math.prod(left[d] for d in dims) for dims in (batch_dims, contract))
    m = math.prod(left) // max(1, batch * k)
    return Matmul(batch, m, k, math.prod(result) // max(1, batch * m), operation.repeats)


def _attention_flops(operation: Operation) -> int:
    """Of a forward kernel, on [B, S, N, H] or, cuDNN's with layout 1, [B, N, S, H]: 4 B N S T H, causal half of it."""
    query, key = operation.inputs[0].shape, operation.inputs[1].shape
    key_len = key[2] if operation.params.get("layout") else key[1]
    flops = 4 * math.prod(query) * key_len * operation.repeats
    # No model has Pallas's without the mask.
    is_causal = operation.name == "pallas_call" or re.search("causal", str(operation.params["mask_type"]), re.I)
    return flops // 2 if is_causal else flops
