"""`amsp-jax plan --model llama-7b --cluster a800 --nodes 128 ...`: the fastest strategy, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from amsp_jax.cli.arguments import PLAN_SEARCH
from amsp_jax.cli.commands.compile import compile_candidate
from amsp_jax.cli.commands.compile import text as compile_text
from amsp_jax.cli.commands.workload import (
    arguments_as_flags,
    basis_lines,
    candidate_of,
    check_count,
    check_no_stages,
    cluster_line,
    cluster_of,
    flag_of,
    longest_sequence,
    model_overrides,
    nearest_multiples,
    parallel_of,
    workload_of,
)
from amsp_jax.compile import ahead_of_time
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.models.registry import MODELS, build_model
from amsp_jax.predict.cluster import Cluster
from amsp_jax.predict.planner import (
    Estimate,
    NothingFits,
    Objective,
    Ranking,
    Scorer,
    Space,
    Workload,
    nothing_fits_message,
    report,
    search,
)
from amsp_jax.predict.planner.pictures import best_by_size, plot_best

ALWAYS = "strategy"
"""Searched whether named or not."""
CUT = ("tensor", "pipeline", "context", "virtual_stages")
GROUP = "microbatch_group"
_MICROBATCHES = (1, 2, 4, 8, 16)
_CHUNKS = (1, 2, 3, 4)
# What else is in the JSON as it was asked for.
_TOLD = ("global_batch", "seq_len", "optimizer", "reduce_dtype", "inter_node_dtype")
# More than any model that is named here has blocks.
_MOST_STAGES = 128
_PICTURES = (".png", ".pdf", ".svg")
# Of the heat map: models from here up, and nodes up to here unless more are asked for.
_SMALLEST_PARAMS = 1e9
_MOST_NODES = 128


@arguments_as_flags()
def run(args: argparse.Namespace) -> None:
    """Prints the ranking, or one strategy in full.

    Raises:
      UserError: an unknown model, cluster or strategy; a number out of range; nothing fits.
    """
    _check(args)
    if args.verify:
        ahead_of_time.keep_jax_on_cpu()
    cluster = cluster_of(args.cluster, args.nodes)
    if args.verify:
        ahead_of_time.target_devices(ahead_of_time.target_name(cluster.device_kind), 1, 1)
    workload = workload_of(args, cluster)
    _check_batch(args, cluster)
    if args.explain is not None:
        _explain(args, workload, cluster)
    else:
        is_fixed = not set(_searched(args)) & {*CUT, "microbatch", GROUP}
        if is_fixed and max(parallel_of(args).total, args.virtual_stages, args.microbatch_group) > 1:
            # One way to cut model and step: what does not divide is said as train.py says it.
            candidate_of(args, "ddp", workload, cluster)
        _rank(args, workload, cluster)


def _check(args: argparse.Namespace) -> None:
    """What needs neither model nor cluster."""
    check_count(args, "top")
    if args.verify is not None:
        check_count(args, "verify")
    if args.memory_limit is not None and not 1e-3 <= args.memory_limit <= 1e6:
        raise UserError(f"--memory-limit {args.memory_limit:g}: GiB of a device, from 0.001 to a million, such as 70")
    for name in _searched(args):
        if name not in PLAN_SEARCH:
            raise UserError(f"--search {args.search}: {name!r} is unknown; some of {','.join((ALWAYS, *PLAN_SEARCH))}")
    if GROUP in _searched(args):
        check_no_stages(f"--search {GROUP}", parallel_of(args).pipeline)
    elif args.microbatch_group > 1:
        check_no_stages(f"--microbatch-group {args.microbatch_group}", parallel_of(args).pipeline)
    if args.explain is not None:
        for flag in ("search", "plot", "any_nodes", "verify"):
            if getattr(args, flag):
                raise UserError(f"--explain is of one strategy, on which {flag_of(flag)} has no effect; leave one out")
        if args.objective != Objective.STEP_TIME:
            raise UserError("--explain tells the step time and nothing of --objective paper; leave one out")
    if args.plot:
        if set(_searched(args)) & set(CUT) or parallel_of(args).total > 1:
            raise UserError("--plot draws data parallelism alone; leave it out, or tensor, pipeline and context at 1")
        _check_picture(args.plot)


def _check_picture(path: Path) -> None:
    """What would only fail after the search."""
    folder = path.resolve().parent
    if path.is_dir() or not os.access(folder, os.W_OK):
        problem = "a folder" if path.is_dir() else f"{folder} cannot be written to"
        raise UserError(f"--plot {path}: {problem}; name a file in a folder of yours")
    if path.suffix.lower() not in _PICTURES:
        raise UserError(f"--plot {path}: draws {', '.join(_PICTURES)}; name it heat.png")


def _check_batch(args: argparse.Namespace, cluster: Cluster) -> None:
    """Of several microbatches one is enough; a cut model has many numbers of data ranks, which the search looks at."""
    if not _space(args, cluster).is_data_parallel:
        return
    ranks, batch = cluster.ranks.total, args.global_batch
    units = [microbatch * ranks for microbatch in _space(args, cluster).microbatches]
    if all(batch % unit for unit in units):
        unit = min(units)
        raise UserError(
            f"--global-batch {batch} does not divide by {unit} = {unit // ranks} (microbatch) x {ranks} devices; "
            f"{nearest_multiples(batch, unit)} does"
        )


def _searched(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name for name in args.search.split(",") if name not in ("", ALWAYS))


def _space(args: argparse.Namespace, cluster: Cluster) -> Space:
    """What is fixed is itself alone; what is searched are all numbers that may divide."""
    parallel = parallel_of(args)
    searched = _searched(args)
    microbatches = {args.microbatch, *(_MICROBATCHES if "microbatch" in searched else ())}
    return Space(
        microbatches=tuple(sorted(microbatches)),
        remats=tuple(Remat) if "remat" in searched else (Remat(args.remat),),
        microbatch_groups=_groups(args, cluster) if GROUP in searched else (args.microbatch_group,),
        fill_nodes=not args.any_nodes,
        tensors=_sizes("tensor", parallel.tensor, searched, cluster.devices_per_node),
        pipelines=_sizes("pipeline", parallel.pipeline, searched, cluster.num_devices),
        contexts=_sizes("context", parallel.context, searched, cluster.devices_per_node),
        virtual_stages=_CHUNKS if "virtual_stages" in searched else (args.virtual_stages,),
        pipeline_schedule=args.pipeline_schedule,
    )


def _groups(args: argparse.Namespace, cluster: Cluster) -> tuple[int, ...]:
    """1, 2, 4, ... as far as the microbatches of one sequence of a step may divide by them, and what was asked for."""
    ranks = 1 if set(_searched(args)) & set(CUT) else cluster.num_devices // parallel_of(args).total
    most = max(1, args.global_batch // max(1, ranks))
    powers = (2**i for i in range(most.bit_length()))
    return tuple(sorted({args.microbatch_group, *(size for size in powers if args.global_batch % size == 0)}))


def _sizes(name: str, fixed: int, searched: tuple[str, ...], num_devices: int) -> tuple[int, ...]:
    """The divisors of as many devices where it is searched, the most stages a model has blocks for aside."""
    if name not in searched:
        return (fixed,)
    return tuple(size for size in range(1, min(num_devices, _MOST_STAGES) + 1) if num_devices % size == 0)


def _limit(args: argparse.Namespace, cluster: Cluster) -> int:
    return cluster.memory_bytes if args.memory_limit is None else int(args.memory_limit * 2**30)


def _asked(args: argparse.Namespace) -> str:
    """What is planned, in a line."""
    overrides = "" if args.model_overrides == "{}" else f" with {args.model_overrides}"
    fixed = [
        f"{_in_words(name)} {getattr(args, name)}"
        for name in PLAN_SEARCH
        if name not in _searched(args) and (name not in (GROUP, *CUT) or getattr(args, name) > 1)
    ]
    return ", ".join(
        [
            f"{args.model}{overrides}: {args.global_batch} sequences of {args.seq_len} tokens a step",
            *fixed,
            args.optimizer,
            _reduction(args),
        ]
    )


def _reduction(args: argparse.Namespace) -> str:
    between = "" if args.inter_node_dtype is None else f", {args.inter_node_dtype} between nodes"
    return f"gradients reduced in {args.reduce_dtype}{between}"


def _in_words(name: str) -> str:
    return name.replace("_", " ")


def _context(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """What was asked, and what the numbers stand on, as JSON."""
    return {
        "model": args.model,
        "model_overrides": model_overrides(args.model_overrides),
        **{name: getattr(args, name) for name in _TOLD},
        "cluster": {
            "name": cluster.name,
            "num_nodes": cluster.num_nodes,
            "devices_per_node": cluster.devices_per_node,
            "device_kind": cluster.device_kind,
            "source": cluster.source,
            "date": cluster.date,
        },
        "assumptions": list(cluster.assumptions),
    }


def _rank(args: argparse.Namespace, workload: Workload, cluster: Cluster) -> None:
    space, objective, limit = _space(args, cluster), Objective(args.objective), _limit(args, cluster)
    out = sys.stderr if args.json else sys.stdout
    try:
        ranking = search(workload, cluster, space, objective, limit, max(args.top, args.verify or 0))
    except NothingFits:
        raise UserError(nothing_fits_message(workload, cluster, space, objective, limit)) from None
    print(_text(args, ranking, cluster), file=out, flush=True)
    if args.json:
        told = report.as_json(ranking)
        told["gin"] += _dtype_lines(args, ranking.best)
        print(json.dumps({**told, **_context(args, cluster)}, indent=1))
    for estimate in ranking.ranked[: args.verify or 0]:
        step = compile_candidate(Scorer(workload, cluster), estimate.candidate)
        print(f"\n{compile_text(step)}", file=out, flush=True)
    if args.plot:
        _plot(args, workload, cluster)
        print(f"\npicture: {args.plot}", file=out)


def _text(args: argparse.Namespace, ranking: Ranking, cluster: Cluster) -> str:
    return "\n\n".join(
        [
            f"{_asked(args)}\n{cluster_line(cluster)}",
            report.ranking_table(ranking, args.top),
            report.rejected_lines(ranking),
            report.why(ranking),
            "\n".join(["for a gin file:", *report.gin_lines(ranking.best), *_dtype_lines(args, ranking.best)]),
            "\n".join(basis_lines(cluster, ranking.best)),
        ]
    )


def _dtype_lines(args: argparse.Namespace, best: Estimate) -> list[str]:
    """Of gradients, where they are not the defaults."""
    lines = [] if args.reduce_dtype == "float32" else [f"REDUCE_DTYPE = '{args.reduce_dtype}'"]
    if args.inter_node_dtype not in (None, args.reduce_dtype):
        lines.append(f"INTER_NODE_DTYPE = '{args.inter_node_dtype}'")
        # The degrees divide each other.
        if best.candidate.degrees.opt_state.inter == 1:
            lines[-1] += "  # without effect: nothing is sharded over nodes"
    return lines


def _explain(args: argparse.Namespace, workload: Workload, cluster: Cluster) -> None:
    candidate = candidate_of(args, args.explain, workload, cluster)
    scorer, limit = Scorer(workload, cluster), _limit(args, cluster)
    estimate, costs = scorer.estimate(candidate, record=True), scorer.message_costs(candidate)
    told = estimate, costs, limit, scorer.microbatch_group_cost(candidate)
    text = f"{_asked(args)}\n{cluster_line(cluster)}\n\n{report.explanation(*told)}\n"
    print(text, *basis_lines(cluster), sep="\n", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps({**report.explanation_json(*told), **_context(args, cluster)}, indent=1))


def _plot(args: argparse.Namespace, workload: Workload, cluster: Cluster) -> None:
    """The heat map: the models of the same family, on 1, 2, 4, ... nodes."""
    if cluster.peak_flops is None:
        raise UserError(f"--plot draws MFU, but the peak of {cluster.device_kind} is not known; leave it out")
    workloads = [workload if name == args.model else _sibling(args, name, cluster) for name in _family(args.model)]
    nodes = {2**i for i in range(max(_MOST_NODES, cluster.num_nodes).bit_length())} | {cluster.num_nodes}
    progress = _Progress()
    grid = best_by_size(
        workloads,
        cluster,
        sorted(nodes),
        _space(args, cluster),
        Objective(args.objective),
        _limit(args, cluster),
        progress,
    )
    progress.close()
    plot_best(grid, args.plot, (workload.model.name, cluster.num_nodes), _caption(args, cluster))


def _family(model: str) -> list[str]:
    """The named models of the same family with at least 1B parameters, and `model`; the smallest first."""
    sizes = {}
    for name in MODELS:
        numbers = build_model(name).numbers
        if numbers and name.split("-")[0] == model.split("-")[0]:
            sizes[name] = numbers.num_params
    return sorted((n for n, size in sizes.items() if size >= _SMALLEST_PARAMS or n == model), key=sizes.__getitem__)


def _sibling(args: argparse.Namespace, name: str, cluster: Cluster) -> Workload:
    """The same job with another model, and with its longest sequence if that is shorter."""
    seq_len = int(min(args.seq_len, longest_sequence(name, {})))
    return workload_of(
        argparse.Namespace(**{**vars(args), "model": name, "model_overrides": "{}", "seq_len": seq_len}), cluster
    )


def _caption(args: argparse.Namespace, cluster: Cluster) -> str:
    each = args.global_batch // cluster.num_devices
    searched = _searched(args)
    names = PLAN_SEARCH[: 3 if args.microbatch_group > 1 or GROUP in searched else 2]
    told = [f"{_in_words(name)} {'searched' if name in searched else getattr(args, name)}" for name in names]
    told.append(_reduction(args))
    told.append(f"{_limit(args, cluster) / 2**30:.1f} GiB a device; framed: as asked")
    return f"{each} sequence{'s' * (each > 1)} a device and step, {', '.join(told)}"


class _Progress:
    """A line on stderr that says which cell is searched: rewritten on a terminal, elsewhere one every few seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = time.monotonic()

    def __call__(self, what: str, done: float) -> None:
        if time.monotonic() - self._shown_at < (0.2 if self._is_terminal else 10.0):
            return
        self._shown_at = time.monotonic()
        begin, end = ("\r\x1b[K", "") if self._is_terminal else ("", "\n")
        print(f"{begin}picture, {done:.0%}: {what}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clears the line of a terminal."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
