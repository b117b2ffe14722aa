"""Times the training step of a model on the devices that are there, or compiles it for GPUs that are not.

    python benchmarks/train_step.py --model llama-7b --strategy zero3 --seq_len 4096 --microbatch 2
    python benchmarks/train_step.py --model llama-7b --compile_for h200 --devices 4

Synthetic random tokens; the step is `amsp_jax.engine.train_step.make_train_step` as `train.py` runs it. Prints
one JSON line: medians over `--steps` after `--warmup`. MFU = tokens/s x `ModelNumbers.flops_per_token` / peak.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure

from amsp_jax.cli import exits, parsing
from amsp_jax.compile import ahead_of_time, xla_flags
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Model
from amsp_jax.models.registry import build_model

_SETTINGS = {"microbatch_group": "MICROBATCH_GROUP"}
"""Of train.py, where their names are not those of the flags here."""


def parse_args() -> argparse.Namespace:
    p = parsing.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = parsing.positive(int)
    p.add_argument("--model", default="llama-7b")
    p.add_argument("--overrides", type=ast.literal_eval, default={}, help="e.g. \"{'num_layers': 8}\"")
    p.add_argument("--strategy", default="zero3")
    p.add_argument("--seq_len", type=count, default=4096)
    p.add_argument("--microbatch", type=count, default=2, help="sequences per data rank")
    p.add_argument("--accumulation", type=count, default=1)
    p.add_argument("--reduce_dtype", default="float32")
    p.add_argument("--inter_node_dtype", help="of gradients between nodes; as --reduce_dtype if left out")
    p.add_argument("--compute_dtype", default="bfloat16")
    p.add_argument("--remat", choices=list(map(str, Remat)), default="projections")
    p.add_argument("--no_peel", action="store_true")
    p.add_argument("--attention", default="cudnn")
    for name in ("tensor", "pipeline", "context", "virtual_stages", "microbatch_group"):
        p.add_argument(f"--{name}", type=count, default=1, help=f"{_SETTINGS.get(name, name.upper())} of train.py")
    p.add_argument("--pipeline-schedule", default="1f1b")
    p.add_argument("--steps", type=count, default=20)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--nodes", type=count, default=1, help="logical nodes the devices are split into")
    p.add_argument("--devices", type=int, default=0, help="devices of --compile_for, or simulated on a CPU")
    p.add_argument("--compile_for", choices=ahead_of_time.TARGETS, help="compiles only, for absent target devices")
    p.add_argument("--xla_flags", default="", help="added to the flags of amsp_jax.compile.xla_flags")
    p.add_argument("--no_default_flags", action="store_true", help="nor its compiler options")
    p.add_argument("--cache", type=Path, help="jax's persistent compilation cache: a second start finds the step in it")
    p.add_argument("--dump", type=Path, help="write the compiled program here")
    p.add_argument("--profile", type=Path, help="write a profiler trace of two steps here")
    p.add_argument("--process", default="", help="ID/COUNT, one process per device, coordinator on this host")
    return p.parse_args()


def set_environment(args: argparse.Namespace) -> None:
    defaults = [] if args.no_default_flags else xla_flags.flags("cuda")
    flags = " ".join([*defaults, args.xla_flags])
    if args.compile_for:
        flags = args.xla_flags
        jax.config.update("jax_platforms", "cpu")
    elif args.devices:
        flags = args.xla_flags + f" --xla_force_host_platform_device_count={args.devices}"
        jax.config.update("jax_platforms", "cpu")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ["XLA_FLAGS"] = flags


def compiler_options(args: argparse.Namespace, model: Model, plan: Plan, settings: StepSettings) -> dict[str, str]:
    """Those of train.py."""
    if args.no_default_flags or args.devices:
        return {}
    options = xla_flags.combine_thresholds(
        model, plan.block_degrees, args.compute_dtype, settings.reduction, args.tensor
    )
    return xla_flags.without(options, args.xla_flags)


def use_cache(folder: Path) -> None:
    """Whatever takes how long to compile is kept in it."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main() -> None:
    args = parse_args()
    set_environment(args)
    if args.cache:
        use_cache(args.cache)
    if args.process:
        rank, count = map(int, args.process.split("/"))
        jax.distributed.initialize("127.0.0.1:12399", count, rank, local_device_ids=[rank])
    if args.compile_for:
        devices: Sequence[jax.Device] = ahead_of_time.target_devices(
            args.compile_for, args.nodes, args.devices // args.nodes
        )
    else:
        devices = jax.devices()
    parallel = ModelParallel(tensor=args.tensor, pipeline=args.pipeline, context=args.context)
    ranks = parallel.data_ranks(args.nodes, len(devices) // args.nodes)
    model = build_model(args.model, args.overrides, attention=args.attention)
    plan = make_plan(
        args.strategy,
        model,
        ranks=ranks,
        devices=devices,
        compute_dtype=jnp.dtype(args.compute_dtype),
        parallel=parallel,
    )
    settings = StepSettings(
        reduce_dtype=jnp.dtype(args.reduce_dtype), inter_node_dtype=args.inter_node_dtype, remat=Remat(args.remat),
        peel_first=not args.no_peel, peel_last=not args.no_peel, pipeline_schedule=args.pipeline_schedule,
        virtual_stages=args.virtual_stages, microbatch_group=args.microbatch_group,
    )  # fmt: skip
    shape = (args.accumulation, args.microbatch * ranks.total, args.seq_len)
    row = {
        "model": args.model, "overrides": args.overrides, "strategy": str(plan.degrees), "seq_len": args.seq_len,
        "microbatch": args.microbatch, "accumulation": args.accumulation, "reduce_dtype": args.reduce_dtype,
        "inter_node_dtype": args.inter_node_dtype, "parallel": str(parallel),
        "pipeline_schedule": args.pipeline_schedule, "virtual_stages": args.virtual_stages,
        "microbatch_group": args.microbatch_group,
        "remat": args.remat, "peel": not args.no_peel, "devices": len(devices), "nodes": args.nodes,
        "device_kind": devices[0].device_kind, "jax": jax.__version__, "xla_flags": os.environ["XLA_FLAGS"],
    }  # fmt: skip
    program, compiled_row = compiled(args, model, plan, settings, shape)
    row |= compiled_row
    if args.dump:
        args.dump.write_text(program.as_text())
    if not args.compile_for:
        row |= timed(args, program, model, plan, shape, parallel.total)
    if jax.process_index() == 0:
        print(json.dumps(row), flush=True)


def compiled(
    args: argparse.Namespace, model: Model, plan: Plan, settings: StepSettings, shape: tuple[int, int, int]
) -> tuple[Any, dict[str, Any]]:
    """The program, and what compiling it took. Its tracing is told apart where the devices are there."""
    start = time.perf_counter()
    if args.compile_for:
        options = ahead_of_time.compiler_options(model, plan, settings)
        program = ahead_of_time.compile_step(model, measure.adamw(), plan, settings, shape)
        seconds = {"compile_s": round(time.perf_counter() - start, 1)}
    else:
        options = compiler_options(args, model, plan, settings)
        step = measure.compile_step(model, plan, settings, shape, options)
        program = step.program
        seconds = {"trace_s": round(step.trace_s, 1), "compile_s": round(step.compile_s, 1)}
    num_bytes = measure.compiled_bytes(program)
    return program, {
        "compiler_options": options, **seconds,
        "argument_gib": round(num_bytes["arguments"] / 2**30, 2),
        "temp_gib": round(num_bytes["temporary"] / 2**30, 2),
    }  # fmt: skip


def timed(
    args: argparse.Namespace, program: Any, model: Model, plan: Plan, shape: tuple[int, int, int], devices_per_rank: int
) -> dict[str, Any]:
    assert model.numbers, f"{model.name} does not say how many FLOPs a token takes"
    state = measure.initial_state(model, plan)
    batches = [measure.random_batch(plan, shape, model, i) for i in range(4)]
    state, times = measure.time_steps(program, state, batches, args.warmup, args.steps)
    if args.profile:
        with jax.profiler.trace(args.profile):
            # One that is timed, and the one in flight after it.
            measure.run_steps(program, state, batches, 1)
    median = statistics.median(times.times_s)
    tokens_per_s = args.microbatch * args.accumulation * args.seq_len / devices_per_rank / median
    device_kind = jax.devices()[0].device_kind
    share = measure.mfu(model, device_kind, tokens_per_s, args.seq_len)
    return {
        "step_ms": round(median * 1e3, 1),
        "max_ms": round(max(times.times_s) * 1e3, 1),
        "min_ms": round(min(times.times_s) * 1e3, 1),
        "tokens_per_s_per_device": round(tokens_per_s),
        "tflops_per_device": round(tokens_per_s * model.numbers.flops_per_token(args.seq_len) / 1e12, 1),
        "mfu": share and round(share, 4),
        "peak_gib": round(measure.peak_bytes() / 2**30, 1),
        "losses": [round(x, 5) for x in (times.losses[0], times.losses[-1])],
    }


if __name__ == "__main__":
    sys.exit(exits.run(main))
