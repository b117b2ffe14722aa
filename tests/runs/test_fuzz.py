"""Broken input of every kind, through the functions that `train.py` calls: one line for the person, and no damage.

Every case follows from its number. `pytest -m soak tests/runs/test_fuzz.py` runs the wide version.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amsp_jax.cli import exits
from amsp_jax.cli import settings as cli
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import CLUSTERS, load_cluster, save_cluster
from amsp_jax.run.checkpoint import Checkpointer
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.data import Tokenizer, open_dataset
from amsp_jax.run.metrics import MetricsWriter, TrainRow, ValidationRow
from amsp_jax.run.run_folder import find_run_folder
from amsp_jax.strategy import PRESETS, DataRanks, parse

# Far above what any case takes, on a machine that is busy with other things, too.
LIMIT_S = 60.0
LONGEST_MESSAGE = 600

ODDITIES = [
    *("", " ", "\0", "\n", "\r", "\t", "\x0c", "\x1b[31m", "\ufeff", "\u202e", "\u2028", "é", "中", "\U0001f600"),
    *("\u0663", "\u00b2", "-1", "-0", "0", "1e999", "-1e999", "NaN", "Infinity", "1_000", "0x10", "1.", ".5", "3j"),
    *("9" * 30, "9" * 5000, "1e" + "9" * 20, "[" * 40, "[" * 5000, "{" * 300, "(" * 300, "'" * 3, '"' * 3, "\\"),
    *("None", "True", "null", "true", "@os.system()", "%STEPS", "../../x", "~nobody-here", "a" * 3000, "=", "#", ";"),
]


@contextlib.contextmanager
def one_line_or_nothing(case: object) -> Iterator[None]:
    """What happens inside ends in time, and either works or says in one line why not."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"{case}: still running after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    except UserError as error:
        message = exits.one_line(error)
        assert 10 < len(message) <= LONGEST_MESSAGE, (
            f"{case}: a message of {len(message)} characters: {message[:300]!r}"
        )
        assert "Traceback" not in message, f"{case}: {message}"
    except AssertionError:
        raise
    except BaseException as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:500]}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def mutated(rng: random.Random, content: bytes, words: Sequence[bytes]) -> bytes:
    """One to four changes, of bytes or of whole words."""
    for _ in range(rng.randint(1, 4)):
        place, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        near = min(end, place + rng.randint(0, 12))
        word = rng.choice(words) if rng.random() < 0.6 else rng.choice(ODDITIES).encode()
        change = rng.randrange(7)
        if change == 0 and content:
            flipped = bytearray(content)
            flipped[place % len(content)] ^= 1 << rng.randrange(8)
            content = bytes(flipped)
        elif change == 1:
            content = content[:place]
        elif change == 2:
            content = content[:place] + content[near:]
        elif change == 3:
            content = content[:place] + word + content[place:]
        elif change == 4:
            content = content[:place] + word + content[near:]
        elif change == 5:
            content = content[:near] + content[place:]
        elif word:
            content = content.replace(rng.choice(words), word, 1)
    return content


def made_of(rng: random.Random, words: Sequence[str], longest: int) -> str:
    return "".join(rng.choice(words if rng.random() < 0.85 else ODDITIES) for _ in range(rng.randint(1, longest)))


def digest(folder: Path) -> str:
    """Of every name, kind and content below a folder."""
    found = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        kind = "link" if path.is_symlink() else "file" if path.is_file() else "folder"
        found.update(f"{path.relative_to(folder)}\0{kind}\0".encode("utf-8", "surrogateescape"))
        found.update(path.read_bytes() if kind == "file" else b"")
    return found.hexdigest()


def damage(rng: random.Random, folder: Path, words: Sequence[bytes]) -> str:
    """Changes one entry of a folder, and says how."""
    path = rng.choice(sorted(folder.rglob("*")))
    change = rng.choice(["content", "content", "content", "content", "empty", "gone", "other kind", "link", "moved"])
    name = f"{change} {path.relative_to(folder)}"
    if change in ("content", "empty"):
        if path.is_file():
            path.write_bytes(b"" if change == "empty" else mutated(rng, path.read_bytes(), words))
        return name
    was_file = path.is_file()
    if change == "moved":
        path.rename(path.with_name(rng.choice(["7", "x", ".x", path.name + "1"])))
        return name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if change == "other kind":
        path.mkdir() if was_file else path.write_bytes(b"x")
    elif change == "link":
        path.symlink_to(rng.choice(["nowhere", path.name, "/dev/null", "/", str(folder)]))
    return name


# The kinds of input. Each makes a function of (random numbers, folder) that tries one case.


Case = Callable[[random.Random], None]


def of_strategies(_: Path) -> Case:
    words = [*PRESETS, "params", "grads", "opt_state", "=", " ", ",", "(", ")", "x", "replica", "node", "full"]
    words += ["1", "2", "4", "8", "params=replica ", "grads=4x1 ", "opt_state=full"]

    def case(rng: random.Random) -> None:
        text = made_of(rng, words, 9)
        if rng.random() < 0.5:
            text = mutated(rng, b"params=2x1 grads=4x1 opt_state=8", [w.encode() for w in words]).decode(
                errors="replace"
            )
        ranks = DataRanks(rng.choice([1, 4, 6, 8]), rng.choice([1, 2, 3, 16]))
        with one_line_or_nothing(repr(text)):
            parse(text).resolve(ranks)

    return case


def of_clusters(folder: Path) -> Case:
    path = folder / "cluster.json"
    contents = []
    for cluster in CLUSTERS.values():
        save_cluster(cluster, path)
        contents.append(path.read_bytes())
    words = [
        b"null",
        b"0",
        b"-1",
        b"[]",
        b"{}",
        b'""',
        b"1e400",
        b"NaN",
        b"true",
        b'"x"',
        b",",
        b":",
        b'"intra"',
        b"[1]",
    ]

    def case(rng: random.Random) -> None:
        path.write_bytes(mutated(rng, rng.choice(contents), words))
        with one_line_or_nothing(path.read_bytes()[:2000]):
            load_cluster(path)

    return case


SETTINGS = [f.upper() for f in ("strategy", "steps", "seed", "learning_rate", "peel", "model_overrides", "clip_norm")]


def of_command_lines(folder: Path) -> Case:
    (folder / "some.gin").write_text("STEPS = 3\n")
    flags = [
        "--gin_file",
        f"--gin_file={folder}/some.gin",
        f"--gin_file={folder}",
        "--coordinator",
        "--num_processes=2",
    ]
    flags += ["--process_id=x", "--help", "-h", "--", "--gin.", "--gin", "--dry_run", "run", "--gin.STEPS"]
    values = ["zero3", "3", "'3'", "0.1", "None", "[1, 2]", "{'a': 1}", "%SEED", "%STEPS", "True", "1e-3", "llama-tiny"]

    def argument(rng: random.Random) -> str:
        if rng.random() < 0.2:
            return rng.choice(flags)
        name = rng.choice(SETTINGS) if rng.random() < 0.9 else made_of(rng, SETTINGS, 2)
        return f"--gin.{name}={made_of(rng, values, 2)}"

    def case(rng: random.Random) -> None:
        argv = [argument(rng) for _ in range(rng.randint(1, 3))]
        with one_line_or_nothing(argv):
            line = cli.parse_command_line(argv, starts_from_quickstart=True)
            config = cli.load_config(line.gin_files, line.bindings)
            if not config.is_auto:
                parse(config.strategy)
            cli.build_model(config)

    return case


def of_gin_files(folder: Path) -> Case:
    path = folder / "bad.gin"
    contents = [cli.find_gin_file(cli.QUICKSTART).read_bytes(), TrainConfig().to_gin().encode()]
    contents.append(
        b"STEPS = 3\nSEED = %STEPS\nMODEL_OVERRIDES = {'num_layers': 2}\ninclude 'configs/quickstart.gin'\n"
    )
    words = [f"\n{name} = ".encode() for name in SETTINGS]
    words += [
        b"include ",
        b"'bad.gin'",
        b"import ",
        b"from ",
        b"@",
        b"()",
        b"%",
        b"/",
        b":",
        b"\n    ",
        b"\n",
        b"config.",
    ]
    words += [b"TrainConfig.", b"steps", b"= ", b"[", b"]", b"{", b"}", b"gin.macro.value", b"'", b'"""', b"1", b"\\\n"]

    def case(rng: random.Random) -> None:
        path.write_bytes(mutated(rng, rng.choice(contents), words))
        with one_line_or_nothing(path.read_bytes()):
            cli.build_model(cli.load_config([path]))

    return case


def of_texts(folder: Path) -> Case:
    lines = [json.dumps({"text": f"document {i} " * (i % 5 + 1)}) + "\n" for i in range(30)]
    content = "".join(lines).encode()
    words = [
        b'{"text": "a"}\n',
        b'{"text": ',
        b"\n",
        b'"',
        b"\\u",
        b"\\ud800",
        b"{}",
        b"null",
        b"\xff",
        b"\xe4\xb8",
        b"[1]",
    ]

    def case(rng: random.Random) -> None:
        path = folder / rng.choice(["a.jsonl", "a.txt", "b.jsonl"])
        path.write_bytes(mutated(rng, content, words))
        data = str(rng.choice([path, path, path, folder]))
        with one_line_or_nothing(path.read_bytes()):
            read_all(data, folder / ".cache", on_corrupt=rng.choice(["stop", "skip"]))

    return case


def of_token_files(folder: Path) -> Case:
    path = folder / "ids.npy"
    contents = []
    for shape, kind in (((200,), "<u2"), ((8, 25), "<i4"), ((40,), ">i8")):
        np.save(path, (np.arange(200)[: np.prod(shape)] % 290).astype(kind).reshape(shape))
        contents.append(path.read_bytes())
    words = [
        b"'descr'",
        b"'<u2'",
        b"'|O'",
        b"'<f4'",
        b"'>i8'",
        b"True",
        b"(200,)",
        b"(8, 25)",
        b"()",
        b"(-1,)",
        b"(9,)",
    ]
    words += [b"fortran_order", b"\x93NUMPY", b"\x01\x00", b"\x03\x00", b"PK\x03\x04", b"\xff\xff", b"[('a', '<u2')]"]

    def case(rng: random.Random) -> None:
        path = folder / rng.choice(["ids.npy", "ids.bin", "ids.uint32.bin"])
        path.write_bytes(mutated(rng, rng.choice(contents), words))
        with one_line_or_nothing(path.read_bytes()):
            read_all(str(path), folder / ".cache", end_of_document=rng.choice([None, 0]))

    return case


def read_all(data: str, cache: Path, **changes: object) -> None:
    datasets = open_dataset(data, vocab_size=300, seq_len=8, global_batch=2, seed=0, cache_dir=cache, **changes)
    for dataset in (datasets.train, datasets.validation):
        dataset.rows(0, range(2))
        dataset.rows(7, range(2))


def of_names(folder: Path) -> Case:
    """Paths in settings, where one is looked up."""
    words = [
        *"abc",
        "/b",
        "..",
        ".",
        "~",
        "\0",
        "\ud800",
        "%",
        "x" * 300,
        str(folder),
        ".npy",
        ".jsonl",
    ]
    config = cli.load_config([])
    # As deep as a name can lead up.
    deep = folder / "1/2/3/4/5/6"
    deep.mkdir(parents=True)

    def case(rng: random.Random) -> None:
        with contextlib.chdir(deep), mock.patch.dict(os.environ, HOME=str(deep)):
            look_up(made_of(rng, words, 5))

    def look_up(name: str) -> None:
        with one_line_or_nothing(repr(name)):
            load_cluster(name)
        with one_line_or_nothing(repr(name)):
            read_all(name, folder)
        with one_line_or_nothing(repr(name)):
            find_run_folder(dataclasses.replace(config, run_dir=name))
        with one_line_or_nothing(repr(name)):
            cli.find_gin_file(name)

    return case


def of_run_folders(folder: Path) -> Case:
    config = cli.load_config([], [f"RUN_DIR = {str(folder / 'run')!r}"])
    with find_run_folder(config).claimed(config) as run:
        run.write("config.gin", "STEPS = 3\n")
        writer = MetricsWriter(run.path, None)
        for step in range(3):
            numbers = dict.fromkeys((f.name for f in dataclasses.fields(TrainRow)), 1)
            writer.train(TrainRow(**{**numbers, "step": step}))
            writer.validation(ValidationRow(step=step, loss=1.0, num_tokens=3))
        writer.close()
    shutil.rmtree(folder / "run" / "tensorboard", ignore_errors=True)
    shutil.copytree(folder / "run", folder / "original", symlinks=True)
    untouched = digest(folder / "original")
    words = [b'"model"', b"null", b"{}", b"[]", b"3", b'"step"', b"NaN", b"\n", b",", b":", b'"', b'"loss"', b"\xff"]

    def case(rng: random.Random) -> None:
        shutil.rmtree(folder / "run")
        shutil.copytree(folder / "original", folder / "run", symlinks=True)
        what = damage(rng, folder / "run", words)
        before = digest(folder / "run")
        with one_line_or_nothing(what):
            found = find_run_folder(config)
            assert digest(folder / "run") == before, f"{what}: looking changed the folder"
            with found.claimed(config):
                MetricsWriter(found.path, 2).close()
        shutil.rmtree(folder / "run" / "tensorboard", ignore_errors=True)
        assert digest(folder / "original") == untouched, what

    return case


def of_checkpoints(folder: Path) -> Case:
    state = {"params": {"w": jnp.arange(24.0).reshape(4, 6), "b": jnp.ones(3, jnp.bfloat16)}, "step": jnp.int32(2)}
    saver = Checkpointer(folder / "original", keep=2)
    for step in (1, 2):
        saver.save(step, state, {"steps": 2, "strategy": "zero3"})
    saver.close()
    untouched = digest(folder / "original")
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    words = [
        b"null",
        b"{}",
        b"[]",
        b'"shape"',
        b"0",
        b"-1",
        b'"params/w"',
        b"shapes",
        b"zstd",
        b"\x00",
        b",",
        b'"',
        b"1e400",
    ]

    def case(rng: random.Random) -> None:
        shutil.rmtree(folder / "damaged", ignore_errors=True)
        shutil.copytree(folder / "original", folder / "damaged", symlinks=True)
        what = damage(rng, folder / "damaged", words)
        before = digest(folder / "damaged")
        with one_line_or_nothing(what):
            reader = Checkpointer(folder / "damaged", keep=None)
            with contextlib.closing(reader):
                step = reader.latest_step()
                if step is not None:
                    meta = reader.meta(step)
                    reader.check(step, abstract)
                    restored = reader.restore(step, abstract)
                    assert meta["steps"] == 2 and isinstance(meta["strategy"], str), f"{what}: {meta}"
                    same = jax.tree.map(lambda a, b: np.array_equal(a, b), restored, state)
                    assert all(jax.tree.leaves(same)), f"{what}: other values, and no error"
        assert digest(folder / "damaged") == before, f"{what}: reading changed the folder"
        assert digest(folder / "original") == untouched, what

    return case


def of_tokenizers(folder: Path) -> Case:
    (folder / "a.txt").write_text("some text, " * 50)
    open_dataset(str(folder / "a.txt"), vocab_size=260, seq_len=8, global_batch=2, seed=0, cache_dir=folder / "cache")
    content = next((folder / "cache").glob("tokenizer-*/tokenizer.json")).read_bytes()
    words = [
        b"null",
        b"{}",
        b"[]",
        b'"BPE"',
        b'"vocab"',
        b"-1",
        b'"merges"',
        b'"type"',
        b"<|endoftext|>",
        b"true",
        b"99",
    ]

    def case(rng: random.Random) -> None:
        path = folder / "tokenizer.json"
        path.write_bytes(mutated(rng, content, words))
        with one_line_or_nothing(path.read_bytes()[:200]):
            tokenizer = Tokenizer.load(path)
            tokenizer.decode(tokenizer.encode("some other text"))

    return case


KINDS: dict[str, tuple[Callable[[Path], Case], int, int]] = {
    "strategies": (of_strategies, 500, 5000),
    "clusters": (of_clusters, 150, 2500),
    "command lines": (of_command_lines, 40, 500),
    "gin files": (of_gin_files, 30, 500),
    "texts": (of_texts, 40, 400),
    "token files": (of_token_files, 120, 2000),
    "names": (of_names, 50, 400),
    "run folders": (of_run_folders, 40, 300),
    "checkpoints": (of_checkpoints, 10, 150),
    "tokenizers": (of_tokenizers, 50, 400),
}
"""How cases are made, how many always run, and how many of the wide version."""


def run_cases(kind: str, folder: Path, numbers: range) -> None:
    make, *_ = KINDS[kind]
    case = make(folder)
    for number in numbers:
        case(random.Random(f"{kind} {number}"))


@pytest.mark.parametrize("kind", KINDS)
def test_broken_input(kind: str, tmp_path: Path) -> None:
    run_cases(kind, tmp_path, range(KINDS[kind][1]))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_much_broken_input(kind: str, tmp_path: Path) -> None:
    first, last = KINDS[kind][1:]
    run_cases(kind, tmp_path, range(first, last))


def test_it_is_ten_thousand_cases() -> None:
    assert sum(wide for _, _, wide in KINDS.values()) >= 10_000
