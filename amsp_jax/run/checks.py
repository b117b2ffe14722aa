"""What must hold before a run starts: the batch divides, and everything fits into memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from amsp_jax.engine.plan import Plan
from amsp_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How a global batch is cut up; arrays are [accumulation, microbatch x num_ranks, seq_len].

    Attributes:
      microbatch: sequences a rank computes at once.
      num_ranks: data-parallel ranks.
      accumulation: microbatches a step.
      seq_len: tokens of a sequence.
      devices_per_rank: devices that share what a rank computes.
    """

    microbatch: int
    num_ranks: int
    accumulation: int
    seq_len: int
    devices_per_rank: int = 1

    @property
    def num_devices(self) -> int:
        """Of all ranks."""
        return self.num_ranks * self.devices_per_rank

    @property
    def rows(self) -> int:
        """Sequences of one microbatch over all ranks."""
        return self.microbatch * self.num_ranks

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.rows * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of a step, padding included."""
        return self.sequences * self.seq_len

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the arrays of a batch."""
        return self.accumulation, self.rows, self.seq_len

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        ranks += f" of {self.devices_per_rank} devices" if self.devices_per_rank > 1 else ""
        return (
            f"{self.sequences} sequences of {self.seq_len} = {self.tokens:,} tokens a step: "
            f"{ranks} x microbatch {self.microbatch} x accumulation {self.accumulation}"
        )


def batch_shape(
    global_batch: int, microbatch: int, num_ranks: int, seq_len: int, devices_per_rank: int = 1
) -> BatchShape:
    """Cuts a global batch into microbatches.

    Raises:
      UserError: it does not divide; the message names sizes that do.
    """
    unit = microbatch * num_ranks
    if global_batch % unit:
        below, above = global_batch // unit * unit, -(-global_batch // unit) * unit
        sizes = f"global_batch={below} or {above}" if below else f"global_batch={above}"
        per_rank = global_batch // num_ranks
        smaller = [str(m) for m in range(1, per_rank + 1) if global_batch % (m * num_ranks) == 0]
        other = f", or microbatch={' or '.join(smaller)}" if smaller else ""
        raise UserError(
            f"global_batch={global_batch} is not a multiple of microbatch={microbatch} x {num_ranks} data-parallel "
            f"ranks = {unit}; {sizes} would do{other}"
        )
    return BatchShape(
        microbatch=microbatch,
        num_ranks=num_ranks,
        accumulation=global_batch // unit,
        seq_len=seq_len,
        devices_per_rank=devices_per_rank,
    )


def require_memory(plan: Plan, memory_bytes: int) -> None:
    """The states of the plan alone must fit on a device; nothing is allocated.

    Args:
      plan: of the model's parameters.
      memory_bytes: of one device.

    Raises:
      UserError: they do not fit; the message has the bytes of each part.
    """
    need = plan.bytes_per_device()
    if need.total > memory_bytes:
        is_full = plan.degrees.params.total == plan.degrees.ranks.total
        shard_more = "" if is_full else "shard more (strategy='zero3'), "
        raise UserError(
            f"strategy '{plan.strategy}' needs {_gib(need.total)} on each device before activations "
            f"(P {_gib(need.params)}, G {_gib(need.grads)}, master {_gib(need.master)}, moments {_gib(need.moments)}), "
            f"and a device has {_gib(memory_bytes)}; {shard_more}use more devices or a smaller model"
        )


def require_compiled_memory(compiled: Any, memory_bytes: int) -> None:
    """The compiled step, activations and buffers included, must fit on a device.

    Args:
      compiled: of `jit(...).lower(...).compile()`.
      memory_bytes: of one device.

    Raises:
      UserError: XLA's own account of the program is larger.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    # Donated arguments come back as outputs and count once.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    total = arguments + temporary + outputs
    if total > memory_bytes:
        raise UserError(
            f"the compiled step needs {_gib(total)} on each device (state and batch {_gib(arguments)}, temporary "
            f"{_gib(temporary)}, other outputs {_gib(outputs)}), and a device has {_gib(memory_bytes)}; "
            "lower microbatch or seq_len, set remat='full', or shard more (strategy='zero3')"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
