"""What the README says is so: its Python runs, its presets are those of the program, its links lead somewhere."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from amsp_jax import PRESETS, DataRanks, parse
from amsp_jax.engine.mesh import ROLES
from amsp_jax.engine.plan import plan_parameters

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
RANKS, K = DataRanks(per_node=4, num_nodes=2), 2
PICTURE = "params=replica grads=node opt_state=full"


def table(heading: str) -> list[list[str]]:
    """The rows of the first table after this heading."""
    lines = README.split(heading)[1].split("\n\n")[2].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_python_runs(number: int, tmp_path: Path) -> None:
    """As it is copied: in a process of its own, with nothing set up before it."""
    checks = """
if "metrics" in globals():
    assert metrics.loss < 5.5  # ln 256 = 5.545
    assert state.params["head"].sharding == zero3.opt_shardings["head"]
    print("trained")
"""
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[number] + checks)
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("trained" in done.stdout) == ("make_train_step" in SNIPPETS[number])


def test_the_data_page_trains_on_each_kind_of_rows(tmp_path: Path) -> None:
    """Its blocks one after the other, as they are copied."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join([*blocks, 'assert run.metrics[-1]["step"] == 4 and len(run.validations) == 2']))
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, script]
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"rows", "map", "iterator"}


def preset_rows() -> list[tuple[str, list[str]]]:
    """(strategy, the other cells) of each name in the table of presets, at k = K."""
    rows = []
    for names, *cells in table("### Presets"):
        for name in re.findall(r"`(.*?)`", names) or [PICTURE]:
            rows.append((name.replace("(k)", f"({K})"), cells))
    return rows


def test_every_preset_is_in_the_table() -> None:
    assert {name.split("(")[0] for name, _ in preset_rows()} == {*PRESETS, PICTURE}


def collectives(cell: str, numbers: dict[str, int]) -> dict[str, float]:
    """{kind: devices in a group} of `2 all-gathers and a reduce-scatter over N/k`."""
    groups = {}
    for piece in filter(None, cell.split(", ")):
        kinds, _, group = piece.partition(" over ")
        groups.update(dict.fromkeys(re.findall(r"all-gather|reduce-scatter|all-reduce", kinds), eval(group, numbers)))
    return groups


@pytest.mark.parametrize(("name", "cells"), preset_rows())
def test_a_preset_is_the_point_that_the_table_says(name: str, cells: list[str]) -> None:
    *shardings, formula, every_microbatch, once = (cell.strip("`") for cell in cells)
    words = (str(K) if word == "k" else word for word in shardings)
    assert parse(name) == parse("params={} grads={} opt_state={}".format(*words))

    size = 64
    plan = plan_parameters(name, {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}, RANKS)
    numbers = {"phi": size, "N": RANKS.total, "n": RANKS.per_node, "k": K}
    assert plan.bytes_per_device().total == eval(formula.replace("Φ", "*phi"), numbers)

    axes = plan.axes
    group = {role: math.prod(plan.mesh.shape[a] for a in getattr(axes, role)) for role in ROLES}
    param, grad, opt, replica = (group[role] for role in ("param", "grad", "opt", "replica"))
    expected = {"all-gather": param, "reduce-scatter": param * grad}
    assert collectives(every_microbatch, numbers) == {kind: n for kind, n in expected.items() if n > 1}
    expected = {"reduce-scatter": opt, "all-gather": grad * opt, "all-reduce": replica}
    assert collectives(once, numbers) == {kind: n for kind, n in expected.items() if n > 1}


def test_every_design_note_is_in_the_index() -> None:
    folder = ROOT / "docs" / "design"
    listed = set(re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/data.md", "docs/design/README.md"])
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link
