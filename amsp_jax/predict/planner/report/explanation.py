"""One strategy in full: memory bars, the two streams while a block is computed, every collective."""

from __future__ import annotations

from collections.abc import Sequence

from amsp_jax.predict.cost.memory import MemoryEstimate
from amsp_jax.predict.cost.timeline import Event
from amsp_jax.predict.planner.message_costs import MEASURED, MessageCost
from amsp_jax.predict.planner.report.table import TERMS
from amsp_jax.predict.planner.report.text import aligned, counted, gib, percent, seconds
from amsp_jax.predict.planner.scorer import MicrobatchGroupCost
from amsp_jax.predict.planner.types import Estimate

_MEMORY_BAR, _TIME_BAR = 50, 60
PARTS = {
    "master": "master parameters",
    "opt_state": "optimizer states",
    "batch": "batch",
    "params": "P shards of the step",
    "grads": "gradients",
    "activations": "activations",
    "gathered": "gathered parameters",
    "reductions": "gradients in flight",
}
"""What the fields of a `MemoryEstimate` are called."""


def explanation(
    estimate: Estimate, messages: Sequence[MessageCost], memory_bytes: int, group: MicrobatchGroupCost | None = None
) -> str:
    """One strategy in full.

    Args:
      estimate: with recorded events.
      messages: of the same candidate.
      memory_bytes: the limit.
      group: of the same candidate, where it has groups.
    """
    return "\n\n".join(
        [
            f"{estimate.candidate}, {counted(estimate.accumulation, 'microbatch')} a step",
            _summary(estimate),
            _memory_bars(estimate.memory, memory_bytes),
            *([_group_lines(estimate.memory, group)] if group else []),
            _streams(estimate) if estimate.timeline.events else _ticks(estimate),
            _message_table(messages),
        ]
    )


def _summary(estimate: Estimate) -> str:
    timeline = estimate.timeline
    text = f"step {seconds(estimate.step_s)}: computes {seconds(timeline.compute_s)}, waits "
    text += f"{seconds(timeline.exposed_s)} for collectives, which take {seconds(timeline.communication_s)}; "
    if timeline.bubble_s:
        text += f"the bubble is {seconds(timeline.bubble_s)}; "
    text += f"{estimate.tokens_per_s_per_device:,.0f} tokens/s a device"
    if estimate.mfu is not None and estimate.hfu is not None:
        text += f", MFU {percent(estimate.mfu)} %, with recomputation {percent(estimate.hfu)} %"
    return text


def _memory_bars(memory: MemoryEstimate, limit: int) -> str:
    """A bar for each part that is not empty, the sum, and what it is compared with."""
    needed = memory.total + memory.margin_bytes
    parts = {name: getattr(memory, field) for field, name in PARTS.items() if getattr(memory, field)}
    sums = {"peak": memory.total, "with margin": needed, "limit": limit}
    rows = [["memory of a device at the peak", "GiB", ""]]
    for name, num_bytes in {**parts, **sums}.items():
        rows.append([name, gib(num_bytes), "#" * round(_MEMORY_BAR * num_bytes / max(limit, needed))])
    fits = "fits" if needed <= limit else f"does not fit: {gib(needed - limit)} GiB too much"
    rows[-1][-1] += f"  {fits}"
    return "\n".join(aligned(rows, left=(0, 2)))


def _group_lines(memory: MemoryEstimate, group: MicrobatchGroupCost) -> str:
    """When the peak is, beside that without groups, and what loops move."""
    before = group.ungrouped
    is_same = memory.peak_at == before.peak_at
    when = "at the same moment" if is_same else f"at another moment: while {before.peak_at}"
    peak = f"the peak is while {memory.peak_at}; without groups it is {gib(before.total)} GiB, {when}"
    rows = [["moved by loops over groups beside their kernels, a step", "GiB"]]
    for what, num_bytes in (
        ("forward: what blocks keep, into stacks of zeros; blocks' inputs", group.forward_bytes),
        ("backward: half of what blocks keep; zeros of whole gradients, and their sums", group.backward_bytes),
        (f"{seconds(group.seconds)} of computing", group.forward_bytes + group.backward_bytes),
    ):
        rows.append([what, gib(num_bytes)])
    basis = "as seen in programs compiled for H100 and a trace of one H200"
    return "\n".join([peak, "", *aligned(rows, left=(0,)), basis])


def _ticks(estimate: Estimate) -> str:
    """A pipeline's step by what its slowest stage does."""
    timeline = estimate.timeline
    rows = [["the stage that works longest", "", "of the step"]]
    for what, time in (
        ("computes", timeline.compute_s),
        ("waits for collectives", timeline.exposed_s),
        ("waits for other stages", timeline.bubble_s),
    ):
        rows.append([what, seconds(time), f"{percent(time / estimate.step_s)} %"])
    return "\n".join(aligned(rows, left=(0,)))


def num_parts(estimate: Estimate) -> int:
    """Embedding, blocks and head, of recorded events; the head always computes."""
    return 1 + max(int(e.name.split()[1]) for e in estimate.timeline.events if e.name.startswith("forward "))


def part_name(index: int, parts: int) -> str:
    """`block 3 of 32`, `embedding` or `head`, of the part's place in a step."""
    if index in (0, parts - 1):
        return "head" if index else "embedding"
    return f"block {index} of {parts - 2}"


def event_name(event: Event, parts: int) -> str:
    """`gather, block 3 of 32` of the timeline's `gather 3`; `gather, blocks 3 to 6 of 32` if those travel together."""
    what, _, number = event.name.rpartition(" ")
    if what == "optimizer":
        return what
    first = int(number)
    last = first + event.num_parts - 1
    if first == last:
        return f"{what}, {part_name(first, parts)}"
    if first > 0 and last < parts - 1:
        return f"{what}, blocks {first} to {last} of {parts - 2}"
    return f"{what}, {part_name(first, parts)} to {part_name(last, parts)}"


def _streams(estimate: Estimate) -> str:
    """The block in the middle, forward and backward, in each microbatch or group that was simulated; equal once."""
    parts = num_parts(estimate)
    middle, events = parts // 2, estimate.timeline.events
    lines = [f"while {part_name(middle, parts)} is computed; blanks on the compute stream are waiting"]
    for way in ("forward", "backward"):
        blocks = [e for e in events if e.stream == "compute" and e.name == f"{way} {middle}"]
        pictures: dict[str, list[str]] = {}
        for when, turn in _turns(estimate):
            pictures.setdefault("\n".join(_lanes(events, blocks[turn], parts)), []).append(when)
        for picture, whens in pictures.items():
            when = f"every {_unit(estimate)}" if len(pictures) == 1 else " and ".join(whens)
            lines += ["", f"{way}, {when}: {picture}"]
    return "\n".join(lines)


def _turns(estimate: Estimate) -> list[tuple[str, int]]:
    """What each simulated microbatch or group is called, and its place among them."""
    trips = estimate.timeline.num_loop_trips
    unit = _unit(estimate)
    if estimate.rounds == 1:
        return [(f"the only {unit}", 0)]
    if trips == estimate.rounds:
        return [(f"every {unit}", 0)]
    loop = [(f"each of the {trips} between them", 1)] if trips else []
    return [(f"first {unit}", 0), *loop, (f"last {unit}", -1)]


def _unit(estimate: Estimate) -> str:
    """What gathers parameters and reduces gradients for itself."""
    return "microbatch" if estimate.candidate.microbatch_group == 1 else "group"


def _lanes(events: Sequence[Event], block: Event, parts: int) -> list[str]:
    """Its length, and a line for each event: from the end of what was computed before to the end of `block`."""
    before = [e.end_s for e in events if e.stream == "compute" and e.end_s <= block.start_s]
    begin, end = max(before, default=block.start_s), block.end_s
    rows = []
    for event in sorted(events, key=lambda e: (e.stream == "communication", e.start_s)):
        start, stop = max(event.start_s, begin), min(event.end_s, end)
        if stop > start:
            left, right = (round(_TIME_BAR * (t - begin) / (end - begin)) for t in (start, stop))
            bar = " " * min(left, _TIME_BAR - 1) + ("=" if event.stream == "compute" else "~") * max(1, right - left)
            length = seconds(event.end_s - event.start_s)
            rows.append([event.stream, f"|{bar:{_TIME_BAR}}|", event_name(event, parts), length])
    return [seconds(end - begin), *aligned(rows, left=(0, 1, 2))]


def _message_table(messages: Sequence[MessageCost]) -> str:
    """Every collective of a step; bandwidth is the message over its seconds."""
    rows = [["part", "when", "collective", "over", "group", "MiB", "times", "each", "a step", "GB/s", ""]]
    for cost in messages:
        message = cost.message
        rows.append(
            [
                cost.part,
                TERMS[message.phase],
                message.kind,
                "+".join(message.axes),
                str(message.group),
                f"{message.num_bytes / 2**20:,.1f}",
                str(cost.count),
                seconds(cost.seconds),
                seconds(cost.count * cost.seconds),
                f"{message.num_bytes / cost.seconds / 1e9:.1f}",
                "" if cost.basis == MEASURED else f"not measured: {cost.basis}",
            ]
        )
    return "\n".join(aligned(rows, left=(0, 1, 2, 3, 4, 10))) if messages else "no collectives"
