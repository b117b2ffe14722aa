"""Eight simulated CPU devices for every test, set before jax is used; and a cache of compiled programs."""

import contextlib
import os
import time
from importlib.metadata import version
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        # Compilation is most of a test's time. A third of it is fusion emitters; jax 0.11 knows no such flag, and a
        # flag that is not known ends the process.
        "--xla_backend_optimization_level=0",
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []),
        # Programs are too small for several threads of LLVM.
        "--xla_cpu_parallel_codegen_split_count=1",
        # On jax 0.10.2's CPU the barriers of rematerialisation are gone before CSE: re-gathers would merge.
        "--xla_disable_hlo_passes=cse_barrier_expander",
        os.environ.get("XLA_FLAGS", ""),
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"
# A program that some process compiled once is read from the disk by all others, by processes that tests start, too.
# The keys hold the program, the flags and the versions of jax and XLA, so that nothing stale is read.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "programs"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# No site file of whoever runs the tests.
os.environ["AMSP_JAX_SITE"] = ""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# The folder above, and not one that the person named.
PROGRAMS, KEPT_DAYS = Path(__file__).parents[1] / ".cache" / "programs", 7

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config):
    # jax writes in place: an entry that another process is writing, or was killed in writing, is compiled again.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry:UserWarning")
    if not hasattr(config, "workerinput"):
        remove_unused_programs()


def remove_unused_programs():
    """Programs of earlier versions of the code would stay for ever."""
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for path in PROGRAMS.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if max(path.stat().st_atime, path.stat().st_mtime) < oldest:
                path.unlink()


@pytest.fixture
def no_program_cache():
    """For what is said of a compilation itself: each program is compiled, and none is read from the disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture
def clean_environment(tmp_path, monkeypatch):
    """Caches of its own, and nothing of SLURM or NCCL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    for name in ("NCCL_SOCKET_IFNAME", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
