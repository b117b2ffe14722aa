"""Imports flow one way: the room table of docs/design/architecture.md against the imports of every module."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("amsp_jax", "models")
ENTRY_ROW = 9


class Room(NamedTuple):
    row: int
    also: frozenset[str]


def read_table():
    text = (ROOT / "docs" / "design" / "architecture.md").read_text()
    lines = re.findall(r"^\| (\d+) \| `(\w+)` \| .* \| ?(.*?) ?\|$", text, re.MULTILINE)
    return {room: Room(int(row), frozenset(re.findall(r"\w+", also))) for row, room, also in lines}


TABLE = read_table()


def modules():
    """The path of each module by its dotted name; a package's own module ends in `__init__`."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in [*paths, ROOT / "train.py"]}


MODULES = modules()


def room_of(module):
    """`amsp_jax.data.windows` is in the room data, `models.llama` in models, `amsp_jax` in `__init__`."""
    head, *rest = module.split(".")
    if head != "amsp_jax":
        return head
    return rest[0] if rest else "__init__"


def imports_of(path):
    """Every imported dotted name; `from package import name` is that module's where there is one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if {name, f"{name}.__init__"} & MODULES.keys() else node.module for name in found}
    return names


def wrong_imports(module, path):
    room = room_of(module)
    for name in sorted(imports_of(path)):
        head = name.split(".")[0]
        if head == "gin" and TABLE[room].row < ENTRY_ROW:
            yield f"{module} imports gin, which only row {ENTRY_ROW} may"
        if head not in PACKAGES or (target := room_of(name)) == room:
            continue
        allowed = TABLE[target].row < TABLE[room].row or target == "errors" or target in TABLE[room].also
        if room == "models":
            allowed = target in ("model", "tensor", "context", "errors")
        if not allowed:
            yield f"{module} (row {TABLE[room].row}) imports {name} (row {TABLE[target].row})"


def test_every_module_has_a_row_and_every_row_a_module():
    assert {room_of(module) for module in MODULES} == set(TABLE)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_to_rows_above(module):
    assert list(wrong_imports(module, MODULES[module])) == []


def test_a_room_that_is_also_imported_stands_above():
    """So imports within a row make no cycle."""
    seen = set()
    for name, room in TABLE.items():
        assert room.also <= seen, f"{name} imports {room.also - seen}, which stand below it"
        seen.add(name)


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("amsp_jax.plan", "from amsp_jax.step import make_train_step", "(row 2) imports amsp_jax.step (row 5)"),
        ("amsp_jax.data.windows", "from amsp_jax import metrics", "(row 6) imports amsp_jax.metrics (row 6)"),
        ("amsp_jax.metrics", "def f():\n  import amsp_jax.plots", "(row 6) imports amsp_jax.plots (row 6)"),
        ("amsp_jax.step", "from amsp_jax import Strategy", "(row 5) imports amsp_jax (row 6)"),
        ("models.llama", "from amsp_jax.strategy import parse", "(row 8) imports amsp_jax.strategy (row 0)"),
        ("amsp_jax.trainer", "from models import registry", "(row 7) imports models.registry (row 8)"),
        ("amsp_jax.trainer", "import gin", "amsp_jax.trainer imports gin"),
    ],
)
def test_wrong_imports_are_found(module, code, message, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(code)
    (found,) = wrong_imports(module, path)
    assert message in found


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_strategies_need_no_jax():
    """A strategy is read and resolved where jax is not installed."""
    run_python(
        "import sys; sys.modules['jax'] = sys.modules['numpy'] = None\n"
        "import amsp_jax.strategy, amsp_jax.cluster, amsp_jax.config\n"
        "from amsp_jax import DataRanks, parse\n"
        "parse('zero3').resolve(DataRanks(8, 128))"
    )


def test_importing_changes_no_setting_and_starts_no_backend():
    """No environment variable, no jax option, no devices; jax's own import may set its variables."""
    run_python(
        "import importlib, os, jax\n"
        "from jax._src import xla_bridge\n"
        "before = dict(os.environ), dict(jax.config.values)\n"
        f"for name in {sorted(set(MODULES))!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "assert (dict(os.environ), dict(jax.config.values)) == before\n"
        "assert not xla_bridge.backends_are_initialized()"
    )


def test_public_names_are_those_of_their_modules():
    import amsp_jax

    for name in amsp_jax.__all__:
        assert getattr(amsp_jax, name) is not None
    assert dir(amsp_jax) == sorted(amsp_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        amsp_jax.nothing  # noqa: B018
