"""The loss curve of a run as a picture."""

from __future__ import annotations

import pathlib

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from amsp_jax.run.metrics import TRAIN_FILE, VALIDATION_FILE, read_rows

_TRAIN, _VALIDATION = "#4c78a8", "#d1495b"


def plot_losses(run_dir: str | pathlib.Path, title: str | None = None) -> pathlib.Path:
    """Draws `loss.png` in `run_dir` out of its metrics files and returns its path.

    The training loss is drawn step by step and, once there are enough steps, its running mean over it.
    Needs no display.

    Args:
      run_dir: the folder with `metrics.jsonl`; `validation.jsonl` may be missing.
      title: of the picture; the folder's name if None.
    """
    run_dir = pathlib.Path(run_dir)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, *_losses(run_dir / TRAIN_FILE))
    _draw_validation(axes, *_losses(run_dir / VALIDATION_FILE))
    axes.set_title(title or run_dir.resolve().name, loc="left", fontweight="bold")
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.01)
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    path = run_dir / "loss.png"
    figure.savefig(path, dpi=150)
    return path


def _losses(path: pathlib.Path) -> tuple[list[int], list[float]]:
    rows = read_rows(path) if path.exists() else []
    return [row["step"] for row in rows], [row["loss"] for row in rows]


def _draw_training(axes: Axes, steps: list[int], losses: list[float]) -> None:
    if not steps:
        return
    window = len(steps) // 50
    if window < 2:
        axes.plot(steps, losses, color=_TRAIN, linewidth=1.5, label="training")
        return
    axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, alpha=0.35, label="training")
    axes.plot(
        steps, _running_mean(losses, window), color=_TRAIN, linewidth=1.8, label=f"training, mean of {window} steps"
    )


def _draw_validation(axes: Axes, steps: list[int], losses: list[float]) -> None:
    if steps:
        label = f"validation, last {losses[-1]:.3f}"
        axes.plot(steps, losses, color=_VALIDATION, linewidth=1.5, marker="o", markersize=4, label=label)


def _running_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    return [sum(chunk) / len(chunk) for chunk in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
