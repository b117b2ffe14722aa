"""The training step at thousands of devices, from shapes alone: lowered and compiled, its memory beside the plan's.

    python benchmarks/scale.py 175b-cpu
    python benchmarks/scale.py 1t-h100 --hlo 1t.hlo

No device is there: those of a CPU are simulated, GPUs are described (`amsp_jax.compile.ahead_of_time`, needs the cuda
extra). Prints one JSON line: seconds, the process's largest memory, argument bytes beside the plan's, collectives by
where they are.
`scale.md` has the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from amsp_jax import StepSettings, abstract_state, make_optimizer, make_train_step
from amsp_jax.cli import exits
from amsp_jax.compile import ahead_of_time, hlo
from amsp_jax.compile.hlo.collectives import operations
from amsp_jax.compile.hlo.text import parse
from amsp_jax.engine.learning_rate import make_learning_rate
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cost.trace import cudnn_assumed

DEVICES_PER_NODE = 8
CPU_LIMIT = 2048
"""XLA's CPU client has no more devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step and its devices; microbatches of one row, `full` rematerialisation, ZeRO-1 as in the Frontier study.

    Attributes:
      target: `cpu`, or a key of `ahead_of_time.TARGETS`.
      overrides: of the model's configuration.
    """

    model: str
    num_devices: int
    tensor: int
    pipeline: int
    global_batch: int
    target: str = "cpu"
    virtual_stages: int = 1
    seq_len: int = 2048
    strategy: str = "zero1"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def parallel(self) -> ModelParallel:
        """What one copy of the model is cut into."""
        return ModelParallel(pipeline=self.pipeline, tensor=self.tensor)

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """[microbatches, rows, seq]."""
        rows = self.num_devices // self.parallel.total
        return self.global_batch // rows, rows, self.seq_len


CASES = {
    "tiny-cpu": Case(
        model="gpt-22b", num_devices=16, tensor=2, pipeline=4, global_batch=16, seq_len=128,
        overrides={"num_layers": 8, "hidden": 256, "ffn": 1024, "num_heads": 8, "vocab_size": 1024},
    ),
    "175b-cpu": Case(model="gpt-175b", num_devices=1024, tensor=4, pipeline=16, global_batch=640),
    "1t-cpu-2048": Case(model="gpt-1t", num_devices=2048, tensor=8, pipeline=64, global_batch=4800 // 6 * 4),
    "1t-cpu-3072": Case(model="gpt-1t", num_devices=3072, tensor=8, pipeline=64, global_batch=4800),
    "175b-h100": Case(model="gpt-175b", num_devices=1024, tensor=8, pipeline=16, global_batch=640, target="h100"),
    "1t-h100": Case(model="gpt-1t", num_devices=3072, tensor=8, pipeline=64, global_batch=4800, target="h100"),
}  # fmt: skip
CASES["tiny-h100"] = dataclasses.replace(CASES["tiny-cpu"], target="h100")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("case", choices=CASES)
    p.add_argument("--num_layers", type=int, help="a cut of the model")
    p.add_argument("--lower", action="store_true", help="stop before XLA")
    p.add_argument("--hlo", type=Path, help="write the compiled program here")
    args = p.parse_args()
    case = CASES[args.case]
    if args.num_layers:
        case = dataclasses.replace(case, overrides={**case.overrides, "num_layers": args.num_layers})
    jax.config.update("jax_platforms", "cpu")
    if case.target == "cpu" and case.num_devices <= CPU_LIMIT:
        jax.config.update("jax_num_cpu_devices", case.num_devices)
    row = {"case": args.case, **dataclasses.asdict(case), "jax": jax.__version__}
    row |= measure(case, args.lower, args.hlo)
    row["max_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    print(json.dumps(row), flush=True)


def measure(case: Case, only_lower: bool, hlo_path: Path | None) -> dict[str, Any]:
    """Seconds of each phase and what the compiled program says; only up to XLA where there is no compiler for it."""
    model = build_model(case.model, case.overrides, attention="xla" if case.target == "cpu" else "cudnn")
    ranks = case.parallel.data_ranks(case.num_devices // DEVICES_PER_NODE, DEVICES_PER_NODE)
    plan = make_plan(case.strategy, model, ranks=ranks, devices=devices_of(case), parallel=case.parallel)
    settings = StepSettings(remat=Remat.FULL, virtual_stages=case.virtual_stages)
    optimizer = make_optimizer(
        "adamw",
        make_learning_rate("cosine", 6e-5, steps=240_000, warmup_steps=2000),
        weight_decay=0.1,
        clip_norm=1.0,
    )
    arguments = (abstract_state(plan, optimizer), batch_of(case, plan))
    planned = planned_bytes(plan, arguments)
    clock = Clock()
    with cudnn_assumed():
        traced = make_train_step(plan, optimizer, settings).trace(*arguments)
        clock.lap("trace")
        lowered = traced.lower(lowering_platforms=None if plan_has_devices(plan) else ("cpu",))
        clock.lap("lower")
    row = {"plan_argument_bytes": planned, "num_leaves": len(jax.tree.leaves(plan.leaves)), **clock.seconds}
    if only_lower or not plan_has_devices(plan):
        return row
    options = {} if case.target == "cpu" else ahead_of_time.compiler_options(model, plan, settings)
    compiled = lowered.compile(compiler_options=options)
    clock.lap("compile")
    text = compiled.as_text()
    if hlo_path:
        hlo_path.write_text(text)
    memory = compiled.memory_analysis()
    return {
        **row,
        **clock.seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "is_exact": memory.argument_size_in_bytes == planned,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": getattr(memory, "peak_memory_in_bytes", 0),
        "hlo_mib": round(len(text) / 2**20, 1),
        "collectives": collectives(text, plan),
    }


class Clock:
    """Seconds between laps, by the wall and of all cores that this process had."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        """Since the lap before."""
        now = time.perf_counter(), time.process_time()
        wall, cpu = (round(after - before, 1) for after, before in zip(now, self.last, strict=True))
        self.seconds |= {f"{name}_s": wall, f"{name}_core_s": cpu}
        self.last = now


def devices_of(case: Case) -> tuple[jax.Device, ...] | None:
    """Simulated or described; None where a CPU cannot simulate as many."""
    if case.target != "cpu":
        return ahead_of_time.target_devices(case.target, case.num_devices // DEVICES_PER_NODE, DEVICES_PER_NODE)
    return tuple(jax.devices()) if case.num_devices <= CPU_LIMIT else None


def plan_has_devices(plan: Plan) -> bool:
    """Whether there is something to compile for."""
    return isinstance(plan.mesh, jax.sharding.Mesh)


def batch_of(case: Case, plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """The step's argument after the state."""
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    shape, sharding = case.batch_shape, plan.batch_sharding
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def planned_bytes(plan: Plan, arguments: Any) -> int:
    """Of one device: master and moments by the plan's arithmetic, its rows of the batch, counters and seed."""
    states, (_, batch) = plan.bytes_per_device(), arguments
    rows = sum(x.size * x.dtype.itemsize for x in batch.values()) // plan.degrees.ranks.total
    scalars = sum(x.dtype.itemsize for x in jax.tree.leaves(arguments) if not x.shape)
    return states.master + states.moments + rows + scalars


def collectives(text: str, plan: Plan) -> list[dict[str, Any]]:
    """The collective operations by kind, axes and place: how many, how many synchronous, beside how many is work."""
    places, names = dict(places_of(text)), AxesOf(plan)
    found: dict[tuple[str, str, str], list[hlo.Span]] = defaultdict(list)
    for span in hlo.analyse(text):
        found[span.kind, names[span.groups], places[span.op]].append(span)
    return [
        {
            "kind": kind, "axes": axes, "place": place, "num": len(spans), "num_sync": sum(s.is_sync for s in spans),
            "mib": round(sum(s.num_bytes for s in spans) / 2**20, 3),
            "num_beside_work": sum(s.flops.total > 0 for s in spans),
            "tflop_beside": round(sum(s.flops.total for s in spans) / 1e12, 3),
            "num_runs_each": sorted({s.num_runs for s in spans}),
        }
        for (kind, axes, place), spans in sorted(found.items())
    ]  # fmt: skip


def places_of(text: str) -> Iterator[tuple[str, str]]:
    """(collective operation, where it is): `step`, or what is around it, `step/while/conditional`."""
    program = parse(text)
    waiting = [(program.entry, "step")]
    while waiting:
        name, place = waiting.pop()
        computation = program.computations[name]
        yield from ((operation.start.name, place) for operation in operations(program, computation))
        for line in computation:
            if line.opcode in ("while", "call", "conditional"):
                inside = place if line.opcode == "call" else f"{place}/{line.opcode}"
                waiting += [(called, inside) for called in line.called()]


class AxesOf(dict[hlo.Groups, str]):
    """The mesh axes along which the members of each group, or the two ends of each send, differ."""

    def __init__(self, plan: Plan) -> None:
        self.names, self.sizes = tuple(plan.mesh.shape), tuple(plan.mesh.shape.values())

    def __missing__(self, groups: hlo.Groups) -> str:
        coordinates = (np.array(np.unravel_index(sorted(group), self.sizes)) for group in groups)
        varies = sum((x != x[:, :1]).any(axis=1) for x in coordinates)
        self[groups] = "+".join(name for name, number in zip(self.names, varies, strict=True) if number) or "none"
        return self[groups]


if __name__ == "__main__":
    sys.exit(exits.run(main))
