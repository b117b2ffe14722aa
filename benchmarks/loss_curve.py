"""Do losses change when communication overlaps compute? A loss curve with overlap, once more, and without.

    python benchmarks/loss_curve.py --out OUT
    RANKS=4 benchmarks/nodes.sh 240 OUT/logs/loss_curve python3 benchmarks/loss_curve.py --out OUT
    python benchmarks/loss_curve.py --out DIR --simulated-nodes 2 --simulated-devices-per-node 1 --steps 5 \\
        --gin_file=configs/quickstart.gin --set MICROBATCH=2

The second is for one GPU that ranks share. A run of `train.py` three times over in its processes: its config, data in
its order, initial state and compiled step. Without overlap all collectives are synchronous and all microbatches are in
the loop. By how much the first two differ is what two runs of one program differ by. Writes `loss_curve.json`;
`plot.py` draws it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import measure
from ablation import PARTS, Part

from amsp_jax.cli import exits, parsing
from amsp_jax.cli import settings as cli
from amsp_jax.engine.state import init_state
from amsp_jax.run.data import Prefetcher
from amsp_jax.run.job import Job, prepare
from amsp_jax.run.resolved import resolve
from amsp_jax.runtime import launch

RUNS = (("overlap", PARTS[-1]), ("overlap again", PARTS[-1]), ("no overlap", PARTS[0]))


def main() -> None:
    args = parse_args()
    bindings = [f"{name} = {value!r}" for name, value in settings(args).items()]
    bindings += map(cli.binding, args.set)
    config = cli.load_config([cli.find_gin_file(args.gin_file)], bindings)
    layout = measure.set_up(args)
    built = cli.build_model(config, layout.devices[0])
    job = prepare(resolve(config, built.model, layout))
    programs = {part: compiled(job, part) for _, part in RUNS}
    losses = {}
    for name, part in RUNS:
        losses[name] = run(job, programs[part])
        launch.say(f"{name}: {losses[name][0]:.4f} to {losses[name][-1]:.4f}")
    if layout.process_index == 0:
        row = {
            "model": config.model, "strategy": str(job.plan.degrees), "batch": job.batch.shape, "data": config.data,
            "compute_dtype": config.compute_dtype, "reduce_dtype": config.reduce_dtype, "attention": built.attention,
            "device_kind": layout.device_kind, "num_nodes": layout.num_nodes,
            "devices_per_node": layout.devices_per_node, "jax": jax.__version__,
            "date": datetime.date.today().isoformat(), "losses": losses, **compare(losses),
        }  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "loss_curve.json").write_text(json.dumps(row) + "\n")
        print(json.dumps({name: value for name, value in row.items() if name != "losses"}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gin_file", default="configs/runs/llama_125m.gin")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the run")
    parsing.add_device_arguments(parser)
    return parser.parse_args()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What differs from the gin file: a strategy that gathers and reduces in blocks and once a step, and a smaller
    batch, of 4 microbatches on each of 2 devices."""
    return {
        "STEPS": args.steps,
        "STRATEGY": "params=replica grads=node opt_state=full",
        "GLOBAL_BATCH": 32,
        "WARMUP_STEPS": 20,
    }


def compiled(job: Job, part: Part) -> Any:
    """The step with this part of the overlap."""
    chosen = dataclasses.replace(job.settings, peel_first=part.peel_first, peel_last=part.peel_last)
    options = part.options(job.layout, job.model, job.plan)
    return measure.compile_step(job.model, job.plan, chosen, job.batch.shape, options, job.optimizer).program


def run(job: Job, program: Any) -> list[float]:
    """The loss of each step, from the run's initial state."""
    state = init_state(job.plan, job.optimizer, job.config.seed)
    losses = []
    with Prefetcher(lambda i: job.load_batch(job.datasets.train, i), 0, job.config.steps) as batches:
        for batch in batches:
            state, metrics = program(state, batch)
            losses.append(metrics.loss)
            # One step is in flight, as in the trainer.
            jax.block_until_ready(losses[-2:-1])
    return [float(loss) for loss in losses]


def compare(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Relative differences over the steps, largest and median: without overlap, and of two runs with it."""
    noise = differences(losses["overlap"], losses["overlap again"])
    change = differences(losses["overlap"], losses["no overlap"])
    return {
        "largest_difference": max(change), "median_difference": statistics.median(change),
        "largest_noise": max(noise), "median_noise": statistics.median(noise),
    }  # fmt: skip


def differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Of each step, relative to the first curve."""
    return [abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)]


if __name__ == "__main__":
    launch.end_process(exits.run(main))
