"""What each pipeline stage does at each tick, as tables of numbers; no jax.

A model of p x v virtual stages, virtual stage chunk x p + stage, runs m microbatches. A tick has a forward and a
backward half. Unit n of the forward pass is (microbatch group x p + i, chunk), n = group x p v + chunk x p + i, and
runs on stage s at tick n + s; backward units go through the chunks in reverse, on stage s at tick T0 + n + p-1-s. So
what a stage sends is used in the very next tick, and only inputs kept for the backward pass need a place.

1F1B: Narayanan et al., arXiv 2006.09503; interleaved: arXiv 2104.04473; GPipe: arXiv 1811.06965.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from enum import IntEnum

import numpy as np

from amsp_jax.errors import UserError

NAMES = ("gpipe", "1f1b")
"""GPipe: all forward passes before the first backward pass; 1F1B: each as early as it can be."""


class Kind(IntEnum):
    """What a stage does in half a tick."""

    IDLE = 0
    FIRST = 1  # The first virtual stage: it begins with the embedding.
    MIDDLE = 2
    LAST = 3  # The last virtual stage: it ends with the head.


@dataclasses.dataclass(frozen=True)
class Half:
    """One half of all ticks: int32 arrays [ticks, stages]; 0 where a stage is idle.

    Attributes:
      kind: a `Kind`.
      chunk: which of the stage's virtual stages.
      microbatch: its number.
    """

    kind: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray

    @property
    def is_busy(self) -> np.ndarray:
        """[ticks, stages]: whether there is work."""
        return self.kind != Kind.IDLE

    @property
    def is_kept(self) -> np.ndarray:
        """[ticks, stages]: whether its input is kept for the backward pass; the first's is made of tokens again."""
        return self.is_busy & (self.kind != Kind.FIRST)

    def without(self, kind: Kind) -> Half:
        """The same, idle in place of `kind`."""
        keep = self.kind != kind
        return Half(self.kind * keep, self.chunk * keep, self.microbatch * keep)

    def works(self) -> tuple[list[tuple[Kind, int]], np.ndarray]:
        """The different (kind, chunk) that occur, and which one it is: int32 [ticks, stages]."""
        pairs, index = np.unique(np.stack([self.kind, self.chunk], axis=-1).reshape(-1, 2), axis=0, return_inverse=True)
        return [(Kind(kind), int(chunk)) for kind, chunk in pairs], index.reshape(self.kind.shape).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where stage inputs are kept: int32 arrays [ticks, stages]; -1 where there is nothing to write or read.

    Attributes:
      write: the slot that a forward half writes its input to.
      read: the slot that a backward half reads it from; free from the next tick on.
    """

    write: np.ndarray
    read: np.ndarray


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """The order in which a pipeline's stages work.

    Attributes:
      name: of `NAMES`.
      num_stages: p.
      virtual_stages: v, parts of the model that one stage has.
      num_microbatches: m, of one step.

    Raises:
      UserError: the numbers do not fit each other.
    """

    name: str
    num_stages: int
    virtual_stages: int
    num_microbatches: int

    def __post_init__(self) -> None:
        p, v, m = self.num_stages, self.virtual_stages, self.num_microbatches
        if self.name not in NAMES:
            raise UserError(f"pipeline_schedule={self.name!r}: it must be one of {', '.join(NAMES)}")
        if min(p, v, m) < 1:
            raise UserError(f"pipeline={p}, virtual_stages={v}, {m} microbatches: each must be at least 1")
        if v > 1 and p == 1:
            raise UserError(
                f"virtual_stages={v} with pipeline=1: one stage has nothing to interleave with; use virtual_stages=1, "
                "or pipeline=2 or more"
            )
        if m < p:
            raise UserError(
                f"{m} microbatch{'es' * (m > 1)} in a step are fewer than the pipeline={p} stages, some of which would "
                f"never work; use pipeline={m}, or at least {p} microbatches (global_batch / microbatch / data ranks)"
            )
        if v > 1 and m % p:
            raise UserError(
                f"virtual_stages={v} needs microbatches in groups of pipeline={p}, and {m} is no multiple of {p}; use "
                f"{m // p * p} or {-(-m // p) * p} microbatches (global_batch / microbatch / data ranks), or "
                "virtual_stages=1"
            )

    @property
    def num_virtual(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.num_stages * self.virtual_stages

    @property
    def first_backward_tick(self) -> int:
        """T0: the tick in which the last virtual stage goes back with microbatch 0."""
        if self.name == "gpipe":
            return self.num_microbatches * self.virtual_stages + self.num_stages - 1
        return self.num_virtual - 1

    @property
    def num_ticks(self) -> int:
        """Ticks of a step."""
        return self.first_backward_tick + self.num_microbatches * self.virtual_stages + self.num_stages - 1

    @functools.cached_property
    def forward(self) -> Half:
        """The forward half of every tick."""
        tick, stage = np.ogrid[: self.num_ticks, : self.num_stages]
        return _half(tick - stage, self.num_stages, self.virtual_stages, self.num_microbatches)

    @functools.cached_property
    def backward(self) -> Half:
        """The backward half of every tick."""
        tick, stage = np.ogrid[: self.num_ticks, : self.num_stages]
        unit = tick - self.first_backward_tick - (self.num_stages - 1 - stage)
        return _half(unit, self.num_stages, self.virtual_stages, self.num_microbatches, mirrored=True)

    @property
    def num_slots(self) -> int:
        """Stage inputs that the fullest stage keeps at once, in the middle of a tick."""
        written, read = (np.cumsum(half.is_kept, axis=0) for half in (self.forward, self.backward))
        return max(1, int((written - np.pad(read, ((1, 0), (0, 0)))[:-1]).max()))

    @functools.cached_property
    def slots(self) -> Slots:
        """The places of stage inputs, `num_slots` of them; the lowest free one is taken."""
        write, read = (np.full((self.num_ticks, self.num_stages), -1, np.int32) for _ in range(2))
        num_slots, is_written, is_read = self.num_slots, self.forward.is_kept, self.backward.is_kept
        for stage in range(self.num_stages):
            free, kept = list(range(num_slots)), {}
            for tick in np.flatnonzero(is_written[:, stage] | is_read[:, stage]).tolist():
                if is_written[tick, stage]:
                    write[tick, stage] = kept[_unit(self.forward, tick, stage)] = heapq.heappop(free)
                if is_read[tick, stage]:
                    read[tick, stage] = kept.pop(_unit(self.backward, tick, stage))
                    heapq.heappush(free, read[tick, stage])
        return Slots(write, read)

    def bubble(self, forward_time: float = 1.0, backward_time: float = 2.0) -> float:
        """Idle time as a part of the ideal time, where every tick waits for its slowest stage.

        Args:
          forward_time: of one microbatch on all chunks of a stage, in any unit.
          backward_time: likewise.
        """
        busy = self.forward.is_busy.any(1).sum() * forward_time + self.backward.is_busy.any(1).sum() * backward_time
        ideal = self.num_microbatches * (forward_time + backward_time)
        return float(busy / self.virtual_stages / ideal - 1)


def forward_alone(num_stages: int, virtual_stages: int, num_microbatches: int) -> Half:
    """The ticks of a pipeline without a backward pass, for any number of microbatches."""
    num_units = -(-num_microbatches // num_stages) * num_stages * virtual_stages
    tick, stage = np.ogrid[: num_units + num_stages - 1, :num_stages]
    half = _half(tick - stage, num_stages, virtual_stages, num_microbatches)
    num_ticks = int(np.flatnonzero(half.is_busy.any(1))[-1]) + 1
    return Half(half.kind[:num_ticks], half.chunk[:num_ticks], half.microbatch[:num_ticks])


def _half(unit: np.ndarray, p: int, v: int, m: int, mirrored: bool = False) -> Half:
    """The work of units [ticks, stages]; those before the first microbatch and after the last are idle."""
    group, rest = np.divmod(unit, p * v)
    chunk, i = np.divmod(rest, p)
    chunk = v - 1 - chunk if mirrored else chunk
    microbatch = group * p + i
    virtual = chunk * p + np.arange(p)
    kind = np.select([virtual == 0, virtual == p * v - 1], [Kind.FIRST, Kind.LAST], Kind.MIDDLE)
    busy = (unit >= 0) & (microbatch < m)
    return Half(*(np.where(busy, x, 0).astype(np.int32) for x in (kind, chunk, microbatch)))


def _unit(half: Half, tick: int, stage: int) -> tuple[int, int]:
    return int(half.chunk[tick, stage]), int(half.microbatch[tick, stage])


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Which blocks a stage has, in slots that all stages have alike.

    Attributes:
      owner: [stages, slots] int32: the number of the block, from 0; -1 where a stage lacks the slot.
      chunk_slots: the slots of each chunk, in the order of their blocks.
    """

    owner: np.ndarray
    chunk_slots: tuple[range, ...]

    @property
    def num_slots(self) -> int:
        """Blocks of the fullest stage."""
        return self.owner.shape[1]

    def blocks(self, slot: int) -> list[int]:
        """The blocks in a slot, of the stages that have one."""
        return [int(block) for block in self.owner[:, slot] if block >= 0]

    def is_everywhere(self, slot: int) -> bool:
        """Whether every stage has a block in this slot."""
        return bool((self.owner[:, slot] >= 0).all())


def assign_blocks(num_blocks: int, num_stages: int, virtual_stages: int = 1) -> Assignment:
    """Deals contiguous blocks to virtual stages: lengths differ by one at most, the shorter ones at both ends first.

    Raises:
      UserError: there are more virtual stages than blocks.
    """
    num_virtual = num_stages * virtual_stages
    if num_virtual > num_blocks:
        fewer = [f"virtual_stages={num_blocks // num_stages}"] if num_blocks >= num_stages else []
        if num_blocks // virtual_stages > 1:
            fewer.append(f"pipeline={num_blocks // virtual_stages}")
        raise UserError(
            f"pipeline={num_stages} x virtual_stages={virtual_stages} are {num_virtual} virtual stages, and each needs "
            f"a block, of which the model has {num_blocks}; use at most "
            f"{' or '.join(fewer) or 'pipeline=1 and virtual_stages=1'}"
        )
    lengths = _lengths(num_blocks, num_virtual)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    columns: list[np.ndarray] = []
    chunk_slots = []
    for chunk in range(virtual_stages):
        own = slice(chunk * num_stages, (chunk + 1) * num_stages)
        longest = int(lengths[own].max())
        chunk_slots.append(range(len(columns), len(columns) + longest))
        columns += [np.where(j < lengths[own], starts[own] + j, -1) for j in range(longest)]
    return Assignment(np.stack(columns, axis=1).astype(np.int32), tuple(chunk_slots))


def _lengths(num_blocks: int, num_virtual: int) -> np.ndarray:
    """[virtual stages]: blocks of each."""
    length, num_longer = divmod(num_blocks, num_virtual)
    lengths = np.full(num_virtual, length)
    # From the ends inwards: 0, last, 1, last but one, ...
    inwards = [i // 2 if i % 2 == 0 else num_virtual - 1 - i // 2 for i in range(num_virtual)]
    lengths[inwards[num_virtual - num_longer :]] += 1
    return lengths
