"""Every named strategy on one network, at several numbers of microbatches: which is fastest where?

    benchmarks/nodes.sh 300 OUT/logs/strategies python3 benchmarks/strategies.py --out OUT/strategies.jsonl
    python benchmarks/strategies.py --size tiny --simulated-nodes 2 --simulated-devices-per-node 2 --out FILE

The first is a host of GPUs as two nodes, the second a CPU. One JSON line a strategy and number of microbatches, and a
table at the end. A setting whose line is there is not measured again. All are measured in one process, so that
communicators of those before are still there; memory is the compiled program's.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import measure
from measure import SIZES, Size
from regret_report import choice
from rows import Row, append_row, gibibytes, read_rows, step_times, table

from amsp_jax.cli import exits, parsing
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import load_cluster
from amsp_jax.runtime import launch
from amsp_jax.strategy import DataRanks, PartialSharding, parse

NAMED = ("params=replica grads=node opt_state=full", "mics", "hpz", "zero3", "zero1", "zero2", "ddp")
ACCUMULATIONS = (4, 8, 1, 2)
"""In the order in which they are measured."""

NUM_WARMUP = 2
# Of a setting, before one has been measured.
FIRST_GUESS_S = 20.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """One thing to measure.

    Attributes:
      accumulation: microbatches of a step.
      strategy: in canonical form.
      inter_node_dtype, microbatch_group: as in `StepSettings`.
    """

    accumulation: int
    strategy: str
    inter_node_dtype: str | None = None
    microbatch_group: int = 1


def main() -> None:
    args = parse_args()
    layout = measure.set_up(args)
    launch.from_process_0(lambda: measure.check_file(args.out))
    ranks = DataRanks(layout.devices_per_node, layout.num_nodes)
    size = size_of(args)
    chosen = launch.from_process_0(lambda: planned(args.cluster, size, args.accumulation, args.microbatch_group))
    names = named(args.strategy, ranks)
    missing = launch.from_process_0(lambda: [vars(s) for s in left(read_rows(args.out), settings(names, chosen, args))])
    end = time.monotonic() + args.budget_s
    for setting in (Setting(**each) for each in missing):
        if not measure.has_time(expected_s(read_rows(args.out)), end):
            launch.say(f"no time for {setting}")
            break
        strategy, n = setting.strategy, setting.accumulation
        row = measure.measured(
            layout, size, strategy, n, num_warmup=NUM_WARMUP, num_steps=args.steps, most_s=args.most_s,
            inter_node_dtype=setting.inter_node_dtype, microbatch_group=setting.microbatch_group,
        )  # fmt: skip
        row |= {
            "strategy": strategy,
            "names": names.get(strategy, []),
            "is_choice": chosen.get(str(n)) == [strategy, setting.microbatch_group],
        }
        if layout.process_index == 0:
            append_row(args.out, row)
            print(f"x{n} {strategy_cell(row)}: {step_times(row)} ms, all {row['wall_s']} s", flush=True)
    if layout.process_index == 0:
        print(report(read_rows(args.out)) + measure.cpu_note(layout))


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, NAMED)
    parser.add_argument("--accumulation", nargs="+", type=int, default=ACCUMULATIONS, help="microbatches of a step")
    parser.add_argument(
        "--microbatch-group", nargs="+", type=int, default=(1,), help="of them that go through a block in turn"
    )
    parser.add_argument("--cluster", help="a calibrated cluster file: measures the planner's choice, too")
    parser.add_argument(
        "--inter-node-dtype",
        choices=("bfloat16",),
        help="of gradients between nodes, where a strategy shards them over nodes; left out: float32",
    )
    return parser.parse_args()


def make_parser(description: str | None, strategies: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments of a benchmark that measures strategies into a file; `size_of` reads what is trained."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--strategy", nargs="+", default=strategies)
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin nothing that would end later")
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--overrides", type=ast.literal_eval, help="other than the size's, \"{'num_layers': 8}\"")
    parser.add_argument("--microbatch", type=int, help="sequences a device computes at once, other than the size's")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence, other than the size's")
    parser.add_argument("--steps", type=int, default=20, help="timed, fewer if they take long")
    parser.add_argument("--most-s", type=float, default=8.0, help="of a setting's timed steps, seconds")
    parsing.add_device_arguments(parser)
    return parser


def size_of(args: argparse.Namespace) -> Size:
    """The size that the arguments describe."""
    changes = {"overrides": args.overrides, "microbatch": args.microbatch, "seq_len": args.seq_len}
    return dataclasses.replace(SIZES[args.size], **{name: value for name, value in changes.items() if value})


def named(strategies: Sequence[str], ranks: DataRanks) -> dict[str, list[str]]:
    """By the canonical form on these ranks, the names that mean it; those that do not fit them are left out."""
    found: dict[str, list[str]] = {}
    for text in strategies:
        strategy = parse(text)
        try:
            found.setdefault(str(strategy.resolve(ranks)), []).append(text)
        except UserError as error:
            launch.say(f"left out: {error}")
    return found


def planned(
    cluster_file: str | None, size: Size, accumulations: Sequence[int], groups: Sequence[int]
) -> dict[str, list[Any]]:
    """The planner's choice of strategy and microbatch group by the number of microbatches; empty without a cluster."""
    if cluster_file is None:
        return {}
    cluster = load_cluster(cluster_file)
    found = {str(n): choice(size, n, cluster, groups) for n in accumulations}
    return {n: [str(candidate.degrees), candidate.microbatch_group] for n, candidate in found.items()}


def settings(names: dict[str, list[str]], chosen: dict[str, list[Any]], args: argparse.Namespace) -> Iterator[Setting]:
    """The planner's choice first: it is what the others are compared with."""
    for n in args.accumulation:
        first = [tuple(chosen[str(n)])] if chosen else []
        others = [(strategy, group) for group in args.microbatch_group if n % group == 0 for strategy in names]
        for strategy, group in dict.fromkeys([*first, *others]):
            yield Setting(n, strategy, args.inter_node_dtype if shards_over_nodes(strategy) else None, group)


def shards_over_nodes(strategy: str) -> bool:
    """Whether gradients of a strategy in canonical form can travel between nodes in a dtype of their own."""
    opt_state = parse(strategy).opt_state
    assert isinstance(opt_state, PartialSharding), strategy
    # The degrees of P and G divide that of OS.
    return opt_state.inter > 1


def left(rows: Sequence[Row], wanted: Iterator[Setting]) -> list[Setting]:
    """Those without a row."""
    # Rows of old files have neither a dtype nor a microbatch group.
    done = {
        Setting(row["accumulation"], row["strategy"], row.get("inter_node_dtype"), row.get("microbatch_group", 1))
        for row in rows
    }
    return [setting for setting in wanted if setting not in done]


def expected_s(rows: Sequence[Row]) -> float:
    """The longest so far."""
    return max([row["wall_s"] for row in rows] or [FIRST_GUESS_S])


def report(rows: Sequence[Row]) -> str:
    """A table for each number of microbatches."""
    heads = [
        "microbatches",
        "strategy",
        "named",
        "step ms (min, max)",
        "MFU",
        "GiB",
        "against the choice, or the fastest",
    ]
    lines = []
    for n in sorted({row["accumulation"] for row in rows}):
        alike = [row for row in rows if row["accumulation"] == n]
        lines += [
            [
                str(n), strategy_cell(row), ", ".join(row["names"]), step_times(row), percent(row.get("mfu")),
                gibibytes(row["compiled_bytes"]["total"]), ratio(row, alike),
            ]
            for row in sorted(alike, key=lambda row: row.get("step_s", float("inf")))
        ]  # fmt: skip
    return table(heads, lines)


def strategy_cell(row: Row) -> str:
    """With the dtype of gradients between nodes where that is another than float32, and groups of microbatches."""
    dtype, group = row.get("inter_node_dtype"), row.get("microbatch_group", 1)
    words = [row["strategy"], f"{dtype} between nodes" if dtype else "", f"groups of {group}" if group > 1 else ""]
    return ", ".join(filter(None, words))


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def ratio(row: Row, alike: Sequence[Row]) -> str:
    """Time over that of the planner's choice, or where there is none, of the fastest."""
    timed: list[Any] = [each for each in alike if "step_s" in each]
    if "step_s" not in row:
        return ""
    base = next((each for each in timed if each["is_choice"]), min(timed, key=lambda each: each["step_s"]))
    return f"{row['step_s'] / base['step_s']:.2f}x" + " (the choice)" * row["is_choice"]


if __name__ == "__main__":
    launch.end_process(exits.run(main))
