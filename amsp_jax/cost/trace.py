"""The work and the memory of a model's parts, read off abstract traces of one microbatch on one device.

Each part runs through the step's own code (`stack.run_blocks`) with whole parameters, so what a rematerialisation
policy saves and recomputes is what the step will. No device is touched. FLOPs are exact; bytes moved are an estimate
(`program`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

from amsp_jax.cost.program import Operation, Program, flatten, traffic_bytes
from amsp_jax.cost.sketch import Sketch
from amsp_jax.model import Params
from amsp_jax.plan import make_plan
from amsp_jax.stack import Gather, Remat, policy, run_blocks
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
      output_bytes: of what flows to the next part.
    """

    forward: Work
    backward: Work
    saved_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """The parts of a sketch: `blocks[kind]` for each of its blocks."""

    embed: PartTrace
    blocks: tuple[PartTrace, ...]
    head: PartTrace


def trace_model(sketch: Sketch, microbatch: int, seq_len: int, remat: Remat, compute_dtype: Any) -> ModelTrace:
    """Traces each distinct part of a model.

    Args:
      sketch: of a model that was built with the attention of the device that will run it.
      microbatch: rows on one device.
      seq_len: tokens of a row.
      remat: what blocks keep.
      compute_dtype: of gathered parameters.
    """
    model, tracer = sketch.model, _Tracer(sketch, microbatch, seq_len, remat, jnp.dtype(compute_dtype))
    with cudnn_assumed():
        embed, x = tracer.embed()
        blocks = []
        for index in range(len(model.blocks)):
            block, x = tracer.block(index, x)
            blocks.append(block)
        return ModelTrace(embed=embed, blocks=tuple(blocks), head=tracer.head(x))


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
    """Abstract arguments of a sketch's parts, and their traces."""

    def __init__(self, sketch: Sketch, microbatch: int, seq_len: int, remat: Remat, dtype: jnp.dtype) -> None:
        self.model, self.remat, self.gather = sketch.model, remat, Gather(dtype, jnp.dtype(jnp.float32))
        params = self.model.abstract_params()
        # One device: gathers are the identity, and keep the names that policies look at.
        leaves = make_plan("ddp", params, DataRanks(1), compute_dtype=dtype).leaves
        self.leaves = self.model.split(leaves)
        self.sinks = self.model.split(params)
        self.shards = self.model.split(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params))
        rows = (microbatch, seq_len)
        self.batch = {name: jax.ShapeDtypeStruct(rows, jnp.int32) for name in ("tokens", "targets")}
        self.batch["weights"] = jax.ShapeDtypeStruct(rows, jnp.float32)
        self.keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), microbatch))

    def embed(self) -> tuple[PartTrace, Any]:
        """The embedding, and what flows out of it."""
        leaves, apply = self.leaves[0], self.model.embed.apply

        def run(sinks: Params, shards: Params, batch: Any, keys: Any) -> Any:
            return apply(self.gather(leaves, shards, sinks), batch, keys)

        return _trace(run, (self.sinks[0],), (self.shards[0], self.batch, self.keys))

    def block(self, index: int, x: Any) -> tuple[PartTrace, Any]:
        """A block as the stack runs it, and what flows out of it."""
        part, leaves = self.model.blocks[index], self.leaves[1][index]

        def run(sinks: Params, x: Any, shards: Params, batch: Any, keys: Any) -> Any:
            return run_blocks([part], [leaves], self.gather, self.remat, [shards], [sinks], x, batch, [keys])

        return _trace(run, (self.sinks[1][index], x), (self.shards[1][index], self.batch, self.keys))

    def head(self, x: Any) -> PartTrace:
        """The head, up to the sum of losses; a tied table is differentiated, too."""
        leaves, apply = self.leaves[2], self.model.head.apply
        embed = self.shards[0] if self.model.tied else None

        def run(sinks: Params, x: Any, embed: Any, shards: Params, batch: Any, keys: Any) -> Any:
            return apply(self.gather(leaves, shards, sinks), embed, x, batch, keys)[0][0]

        if not self.model.blocks:
            kept = policy(Remat.FULL if self.remat is Remat.FULL else Remat.NONE)
            run = jax.checkpoint(run, policy=kept, prevent_cse=False)
        return _trace(run, (self.sinks[2], x, embed), (self.shards[2], self.batch, self.keys))[0]


def _trace(run: Callable[..., Any], inputs: tuple[Any, ...], constants: tuple[Any, ...]) -> tuple[PartTrace, Any]:
    """`run(*inputs, *constants)` and its gradient in `inputs`; with the abstract result."""

    def forward(inputs: Any, constants: Any) -> Any:
        return jax.vjp(lambda *inputs: run(*inputs, *constants), *inputs)

    closed, (output, vjp) = jax.make_jaxpr(forward, return_shape=True)(inputs, constants)
    backward = flatten(jax.make_jaxpr(lambda vjp, cotangent: vjp(cotangent))(vjp, output))
    ahead = flatten(closed)
    num_outputs, num_constants = len(jax.tree.leaves(output)), len(jax.tree.leaves(constants))
    part = PartTrace(
        forward=_work(ahead),
        backward=_work(backward),
        saved_bytes=_saved_bytes(ahead, num_outputs, num_constants, len(jax.tree.leaves(inputs[0]))),
        output_bytes=sum(value.num_bytes for value in ahead.outputs[:num_outputs]),
    )
    return part, output


def _saved_bytes(program: Program, num_outputs: int, num_constants: int, num_sinks: int) -> int:
    """Distinct residuals that are neither constants nor sinks. Two views of one array are one."""
    borrowed = {*program.inputs[len(program.inputs) - num_constants :], *program.inputs[:num_sinks]}
    return sum(value.num_bytes for value in set(program.outputs[num_outputs:]) - borrowed)


def _work(program: Program) -> Work:
    matmuls = tuple(_matmul(op) for op in program.operations if op.name == "dot_general")
    attention = [op for op in program.operations if "dot_product_attention" in op.name]
    forward, backward = (
        sum(map(_attention_flops, (op for op in attention if way in op.name))) for way in ("fwd", "bwd")
    )
    return Work(matmuls, (forward, 2 * backward), traffic_bytes(program))


def _matmul(operation: Operation) -> Matmul:
    (contract, _), (batch_dims, _) = operation.params["dimension_numbers"]
    left, result = operation.inputs[0].shape, operation.outputs[0].shape
    batch, k = (math.prod(left[d] for d in dims) for dims in (batch_dims, contract))
    m = math.prod(left) // max(1, batch * k)
    return Matmul(batch, m, k, math.prod(result) // max(1, batch * m), operation.repeats)


def _attention_flops(operation: Operation) -> int:
    """Of cuDNN's forward kernel, on [B, S, N, H] or with layout 1 [B, N, S, H]: 4 B N S T H, causal half of it."""
    query, key = operation.inputs[0].shape, operation.inputs[1].shape
    key_len = key[2] if operation.params["layout"] else key[1]
    flops = 4 * math.prod(query) * key_len * operation.repeats
    return flops // 2 if re.search("causal", str(operation.params["mask_type"]), re.I) else flops
