"""A wheel, installed into an empty folder: it holds the package alone, and every command works from anywhere.

The files of the checkout are out of reach: they are copied, built and left before a command starts.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from amsp_jax.__main__ import TRAIN
from amsp_jax.cli.arguments import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("amsp_jax", "models", "configs", "pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta; import sys; getattr(build_meta, sys.argv[1])(sys.argv[2])"
MICRO = [
    "--gin.DATA=corpus.txt", "--gin.STEPS=3", "--gin.EVAL_BATCHES=1", "--gin.SIMULATED_NODES=1",
    "--gin.SIMULATED_DEVICES_PER_NODE=2", "--gin.GLOBAL_BATCH=2", "--gin.SEQ_LEN=32", "--gin.RUN_DIR=run",
    "--gin.MICROBATCH=1",
    "--gin.MODEL_OVERRIDES={'num_layers': 1, 'hidden': 32, 'ffn': 64, 'vocab_size': 300}",
]  # fmt: skip
PLANNED = ["--model", "llama-tiny", "--cluster", "h100", "--global-batch", "8", "--seq-len", "128"]


def python(*words: str | Path, cwd: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python that imports from `path` and from the installed dependencies, and from no checkout."""
    own = {**os.environ, "PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=own, capture_output=True, text=True, timeout=600, check=False
    )


def _all_but_sources(folder: str, names: list[str]) -> set[str]:
    """Nothing built, no run, and no `.git`: as a fresh clone is."""
    return set(names) - set(SOURCES) if Path(folder) == ROOT else {name for name in names if name == "__pycache__"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel of the sources, and the wheel that is built from their source distribution."""
    folder = tmp_path_factory.mktemp("build")
    source, tools = folder / "source", folder / "tools"
    shutil.copytree(ROOT, source, symlinks=True, ignore=_all_but_sources)
    (source / "configs/slurm/site.sh").write_text("# of one site\n")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target"]
    subprocess.run([*pip, tools, "setuptools>=77"], check=True)

    def build(kind: str, where: Path, out: Path) -> Path:
        done = python("-c", BUILD, kind, out, cwd=where, path=tools)
        assert done.returncode == 0, done.stderr
        return next(out.iterdir())

    direct = build("build_wheel", source, folder / "direct")
    packed = build("build_sdist", source, folder / "packed")
    shutil.unpack_archive(packed, folder / "unpacked")
    return [direct, build("build_wheel", next((folder / "unpacked").iterdir()), folder / "indirect")]


@pytest.fixture(scope="module")
def site(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--target"]
    subprocess.run([*pip, folder, wheels[0]], check=True)
    return folder


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `models`, `configs` and `train.py` are a user's own, and of no use to us."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("models/__init__.py", "configs/quickstart.gin", "configs/base.gin", "train.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('a file of the user')\n")
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    return folder


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_a_wheel_holds_the_package_alone(wheels: list[Path]) -> None:
    direct, indirect = map(names, wheels)
    assert direct == indirect
    assert {name.split("/")[0].split("-")[0] for name in direct} == {"amsp_jax"}
    folders = {"models": "models", "configs": "configs", "compile/targets": "amsp_jax/compile/targets"}
    for inside, outside in folders.items():
        there = {path.relative_to(ROOT / outside) for path in (ROOT / outside).rglob("*") if path.is_file()}
        wanted = {path for path in there if "__pycache__" not in path.parts and path.name != "site.sh"}
        assert {f"amsp_jax/{inside}/{path}" for path in wanted} <= direct, inside
    assert "amsp_jax/py.typed" in direct
    assert not any("site.sh" in name or "__pycache__" in name for name in direct)


def test_every_help(site: Path, user: Path) -> None:
    for command in ([], *([name] for name in (TRAIN, *COMMANDS))):
        done = python("-m", "amsp_jax", *command, "--help", cwd=user, path=site)
        assert done.returncode == 0, (command, done.stderr)
        assert "amsp-jax" in done.stdout or "train" in done.stdout


def test_the_script_is_the_module(site: Path, user: Path) -> None:
    scripts = python(site / "bin" / "amsp-jax", "--version", cwd=user, path=site)
    assert scripts.stdout.startswith("amsp-jax ") and scripts.returncode == 0
    assert scripts.stdout == python("-m", "amsp_jax", "--version", cwd=user, path=site).stdout


def test_commands_work_from_a_folder_of_the_user_s(site: Path, user: Path, tmp_path: Path) -> None:
    def amsp(*words: str) -> str:
        done = python("-m", "amsp_jax", *words, cwd=user, path=site, XDG_CACHE_HOME=str(tmp_path))
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    # Without a gin file it is the package's quickstart that runs, not the user's file of that name.
    assert "step 3/3" in amsp("train", *MICRO)
    assert amsp("generate", "run", "--prompt", "the quick", "--max-tokens", "4").startswith("the quick")
    assert "for a gin file:" in amsp("plan", *PLANNED)
    assert " 0 FAIL" in amsp("doctor")
    profiled = [word for word in MICRO if "STEPS" not in word]
    assert "timeline.png" in amsp("profile", "--steps", "1", *profiled)
    small = ["--gin_file=configs/runs/llama_125m.gin", "--gin.MODEL=llama-tiny", *MICRO, "--gin.RUN_DIR=other"]
    assert "strategy  " in amsp("train", *small, "--dry-run")
    tuned = ["tune", "--trials", "1", "--steps", "2", "--warmup", "1", "--search", "strategy=zero1"]
    assert "best.gin" in amsp(*tuned, *(word for word in MICRO if "RUN_DIR" not in word))
    amsp("calibrate", "--out", "cluster.json", "--budget", "1", "--simulated-devices-per-node", "2")
    assert (user / "cluster.json").is_file()
    assert "memory of a device" in amsp("compile", *PLANNED, "--strategy", "zero3")
