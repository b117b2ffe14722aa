"""`srun python train.py`: the same training on one process a node, on one a device, and on one alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from slurm_cluster import ROOT, TINY_GIN, Slurm

from amsp_jax.run.metrics import read_rows

pytestmark = pytest.mark.slow

# Sums over processes are taken in another order than those within one.
RTOL = 1e-6


def test_one_process_a_node_or_a_device_gives_the_losses_of_one(slurm: Slurm, corpus: Path, tmp_path: Path) -> None:
    def command(name: str) -> list[object]:
        return [sys.executable, ROOT / "train.py", f"--gin_file={TINY_GIN}", f"--gin.DATA={corpus}"] + [
            f"--gin.RUN_DIR={tmp_path / name}"
        ]

    slurm.run(*command("alone"), timeout=240)
    slurm.srun(*command("node"), num_nodes=2, per_node=1)
    slurm.srun(*command("device"), num_nodes=2, per_node=2)
    alone, *others = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("alone", "node", "device"))
    for rows in others:
        assert [row["step"] for row in rows] == list(range(1, 21))
        for name in ("loss", "grad_norm", "num_tokens"):
            np.testing.assert_allclose([row[name] for row in rows], [row[name] for row in alone], rtol=RTOL)
