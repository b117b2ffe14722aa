"""`python -m amsp_jax plan --model llama-7b --cluster a800 --nodes 128 ...`: the fastest strategy, and why."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amsp_jax.cluster import CLUSTERS, Cluster, compute_capability, load_cluster, named_cluster
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.optimizer import OPTIMIZERS, make_optimizer
from amsp_jax.planner import Candidate, Objective, Ranking, Scorer, Space, Workload, report, search
from amsp_jax.stack import Remat
from amsp_jax.strategy import parse
from models.layers import choose_attention
from models.registry import build_model, model_config

SEARCHED = ("microbatch", "remat")
_MICROBATCHES = (1, 2, 4, 8, 16)


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's subparsers."""
    plan = commands.add_parser(
        "plan", help="rank every strategy for a model on a cluster; needs no device", description=__doc__
    )
    add_workload(plan)
    plan.add_argument("--search", default="", metavar="LIST", help=f"what to vary, too: {','.join(SEARCHED)}")
    plan.add_argument("--objective", default="step_time", choices=list(Objective), help="(default: %(default)s)")
    plan.add_argument("--memory-limit", type=float, metavar="GIB", help="of a device; the cluster's if left out")
    plan.add_argument("--any-nodes", action="store_true", help="also strategies that span nodes before they fill one")
    plan.add_argument("--top", type=int, default=10, metavar="N", help="lines of the table (default: %(default)s)")
    plan.add_argument("--explain", metavar="STRATEGY", help="one strategy in full: memory, streams, every collective")
    plan.add_argument("--verify", type=int, metavar="N", help="compile the N best for absent GPUs and compare")
    plan.add_argument("--plot", type=Path, metavar="PNG", help="best MFU and strategy by model size and nodes")
    plan.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    plan.set_defaults(run=run)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds what is trained and where: the arguments that `plan` and `compile` share."""
    parser.add_argument("--model", required=True, help="a name of the configs, such as llama-7b")
    parser.add_argument("--model-overrides", default="{}", metavar="DICT", help="fields to change, {'num_layers': 8}")
    parser.add_argument(
        "--cluster", required=True, help=f"{', '.join(CLUSTERS)}, or a file of `python -m amsp_jax calibrate`"
    )
    parser.add_argument("--nodes", type=int, help="nodes; those of the file, or 1, if left out")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences a step, over all devices")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--microbatch", type=int, default=1, help="sequences a device computes at once (default: 1)")
    parser.add_argument("--remat", default="projections", choices=list(Remat), help="(default: %(default)s)")
    parser.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS), help="(default: %(default)s)")
    parser.add_argument("--reduce-dtype", default="float32", choices=("float32", "bfloat16"))


def run(args: argparse.Namespace) -> None:
    """Prints the ranking.

    Raises:
      UserError: an unknown model, cluster or strategy; nothing fits.
    """
    cluster = cluster_of(args.cluster, args.nodes)
    workload = workload_of(args, cluster)
    out = sys.stderr if args.json else sys.stdout
    for line in cluster_lines(cluster):
        print(line, file=out)
    if args.explain:
        print(_explanation(args, workload, cluster))
        return
    searched = _searched(args.search)
    ranking = search(workload, cluster, _space(args, searched), Objective(args.objective), _limit(args))
    print(_text(ranking, args.top, searched), file=out)
    if args.json:
        print(json.dumps(report.as_json(ranking), indent=1))


def cluster_of(name: str, nodes: int | None) -> Cluster:
    """A preset, or a file's cluster; with this number of nodes.

    Raises:
      UserError: neither a preset nor a file; a broken file.
    """
    if name.endswith(".json") or Path(name).is_file():
        cluster = load_cluster(Path(name))
        return cluster if nodes is None else cluster.with_nodes(nodes)
    return named_cluster(name, 1 if nodes is None else nodes)


def workload_of(args: argparse.Namespace, cluster: Cluster) -> Workload:
    """What the arguments of `add_workload` describe, with the attention that the cluster's devices will run.

    Raises:
      UserError: an unknown model or override.
    """
    return Workload(
        model=planned_model(args.model, _overrides(args.model_overrides), cluster),
        optimizer=make_optimizer(args.optimizer, 1e-4, weight_decay=0.1, clip_norm=1.0),
        global_batch=args.global_batch,
        seq_len=args.seq_len,
        reduce_dtype=args.reduce_dtype,
    )


def planned_model(name: str, overrides: Mapping[str, Any], cluster: Cluster) -> Model:
    """A named model as `train.py` would build it on the devices of a cluster."""
    head_dim = model_config(name, overrides).head_dim
    capability = compute_capability(cluster.device_kind)
    platform = "cuda" if capability else "other"
    attention = choose_attention(platform, capability, head_dim, "bfloat16")
    return build_model(name, overrides, attention=attention.implementation)


def _overrides(text: str) -> Mapping[str, Any]:
    try:
        overrides = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        overrides = None
    if not isinstance(overrides, dict):
        raise UserError(f"--model-overrides {text!r} is no dictionary; write \"{{'num_layers': 8}}\"")
    return overrides


def cluster_lines(cluster: Cluster) -> list[str]:
    """What the numbers stand on."""
    when = f", measured {cluster.date}" if cluster.date else ""
    return [
        f"cluster {cluster.name}: {cluster.num_nodes} nodes of {cluster.devices_per_node} {cluster.device_kind}{when}",
        f"source: {cluster.source}",
        *(f"assumed: {line}" for line in cluster.assumptions),
    ]


def _searched(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in SEARCHED:
            raise UserError(f"--search {text}: {name!r} is nothing to search; one or both of {','.join(SEARCHED)}")
    return names


def _space(args: argparse.Namespace, searched: Sequence[str]) -> Space:
    return Space(
        microbatches=_MICROBATCHES if "microbatch" in searched else (args.microbatch,),
        remats=tuple(Remat) if "remat" in searched else (Remat(args.remat),),
        fill_nodes=not args.any_nodes,
    )


def _limit(args: argparse.Namespace) -> int | None:
    return None if args.memory_limit is None else int(args.memory_limit * 2**30)


def _text(ranking: Ranking, top: int, searched: Sequence[str]) -> str:
    return "\n\n".join(
        [
            report.ranking_table(ranking, top),
            report.rejected_lines(ranking),
            report.why(ranking),
            report.gin_lines(ranking.best, searched),
        ]
    )


def _explanation(args: argparse.Namespace, workload: Workload, cluster: Cluster) -> str:
    candidate = Candidate(parse(args.explain).resolve(cluster.ranks), args.microbatch, Remat(args.remat))
    scorer = Scorer(workload, cluster)
    estimate = scorer.estimate(candidate, record=True)
    return report.explanation(estimate, scorer.message_costs(candidate), _limit(args) or cluster.memory_bytes)
