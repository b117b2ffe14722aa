"""What each part of the overlap of communication and compute gains, added one by one (AMSP, arXiv 2311.00257).

    benchmarks/nodes.sh 300 OUT/logs/ablation python3 benchmarks/ablation.py --out OUT/ablation.jsonl
    python benchmarks/ablation.py --size tiny --simulated-nodes 2 --simulated-devices-per-node 2 --out FILE

The first is a host of GPUs as two nodes, the second a CPU, where collectives are always synchronous. The parts of a
strategy have their programs in one process and take turns, so that a network that is slower for a while is so for all
of them. One JSON line a strategy and part, and a table at the end; what has its lines is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import measure
from measure import COMPUTE_DTYPE, Size
from rows import Row, append_row, read_rows, step_times, table
from strategies import make_parser, named, size_of

from amsp_jax.cli import exits
from amsp_jax.engine.mesh import level
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.state import TrainState
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Batch, Model
from amsp_jax.runtime import launch
from amsp_jax.strategy import DataRanks

STRATEGIES = ("params=replica grads=node opt_state=full", "zero1", "mics", "zero3")
SYNCHRONOUS = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
NUM_WARMUP, NUM_TURNS, NUM_LEAST = 2, 4, 2
# Of a strategy, before one has been measured.
FIRST_GUESS_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A step with some of the overlap.

    Attributes:
      name: of what it has beyond the one before it.
      is_async: collectives run beside compute.
      peel_first, peel_last, inter_node_dtype: as in `StepSettings`.
      is_grouped: all microbatches of a step go through a block before the next.
    """

    name: str
    is_async: bool = True
    peel_first: bool = False
    peel_last: bool = False
    inter_node_dtype: str | None = None
    is_grouped: bool = False

    def settings(self, accumulation: int) -> StepSettings:
        """Of a step of so many microbatches."""
        return StepSettings(
            peel_first=self.peel_first,
            peel_last=self.peel_last,
            inter_node_dtype=self.inter_node_dtype,
            microbatch_group=accumulation if self.is_grouped else 1,
        )

    def options(self, layout: launch.DeviceLayout, model: Model, plan: Plan) -> dict[str, str]:
        """For the compiler; on a CPU it has no such option."""
        ours = measure.compiler_options(layout, model, plan, self.settings(1))
        return ours if self.is_async or layout.platform == "cpu" else ours | SYNCHRONOUS


PARTS = (
    Part(name="no overlap", is_async=False),
    Part(name="blocks' gathers and scatters"),
    Part(name="reductions beside the last backward", peel_last=True),
    Part(name="gathers beside the first forward", peel_first=True, peel_last=True),
)
GROUPED = Part(name="a group of all microbatches", peel_first=True, peel_last=True, is_grouped=True)
NARROWER = dataclasses.replace(GROUPED, name="bf16 gradients between nodes", inter_node_dtype="bfloat16")
"""No overlap, but less to hide: where gradients are sharded over nodes."""


def main() -> None:
    args = parse_args()
    layout = measure.set_up(args)
    launch.from_process_0(lambda: measure.check_file(args.out))
    ranks, size = DataRanks(layout.devices_per_node, layout.num_nodes), size_of(args)
    names = named(args.strategy, ranks)
    done = launch.from_process_0(lambda: [[row["strategy"], row["accumulation"]] for row in read_rows(args.out)])
    end, last_s = time.monotonic() + args.budget_s, FIRST_GUESS_S
    for strategy in (s for s in names if [s, args.accumulation] not in done):
        begin = time.monotonic()
        if not measure.has_time(last_s, end):
            launch.say(f"no time for {strategy}")
            break
        for row in measured(layout, ranks, size, strategy, args):
            if layout.process_index == 0:
                append_row(args.out, row | {"names": names[strategy]})
        last_s = time.monotonic() - begin
        launch.say(f"{strategy}: {last_s:.1f} s")
    if layout.process_index == 0:
        print(report(read_rows(args.out)) + measure.cpu_note(layout))


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, STRATEGIES)
    parser.add_argument("--accumulation", type=int, default=4, help="microbatches of a step")
    return parser.parse_args()


def parts_of(plan: Plan, accumulation: int) -> Sequence[Part]:
    """Those that are programs of their own: of overlap only two where nothing is gathered or reduced once a step."""
    axes = plan.axes
    parts = PARTS if axes.grad or axes.opt or axes.replica else PARTS[:2]
    is_sharded = any(level(axis) == "inter" for axis in axes.param + axes.grad + axes.opt)
    return [*parts, *([GROUPED] if accumulation > 1 else []), *([NARROWER] if is_sharded else [])]


def measured(
    layout: launch.DeviceLayout, ranks: DataRanks, size: Size, strategy: str, args: argparse.Namespace
) -> list[Row]:
    """Compiles the parts of a strategy and times them in turns: a row for each."""
    model, attention = measure.model_on(layout, size)
    plan = make_plan(strategy, model, ranks=ranks, devices=layout.devices, compute_dtype=COMPUTE_DTYPE)
    shape, parts = size.shape(args.accumulation, ranks), parts_of(plan, args.accumulation)
    steps = []
    for part in parts:
        options = part.options(layout, model, plan)
        steps.append(measure.compile_step(model, plan, part.settings(args.accumulation), shape, options))
        launch.say(f"{strategy}, {part.name}: compiled in {steps[-1].compile_s:.1f} s")
    state = measure.filled_state(model, plan)
    batches = [measure.random_batch(plan, shape, model, i) for i in range(2)]
    times = in_turns([step.program for step in steps], state, batches, args)
    rows = []
    for part, step, each in zip(parts, steps, times, strict=True):
        options = part.options(layout, model, plan)
        row = {"strategy": strategy, "accumulation": args.accumulation, "part": part.name, **each.row()}
        row |= {**measure.surroundings(layout, size, attention, options), **step.row()}
        rows.append(row | {"mfu": size.mfu(row)})
    return rows


def in_turns(
    programs: Sequence[Any], state: TrainState, batches: Sequence[Batch], args: argparse.Namespace
) -> list[measure.StepTimes]:
    """Some steps of each program, of each again, and so on; as many of each, fewer where the slowest takes long."""
    times: list[measure.StepTimes] = []
    for program in programs:
        state, warm = measure.run_steps(program, state, batches, NUM_WARMUP)
        times.append(measure.StepTimes(losses=warm.losses, warmup_s=warm.times_s))
        launch.say(f"program {len(times)} of {len(programs)}: a step of {warm.times_s[-1]:.3f} s")

    def steps_of_a_turn() -> int:
        """As many of each program as fit of the slowest: medians over turns of other lengths do not compare."""
        slowest = max(each.warmup_s[-1] for each in times)
        return max(NUM_LEAST, int(min(args.most_s / slowest, args.steps) / NUM_TURNS))

    num_steps = launch.from_process_0(steps_of_a_turn)
    for _, (i, program) in itertools.product(range(NUM_TURNS), enumerate(programs)):
        state, new = measure.run_steps(program, state, batches, num_steps)
        times[i] += new
    return times


def report(rows: Sequence[Row]) -> str:
    """By strategy: each part's time, over it that of the part before, and that of no overlap."""
    heads = ["microbatches", "strategy", "overlap", "step ms (min, max)", "gain of this part", "gain of all so far"]
    lines, first, before = [], rows[0], rows[0]
    for row in rows:
        if row["part"] == PARTS[0].name:
            first = before = row
        lines.append(
            [
                str(row["accumulation"]), ", ".join(row["names"]), row["part"], step_times(row),
                f"{before['step_s'] / row['step_s']:.3f}x", f"{first['step_s'] / row['step_s']:.3f}x",
            ]
        )  # fmt: skip
        before = row
    return table(heads, lines)


if __name__ == "__main__":
    launch.end_process(exits.run(main))
