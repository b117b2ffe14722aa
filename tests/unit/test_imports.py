"""Imports flow one way: the room table of docs/design/architecture.md against the imports of every module."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "amsp_jax"
SHARED = ("errors", "user_cache", "strategy", "model")
OPERATORS = ("amsp_jax.engine.tensor", "amsp_jax.engine.context")
"""What model code may import of the engine."""


def read_table():
    text = (ROOT / "docs" / "design" / "architecture.md").read_text()
    return {room: int(row) for row, room in re.findall(r"^\| (\d) \| `(\w+)` \| .* \|$", text, re.MULTILINE)}


ROOMS = read_table()


def modules():
    """The path of each module by its dotted name; `amsp_jax/models` is a link to the folder `models`."""
    folders = [PACKAGE, *(path for path in PACKAGE.iterdir() if path.is_symlink())]
    paths = {path for folder in folders for path in folder.rglob("*.py")}
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sorted(paths)
    }


MODULES = modules()


def room_of(module):
    """`run` for `amsp_jax.run.data.windows`; the module itself where it stands beside the rooms."""
    return (module.split(".") + [""])[1]


def imports_of(path):
    """Every imported dotted name; `from package import name` is that module's where there is one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in found}
    return names


def wrong_imports(module, path):
    room = room_of(module)
    for name in sorted(imports_of(path)):
        head, target = name.split(".")[0], room_of(name)
        if head == "gin" and room != "cli":
            yield f"{module} imports gin, which only cli may"
        if head in ("models", "configs", "train"):
            yield f"{module} imports {name}, which is not in the package"
        if head != "amsp_jax" or target in ("errors", room):
            continue
        if room in ("", "__main__"):
            allowed = True
        elif room in SHARED:
            allowed = target in SHARED
        elif room == "models":
            allowed = target in SHARED or name.startswith(OPERATORS)
        else:
            allowed = target in SHARED or ROOMS.get(target, 9) < ROOMS[room]
        if target == "models" and room not in ("cli", "", "__main__"):
            allowed = False
        if not allowed:
            yield f"{module} imports {name}, which is not above it"


def test_every_room_has_a_row_and_every_row_a_room():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS)
    assert {room_of(module) for module in MODULES} == folders | {*SHARED, "__main__", ""}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_to_rooms_above(module):
    assert list(wrong_imports(module, MODULES[module])) == []


def find_cycle(graph):
    """A cycle of module names, or None; depth first."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return None
        path.append(node)
        cycle = next(filter(None, map(visit, sorted(graph.get(node, ())))), None)
        path.pop()
        done.add(node)
        return cycle

    return next(filter(None, map(visit, sorted(graph))), None)


def test_imports_make_no_cycle():
    """A package's own `__init__` only re-exports, so its modules may name each other but not the package."""
    graph = {module: {name for name in imports_of(path) if name in MODULES} for module, path in MODULES.items()}
    assert find_cycle(graph) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("module", "code", "found"),
    [
        ("amsp_jax.engine.plan", "from amsp_jax.run import config", "amsp_jax.run.config"),
        ("amsp_jax.run.metrics", "def f():\n  import amsp_jax.cli.settings", "amsp_jax.cli.settings"),
        ("amsp_jax.engine.train_step", "from amsp_jax import Strategy", "amsp_jax"),
        ("amsp_jax.strategy", "from amsp_jax.engine.mesh import level", "amsp_jax.engine.mesh"),
        ("amsp_jax.models.llama", "from amsp_jax.engine.plan import Plan", "amsp_jax.engine.plan"),
        ("amsp_jax.run.trainer", "from amsp_jax.models import registry", "amsp_jax.models.registry"),
        ("amsp_jax.run.trainer", "import gin", "gin"),
        ("amsp_jax.cli.settings", "import models", "models"),
    ],
)
def test_wrong_imports_are_found(module, code, found, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(code)
    (line,) = wrong_imports(module, path)
    assert line.startswith(f"{module} imports {found}")


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_strategies_need_no_jax():
    """A strategy is read and resolved where jax is not installed."""
    run_python(
        "import sys; sys.modules['jax'] = sys.modules['numpy'] = None\n"
        "import amsp_jax.strategy, amsp_jax.predict.cluster, amsp_jax.run.config\n"
        "from amsp_jax import DataRanks, parse\n"
        "parse('zero3').resolve(DataRanks(8, 128))"
    )


def test_importing_changes_no_setting_and_starts_no_backend():
    """No environment variable, no jax option, no devices; jax's own import may set its variables."""
    run_python(
        "import importlib, os, jax\n"
        "from jax._src import xla_bridge\n"
        "before = dict(os.environ), dict(jax.config.values)\n"
        f"for name in {sorted(set(MODULES))!r}: importlib.import_module(name)\n"
        "assert (dict(os.environ), dict(jax.config.values)) == before\n"
        "assert not xla_bridge.backends_are_initialized()"
    )


def test_the_names_of_the_launch_package_are_not_modules_of_it():
    """A module that is imported takes its name in the package, and would hide a function of that name."""
    from amsp_jax.runtime import launch

    modules = {path.stem for path in (PACKAGE / "runtime" / "launch").glob("*.py")}
    assert not modules & set(launch._HOME)
    assert all(getattr(launch, name) is not None for name in launch._HOME)


def test_public_names_are_those_of_their_modules():
    import amsp_jax

    for name in amsp_jax.__all__:
        assert getattr(amsp_jax, name) is not None
    assert dir(amsp_jax) == sorted(amsp_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        amsp_jax.nothing  # noqa: B018
