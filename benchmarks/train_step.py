"""Times the training step of a model on the devices that are there, or compiles it for GPUs that are not.

    python benchmarks/train_step.py --model llama-7b --strategy zero3 --seq_len 4096 --microbatch 2
    python benchmarks/train_step.py --model llama-7b --compile_for h200 --devices 4

Synthetic random tokens; the step is `amsp_jax.step.make_train_step` as `train.py` runs it. Prints one JSON line:
medians over `--steps` after `--warmup`. MFU = tokens/s x `ModelNumbers.flops_per_token` / peak.
"""

import argparse
import ast
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax  # noqa: E402

from amsp_jax import absent, xla_flags  # noqa: E402


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="llama-7b")
    p.add_argument("--overrides", type=ast.literal_eval, default={}, help="e.g. \"{'num_layers': 8}\"")
    p.add_argument("--strategy", default="zero3")
    p.add_argument("--seq_len", type=int, default=4096)
    p.add_argument("--microbatch", type=int, default=2, help="sequences per data rank")
    p.add_argument("--accumulation", type=int, default=1)
    p.add_argument("--reduce_dtype", default="float32")
    p.add_argument("--compute_dtype", default="bfloat16")
    p.add_argument("--remat", default="projections")
    p.add_argument("--no_peel", action="store_true")
    p.add_argument("--attention", default="cudnn")
    for name in ("tensor", "pipeline", "context", "virtual_stages"):
        p.add_argument(f"--{name}", type=int, default=1, help=f"{name.upper()} of train.py")
    p.add_argument("--schedule", default="1f1b")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--nodes", type=int, default=1, help="logical nodes the devices are split into")
    p.add_argument("--devices", type=int, default=0, help="devices of --compile_for, or simulated on a CPU")
    p.add_argument("--compile_for", choices=absent.TARGETS, help="compiles only, for GPUs that are not there")
    p.add_argument("--xla_flags", default="", help="added to the flags of amsp_jax.xla_flags")
    p.add_argument("--no_default_flags", action="store_true", help="nor its compiler options")
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


def compiler_options(args: argparse.Namespace, model, degrees) -> dict[str, str]:
    """Those of train.py."""
    if args.no_default_flags or args.devices:
        return {}
    options = xla_flags.combine_thresholds(model, degrees, args.compute_dtype, args.reduce_dtype, args.tensor)
    return xla_flags.without(options, args.xla_flags)


def main() -> None:
    args = parse_args()
    set_environment(args)
    import jax.numpy as jnp

    from amsp_jax.cluster import peak_flops
    from amsp_jax.optimizer import make_optimizer
    from amsp_jax.parallel import ModelParallel
    from amsp_jax.plan import plan_model
    from amsp_jax.state import abstract_state, init_state
    from amsp_jax.step import Remat, StepSettings, make_train_step
    from models.registry import build_model

    if args.process:
        rank, count = map(int, args.process.split("/"))
        jax.distributed.initialize("127.0.0.1:12399", count, rank, local_device_ids=[rank])
    if args.compile_for:
        devices = absent.devices(args.compile_for, args.nodes, args.devices // args.nodes)
    else:
        devices = jax.devices()
    parallel = ModelParallel(tensor=args.tensor, pipeline=args.pipeline, context=args.context)
    ranks = parallel.data_ranks(args.nodes, len(devices) // args.nodes)
    model = build_model(args.model, args.overrides, attention=args.attention)
    plan = plan_model(args.strategy, model, ranks, devices, jnp.dtype(args.compute_dtype), parallel)
    optimizer = make_optimizer("adamw", 3e-4, weight_decay=0.1, clip_norm=1.0)
    settings = StepSettings(
        reduce_dtype=jnp.dtype(args.reduce_dtype), remat=Remat(args.remat), peel=not args.no_peel,
        schedule=args.schedule, virtual_stages=args.virtual_stages,
    )  # fmt: skip
    step = make_train_step(model, optimizer, plan, settings)

    shape = (args.accumulation, args.microbatch * ranks.total, args.seq_len)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {k: jax.ShapeDtypeStruct(shape, d, sharding=plan.batch_sharding) for k, d in kinds.items()}
    start = time.perf_counter()
    if args.compile_for:
        options = absent.compiler_options(model, plan, settings)
        compiled = absent.compile_step(model, optimizer, plan, settings, shape)
    else:
        options = compiler_options(args, model, plan.degrees)
        seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=plan.replicated)
        lowered = step.lower(abstract_state(model, optimizer, plan), batch, seed)
        compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    row = {
        "model": args.model, "overrides": args.overrides, "strategy": str(plan.degrees), "seq_len": args.seq_len,
        "microbatch": args.microbatch, "accumulation": args.accumulation, "reduce_dtype": args.reduce_dtype,
        "parallel": str(parallel), "schedule": args.schedule, "virtual_stages": args.virtual_stages,
        "remat": args.remat, "peel": not args.no_peel, "devices": len(devices), "nodes": args.nodes,
        "device_kind": devices[0].device_kind, "jax": jax.__version__, "xla_flags": os.environ["XLA_FLAGS"],
        "compiler_options": options,
        "compile_s": round(time.perf_counter() - start, 1),
        "argument_gib": round(memory.argument_size_in_bytes / 2**30, 2),
        "temp_gib": round(memory.temp_size_in_bytes / 2**30, 2),
    }  # fmt: skip
    if args.dump:
        args.dump.write_text(compiled.as_text())
    if not args.compile_for:
        state = init_state(model, optimizer, plan, 0)
        batches = [random_batch(plan, shape, model, i) for i in range(4)]
        row |= measure(args, compiled, state, batches, model, devices, parallel.total, peak_flops)
    if jax.process_index() == 0:
        print(json.dumps(row), flush=True)


def random_batch(plan, shape: tuple[int, int, int], model, number: int) -> dict:
    """Rows of random tokens, targets shifted by one; each process makes its own rows alone."""
    import numpy as np

    vocab = model.abstract_params()["embed"]["table"].shape[0]

    def rows(index, offset: int):
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)]
        draw = np.random.default_rng([number, index[1].start or 0])
        tokens = draw.integers(0, vocab, (*sizes[:2], shape[2] + 1), dtype=np.int32)
        return tokens[..., offset : offset + shape[2]][..., index[2]]

    make = lambda f: jax.make_array_from_callback(shape, plan.batch_sharding, f)  # noqa: E731
    ones = make(lambda index: np.ones_like(rows(index, 0), np.float32))
    return {"tokens": make(lambda i: rows(i, 0)), "targets": make(lambda i: rows(i, 1)), "weights": ones}


def measure(args, compiled, state, batches, model, devices, devices_per_rank, peak_flops) -> dict:
    import numpy as np

    seed = jax.device_put(np.uint32(0), compiled.input_shardings[0][2])
    # One step is always in flight, as in the trainer: a step's time is from its predecessor's end to its own.
    marks, losses, pending = [], [], None
    for i in range(args.warmup + args.steps + 1):
        state, metrics = compiled(state, batches[i % len(batches)], seed)
        if pending is not None:
            losses.append(float(pending.loss))
            marks.append(time.perf_counter())
        pending = metrics
    jax.block_until_ready(pending)
    times = [after - before for before, after in zip(marks, marks[1:], strict=False)][args.warmup - 1 :]
    if args.profile:
        with jax.profiler.trace(args.profile):
            for i in range(2):
                state, metrics = compiled(state, batches[i], seed)
                jax.block_until_ready(metrics)
    median = statistics.median(times)
    tokens_per_s = args.microbatch * args.accumulation * args.seq_len / devices_per_rank / median
    flops = tokens_per_s * model.numbers.flops_per_token(args.seq_len)
    peak = peak_flops(devices[0].device_kind)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "step_ms": round(median * 1e3, 1),
        "max_ms": round(max(times) * 1e3, 1),
        "min_ms": round(min(times) * 1e3, 1),
        "tokens_per_s_per_device": round(tokens_per_s),
        "tflops_per_device": round(flops / 1e12, 1),
        "mfu": round(flops / peak, 4) if peak else None,
        "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 1),
        "losses": [round(x, 5) for x in (losses[0], losses[-1])],
    }


if __name__ == "__main__":
    main()
