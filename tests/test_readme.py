"""What the README says is so: its Python runs, its presets are those of the program, its links lead somewhere."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from amsp_jax import PRESETS, DataRanks, make_plan, parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
RANKS, K = DataRanks(per_node=4, num_nodes=2), 2
PICTURE = "params=replica grads=node opt_state=full"


def table(heading: str) -> list[list[str]]:
    """The rows of the first table after this heading."""
    lines = README.split(heading)[1].split("\n\n")[2].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_python_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(SNIPPETS[number], f"README.md, snippet {number + 1}", "exec"), names)
    if "metrics" in names:
        assert names["metrics"].loss < 5.5  # ln 256 = 5.545
        assert names["state"].params["head"].sharding == names["zero3"].opt_shardings["head"]


def preset_rows() -> list[tuple[str, list[str]]]:
    """(strategy, the other cells) of each name in the table of presets, at k = K."""
    rows = []
    for names, *cells in table("### Presets"):
        for name in re.findall(r"`(.*?)`", names) or [PICTURE]:
            rows.append((name.replace("(k)", f"({K})"), cells))
    return rows


def test_every_preset_is_in_the_table() -> None:
    assert {name.split("(")[0] for name, _ in preset_rows()} == {*PRESETS, PICTURE}


@pytest.mark.parametrize(("name", "cells"), preset_rows())
def test_a_preset_is_the_point_that_the_table_says(name: str, cells: list[str]) -> None:
    params, grads, opt_state, formula = (cell.strip("`") for cell in cells[:4])
    words = {"k": str(K)}
    text = " ".join(
        f"{part}={words.get(word, word)}"
        for part, word in {"params": params, "grads": grads, "opt_state": opt_state}.items()
    )
    assert parse(name) == parse(text)
    size = 64
    plan = make_plan(name, {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}, RANKS)
    numbers = {"phi": size, "N": RANKS.total, "n": RANKS.per_node, "k": K}
    assert plan.bytes_per_device().total == eval(formula.replace("Φ", "*phi"), numbers)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design/README.md"])
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link
