"""Nothing that a run reads runs code, and nothing that it writes leaves its folder."""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amsp_jax.cli import settings as cli
from amsp_jax.cli.gin_safety import checked_files
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import CLUSTERS, load_cluster, save_cluster
from amsp_jax.run.checkpoint import Checkpointer
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.data import open_dataset
from amsp_jax.run.run_folder import find_run_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def load(text: str) -> TrainConfig:
    Path("bad.gin").write_text(text)
    return cli.load_config([Path("bad.gin")])


# Gin files


DYNAMIC = "from __gin__ import dynamic_registration\nfrom amsp_jax.run import config\n"
HOSTILE = {
    "import": "import marks\n",
    "import of a submodule": "import os.path\n",
    "from": "from marks import thing\n",
    "alias": "import marks as config\n",
    "alias of ours": "from amsp_jax.run import config as c\n",
    "another of our modules": "from amsp_jax.run import trainer\n",
    "import after dynamic registration": DYNAMIC + "import marks\n",
    "after a carriage return": "STEPS = 3 # comment\rimport marks\n",
    "after a form feed": "STEPS = 3 # comment\x0c\nimport marks\n",
    "call": DYNAMIC + "RUN_DIR = @config.difflib.unicode()\n",
    "call through attributes": DYNAMIC + "RUN_DIR = @config.dataclasses.sys.exit()\n",
    "call in a list": DYNAMIC + "MODEL_OVERRIDES = {'a': [1, (@config.typing.sys.exit(), 2)]}\n",
    "call as a key": DYNAMIC + "MODEL_OVERRIDES = {@config.did_you_mean(): 1}\n",
    "scoped call": DYNAMIC + "RUN_DIR = @a/b/config.did_you_mean()\n",
    "reference": DYNAMIC + "RUN_DIR = @config.did_you_mean\n",
    "binding of another function": DYNAMIC + "config.did_you_mean.name = 'x'\n",
    "binding of gin's own": DYNAMIC + "gin.macro.value = 'x'\n",
    "binding through attributes": DYNAMIC + "config.dataclasses.field.default = 'x'\n",
    "block": DYNAMIC + "config.did_you_mean:\n    name = 'x'\n",
    "call in a block": DYNAMIC + "config.TrainConfig:\n    steps = @config.did_you_mean()\n",
    "included": "include 'import.gin'\n",
    "included by absolute path": "include '{folder}/import.gin'\n",
    "included twice": "include 'middle.gin'\n",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_config_imports_and_calls_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "marks.py").write_text("open('mark', 'w')\nthing = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    Path("import.gin").write_text("import marks\n")
    Path("middle.gin").write_text("STEPS = 3\ninclude 'import.gin'\n")
    before = set(sys.modules)
    with pytest.raises(UserError, match=r"\w+\.gin, line \d: .*(imports no code|refers to code|binds settings alone)"):
        load(HOSTILE[what].format(folder=Path.cwd()) if "{folder}" in HOSTILE[what] else HOSTILE[what])
    assert not Path("mark").exists() and "marks" not in set(sys.modules) - before


@pytest.mark.parametrize("flag", ["RUN_DIR=@os.system()", "RUN_DIR=%a/@os.system()", "STEPS=3\nimport marks"])
def test_a_flag_is_a_value(flag: str) -> None:
    line = cli.parse_command_line([f"--gin.{flag}"])
    try:
        config = cli.load_config(line.gin_files, line.bindings)
    except UserError:
        return
    assert config.run_dir == flag.removeprefix("RUN_DIR=")


def test_statements_given_as_text_are_checked_too() -> None:
    for statement in ("import marks", "RUN_DIR = @os.system()", "STEPS = 3\nimport marks"):
        with pytest.raises(UserError, match="a binding, line"):
            cli.load_config([], [statement])


def test_includes_that_never_end() -> None:
    Path("a.gin").write_text("include 'b.gin'\n")
    Path("b.gin").write_text("include 'a.gin'\n")
    with pytest.raises(UserError, match=r"a\.gin includes itself, through .*a\.gin and .*b\.gin"):
        checked_files(Path("a.gin"), (Path(),))
    for level in range(20):
        Path(f"{level}.gin").write_text(f"include '{level + 1}.gin'\n" * 2)
    Path("20.gin").write_text("STEPS = 3\n")
    with pytest.raises(UserError, match="more than 100 files"):
        checked_files(Path("0.gin"), (Path(),))


def test_what_is_no_config_is_not_read_to_its_end() -> None:
    Path("large.gin").write_bytes(b"#" * (2 << 20))
    with pytest.raises(UserError, match="more than 1,048,576 bytes"):
        load("include 'large.gin'\n")
    os.mkfifo("pipe.gin")
    for name in ("pipe.gin", "/dev/zero", "."):
        with pytest.raises(UserError, match="no such file"):
            load(f"include {name!r}\n")


def test_our_own_configs_are_harmless() -> None:
    for path in (cli.PACKAGE / "configs").rglob("*.gin"):
        assert path in checked_files(path, (Path(), cli.PACKAGE))


def test_the_config_that_a_run_keeps_can_be_read_again() -> None:
    config = cli.load_config([cli.find_gin_file(cli.QUICKSTART)])
    assert load(config.to_gin()) == config


# Pickles


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, ("mark", "w")


def test_no_pickle_is_loaded_from_a_corpus() -> None:
    array = np.empty(40, object)
    array[:] = [Malicious()] * 40
    np.save("objects.npy", array, allow_pickle=True)
    np.savez("archive.npz", array)
    Path("archive.npz").rename("archive.npy")
    for name in ("pickle.npy", "pickle.bin", "pickle.txt", "pickle.jsonl"):
        Path(name).write_bytes(pickle.dumps([Malicious()] * 40))
    for name in ("objects.npy", "archive.npy", "pickle.npy", "pickle.bin", "pickle.txt", "pickle.jsonl"):
        with pytest.raises(UserError):
            open_dataset(name, vocab_size=300, seq_len=4, global_batch=1, seed=0, cache_dir=Path("cache"))
    assert not Path("mark").exists()


def test_no_pickle_is_loaded_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even looked at: unpickling anything at all fails this test."""
    state = {"w": jnp.arange(8.0)}
    saver = Checkpointer("checkpoints", keep=1)
    saver.save(1, state, {"steps": 1})
    saver.close()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a pickle was loaded")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    reader = Checkpointer("checkpoints", keep=None)
    np.testing.assert_array_equal(reader.restore(1, abstract)["w"], state["w"])
    reader.close()


def test_a_pickle_in_place_of_a_checkpoints_file_is_damage() -> None:
    state = {"w": jnp.arange(8.0)}
    saver = Checkpointer("checkpoints", keep=1)
    saver.save(1, state, {"steps": 1})
    saver.close()
    for path in [path for path in Path("checkpoints/1").rglob("*") if path.is_file()]:
        path.write_bytes(pickle.dumps(Malicious()))
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    with pytest.raises(UserError):
        Checkpointer("checkpoints", keep=None).restore(1, abstract)
    assert not Path("mark").exists()


# Writes stay in the folder


def config(run_dir: str) -> TrainConfig:
    return cli.load_config([], [f"RUN_DIR = {run_dir!r}"])


@pytest.mark.parametrize("name", ["run.json", "config.gin", ".lock", "metrics.jsonl", "loss.png"])
@pytest.mark.parametrize("target", ["../outside", "nothing"])
def test_a_link_in_a_run_folder_is_not_written_through(name: str, target: str) -> None:
    Path("../outside").write_text("precious")
    with find_run_folder(config("run")).claimed(config("run")):
        pass
    Path("run", name).unlink(missing_ok=True)
    if name == "run.json":
        Path("../outside").write_text(json.dumps({}))
    before = Path("../outside").read_text()
    Path("run", name).symlink_to(Path(target).absolute())
    with pytest.raises(UserError, match="is a link|another|different|no run"):
        find_run_folder(config("run"))
    assert Path("../outside").read_text() == before and not Path("nothing").exists()


def test_a_link_that_appears_later_is_not_written_through() -> None:
    Path("outside").write_text("precious")
    with find_run_folder(config("run")).claimed(config("run")) as folder:
        for name in (".plan.txt.part", "plan.txt"):
            Path("run", name).symlink_to(Path("outside").absolute())
        folder.write("plan.txt", "ours")
        with pytest.raises(AssertionError):
            folder.write("../plan.txt", "ours")
    assert Path("outside").read_text() == "precious"
    assert Path("run/plan.txt").read_text() == "ours" and not Path("run/plan.txt").is_symlink()


def test_checkpoints_may_lie_on_another_disk() -> None:
    with find_run_folder(config("run")).claimed(config("run")):
        pass
    Path("scratch").mkdir()
    Path("run/checkpoints").symlink_to(Path("scratch").absolute())
    folder = find_run_folder(config("run"))
    assert folder.is_same_run
    with folder.claimed(config("run")):
        pass


@pytest.mark.parametrize("model", ["../../x", "/etc/passwd", "llama-tiny/../x"])
def test_a_models_name_is_no_path(model: str) -> None:
    with pytest.raises(UserError, match="model="):
        cli.build_model(cli.load_config([], [f"MODEL = {model!r}"]))


def test_a_cluster_file_is_not_written_through_a_link() -> None:
    Path("outside").write_text("precious")
    Path("cluster.json").symlink_to("outside")
    save_cluster(CLUSTERS["a100"], Path("cluster.json"))
    assert Path("outside").read_text() == "precious"
    assert load_cluster(Path("cluster.json")) == CLUSTERS["a100"]
