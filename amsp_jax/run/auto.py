"""strategy=auto: what the planner picks on the devices that are there, and afterwards how right it was."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import optax

from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.predict.calibrate import ProgressLine, calibrated, running_cluster
from amsp_jax.predict.cluster import CLUSTERS, Cluster, differences, load_cluster
from amsp_jax.predict.planner import NothingFits, Objective, Space, Workload, nothing_fits_message, report, search
from amsp_jax.run.actions import Action
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.metrics import TRAIN_FILE, read_rows
from amsp_jax.run.resolved import Resolved
from amsp_jax.run.run import Run
from amsp_jax.runtime.launch import DeviceLayout, from_process_0

_TOP = 5
# The first steps fill caches and start communicators.
_WARMUP_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and what is expected of it.

    Attributes:
      strategy: canonical text.
      lines: the head of the ranking and why its first won, for the user.
      prediction: `report.estimate_json` of the winner; None where there was nothing to choose.
    """

    strategy: str
    lines: tuple[str, ...]
    prediction: dict | None

    def to_json(self) -> str:
        """The strategy and the prediction, for the run folder."""
        return json.dumps({"strategy": self.strategy, "prediction": self.prediction}, indent=1) + "\n"

    def comparison(self, run_dir: Path, first_step: int = 0) -> str:
        """One line: predicted and measured step time and peak memory of a run that has ended."""
        if self.prediction is None:
            return ""
        rows = [row for row in read_rows(run_dir / TRAIN_FILE) if row["step"] > first_step + _WARMUP_STEPS]
        if not rows:
            return ""
        predicted_s, measured_s = self.prediction["step_s"], statistics.median(row["step_time_s"] for row in rows)
        text = f"step time: predicted {1e3 * predicted_s:.1f} ms, measured {1e3 * measured_s:.1f} ms (median of "
        text += f"{len(rows)} steps), {predicted_s / measured_s - 1:+.1%}"
        peaks = [row["peak_memory_bytes"] for row in rows if row["peak_memory_bytes"]]
        if not peaks:
            return text
        predicted, measured = self.prediction["memory_bytes"]["peak"], max(peaks)
        return f"{text}; peak memory: predicted {_gib(predicted)}, measured {_gib(measured)}"


class Comparison(Action):
    """Prints how right the prediction was, when the run has reached its last step."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def on_end(self, run: Run) -> None:
        if run.error is None and run.is_process_0:
            run.say(*filter(None, [self._choice.comparison(run.run_dir, run.first_step)]))


def choose(resolved: Resolved) -> Choice:
    """The fastest strategy on these devices, by a cluster file or by what is measured now and kept.

    Every process calls it, and gets process 0's choice.

    Raises:
      UserError: no strategy fits; the cluster file is broken.
    """
    config, layout = resolved.config, resolved.layout
    if layout.cluster().num_devices == 1:
        return Choice(strategy="ddp", lines=("one device has one strategy, ddp",), prediction=None)
    cluster, notes = _cluster(config, layout)
    made = from_process_0(lambda: _ranked(resolved, cluster))
    if config.frozen:
        notes = [*notes, "frozen parameters: bytes and reductions leave them out, the time to compute does not"]
    if layout.platform == "cpu":
        notes = [*notes, "simulated devices share this machine's cores: what is predicted of their times is rough"]
    return Choice(strategy=made["strategy"], lines=(*notes, *made["lines"]), prediction=made["prediction"])


def _cluster(config: TrainConfig, layout: DeviceLayout) -> tuple[Cluster, list[str]]:
    """The numbers to plan with, and lines on where they come from."""
    if config.cluster is None:
        progress = ProgressLine() if layout.process_index == 0 else None
        try:
            cluster, line = calibrated(layout, from_process_0, progress=progress)
        finally:
            if progress:
                progress.close()
        return cluster, [f"network and rates: {line}"]
    if config.cluster in CLUSTERS and not Path(config.cluster).exists():
        raise UserError(
            f"cluster={config.cluster} is a preset, to plan without devices; here they are: name a file of "
            "`python -m amsp_jax calibrate --out FILE`, or leave it out to measure them now"
        )
    running = running_cluster(layout)
    cluster = load_cluster(Path(config.cluster))
    notes = [f"network and rates: {cluster.source}, from {config.cluster}"]
    notes += [f"cluster={config.cluster} is of other devices: {line}" for line in differences(cluster, running)]
    same_grid = dataclasses.replace(
        cluster, num_nodes=running.num_nodes, devices_per_node=running.devices_per_node,
        memory_bytes=running.memory_bytes,
    )  # fmt: skip
    return same_grid, notes


def workload_of(config: TrainConfig, model: Model, optimizer: optax.GradientTransformation) -> Workload:
    """Describes a run to the planner: its model and optimizer, the batch, the dtypes and the frozen parameters."""
    return Workload(
        model=model,
        optimizer=optimizer,
        global_batch=config.global_batch,
        seq_len=config.seq_len,
        compute_dtype=config.compute_dtype,
        reduce_dtype=config.reduce_dtype,
        inter_node_dtype=config.inter_node_dtype,
        peel=config.peel,
        frozen=tuple(config.frozen),
    )


def _ranked(resolved: Resolved, cluster: Cluster) -> dict:
    config = resolved.config
    workload = workload_of(config, resolved.model, resolved.optimizer)
    space = Space(
        microbatches=(config.microbatch,),
        remats=(Remat(config.remat),),
        tensors=(config.tensor,),
        pipelines=(config.pipeline,),
        contexts=(config.context,),
        virtual_stages=(config.virtual_stages,),
        pipeline_schedule=config.pipeline_schedule,
        microbatch_groups=(config.microbatch_group,),
    )
    try:
        ranking = search(workload, cluster, space)
    except NothingFits:
        raise UserError(
            nothing_fits_message(workload, cluster, space, Objective.STEP_TIME, cluster.memory_bytes)
        ) from None
    lines = [report.ranking_table(ranking, _TOP), report.rejected_lines(ranking), report.why(ranking)]
    return {
        "strategy": str(ranking.best.candidate.degrees),
        "lines": lines,
        "prediction": report.estimate_json(ranking.best),
    }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
