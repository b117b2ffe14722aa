"""A real SLURM cluster of four virtual nodes on this machine: see cluster.sh.

Where SLURM is not installed its tests are skipped; where it is, a cluster that does not come up is a failure. The
cluster is one for all pytest processes, each test has it alone, and the last process stops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fault_table import Fault, write_table
from slurm_cluster import CLUSTER_SH, NUM_NODES, Slurm

# Beside the cluster's own folder.
_LOCK = os.environ.get("SLURM_CI_DIR", "/tmp/slurm-ci") + ".pytest"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", type=Path, help="a file of which the fault tests write a part anew")


@pytest.fixture(scope="session")
def fault_table(request: pytest.FixtureRequest) -> Iterator[list[Fault]]:
    """What the fault tests measured; they add to it."""
    faults: list[Fault] = []
    yield faults
    if file := request.config.getoption("--fault-table", None):
        write_table(file, faults, f"python -m pytest {' '.join(request.config.invocation_params.args)}")


@contextlib.contextmanager
def _held(name: str, mode: int) -> Iterator[int]:
    with open(f"{_LOCK}.{name}", "w") as file:
        fcntl.flock(file, mode)
        yield file.fileno()


@pytest.fixture(scope="session")
def slurm_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster of virtual nodes needs root")
    sbin = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(name, path=sbin)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; on Debian {CLUSTER_SH} install does it")
    with _held("users", fcntl.LOCK_SH) as users:
        with _held("test", fcntl.LOCK_EX):
            started = subprocess.run(
                [CLUSTER_SH, "start", str(NUM_NODES)], capture_output=True, text=True, timeout=120, check=False
            )
        if started.returncode != 0:
            pytest.fail(f"the SLURM cluster did not come up:\n{started.stderr[-8000:]}")
        mode = re.search(r"nodes, (\w+)", started.stderr)
        conf = re.search(r"SLURM_CONF=(\S+)", subprocess.check_output([CLUSTER_SH, "env"], text=True))
        assert mode and conf, started.stderr
        yield Slurm(conf[1], mode[1], tmp_path_factory.mktemp("cache"))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run([CLUSTER_SH, "stop"], check=True, timeout=120)


@pytest.fixture
def slurm(slurm_session: Slurm) -> Iterator[Slurm]:
    """The cluster, idle before and after the test."""
    with _held("test", fcntl.LOCK_EX):
        yield slurm_session
        slurm_session.reset()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids, which need no tokenizer."""
    file = tmp_path_factory.mktemp("corpus") / "ids.npy"
    np.save(file, np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint16))
    return file
