"""Peak memory as `cost.memory` predicts it, beside what XLA:GPU compiles the same step to, for target devices.

    python benchmarks/memory.py --compile_for h200 --results memory.jsonl

Compiles each setting that is not in the file yet with `train_step.py`, 10 to 40 s each, then prints the table.
Without --compile_for it prints the table of what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax.numpy as jnp

from amsp_jax.cli import exits
from amsp_jax.compile import ahead_of_time
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cost import memory, microbatch_group_memory
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.trace import ModelTrace, trace_model
from amsp_jax.strategy import DataRanks

ROOT = Path(__file__).parent.parent
Overrides = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One compiled step; 4 devices a node."""

    model: str
    num_layers: int
    strategy: str
    remat: str
    microbatch: int
    accumulation: int
    num_nodes: int = 1
    reduce_dtype: str = "float32"
    vocab_size: int = 0
    loss_chunks: int = 1
    microbatch_group: int = 1
    is_tied: bool = False

    @property
    def overrides(self) -> dict[str, int]:
        """Of the model's configuration; a vocabulary of 0 is its own."""
        vocabulary = {"vocab_size": self.vocab_size} if self.vocab_size else {}
        tied = {"tied": True} if self.is_tied else {}
        return {"num_layers": self.num_layers, "loss_chunks": self.loss_chunks, **vocabulary, **tied}

    @property
    def seq_len(self) -> int:
        """Tokens of a row; GPT has no positions for more."""
        return 2048 if self.model.startswith("gpt") else 4096

    @property
    def flags(self) -> dict[str, Any]:
        """Of `train_step.py`."""
        return {
            "model": self.model,
            "overrides": self.overrides,
            "strategy": self.strategy,
            "remat": self.remat,
            "microbatch": self.microbatch,
            "accumulation": self.accumulation,
            "seq_len": self.seq_len,
            "nodes": self.num_nodes,
            "devices": 4 * self.num_nodes,
            "reduce_dtype": self.reduce_dtype,
            "microbatch_group": self.microbatch_group,
        }


MIXED = "params=replica grads=node opt_state=full"
SETTINGS = [
    *(Setting("llama-7b", 8, s, "projections", 2, a) for s in ("ddp", "zero1", "zero2", "zero3") for a in (1, 4)),
    *(Setting("llama-7b", 8, s, "projections", 2, 4, 2) for s in ("mics", "hpz", "hfsdp", MIXED, "zero3")),
    Setting("llama-7b", 8, "hpz", "projections", 2, 1, 2),
    Setting("llama-7b", 8, "ddp", "projections", 1, 4),
    Setting("llama-7b", 8, "zero3", "projections", 4, 1),
    Setting("llama-7b", 8, "zero3", "projections", 2, 1, 1, "bfloat16"),
    Setting("llama-7b", 8, "zero3", "none", 1, 4),
    Setting("llama-7b", 8, "zero1", "none", 1, 1),
    Setting("llama-7b", 8, "zero3", "full", 2, 4),
    Setting("llama-7b", 8, "zero3", "full", 1, 1),
    Setting("llama-7b", 8, "zero1", "full", 4, 4),
    Setting("llama-7b", 8, MIXED, "full", 2, 1, 2),
    Setting("llama-7b", 32, "zero3", "projections", 2, 1),
    Setting("llama-7b", 32, "hfsdp", "projections", 1, 4, 2),
    Setting("llama-1b", 16, "zero1", "projections", 4, 4),
    Setting("llama-1b", 16, "hfsdp", "projections", 2, 4, 2),
    Setting("llama-1b", 16, "mics", "projections", 1, 1, 2),
    Setting("llama-1b", 16, "zero2", "none", 2, 4),
    Setting("llama-1b", 16, "zero1", "none", 4, 1),
    Setting("llama-1b", 16, "zero3", "full", 4, 4),
    Setting("llama-1b", 16, "hpz", "full", 4, 4, 2),
    Setting("llama-1b", 16, "ddp", "full", 4, 4),
    Setting("gpt-22b", 4, "zero1", "projections", 2, 4),
    Setting("gpt-22b", 4, "zero3", "projections", 2, 4),
    Setting("gpt-22b", 4, "hpz", "projections", 4, 4, 2),
    Setting("gpt-22b", 4, MIXED, "projections", 1, 4, 2),
    Setting("gpt-22b", 4, "ddp", "projections", 1, 1),
    Setting("gpt-22b", 4, "zero2", "none", 1, 4),
    Setting("gpt-22b", 4, "zero3", "full", 4, 1),
    *(
        Setting("llama-7b", 4, strategy, "projections", 4, 1, 1, "bfloat16", 128000, num_chunks)
        for strategy in ("zero2", "zero3")
        for num_chunks in (1, 4, 8, 16)
    ),
    *(Setting("llama-7b", 4, "zero3", "projections", 2, 4, 1, "float32", 128000, num_chunks) for num_chunks in (1, 8)),
]
GROUPED = [
    *(Setting("llama-7b", 8, s, "projections", 1, 4, microbatch_group=4) for s in ("ddp", "zero1", "zero2", "zero3")),
    *(Setting("llama-7b", 8, s, "projections", 1, 4, 2, microbatch_group=4) for s in ("mics", "hpz", MIXED)),
    Setting("llama-7b", 8, MIXED, "projections", 1, 6, 2, microbatch_group=2),
    Setting("llama-7b", 8, "zero1", "projections", 1, 8, microbatch_group=2),
    Setting("llama-7b", 8, "zero1", "full", 2, 8, microbatch_group=4),
    Setting("llama-7b", 8, "zero1", "none", 1, 2, microbatch_group=2),
    Setting("llama-7b", 8, "zero2", "full", 1, 16, microbatch_group=8),
    Setting("llama-7b", 8, "zero3", "projections", 1, 4, microbatch_group=2),
    Setting("llama-7b", 8, "zero3", "projections", 2, 12, microbatch_group=4),
    Setting("llama-7b", 8, "zero3", "full", 1, 8, microbatch_group=8),
    Setting("llama-7b", 32, "zero3", "full", 1, 8, microbatch_group=8),
    Setting("llama-1b", 16, "zero1", "projections", 2, 4, microbatch_group=4),
    Setting("llama-1b", 16, "zero3", "full", 4, 8, microbatch_group=4),
    Setting("llama-1b", 16, "mics", "projections", 2, 8, 2, microbatch_group=2),
    Setting("llama-1b", 16, "mics", "projections", 2, 6, 2, microbatch_group=2),
    Setting("llama-1b", 16, "zero2", "none", 2, 4, microbatch_group=4),
    Setting("llama-1b", 16, "zero1", "projections", 2, 4, microbatch_group=4, is_tied=True),
    Setting("llama-1b", 16, "zero3", "full", 2, 12, microbatch_group=4, is_tied=True),
    Setting("gpt-22b", 4, "zero1", "projections", 1, 4, microbatch_group=4),
    Setting("gpt-22b", 4, "zero3", "full", 2, 8, microbatch_group=4),
]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--compile_for", choices=ahead_of_time.TARGETS, help="target devices, where results are missing")
    p.add_argument("--results", type=Path, required=True, help="JSON lines, appended to")
    p.add_argument("--python", default=sys.executable, help="an interpreter with jax's CUDA plugin")
    args = p.parse_args()
    if args.compile_for:
        for setting in SETTINGS + GROUPED:
            if setting not in compiled(args.results):
                append(args.results, setting, compile_setting(setting, args.python, args.compile_for))
    rows = compiled(args.results)
    print("\n".join([*table(rows, SETTINGS), "", *table(rows, GROUPED, has_groups=True)]))


def compile_setting(setting: Setting, python: str, target: str) -> dict[str, Any]:
    """What `train_step.py` prints of it."""
    flags = [f"--{name}={value}" for name, value in setting.flags.items()]
    command = [python, "benchmarks/train_step.py", f"--compile_for={target}", *flags]
    # The plugin looks for a GPU unless told before jax is imported that there is none.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{setting}: {result.stderr[-2000:]}")
    return json.loads(result.stdout)


def append(results: Path, setting: Setting, row: dict[str, Any]) -> None:
    """One line: the setting, and the compiled step's sizes."""
    kept = {name: row[name] for name in ("argument_gib", "temp_gib", "jax", "device_kind")}
    with results.open("a") as file:
        file.write(json.dumps({"setting": dataclasses.asdict(setting), **kept}) + "\n")


def compiled(results: Path) -> dict[Setting, dict[str, Any]]:
    """The rows of a file by setting."""
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Setting(**row["setting"]): row for row in rows}


def table(rows: dict[Setting, dict[str, Any]], settings: Sequence[Setting], has_groups: bool = False) -> Iterator[str]:
    """Markdown, in the order of the settings; with a column of their groups if it `has_groups`."""
    head = ["model", "strategy", "nodes", "remat", "microbatch", "microbatches", *["microbatch_group"] * has_groups]
    head += ["arguments", "compiled", "predicted", "error"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for s in settings:
        if s not in rows:
            continue
        peak = rows[s]["argument_gib"] + rows[s]["temp_gib"]
        predicted = predict(s)
        arguments, total = predicted.argument_bytes / 2**30, predicted.total / 2**30
        # The compiled figure has two decimals.
        assert abs(arguments - rows[s]["argument_gib"]) < 0.006, (s, arguments)
        remat = s.remat if s.reduce_dtype == "float32" else f"{s.remat}, {s.reduce_dtype} reduction"
        tied = ", tied" if s.is_tied else ""
        vocabulary = f", vocabulary {s.vocab_size}, loss_chunks {s.loss_chunks}" if s.vocab_size else ""
        yield (
            f"| {s.model}, {s.num_layers} layers{tied}{vocabulary} | {s.strategy} | {s.num_nodes} | {remat} | "
            f"{s.microbatch} | {s.accumulation} | {f'{s.microbatch_group} | ' if has_groups else ''}"
            f"{arguments:.2f} | {peak:.2f} | {total:.2f} | {total / peak - 1:+.1%} |"
        )


def predict(setting: Setting) -> memory.MemoryEstimate:
    """The planner's estimate."""
    overrides = tuple(setting.overrides.items())
    distinct = sketch_of(setting.model, overrides)
    plan = make_plan(setting.strategy, distinct.model, ranks=DataRanks(4, setting.num_nodes))
    optimizer = make_optimizer("adamw", 3e-4, weight_decay=0.1, clip_norm=1.0)
    settings = StepSettings(
        reduce_dtype=jnp.dtype(setting.reduce_dtype),
        remat=Remat(setting.remat),
        microbatch_group=setting.microbatch_group,
    )
    trace = trace_of(setting.model, overrides, setting.microbatch, setting.seq_len, settings.remat)
    if setting.microbatch_group > 1:
        return microbatch_group_memory.estimate(
            distinct, plan, trace, optimizer, settings, setting.accumulation // setting.microbatch_group
        )
    return memory.estimate(distinct, plan, trace, optimizer, settings, setting.accumulation)


@functools.cache
def sketch_of(model: str, overrides: Overrides) -> DistinctBlocks:
    return DistinctBlocks.of(build_model(model, dict(overrides), attention="cudnn"))


@functools.cache
def trace_of(model: str, overrides: Overrides, microbatch: int, seq_len: int, remat: Remat) -> ModelTrace:
    return trace_model(sketch_of(model, overrides), microbatch, seq_len, remat, jnp.bfloat16)


if __name__ == "__main__":
    sys.exit(exits.run(main))
