"""`amsp-jax compile --model llama-30b --cluster h100 --strategy ...`: the planner and XLA compared.

XLA compiles the real step for target devices that need not be present, and the planner is compared with the program:
memory, collectives, and the work that hides each collective.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from amsp_jax.cli.commands.workload import arguments_as_flags, candidate_of, cluster_lines, cluster_of, workload_of
from amsp_jax.compile import ahead_of_time, hlo
from amsp_jax.engine.plan import make_plan
from amsp_jax.predict.cluster import Cluster
from amsp_jax.predict.cost.communication import step_collectives
from amsp_jax.predict.cost.memory import MemoryEstimate
from amsp_jax.predict.planner import Candidate, Scorer, strategy_of
from amsp_jax.run.checks import batch_shape


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Arrays that travel in a step, and the bytes of their messages: a gather's result, a reduction's input.

    XLA packs the arrays of an all-reduce into one, so there only the bytes can be compared.
    """

    num_arrays: int = 0
    num_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_arrays + other.num_arrays, self.num_bytes + other.num_bytes)


_SUMS_BYTES = 16
"""An array of as many bytes is a few sums, of losses, weights and norms: no leaf, and the planner has none."""

Collectives = Mapping[tuple[str, str], Traffic]
"""By kind and mesh axes, `("all-gather", "intra_param")`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What XLA made of a candidate, and what the planner had predicted.

    Attributes:
      candidate: the point.
      device_kind: what it was compiled for.
      compile_s: seconds that took.
      argument_bytes, temporary_bytes: of one device; their sum is the peak.
      predicted_memory: the planner's.
      collectives, predicted: of a step, without sums of a few values.
      spans: each operation of the program with the work beside it, and the mesh axes that it runs over; likewise.
    """

    candidate: Candidate
    device_kind: str
    compile_s: float
    argument_bytes: int
    temporary_bytes: int
    predicted_memory: MemoryEstimate
    collectives: Collectives
    predicted: Collectives
    spans: tuple[tuple[hlo.Span, str], ...]

    @property
    def peak_bytes(self) -> int:
        """Of one device."""
        return self.argument_bytes + self.temporary_bytes


@arguments_as_flags()
def run(args: argparse.Namespace) -> None:
    """Prints what was compiled beside what was predicted.

    Raises:
      UserError: an unknown model, cluster or strategy; a batch that does not divide; no compiler for the devices.
    """
    ahead_of_time.keep_jax_on_cpu()
    cluster = cluster_of(args.cluster, args.nodes)
    # Mistakes in the command are reported before a missing compiler is.
    ahead_of_time.target_name(cluster.device_kind)
    workload = workload_of(args, cluster)
    candidate = candidate_of(args, args.strategy, workload, cluster)
    print("\n".join(cluster_lines(cluster)), flush=True)
    print(text(compile_candidate(Scorer(workload, cluster), candidate)))


def compile_candidate(scorer: Scorer, candidate: Candidate) -> CompiledStep:
    """Compiles a candidate for target devices like those of the scorer's cluster.

    Raises:
      UserError: the batch does not divide, or there is no compiler for the devices.
    """
    workload, cluster, degrees = scorer.workload, scorer.cluster, candidate.degrees
    shape = batch_shape(workload.global_batch, candidate.microbatch, degrees.ranks.total, workload.seq_len).shape
    devices = _target_devices(cluster)
    strategy, parallel = strategy_of(degrees), candidate.parallel
    plan = make_plan(
        strategy,
        workload.model,
        ranks=degrees.ranks,
        devices=devices,
        compute_dtype=workload.compute_dtype,
        parallel=parallel,
    )
    start = time.perf_counter()
    compiled = ahead_of_time.compile_step(workload.model, workload.optimizer, plan, scorer.settings(candidate), shape)
    compile_s = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    program, axes_of = compiled.as_text() or "", hlo.axes_of(plan.mesh)
    spans = [span for span in hlo.analyse(program) if span.num_bytes > _SUMS_BYTES]
    # Donated arguments come back as outputs and count once.
    other_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledStep(
        candidate=candidate,
        device_kind=devices[0].device_kind,
        compile_s=compile_s,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes + other_outputs,
        predicted_memory=scorer.memory(candidate),
        collectives=_compiled_traffic(hlo.collectives(program), axes_of),
        predicted=_predicted_traffic(scorer, candidate),
        spans=tuple((span, axes_of(span.kind, span.groups)) for span in spans),
    )


def _target_devices(cluster: Cluster) -> Sequence[jax.Device]:
    """Target devices like those of the cluster; UserError where no compiler for them is installed."""
    return ahead_of_time.target_devices(
        ahead_of_time.target_name(cluster.device_kind), cluster.num_nodes, cluster.devices_per_node
    )


def _compiled_traffic(found: Sequence[hlo.Collective], axes_of: hlo.AxesOf) -> Collectives:
    traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
    for one in found:
        if one.num_bytes > _SUMS_BYTES:
            scale = len(next(iter(one.groups))) if one.kind == "reduce-scatter" else 1
            key = one.kind, axes_of(one.kind, one.groups)
            traffic[key] += Traffic(one.num_runs, one.num_runs * scale * one.num_bytes)
    return dict(traffic)


def _predicted_traffic(scorer: Scorer, candidate: Candidate) -> Collectives:
    """Leaf by leaf, as in the program; of a model that is cut whole messages, of which the bytes alone compare."""
    if candidate.parallel.total == 1:
        rounds = candidate.rounds(scorer.workload.global_batch)
        counts = step_collectives(scorer.states.cost(candidate.degrees).parts, scorer.states.wire, rounds)
    else:
        counts = Counter()
        for cost in scorer.message_costs(candidate):
            counts[cost.message] += cost.count
    traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
    for one, count in counts.items():
        traffic[one.kind, hlo.joined(one.axes)] += Traffic(count, count * one.num_bytes)
    return dict(traffic)


def text(step: CompiledStep) -> str:
    """Memory, collectives and what hides them, the planner's numbers beside XLA's."""
    point = step.candidate
    head = (
        f"{point}: compiled in {step.compile_s:.1f} s for "
        f"{point.num_devices} target devices {step.device_kind}, by XLA of jax {jax.__version__}"
    )
    tables = [head, _memory_table(step), _collectives_table(step), _spans_table(step), _sync_line(step)]
    if point.parallel.pipeline > 1:
        tables.insert(3, _BRANCHES)
    return "\n\n".join(tables)


_BRANCHES = (
    "the program has the work of every stage: compiled collectives inside it, over tensor and context, are those of\n"
    "all branches in all ticks, the planner's those of the stage with the most blocks"
)


def _memory_table(step: CompiledStep) -> str:
    predicted = step.predicted_memory
    pairs = [
        ("arguments", step.argument_bytes, predicted.argument_bytes),
        ("temporaries", step.temporary_bytes, predicted.total - predicted.argument_bytes),
        ("peak", step.peak_bytes, predicted.total),
    ]
    rows = [["memory of a device, GiB", "compiled", "planner", "planner's error"]]
    rows += [[name, _gib(a), _gib(b), f"{(b - a) / a:+.1%}" if a else ""] for name, a, b in pairs]
    return _table(rows, left=1)


def _collectives_table(step: CompiledStep) -> str:
    rows = [["collectives of a step", "axes", "arrays", "planner", "MiB", "planner"]]
    for kind, axes in sorted(step.collectives.keys() | step.predicted.keys()):
        found, predicted = (x.get((kind, axes), Traffic()) for x in (step.collectives, step.predicted))
        arrays = "packed" if kind == "all-reduce" else str(found.num_arrays)
        sizes = (f"{x.num_bytes / 2**20:.1f}" for x in (found, predicted))
        rows.append([kind, axes, arrays, str(predicted.num_arrays), *sizes])
    return _table(rows, left=2)


def _spans_table(step: CompiledStep) -> str:
    """Operations of one kind over the same axes together; of their work the least and the median."""
    groups: dict[tuple[str, str], list[hlo.Span]] = defaultdict(list)
    for span, axes in step.spans:
        groups[span.kind, axes] += [span] * span.num_runs
    rows = [["operations of a step", "axes", "runs", "sync", "MiB each", "TFLOP beside, least", "median"]]
    for (kind, axes), spans in sorted(groups.items()):
        flops = sorted(span.flops.total for span in spans)
        size = sum(span.num_bytes for span in spans) / len(spans) / 2**20
        work = [f"{flops[0] / 1e12:.3f}", f"{flops[len(flops) // 2] / 1e12:.3f}"]
        rows.append([kind, axes, str(len(spans)), str(sum(s.is_sync for s in spans)), f"{size:.1f}", *work])
    return _table(rows, left=2)


def _sync_line(step: CompiledStep) -> str:
    """The operations that nothing runs beside, by name."""
    sync = Counter({(span.op, axes, span.num_bytes): span.num_runs for span, axes in step.spans if span.is_sync})
    if not sync:
        return "synchronous: none"
    lines = [
        f"  {op} over {axes}, {num_bytes / 2**20:.1f} MiB, {runs} times" for (op, axes, num_bytes), runs in sync.items()
    ]
    return "\n".join(["synchronous, nothing runs beside them:", *lines])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns of one width; the first `left` begin at it, the others end there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))
