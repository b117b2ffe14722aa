"""What is trained and where: what the arguments that `plan` and `compile` share mean."""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from amsp_jax.engine.context import check_sequence
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule, assign_blocks
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.models.attention import choose_attention
from amsp_jax.models.registry import build_model, model_config
from amsp_jax.predict.cluster import Cluster, compute_capability, load_cluster, named_cluster
from amsp_jax.predict.planner import Candidate, Estimate, Workload, degrees_of
from amsp_jax.predict.planner.report.text import WIDTH

_ARGUMENT = re.compile(
    r"(?<![\w./-])(global_batch|seq_len|microbatch|microbatch_group|remat|optimizer|reduce_dtype|inter_node_dtype|tensor"
    r"|pipeline|context|pipeline_schedule|virtual_stages|strategy)=(?=[\w'])"
)


@contextlib.contextmanager
def arguments_as_flags() -> Iterator[None]:
    """Errors of the library inside it name flags, `--tensor 3`, where they name Python arguments, `tensor=3`."""
    try:
        yield
    except UserError as error:
        raise UserError(_ARGUMENT.sub(lambda found: f"{flag_of(found[1])} ", str(error))) from error


def parallel_of(args: argparse.Namespace) -> ModelParallel:
    """What the model is cut into.

    Raises:
      UserError: a number below 1.
    """
    for flag in ("tensor", "pipeline", "context", "virtual_stages"):
        check_count(args, flag)
    return ModelParallel(pipeline=args.pipeline, context=args.context, tensor=args.tensor)


def candidate_of(args: argparse.Namespace, strategy: str, workload: Workload, cluster: Cluster) -> Candidate:
    """One strategy with the arguments of a workload.

    Raises:
      UserError: devices, blocks, sequence, microbatches or their groups do not divide; groups in a pipeline.
    """
    parallel = parallel_of(args)
    max_stages = len(workload.model.blocks) // args.virtual_stages
    ranks = parallel.data_ranks(cluster.num_nodes, cluster.devices_per_node, max_stages)
    degrees = degrees_of(strategy, ranks)
    check_sequence(workload.seq_len, parallel.context, parallel.tensor)
    candidate = Candidate(
        degrees,
        args.microbatch,
        Remat(args.remat),
        parallel,
        args.virtual_stages,
        args.pipeline_schedule,
        args.microbatch_group,
    )
    unit = candidate.microbatch * degrees.ranks.total
    if workload.global_batch % unit:
        raise UserError(
            f"--global-batch {workload.global_batch} does not divide by {unit} = {candidate.microbatch} (microbatch) x "
            f"{degrees.ranks.total} data ranks; {nearest_multiples(workload.global_batch, unit)} does"
        )
    _check_group(candidate, workload.global_batch)
    if parallel.pipeline > 1 or args.virtual_stages > 1:
        accumulation = candidate.accumulation(workload.global_batch)
        PipelineSchedule(args.pipeline_schedule, parallel.pipeline, args.virtual_stages, accumulation)
        assign_blocks(len(workload.model.blocks), parallel.pipeline, args.virtual_stages)
    return candidate


def check_no_stages(asked: str, pipeline: int) -> None:
    """Raises UserError if groups of microbatches were asked for, in these words, and there are stages."""
    if pipeline > 1:
        raise UserError(
            f"{asked} has no meaning with --pipeline {pipeline}: stages take microbatches in an order of their own; "
            "leave one of the two out"
        )


def _check_group(candidate: Candidate, global_batch: int) -> None:
    group, accumulation = candidate.microbatch_group, candidate.accumulation(global_batch)
    if group > 1:
        check_no_stages(f"--microbatch-group {group}", candidate.parallel.pipeline)
    if accumulation % group:
        raise UserError(
            f"--microbatch-group {group} does not divide the microbatches of a step, {accumulation} = {global_batch} / "
            f"({candidate.microbatch} (microbatch) x {candidate.degrees.ranks.total} data ranks); "
            f"{_divisors(accumulation)}"
        )


def _divisors(number: int) -> str:
    """`1, 2 or 4 does`."""
    *some, last = (str(size) for size in range(1, number + 1) if number % size == 0)
    return f"{', '.join(some)} or {last} does" if some else f"{last} does"


def nearest_multiples(number: int, unit: int) -> str:
    """`992 or 1008`: multiples of a unit, at least one of it."""
    return " or ".join(map(str, sorted({max(unit, number // unit * unit), (number // unit + 1) * unit})))


def cluster_of(name: str, nodes: int | None) -> Cluster:
    """A preset, or a file's cluster; with this number of nodes.

    Raises:
      UserError: neither a preset nor a file; a broken file; fewer than one node.
    """
    if nodes is not None and nodes < 1:
        raise UserError(f"--nodes {nodes}: nodes count from 1; leave it out for those of the file, or for 1")
    if name.endswith(".json") or Path(name).is_file():
        cluster = load_cluster(Path(name))
        return cluster if nodes is None else cluster.with_nodes(nodes)
    return named_cluster(name, 1 if nodes is None else nodes)


def workload_of(args: argparse.Namespace, cluster: Cluster) -> Workload:
    """What the arguments of a workload describe, with the attention that the cluster's devices will run.

    Raises:
      UserError: an unknown model or override; a number below 1; a sequence longer than the model's maximum.
    """
    for flag in ("global_batch", "seq_len", "microbatch", "microbatch_group"):
        check_count(args, flag)
    if (args.inter_node_dtype, args.reduce_dtype) == ("float32", "bfloat16"):
        raise UserError(
            "--inter-node-dtype float32 is wider than --reduce-dtype bfloat16, in which gradients are summed; leave it "
            "out, or give --reduce-dtype float32"
        )
    overrides = model_overrides(args.model_overrides)
    longest = longest_sequence(args.model, overrides)
    if args.seq_len > longest:
        raise UserError(
            f"--seq-len {args.seq_len}: {args.model} has positions for {longest} tokens; shorten it, or give "
            f"--model-overrides \"{{'max_seq_len': {args.seq_len}}}\""
        )
    return Workload(
        model=planned_model(args.model, overrides, cluster, args.seq_len),
        optimizer=make_optimizer(args.optimizer, 1e-4, weight_decay=0.1, clip_norm=1.0),
        global_batch=args.global_batch,
        seq_len=args.seq_len,
        reduce_dtype=args.reduce_dtype,
        inter_node_dtype=args.inter_node_dtype,
    )


def planned_model(
    name: str, overrides: Mapping[str, Any], cluster: Cluster, seq_len: int, compute_dtype: str = "bfloat16"
) -> Model:
    """A named model as `train.py` would build it on the devices of a cluster."""
    head_dim = model_config(name, overrides).head_dim
    capability = compute_capability(cluster.device_kind)
    platform = "gpu" if capability else "other"
    attention = choose_attention(platform, capability, head_dim, compute_dtype, seq_len)
    return build_model(name, overrides, attention=attention.implementation)


def cluster_lines(cluster: Cluster) -> list[str]:
    """The cluster, and what its numbers stand on."""
    return [cluster_line(cluster), *basis_lines(cluster)]


def cluster_line(cluster: Cluster) -> str:
    """One line."""
    when = f", measured {cluster.date}" if cluster.date else ""
    return (
        f"cluster {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device_kind}, "
        f"{cluster.memory_bytes / 2**30:.1f} GiB usable of each{when}"
    )


def basis_lines(cluster: Cluster, best: Estimate | None = None) -> list[str]:
    """Where the numbers come from, and what is assumed, of the best strategy's collectives too."""
    lines = [f"source: {cluster.source}", *(f"assumed: {line}" for line in cluster.assumptions)]
    if best and best.unmeasured:
        lines.append(f"not measured, but used by the first: {', '.join(best.unmeasured)}")
    return [text for line in lines for text in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def model_overrides(text: str) -> Mapping[str, Any]:
    """The dictionary of `--model-overrides`."""
    try:
        overrides = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        overrides = None
    if not isinstance(overrides, dict):
        raise UserError(f"--model-overrides {text!r} is no dictionary; write \"{{'num_layers': 8}}\"")
    return overrides


def longest_sequence(model: str, overrides: Mapping[str, Any]) -> float:
    """Tokens of the longest sequence; infinite for a model without a table of positions."""
    return getattr(model_config(model, overrides), "max_seq_len", math.inf)


def check_count(args: argparse.Namespace, flag: str) -> None:
    """Raises UserError unless the argument is at least 1."""
    if (value := getattr(args, flag)) < 1:
        raise UserError(f"{flag_of(flag)} {value}: it counts from 1")


def flag_of(name: str) -> str:
    """`--seq-len` of `seq_len`."""
    return "--" + name.replace("_", "-")
