"""Eight simulated CPU devices for every test, set before jax is used."""

import os
from importlib.metadata import version

os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        # Compilation is most of a test's time. A third of it is fusion emitters; jax 0.11 knows no such flag, and a
        # flag that is not known ends the process.
        "--xla_backend_optimization_level=0",
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []),
        # On jax 0.10.2's CPU the barriers of rematerialisation are gone before CSE: re-gathers would merge.
        "--xla_disable_hlo_passes=cse_barrier_expander",
        os.environ.get("XLA_FLAGS", ""),
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"
# No site file of whoever runs the tests.
os.environ["AMSP_JAX_SITE"] = ""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def clean_environment(tmp_path, monkeypatch):
    """Caches of its own, and nothing of SLURM or NCCL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    for name in ("NCCL_SOCKET_IFNAME", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
