"""`calibrate`: everything that is measured, within a budget, as one `Cluster`; `calibrated`: the same, cached."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import re
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax.extend.backend import get_backend

from amsp_jax.errors import UserError
from amsp_jax.predict.calibrate import compute
from amsp_jax.predict.calibrate.collectives import SIZES, Table, measure_collectives
from amsp_jax.predict.calibrate.compute import CPU_MENU, GPU_MENU, Menu, Workbench
from amsp_jax.predict.calibrate.overlap import overlap_slowdown
from amsp_jax.predict.calibrate.programs import Machine
from amsp_jax.predict.calibrate.stopwatch import Progress, Stopwatch
from amsp_jax.predict.cluster import Cluster, Link, Network, Rates, differences, from_json, load_cluster, save_cluster
from amsp_jax.predict.cluster.presets import OVERLAP_SLOWDOWN
from amsp_jax.strategy import Degree
from amsp_jax.user_cache import user_cache

DEFAULT_BUDGET_S = 100.0

# Shares of the budget that have gone by when the next part begins; products beside a collective come last.
_COMPUTE_UNTIL, _COLLECTIVES_UNTIL = 0.35, 0.92

FromProcess0 = Callable[[Callable[[], Any]], Any]
"""Gives every process what the function returns in process 0, a JSON value: `launch.from_process_0`."""


def calibrate(
    machine: Machine,
    budget_s: float = DEFAULT_BUDGET_S,
    progress: Progress | None = None,
    *,
    sizes: Iterable[int] = SIZES,
    menu: Menu | None = None,
) -> Cluster:
    """Measures the devices; every process calls it at once and gets the same numbers.

    What does not fit into the budget or the memory is left out, and `Cluster.assumptions` says so.

    Args:
      machine: the devices, as `launch.setup` orders them.
      budget_s: seconds to spend; the first measurement of each sort is made whatever it takes.
      progress: told what is measured now and the share of the budget that is spent.
      sizes: message bytes.
      menu: what is measured of one device; None for what suits the platform.
    """
    menu = menu or (CPU_MENU if machine.platform == "cpu" else GPU_MENU)
    watch = Stopwatch(budget_s, progress)
    bench = Workbench(machine, watch, until_s=_COMPUTE_UNTIL * watch.budget_s)
    memory = compute.memory_bytes_per_s(bench, menu.pass_bytes)
    attention = compute.attention_flops_per_s(bench, menu.attention)
    # Last, as they are many and each is tuned when it is compiled.
    matmul = compute.matmul_rates(bench, menu.products)
    table, left_out = measure_collectives(machine, watch, _COLLECTIVES_UNTIL * watch.budget_s, sizes)
    bench.until_s = watch.budget_s
    dtype, points = next(iter(matmul.items()))
    slowdown = overlap_slowdown(bench, table, points, dtype)
    notes = bench.notes + left_out
    if slowdown is None:
        slowdown, note = _assumed_slowdown(machine.platform)
        notes.append(note)
    return dataclasses.replace(
        running_cluster(machine),
        source=f"measured by calibrate in {watch.elapsed_s:.0f} s",
        network=_network(table, machine),
        rates=Rates(
            matmul=matmul,
            attention_flops_per_s=attention,
            memory_bytes_per_s=memory,
            overlap_slowdown=slowdown,
        ),
        assumptions=tuple(notes),
        date=datetime.date.today().isoformat(),
    )


def running_cluster(machine: Machine) -> Cluster:
    """The devices in numbers, with the versions that a cluster file is compared by."""
    return dataclasses.replace(machine.cluster(), versions=_versions())


def calibrated(
    machine: Machine,
    from_process_0: FromProcess0,
    cache_path: Path | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    progress: Progress | None = None,
) -> tuple[Cluster, str]:
    """What was measured before on such devices, else what `calibrate` measures now and keeps; and a line on which.

    Args:
      machine: the devices.
      from_process_0: only process 0 reads and writes the file.
      cache_path: the file; None for one in `~/.cache/amsp_jax/clusters` by device kind, nodes and jax's version.
      budget_s, progress: of `calibrate`.
    """
    running = running_cluster(machine)
    path = cache_path or _cache_path(running)
    found = from_process_0(lambda: _read(path, running))
    if found["text"] is not None:
        # Memory that is free varies; what was measured does not depend on it.
        cluster = dataclasses.replace(from_json(found["text"]), memory_bytes=running.memory_bytes)
        return cluster, f"measured on {cluster.date}, from {path}"
    cluster = calibrate(machine, budget_s, progress)
    kept = from_process_0(lambda: _write(cluster, path))
    return cluster, f"measured now{found['why']}, {kept}"


def _read(path: Path, running: Cluster) -> dict[str, str | None]:
    """The text of a file that holds for the running devices, else None and why not."""
    if not path.is_file():
        return {"text": None, "why": ""}
    try:
        cluster = load_cluster(path)
    except UserError as error:
        return {"text": None, "why": f" ({error})"}
    changed = differences(cluster, dataclasses.replace(running, memory_bytes=cluster.memory_bytes))
    if changed:
        return {"text": None, "why": f" ({path} is of other devices: {'; '.join(changed)})"}
    return {"text": path.read_text(), "why": ""}


def _write(cluster: Cluster, path: Path) -> str:
    """Keeps the file where it can; without a place to write, the next run measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_cluster(cluster, path)
    except OSError as error:
        return f"not kept: {error}"
    return f"kept in {path}"


def _cache_path(running: Cluster) -> Path:
    grid = f"{running.num_nodes}x{running.devices_per_node}"
    name = re.sub(r"[^\w.-]+", "-", f"{running.device_kind}_{grid}_jax-{running.versions['jax']}")
    return user_cache() / "clusters" / f"{name}.json"


def _versions() -> dict[str, str]:
    backend = " ".join(get_backend().platform_version.split())
    return {
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "backend": backend,
    }


def _assumed_slowdown(platform: str) -> tuple[float, str]:
    """`Rates.overlap_slowdown` where no trial gave it, and the assumption in words."""
    unknown = "compute beside a collective could not be measured, it is assumed to take"
    if platform == "cpu":
        return 1.0, f"{unknown} as long as alone"
    return (
        OVERLAP_SLOWDOWN,
        f"{unknown} {OVERLAP_SLOWDOWN:.2f} times as long, as in 7B training steps on H200",
    )


def _network(table: Table, machine: Machine) -> Network | None:
    """Links of the two levels are those of the largest groups on one level, and fill in for unmeasured groups."""
    if not table:
        return None
    return Network(
        measured={key: tuple(sorted(times.items())) for key, times in table.items()},
        intra=_link(table, Degree(machine.devices_per_node, 1)),
        inter=_link(table, Degree(1, machine.num_nodes)),
    )


def _link(table: Table, group: Degree) -> Link | None:
    """From an all-gather on a ring: the bandwidth of the largest message, a step's share of the smallest's time."""
    times = table.get(("all-gather", group))
    if not times:
        return None
    smallest, largest, num_steps = min(times), max(times), group.total - 1
    return Link(
        bytes_per_s=largest * num_steps / group.total / times[largest],
        latency_s=times[smallest] / num_steps,
    )
