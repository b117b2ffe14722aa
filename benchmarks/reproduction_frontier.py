"""What the planner predicts of the Frontier paper (arXiv 2312.12705): its recipes, its scaling, its observations.

Nothing is fitted to the paper. The cluster is the preset `frontier`: links of the machine's user guide, and for the
devices the fractions of their peaks that H200 was measured to reach. Utilisation is counted as Megatron counts it with
recomputation, of 191.5 TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from papers import frontier, megatron

from amsp_jax.cli import settings as cli
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cluster import named_cluster
from amsp_jax.predict.planner import Candidate, Estimate, Scorer, Workload
from amsp_jax.strategy import parse

ROOT = Path(__file__).parent.parent
IMAGE = ROOT / "docs" / "images" / "frontier.png"
BLUE, ORANGE, GREEN, GREY = "#2f6fde", "#e8912d", "#2a9d6f", "#5f6c7b"

NODE = 8
"""GCDs of one."""
NUM_NODES = {"22b": 8, "175b": 16, "1t": 128}
"""Of the recipes in configs/runs: the first command of each file."""
NODES = {"175b": (16, 32, 64, 128), "1t": (128, 256, 384)}
"""Of the scaling studies; the last of each is the paper's, the others are ours."""
STRONG_BATCHES = {"175b": (1600, 3200, 5120, 8000), "1t": (2400, 4800, 8016)}
"""The paper's global batch for strong scaling is not known here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run to predict.

    Attributes:
      size: of the model, a key of `frontier.MODELS`.
      num_nodes: of 8 GCDs.
      global_batch: sequences a step.
      tensor, pipeline: into how many parts the model is cut.
      attention: `cudnn` stands for a flash attention, as the paper's; `xla` is what this program runs on an MI250X.
    """

    size: str
    num_nodes: int
    global_batch: int
    tensor: int
    pipeline: int
    attention: str = "cudnn"

    @property
    def num_copies(self) -> int:
        """Data ranks: copies of the model."""
        return self.num_nodes * NODE // (self.tensor * self.pipeline)

    @property
    def num_microbatches(self) -> int:
        """Of one sequence, in each copy."""
        return self.global_batch // self.num_copies


@functools.cache
def recipe(size: str) -> Case:
    """The case of a file in configs/runs."""
    config = cli.load_config([ROOT / "configs" / "runs" / f"frontier_{size}.gin"])
    return Case(
        size=size,
        num_nodes=NUM_NODES[size],
        global_batch=config.global_batch,
        tensor=config.tensor,
        pipeline=config.pipeline,
    )


@functools.cache
def predict(case: Case) -> Estimate:
    """ZeRO-1, microbatches of one sequence, 1F1B, every stage computed again, gradients reduced in float32."""
    workload = Workload(
        model=build_model(f"gpt-{case.size}", attention=case.attention),
        optimizer=make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0),
        global_batch=case.global_batch,
        seq_len=frontier.MODELS[case.size].seq_len,
    )
    parallel = ModelParallel(pipeline=case.pipeline, tensor=case.tensor)
    ranks = parallel.data_ranks(case.num_nodes, NODE)
    candidate = Candidate(parse("zero1").resolve(ranks), 1, Remat.FULL, parallel=parallel)
    return Scorer(workload, named_cluster("frontier", case.num_nodes)).estimate(candidate)


def utilization(case: Case) -> float:
    """Share of the peak as Megatron counts it, recomputation included."""
    flops = megatron.hardware_flops(frontier.MODELS[case.size], case.global_batch)
    return megatron.utilization(flops, predict(case).step_s, case.num_nodes * NODE, frontier.GCD_PEAK_FLOPS)


def weak_scaling(size: str) -> list[Case]:
    """The recipe on more nodes, with as many microbatches in each copy."""
    first = recipe(size)
    return [
        dataclasses.replace(first, num_nodes=nodes, global_batch=first.global_batch * nodes // first.num_nodes)
        for nodes in NODES[size]
    ]


def strong_scaling(size: str, global_batch: int) -> list[Case]:
    """The recipe on more nodes with one global batch."""
    return [
        dataclasses.replace(recipe(size), num_nodes=nodes, global_batch=global_batch)
        for nodes in NODES[size]
        if global_batch % dataclasses.replace(recipe(size), num_nodes=nodes).num_copies == 0
    ]


def more_tensor_ranks() -> dict[int, Case]:
    """22B by tensor ranks, with as many microbatches in each copy, so that the bubble is the same."""
    first = recipe("22b")
    return {t: dataclasses.replace(first, tensor=t, global_batch=first.global_batch // t) for t in (1, 2, 4, 8)}


def more_microbatches() -> dict[int, Case]:
    """22B by microbatches in each copy."""
    first = recipe("22b")
    counts = (8, 16, 32, 64, 128, 256, 512)
    return {count: dataclasses.replace(first, global_batch=count * first.num_copies) for count in counts}


def more_stages(microbatches_a_stage: int | None) -> dict[int, Case]:
    """175B by stages, each a node, which is two copies: with so many microbatches for each, or with 64 in all."""
    first = recipe("175b")
    return {
        p: dataclasses.replace(first, num_nodes=p, pipeline=p, global_batch=2 * (p * (microbatches_a_stage or 0) or 64))
        for p in (8, 12, 16, 24, 32, 48)
    }


def efficiency(cases: Iterable[Case]) -> list[float]:
    """Utilisation of each over that of the first."""
    shares = [utilization(case) for case in cases]
    return [share / shares[0] for share in shares]


def print_tables() -> None:
    """The three tables of docs/reproduction.md."""
    _print_recipes()
    _print_weak_scaling()
    _print_strong_scaling()


def _print_recipes() -> None:
    rows = []
    for size in frontier.MODELS:
        case = recipe(size)
        estimate = predict(case)
        rows.append(
            [
                size.upper(),
                f"{case.num_nodes * NODE}",
                f"{case.tensor} x {case.pipeline} x {case.num_copies}",
                f"{case.num_microbatches}",
                f"{frontier.UTILIZATION[size]:.2%}",
                f"{utilization(case):.1%}",
                f"{utilization(dataclasses.replace(case, attention='xla')):.1%}",
                f"{megatron.bubble_of_total(case.pipeline, case.num_microbatches):.1%}",
                f"{estimate.step_s:.1f}",
                f"{estimate.memory.total / 2**30:.1f}",
            ]
        )
    heads = (
        "model, GCDs, TP x PP x DP, microbatches, published, predicted, with XLA attention, bubble, step s, peak GiB"
    )
    print_table(heads.split(", "), rows)


def _print_weak_scaling() -> None:
    rows = []
    for size in NODES:
        cases = weak_scaling(size)
        for case, share in zip(cases, efficiency(cases), strict=True):
            published = frontier.SCALING[size].weak if case is cases[-1] else None
            rows.append(_scaling_row(case, share, published))
    print_table(["model", "GCDs", "batch", "step s", "predicted", "published"], rows)


def _print_strong_scaling() -> None:
    rows = []
    for size, batches in STRONG_BATCHES.items():
        for batch in batches:
            first, *_, last = strong_scaling(size, batch)
            rows.append(_scaling_row(last, efficiency([first, last])[1], frontier.SCALING[size].strong))
    print_table(["model", "GCDs", "batch", "step s", "predicted", "published"], rows)


def _scaling_row(case: Case, share: float, published: float | None) -> list[str]:
    return [
        case.size.upper(),
        f"{case.num_nodes * NODE}",
        f"{case.global_batch}",
        f"{predict(case).step_s:.1f}",
        f"{share:.1%}",
        f"{published:.0%}" if published else "",
    ]


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """In Markdown, with a blank line after it."""
    print("|", " | ".join(heads), "|")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("|", " | ".join(row), "|")
    print()


def draw() -> None:
    """The paper's observations, predicted, as `IMAGE`."""
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _draw_tensor(axes[0, 0])
    _draw_microbatches(axes[0, 1])
    _draw_stages(axes[1, 0])
    _draw_scaling(axes[1, 1])
    figure.savefig(IMAGE, dpi=130)


def _draw_tensor(axes: Axes) -> None:
    cases = more_tensor_ranks()
    _line(axes, cases, BLUE, f"22B, {cases[1].pipeline} stages, {cases[1].num_microbatches} microbatches")
    _finish(axes, "Larger TP: slower", "tensor-parallel GCDs", cases)


def _draw_microbatches(axes: Axes) -> None:
    cases = more_microbatches()
    most = max(cases)
    stages = cases[most].pipeline
    _line(axes, cases, BLUE, f"22B, TP {cases[most].tensor}, {stages} stages")
    without_bubble = utilization(cases[most]) * (1 + megatron.bubble_of_ideal(stages, most))
    ideal = [100 * without_bubble / (1 + megatron.bubble_of_ideal(stages, count)) for count in cases]
    axes.plot(list(cases), ideal, color=GREY, linewidth=1, linestyle="--", label="the bubble alone: 1 / (1 + (p-1)/m)")
    _finish(axes, "More microbatches: a smaller bubble", "microbatches in each copy", cases)


def _draw_stages(axes: Axes) -> None:
    fixed, growing = more_stages(None), more_stages(4)
    _line(axes, fixed, ORANGE, "175B, TP 4, batch fixed: 64 microbatches")
    _line(axes, growing, GREEN, "175B, TP 4, batch grows: 4 microbatches a stage")
    _finish(axes, "More stages: slower, unless the batch grows", "stages", fixed)


def _draw_scaling(axes: Axes) -> None:
    for size, color in (("175b", BLUE), ("1t", ORANGE)):
        cases = weak_scaling(size)
        gpus = [case.num_nodes * NODE for case in cases]
        axes.plot(gpus, [100 * e for e in efficiency(cases)], "o-", color=color, label=f"{size.upper()}, weak scaling")
        batch, published = cases[-1].global_batch, frontier.SCALING[size]
        strong = strong_scaling(size, batch)
        axes.plot(
            [case.num_nodes * NODE for case in strong],
            [100 * e for e in efficiency(strong)],
            "s--",
            color=color,
            label=f"{size.upper()}, strong scaling, batch {batch}",
        )
        for share in (published.weak, published.strong):
            axes.plot(published.num_devices, 100 * share, "*", color=color, markersize=13, markeredgecolor="black")
    axes.plot([], [], "*", color="white", markersize=13, markeredgecolor="black", label="published")
    axes.set_ylim(80, 105)
    _finish(axes, "Scaling", "GCDs", (128, 256, 512, 1024, 2048, 3072), "throughput of a GCD, % of the first")


def _line(axes: Axes, cases: dict[int, Case], color: str, label: str) -> None:
    axes.plot(list(cases), [100 * utilization(case) for case in cases.values()], "o-", color=color, label=label)


def _finish(axes: Axes, title: str, x: str, ticks: Iterable[int], y: str = "% of 191.5 TFLOP/s, predicted") -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
