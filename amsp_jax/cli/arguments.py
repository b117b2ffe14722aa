"""The arguments of every command. Only the words are here: a command's module is imported when it runs.

Words that another module defines are repeated where that module would import jax; a test compares them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from amsp_jax.cli.parsing import add_device_arguments, positive
from amsp_jax.predict.cluster import CLUSTERS

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "projections", "full")
OPTIMIZERS = ("adamw", "sgd", "adafactor", "lion", "lamb", "muon")
SCHEDULES = ("gpipe", "1f1b")
OBJECTIVES = ("step_time", "paper")
PLAN_SEARCH = ("microbatch", "remat", "microbatch_group", "tensor", "pipeline", "context", "virtual_stages")
TUNE_SEARCH = (
    "strategy", "tensor", "pipeline", "pipeline_schedule", "virtual_stages", "context", "microbatch", "remat",
    "microbatch_group",
)  # fmt: skip
CALIBRATE_BUDGET_S = 100.0
RUNS_FOLDER = Path("runs")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its line in the list of commands, its description, and the function that adds its arguments.

    Attributes:
      takes_settings: whether `--gin.NAME=VALUE` flags belong to the command.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    takes_settings: bool = False


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_workload(parser)
    parser.add_argument("--search", default="", metavar="LIST", help=f"what to vary, too: {','.join(PLAN_SEARCH)}")
    parser.add_argument("--objective", default="step_time", choices=OBJECTIVES, help="(default: %(default)s)")
    parser.add_argument("--memory-limit", type=float, metavar="GIB", help="of a device; the cluster's if left out")
    parser.add_argument("--any-nodes", action="store_true", help="also strategies that span nodes before they fill one")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="lines of the table (default: %(default)s)")
    parser.add_argument("--explain", metavar="STRATEGY", help="one strategy in full: memory, streams, every collective")
    parser.add_argument(
        "--verify", type=int, metavar="N", help="compile the N best for target devices; needs the cuda extra"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="best MFU and strategy by model size and nodes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")


def _add_compile(parser: argparse.ArgumentParser) -> None:
    _add_workload(parser)
    parser.add_argument(
        "--strategy", required=True, help="as STRATEGY of train.py, 'params=4x1 grads=4x1 opt_state=8x1'"
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds what is trained and where: the arguments that `plan` and `compile` share."""
    parser.add_argument("--model", required=True, help="a name of the configs, such as llama-7b")
    parser.add_argument("--model-overrides", default="{}", metavar="DICT", help="fields to change, {'num_layers': 8}")
    parser.add_argument("--cluster", required=True, help=f"{', '.join(CLUSTERS)}, or a file of `amsp-jax calibrate`")
    parser.add_argument("--nodes", type=int, help="nodes; the file's number, or 1, if left out")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences a step, over all devices")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--microbatch", type=int, default=1, help="sequences a device computes at once (default: 1)")
    parser.add_argument(
        "--microbatch-group", type=int, default=1, metavar="N",
        help="microbatches that go through each block before the next (default: 1)",
    )  # fmt: skip
    parser.add_argument("--remat", default="projections", choices=REMATS, help="(default: %(default)s)")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, help="(default: %(default)s)")
    parser.add_argument("--reduce-dtype", default="float32", choices=DTYPES, help="of gradients (default: %(default)s)")
    parser.add_argument("--inter-node-dtype", choices=DTYPES, help="of gradients sharded over nodes, between the nodes")
    parser.add_argument("--tensor", type=int, default=1, help="parts of each matrix, inside a node (default: 1)")
    parser.add_argument("--pipeline", type=int, default=1, help="stages, each with a part of the blocks (default: 1)")
    parser.add_argument("--context", type=int, default=1, help="parts of each sequence, inside a node (default: 1)")
    parser.add_argument(
        "--pipeline-schedule", default="1f1b", choices=SCHEDULES, help="of the stages (default: %(default)s)"
    )
    parser.add_argument("--virtual-stages", type=int, default=1, help="chunks of blocks a stage (default: 1)")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the cluster file to write (JSON)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw bandwidth by message size, as a PNG")
    parser.add_argument(
        "--budget", type=float, default=CALIBRATE_BUDGET_S, metavar="S", help="seconds (default: %(default)g)"
    )
    add_device_arguments(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_gin_file(parser)
    parser.add_argument(
        "--steps", type=positive(int), default=3, metavar="N", help="to take medians of (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=RUNS_FOLDER / "profile", metavar="DIR",
        help="for trace, picture and numbers (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, and all else to stderr")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of several processes that SLURM did not start")
    parser.add_argument("--num_processes", "--num-processes", type=positive(int), metavar="N", help="how many they are")
    parser.add_argument("--process_id", "--process-id", type=int, metavar="I", help="which one this is, from 0")


def _add_gin_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gin_file", action="append", default=[], metavar="FILE",
        help="of the run, as for train; so are --gin.NAME=VALUE, and the quickstart if left out",
    )  # fmt: skip


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run folder with a checkpoint")
    parser.add_argument("--step", type=int, metavar="N", help="of one of its checkpoints (default: the newest)")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument(
        "--max-tokens", type=positive(int), default=128, metavar="N", help="longest continuation (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="probability to draw within (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", type=Path, default=RUNS_FOLDER, metavar="DIR", help="where runs will go (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout", type=positive(float), default=60.0, metavar="S", help="of a collective (default: %(default)g)"
    )
    add_device_arguments(parser)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    count = positive(int)
    _add_gin_file(parser)
    parser.add_argument("--trials", type=count, default=30, metavar="N", help="of the study (default: %(default)s)")
    parser.add_argument(
        "--search", action="append", default=[], metavar="NAME=VALUE,...",
        help=f"values of one of {', '.join(TUNE_SEARCH)}; one value fixes it; without it values that suit the devices",
    )  # fmt: skip
    parser.add_argument("--steps", type=count, default=8, metavar="N", help="of a trial (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="steps not counted (default: %(default)s)")
    parser.add_argument(
        "--time-limit", type=positive(float), default=600.0, metavar="S", help="of a trial (default: %(default)g)"
    )
    parser.add_argument(
        "--out", type=Path, default=RUNS_FOLDER / "tune", metavar="DIR", help="the study (default: %(default)s)"
    )
    parser.add_argument("--cluster", help="preset or file to plan with; a kept calibration if left out")
    parser.add_argument("--launcher", default="", metavar="COMMAND", help='put before each trial, as "srun"')
    parser.add_argument("--nodes", type=count, metavar="N", help="of a trial (default: SLURM's under --launcher)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")


COMMANDS = {
    "plan": Command(
        "rank every strategy for a model on a cluster; needs no device",
        "Predicts the fastest strategy for a model on a cluster, and says why.",
        _add_plan,
    ),
    "calibrate": Command(
        "measure collectives and rates of the devices, for `plan`",
        "Measures the devices and their network. Start it as training is started: alone, with srun, or as several "
        "processes by hand.",
        _add_calibrate,
    ),
    "compile": Command(
        "compile a step for target devices that are absent; needs the cuda extra",
        "Compiles the real step for target devices that are absent, and prints its memory, its collectives and what "
        "hides each of them beside the planner's numbers.",
        _add_compile,
    ),
    "profile": Command(
        "run a few steps of a training run and say where their time goes",
        "Trains a few steps under jax's profiler, writes no checkpoint and leaves RUN_DIR alone. Start it as training "
        "is started; of several processes each traces its own devices, and process 0 reports its own.",
        _add_profile,
        takes_settings=True,
    ),
    "generate": Command(
        "continue a text with the model of a run folder",
        "Continues a text with the model of a run folder.",
        _add_generate,
    ),
    "doctor": Command(
        "check an installation and a cluster, and say what to fix",
        "Checks an installation and a cluster, and says what to fix. Start it as training is started: alone, with "
        "srun, or as several processes by hand. Exit code 0: nothing FAILs; 1: something does.",
        _add_doctor,
    ),
    "tune": Command(
        "search the fastest settings of a run on the machine itself",
        "Searches the fastest settings of a run by running it.",
        _add_tune,
        takes_settings=True,
    ),
}
"""Every command but `train`, whose arguments are the settings and are read by `cli.settings`."""
