"""`amsp-jax calibrate --out cluster.json`: measures the machines that will train."""

from __future__ import annotations

import argparse
import os

from amsp_jax.cli import settings as cli
from amsp_jax.errors import UserError
from amsp_jax.predict.calibrate import DEFAULT_BUDGET_S, ProgressLine, calibrate, plot_network
from amsp_jax.predict.calibrate.collectives import size_text
from amsp_jax.predict.cluster import Cluster, save_cluster
from amsp_jax.runtime import launch

# Of the file systems in use.
_LONGEST_NAME = 255


def run(args: argparse.Namespace) -> None:
    """Writes the cluster file, and prints what it holds.

    Raises:
      UserError: a budget or a file that cannot be, devices that cannot be used.
    """
    if not args.budget > 0:
        raise UserError(
            f"--budget={args.budget:g}: seconds to measure, more than 0; the default is {DEFAULT_BUDGET_S:g}"
        )
    layout = cli.set_up(args)
    launch.from_process_0(lambda: _check_files(args))
    progress = ProgressLine() if layout.process_index == 0 else None
    try:
        cluster = calibrate(layout, args.budget, progress)
    finally:
        if progress:
            progress.close()
    if layout.process_index == 0:
        save_cluster(cluster, args.out)
        if args.plot and cluster.network:
            plot_network(cluster, args.plot)
        print("\n".join([*layout.notes, *_summary(cluster), *_files(args, cluster)]))


def _check_files(args: argparse.Namespace) -> None:
    """What would only fail after two minutes of measuring."""
    for flag, path in (("--out", args.out), ("--plot", args.plot)):
        if path is None:
            continue
        folder = path.resolve().parent
        if (num_bytes := len(os.fsencode(path.name))) > _LONGEST_NAME:
            raise UserError(f"{flag}={path}: a name of {num_bytes} bytes, of {_LONGEST_NAME} at most; name it shorter")
        if path.is_dir() or not os.access(folder, os.W_OK):
            problem = "a folder" if path.is_dir() else f"{folder} cannot be written to"
            raise UserError(f"{flag}={path}: {problem}; name a file in a folder of yours")
    if args.plot and args.plot.resolve() == args.out.resolve():
        raise UserError(
            f"--plot={args.plot}: is --out, too; the picture would replace the cluster file. Name two files"
        )
    if args.plot and args.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"--plot={args.plot}: draws .png, .pdf and .svg; name it network.png")


def _summary(cluster: Cluster) -> list[str]:
    rates, network = cluster.rates, cluster.network
    assert rates
    lines = [f"{cluster.device_kind}: {str(cluster.ranks).replace('data rank', 'device')}, {cluster.source}"]
    for dtype, products in rates.matmul.items():
        m, k, n, best = max(products, key=lambda point: point[-1])
        lines.append(f"products of {dtype}: up to {_tera(best)} at {m} x {k} x {n}")
    forward, backward = rates.attention_flops_per_s
    lines.append(f"attention: {_tera(forward)} forward, {_tera(backward)} backward")
    lines.append(f"memory: {rates.memory_bytes_per_s / 1e9:.4g} GB/s")
    lines.append(f"compute beside a collective: {rates.overlap_slowdown:.2f} times as long")
    for (kind, group), points in network.measured.items() if network else ():
        (least_bytes, shortest_s), (num_bytes, seconds) = points[0], points[-1]
        lines.append(
            f"{kind} {group}: {1e6 * shortest_s:.0f} us for {size_text(least_bytes)}, "
            f"{num_bytes / seconds / 1e9:.3g} GB/s (message over time) for {size_text(num_bytes)}"
        )
    return lines + list(cluster.assumptions)


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"


def _files(args: argparse.Namespace, cluster: Cluster) -> list[str]:
    plot = f"plot: {args.plot}" if cluster.network else "no plot: one device has no network to draw"
    return [f"cluster file: {args.out}"] + ([plot] if args.plot else [])
