"""What a checkpoint costs: how long `save` blocks, until it is complete, back again; beside the raw speed of the disk.

    python benchmarks/checkpoint.py --params 0.3e9 --simulated_devices 8 --directory /tmp/checkpoint_benchmark
    python benchmarks/checkpoint.py --params 1e9 --directory /scratch/checkpoint_benchmark     # all GPUs of a host

The state is parameters and two moments in float32, 12 bytes a parameter, sharded over all devices, in layers of a
transformer's shapes. Between two saves a step runs that donates it and writes all of it. Host memory: the state once
more on GPUs; on CPU devices twice more, as a buffer that is being written cannot be donated. The directory needs room
for two checkpoints and is emptied at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from amsp_jax.cli import exits
from amsp_jax.run.checkpoint import Checkpointer

HIDDEN = 1024
BLOCK_BYTES = 16 << 20


def make_state(num_params: float) -> dict[str, dict[str, jax.Array]]:
    """Normal values, created on the devices; blocks of 12 x hidden^2 parameters."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    shapes = {
        "qkv": (HIDDEN, 3 * HIDDEN),
        "out": (HIDDEN, HIDDEN),
        "up": (HIDDEN, 4 * HIDDEN),
        "down": (4 * HIDDEN, HIDDEN),
    }
    num_blocks = max(1, round(num_params / (12 * HIDDEN**2)))

    # One small program for each shape: one for the whole state compiles for minutes on GPUs.
    normal = jax.jit(jax.random.normal, static_argnums=1, out_shardings=sharding)

    def part(seed: int) -> dict[str, jax.Array]:
        keys = iter(jax.random.split(jax.random.key(seed), num_blocks * len(shapes)))
        return {f"{i}/{name}": normal(next(keys), s) for i in range(num_blocks) for name, s in shapes.items()}

    return {name: part(seed) for seed, name in enumerate(("params", "mu", "nu"))}


@jax.jit(donate_argnums=0)
def step(state: Any) -> Any:
    """Reads and writes the whole state in place."""
    return jax.tree.map(lambda x: x * jnp.float32(0.999), state)


def timed(call: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_disk(directory: Path, num_bytes: int) -> Iterator[tuple[str, float]]:
    """Seconds to write and fsync, and to read, one file as large as the state, from one thread."""
    block, file = np.random.default_rng(0).bytes(BLOCK_BYTES), directory / "raw"

    def write() -> None:
        with open(file, "wb", buffering=0) as out:
            for _ in range(num_bytes // BLOCK_BYTES):
                out.write(block)
            os.fsync(out.fileno())

    def read() -> None:
        buffer = bytearray(BLOCK_BYTES)
        with open(file, "rb", buffering=0) as source:
            while source.readinto(buffer):
                pass

    yield "raw_write_s", timed(write)
    forget(file)
    yield "raw_read_s", timed(read)
    file.unlink()


def forget(path: Path) -> None:
    """Drops files from the page cache, so that reading them is reading the disk."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_saves(directory: Path, state: Any, num_saves: int) -> tuple[dict[str, Any], Any]:
    """Each save is followed by a step, as in training, and then waited for."""

    def one_step() -> None:
        nonlocal state
        state = jax.block_until_ready(step(state))

    one_step()
    quiet_steps = [timed(one_step) for _ in range(5)]
    checkpointer = Checkpointer(directory, keep=1)
    stalls, completes, next_steps = [], [], []
    for number in range(1, num_saves + 1):
        start = time.perf_counter()
        stalls.append(timed(lambda number=number: checkpointer.save(number, state, {})))
        next_steps.append(timed(one_step))
        checkpointer.wait()
        completes.append(time.perf_counter() - start)
    checkpointer.close()
    row = {"stall_s": statistics.median(stalls), "stalls_s": stalls, "complete_s": statistics.median(completes)}
    return row | {"step_s": statistics.median(quiet_steps), "step_after_save_s": statistics.median(next_steps)}, state


def measure_restore(directory: Path, step: int, abstract: Any) -> dict[str, float]:
    """Verifying and reading, each from the disk."""
    reader, folder = Checkpointer(directory, keep=None), directory / str(step)
    forget(folder)
    verify_s = timed(lambda: reader.verify(step))
    in_cache_s = timed(lambda: reader.verify(step))
    forget(folder)
    restore_s = timed(lambda: jax.block_until_ready(reader.restore(step, abstract, verify=False)))
    return {"verify_s": verify_s, "checksum_s": in_cache_s, "restore_s": restore_s}


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    state = make_state(args.params)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    row: dict[str, Any] = {
        "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
        "versions": f"jax {jax.__version__}, orbax {orbax.checkpoint.__version__}",
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "params": sum(x.size for x in jax.tree.leaves(state["params"])),
        "state_bytes": state_bytes,
    }
    row |= dict(measure_disk(args.directory, state_bytes))
    saves, state = measure_saves(args.directory / "checkpoints", state, args.saves)
    files = (args.directory / "checkpoints" / str(args.saves)).rglob("*")
    row |= saves | {"disk_bytes": sum(file.stat().st_size for file in files if file.is_file())}
    # On CPU devices the old state and the restored one would not fit side by side.
    del state
    return row | measure_restore(args.directory / "checkpoints", args.saves, abstract)


def table(row: dict[str, Any]) -> str:
    """The row for people."""
    gb = row["state_bytes"] / 1e9

    def line(what: str, seconds: float, speed: bool = True) -> str:
        return f"| {what} | {seconds:.3f} | {f'{gb / seconds:.2f}' if speed else ''} |"

    lines = [
        f"{row['params'] / 1e9:.2f}B parameters, {gb:.2f} GB of state ({row['disk_bytes'] / 1e9:.2f} GB on disk), "
        f"{row['devices']}, {row['cpus']} CPUs (load {row['load']:.0f}), {row['versions']}",
        "",
        "| what | s | GB/s |",
        "|---|---|---|",
        line("`save` blocks, median", row["stall_s"], speed=False),
        line("a step that writes the whole state", row["step_s"], speed=False),
        line("the step right after `save`", row["step_after_save_s"], speed=False),
        line("until complete, checksums included", row["complete_s"]),
        line("the disk: write and fsync, one file", row["raw_write_s"]),
        line("verify, files not in memory", row["verify_s"]),
        line("verify, files in memory: the checksums", row["checksum_s"]),
        line("restore without verifying, files not in memory", row["restore_s"]),
        line("the disk: read, one file", row["raw_read_s"]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=0.01e9, help="parameters; 12 bytes of state each")
    parser.add_argument("--simulated_devices", type=int, default=0, help="CPU devices; 0: those that are there")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure; must not exist")
    args = parser.parse_args()
    if args.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.simulated_devices)
    # Not within `try`: a folder that was there before is not ours to remove.
    args.directory.mkdir(parents=True)
    try:
        row = benchmark(args)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)
    print(json.dumps(row))
    print(table(row))


if __name__ == "__main__":
    sys.exit(exits.run(main))
