"""A training step compiled and timed: what every benchmark of this engine does with one."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rows import Row

from amsp_jax.cli.settings import set_up as set_up
from amsp_jax.compile import xla_flags
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.state import TrainState, abstract_state, init_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.models.attention import choose_attention
from amsp_jax.models.registry import build_model, model_config
from amsp_jax.predict.cluster import peak_flops
from amsp_jax.runtime import launch
from amsp_jax.strategy import DataRanks

COMPUTE_DTYPE, NUM_LEAST = jnp.bfloat16, 4
"""Of every benchmark but `train_step.py`; steps that are timed however slow they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model and one device's share of a microbatch.

    Attributes:
      model, overrides: a name of `models.registry`, and what differs from it.
      seq_len: tokens of a sequence.
      microbatch: sequences a device computes at once.
    """

    model: str
    overrides: Mapping[str, Any]
    seq_len: int
    microbatch: int

    def build(self, attention: str) -> Model:
        """The model, with the attention that it runs with."""
        return build_model(self.model, self.overrides, attention=attention)

    def attention_on(self, platform: str, compute_capability: str | None) -> str:
        """The fastest that works there."""
        head_dim = model_config(self.model, self.overrides).head_dim
        return choose_attention(platform, compute_capability, head_dim, COMPUTE_DTYPE, self.seq_len).implementation

    def shape(self, num_microbatches: int, ranks: DataRanks) -> tuple[int, int, int]:
        """Of a batch's arrays: [microbatches, rows over all ranks, tokens]."""
        return num_microbatches, self.microbatch * ranks.total, self.seq_len

    def mfu(self, row: Row) -> float | None:
        """Of a measured step, and of the part of a GPU that a device is; None where the device's peak is not known."""
        tokens_per_s = row["accumulation"] * self.microbatch * self.seq_len / row["step_s"] / row["gpu_share"]
        return mfu(self.build("xla"), row["device_kind"], tokens_per_s, self.seq_len)


SIZES = {
    "wide": Size(model="llama-7b", overrides={"num_layers": 4}, seq_len=4096, microbatch=2),
    "narrow": Size(model="llama-1b", overrides={"num_layers": 8}, seq_len=4096, microbatch=4),
    "tiny": Size(model="llama-tiny", overrides={"num_layers": 2}, seq_len=64, microbatch=1),
}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step to run, and the seconds that tracing and compiling it took."""

    program: jax.stages.Compiled
    trace_s: float
    compile_s: float

    def row(self) -> Row:
        """Those, and the bytes of one device by XLA's own account."""
        return {
            "trace_s": round(self.trace_s, 1), "compile_s": round(self.compile_s, 1),
            "compiled_bytes": compiled_bytes(self.program),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds and loss of each step; of the warm-up the seconds alone."""

    times_s: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    warmup_s: list[float] = dataclasses.field(default_factory=list)

    def __add__(self, later: StepTimes) -> StepTimes:
        return StepTimes(self.times_s + later.times_s, self.losses + later.losses, self.warmup_s + later.warmup_s)

    def row(self) -> Row:
        """Median, fastest and slowest, and everything."""
        return {
            "step_s": statistics.median(self.times_s), "min_s": min(self.times_s), "max_s": max(self.times_s),
            "times_s": [round(seconds, 6) for seconds in self.times_s],
            "warmup_s": [round(seconds, 6) for seconds in self.warmup_s],
            "losses": [round(self.losses[0], 4), round(self.losses[-1], 4)],
        }  # fmt: skip


def check_file(path: Path) -> None:
    """Makes the file's folder before anything is measured.

    Raises:
      UserError: lines cannot be added to it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a file in a folder of yours") from error


def cpu_note(layout: launch.DeviceLayout) -> str:
    """What to say below times of simulated devices, on a line of its own."""
    return "\nSimulated devices share the CPU's cores: these times rank nothing." if layout.platform == "cpu" else ""


def adamw() -> optax.GradientTransformation:
    """The optimizer of every benchmark."""
    return make_optimizer("adamw", 3e-4, weight_decay=0.1, clip_norm=1.0)


def model_on(layout: launch.DeviceLayout, size: Size) -> tuple[Model, str]:
    """The model with the fastest attention that its devices have, and that attention's name."""
    device = layout.devices[0]
    attention = size.attention_on(device.platform, getattr(device, "compute_capability", None))
    return size.build(attention), attention


def compiler_options(layout: launch.DeviceLayout, model: Model, plan: Plan, settings: StepSettings) -> dict[str, str]:
    """Those of `train.py`; what `XLA_FLAGS` says wins."""
    if layout.platform == "cpu":
        return {}
    options = xla_flags.combine_thresholds(model, plan.block_degrees, plan.compute_dtype, settings.reduction)
    return xla_flags.without(options, os.environ.get("XLA_FLAGS", ""))


def compile_step(
    model: Model,
    plan: Plan,
    settings: StepSettings,
    shape: tuple[int, int, int],
    options: dict[str, str],
    optimizer: optax.GradientTransformation | None = None,
) -> CompiledStep:
    """The step on batches [microbatches, rows over all ranks, tokens]; the optimizer is `adamw()` if None."""
    start = time.perf_counter()
    optimizer = optimizer or adamw()
    step: Any = make_train_step(plan, optimizer, settings)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {k: jax.ShapeDtypeStruct(shape, dtype, sharding=plan.batch_sharding) for k, dtype in kinds.items()}
    lowered = step.lower(abstract_state(plan, optimizer), batch)
    traced = time.perf_counter()
    program = lowered.compile(compiler_options=options)
    return CompiledStep(program, traced - start, time.perf_counter() - traced)


def initial_state(model: Model, plan: Plan) -> TrainState:
    """The state before the first step of a training run."""
    return init_state(plan, adamw(), 0)


def filled_state(model: Model, plan: Plan) -> TrainState:
    """A state that is neither random, which takes seconds to compile, nor zero, whose products run faster."""
    abstract = abstract_state(plan, adamw())

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return 0.02 * jnp.sin(jax.lax.broadcasted_iota(leaf.dtype, leaf.shape, len(leaf.shape) - 1))

    def make() -> TrainState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        return zeros.replace(params=jax.tree.map(fill, abstract.params))

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))()


def random_batch(plan: Plan, shape: tuple[int, int, int], model: Model, number: int) -> dict[str, jax.Array]:
    """Rows of random tokens, targets shifted by one; each process makes its own rows alone."""
    vocab = model.abstract_params()["embed"]["table"].shape[0]

    def rows(index: Any, offset: int) -> np.ndarray:
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)]
        draw = np.random.default_rng([number, index[1].start or 0])
        tokens = draw.integers(0, vocab, (*sizes[:2], shape[2] + 1), dtype=np.int32)
        return tokens[..., offset : offset + shape[2]][..., index[2]]

    def make(values: Any) -> jax.Array:
        return jax.make_array_from_callback(shape, plan.batch_sharding, values)

    ones = make(lambda index: np.ones_like(rows(index, 0), np.float32))
    return {"tokens": make(lambda i: rows(i, 0)), "targets": make(lambda i: rows(i, 1)), "weights": ones}


def run_steps(
    program: Any, state: TrainState, batches: Sequence[Mapping[str, jax.Array]], num_steps: int
) -> tuple[TrainState, StepTimes]:
    """Seconds of each of some steps. One is always in flight, as in the trainer: a step's time is from its
    predecessor's end to its own; in that of the first is its launch, some 1 ms. One more is run, for the last to have
    another in flight, too: where CPUs are short it is faster without."""
    begin = time.perf_counter()
    ends: list[Future[tuple[float, float]]] = []
    # In a thread of its own, as a dispatch may block for most of a step (a loop whose end the host must see).
    with ThreadPoolExecutor(1) as watcher:
        for i in range(num_steps + 1):
            state, metrics = program(state, batches[i % len(batches)])
            ends.append(watcher.submit(_end_of, metrics.loss))
            if i:
                ends[i - 1].result()
    marks = [begin, *(end.result()[1] for end in ends[:-1])]
    times = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    return state, StepTimes(times, [end.result()[0] for end in ends[:-1]])


def _end_of(loss: jax.Array) -> tuple[float, float]:
    """A step's loss, and when it was there."""
    jax.block_until_ready(loss)
    end = time.perf_counter()
    return float(loss), end


def time_steps(
    program: Any,
    state: TrainState,
    batches: Sequence[Mapping[str, jax.Array]],
    num_warmup: int,
    num_steps: int,
    most_s: float = math.inf,
    num_least: int = NUM_LEAST,
) -> tuple[TrainState, StepTimes]:
    """Warm-up and then as many steps as fit into `most_s`, at most `num_steps` and at least `num_least` of them."""
    state, warm = run_steps(program, state, batches, num_warmup)
    fitting = launch.from_process_0(lambda: int(min(most_s / warm.times_s[-1], num_steps)))
    state, timed = run_steps(program, state, batches, min(num_steps, max(num_least, fitting)))
    return state, StepTimes(timed.times_s, warm.losses + timed.losses, warm.times_s)


def has_time(needed_s: float, end: float) -> bool:
    """Whether process 0 can do what takes so long before `end` on the clock of `time.monotonic`."""
    return launch.from_process_0(lambda: time.monotonic() + needed_s < end)


def compiled_bytes(program: Any) -> dict[str, int]:
    """XLA's own account of one device; donated arguments come back as outputs and count once."""
    analysis = program.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {
        "arguments": arguments, "temporary": temporary, "outputs": outputs, "total": arguments + temporary + outputs,
    }  # fmt: skip


def peak_bytes() -> int:
    """The most that this process ever had on its first device; 0 where the backend does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def mfu(model: Model, device_kind: str, tokens_per_s_per_device: float, seq_len: int) -> float | None:
    """Of the device's peak, None where that is not known: `ModelNumbers.flops_per_token` times tokens."""
    peak, numbers = peak_flops(device_kind), model.numbers
    return tokens_per_s_per_device * numbers.flops_per_token(seq_len) / peak if peak and numbers else None


def measured(
    layout: launch.DeviceLayout,
    size: Size,
    strategy: str,
    accumulation: int,
    *,
    num_warmup: int,
    num_steps: int,
    most_s: float,
    inter_node_dtype: str | None = None,
    microbatch_group: int = 1,
) -> Row:
    """Compiles a step and runs it: what is measured, or an error where it needs too much memory.

    Args:
      layout: the devices.
      size: what is trained.
      strategy: in any form.
      accumulation: microbatches of a step.
      num_warmup, num_steps, most_s: as `time_steps` has them.
      inter_node_dtype, microbatch_group: as in `StepSettings`.
    """
    begin, ranks = time.monotonic(), DataRanks(layout.devices_per_node, layout.num_nodes)
    settings = StepSettings(inter_node_dtype=inter_node_dtype, microbatch_group=microbatch_group)
    model, attention = model_on(layout, size)
    plan = make_plan(strategy, model, ranks=ranks, devices=layout.devices, compute_dtype=COMPUTE_DTYPE)
    options, shape = compiler_options(layout, model, plan, settings), size.shape(accumulation, ranks)
    compiled = compile_step(model, plan, settings, shape, options)
    row = {"accumulation": accumulation, **surroundings(layout, size, attention, options), **compiled.row()}
    row |= {"inter_node_dtype": inter_node_dtype, "microbatch_group": microbatch_group}
    row["earlier_peak_bytes"] = row["peak_bytes"] = peak_bytes()
    if layout.platform != "cpu" and row["compiled_bytes"]["total"] > layout.memory_bytes:
        return row | {"error": "needs more memory than a device has", "wall_s": round(time.monotonic() - begin, 1)}
    state = filled_state(model, plan)
    batches = [random_batch(plan, shape, model, i) for i in range(2)]
    _, times = time_steps(compiled.program, state, batches, num_warmup, num_steps, most_s)
    row |= times.row()
    return row | {"mfu": size.mfu(row), "peak_bytes": peak_bytes(), "wall_s": round(time.monotonic() - begin, 1)}


def gpu_share() -> float:
    """The part of a GPU's multiprocessors that this process has: 1 unless MPS shares them out (`nodes.sh`)."""
    return float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100)) / 100


def surroundings(layout: launch.DeviceLayout, size: Size, attention: str, options: Mapping[str, str]) -> Row:
    """What a row says beside its figures."""
    return {
        **vars(size), "attention": attention, "device_kind": layout.device_kind, "num_nodes": layout.num_nodes,
        "devices_per_node": layout.devices_per_node, "gpu_share": gpu_share(), "jax": jax.__version__,
        "date": datetime.date.today().isoformat(), "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compiler_options": dict(options),
    }  # fmt: skip
