"""Data in long runs: the process count changes, records are corrupt, files disappear or change under the run."""

import collections
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from amsp_jax.errors import UserError
from amsp_jax.run.data import Datasets, TokenDataset, Windows, corpus, open_dataset, token_files
from amsp_jax.run.data.scans import remembered

TEXTS = [f"document {i}: " + "na" * (i % 17) + " batman\n" for i in range(500)]


def open_small(data: Path | str, cache: Path, **changes: object) -> Datasets:
    numbers = {"vocab_size": 300, "seq_len": 16, "global_batch": 4, "seed": 0, "cache_dir": cache, **changes}
    return open_dataset(str(data), **numbers)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def settled(path: Path) -> Path:
    """Waits until the file is old enough for what was found in it to be remembered."""
    while time.time() - path.stat().st_mtime < 2.1:
        time.sleep(0.1)
    return path


# The process count changes


@pytest.mark.parametrize("counts", [[1], [2, 4], [4, 1, 2], [1, 2, 4, 8]], ids=str)
def test_no_sample_is_lost_or_repeated_when_the_process_count_changes(counts: list[int]) -> None:
    """Three epochs whose steps are read by other numbers of processes in turn, each of which opens the data anew."""
    num_windows, batch = 64, 8
    tokens = np.arange(16 * num_windows + 1, dtype=np.uint16)[None]
    read: list[collections.Counter[int]] = [collections.Counter() for _ in range(3)]
    steps_an_epoch = num_windows // batch
    for step in range(3 * steps_an_epoch):
        num_processes = counts[step * len(counts) // (3 * steps_an_epoch)]
        share = batch // num_processes
        for process in range(num_processes):
            mine = TokenDataset(windows=Windows(tokens=tokens, seq_len=16), global_batch=batch, seed=3)
            rows = mine.rows(step, range(process * share, (process + 1) * share))
            read[step // steps_an_epoch].update(rows["tokens"][:, 0].tolist())
    every_window_once = dict.fromkeys(range(0, 16 * num_windows, 16), 1)
    assert read == [every_window_once] * 3


# Corrupt records


@pytest.fixture
def corrupt(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[3], lines[200], lines[-1] = '{"text": 7}', '{"text": "cut', "[" * 100_000
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.jsonl").write_bytes(b'{"text": "\xff"}\n{"text": "good"}\n' + b'{"text": ' + b"9" * 5000 + b"}\n")
    (folder / "c.txt").write_bytes(b"x" * 9000 + b"\xff")
    return folder


def test_corrupt_records_are_left_out_counted_and_named(corrupt: Path, tmp_path: Path) -> None:
    datasets = open_small(corrupt, tmp_path / "cache", on_corrupt="skip", validation_fraction=0.1)
    good = [text for i, text in enumerate(TEXTS) if i not in (3, 200, 499)]
    assert datasets.train.num_documents + datasets.validation.num_documents == len(good) + 1
    a, b, c = (str(corrupt / name) for name in ("a.jsonl", "b.jsonl", "c.txt"))
    assert [record.split(" (")[0] for record in datasets.corrupt] == [
        f'{a}:4: no string "text"',
        f"{a}:201: not JSON",
        f"{a}:500: not JSON",
        f"{b}:1: not UTF-8",
        f"{b}:3: not JSON",
        f"{c}: not UTF-8: has byte 0xff at position 9,000",
    ]
    (line,) = (line for line in datasets.description.splitlines() if line.startswith("corrupt"))
    assert line.startswith(f"corrupt: 6 of 504 records are left out: {a}:4: no string") and line.endswith("; ...")


def test_what_is_left_out_is_the_same_at_every_start(corrupt: Path, tmp_path: Path) -> None:
    settled(corrupt / "c.txt")
    starts = [open_small(corrupt, tmp_path / cache, on_corrupt="skip") for cache in ("one", "one", "other")]
    for again in starts[1:]:
        assert again.corrupt == starts[0].corrupt
        assert again.fingerprint == starts[0].fingerprint
        np.testing.assert_array_equal(again.train.windows.tokens[0, :], starts[0].train.windows.tokens[0, :])


def test_corrupt_records_stop_the_start_unless_told_otherwise(corrupt: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:4: .* 3 of 500 records are corrupt.*corrupt_records='skip'"):
        open_small(corrupt, tmp_path / "cache")
    (corrupt / "a.jsonl").unlink()
    (corrupt / "b.jsonl").unlink()
    with pytest.raises(UserError, match=r"c\.txt begins as UTF-8 text but has byte 0xff .*corrupt_records='skip'"):
        open_small(corrupt, tmp_path / "cache")


def test_nothing_but_corrupt_records_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n3\n")
    with pytest.raises(UserError, match=r"holds no text: .* 2 are corrupt, the first is .*a\.jsonl:1: no string"):
        open_small(tmp_path / "a.jsonl", tmp_path / "cache", on_corrupt="skip")


def test_token_ids_have_no_records_to_skip(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(100))
    with pytest.raises(UserError, match="corrupt_records='skip' is for text, but .*ids.npy' holds token ids"):
        open_small(tmp_path / "ids.npy", tmp_path / "cache", on_corrupt="skip")


def test_a_name_of_odd_bytes_can_be_printed_and_written(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / os.fsdecode(b"odd\xff\n\x1b[31m.jsonl")).write_text('{"text": "' + "good " * 40 + '"}\n3\n')
    datasets = open_small(folder, tmp_path / "cache", on_corrupt="skip")
    for text in (*datasets.corrupt, *datasets.description.splitlines()):
        assert text.isprintable() and text.encode()
    assert "odd\\udcff\\n\\x1b[31m.jsonl:2: no string" in datasets.corrupt[0]


# Data that changes between two starts


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    def of(texts: list[str], **changes: object) -> dict[str, str]:
        return dict(open_small(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "cache", **changes).fingerprint)

    first = of(TEXTS)
    assert of(TEXTS, seed=5, seq_len=8) == first
    assert of([*TEXTS[1:], TEXTS[0]])["text"] != first["text"]
    other = of(TEXTS, vocab_size=290)
    assert other["text"] == first["text"] and other["tokenizer"] != first["tokenizer"]
    assert json.loads(json.dumps(first)) == first


def test_one_id_changes_the_fingerprint(tmp_path: Path) -> None:
    ids = np.arange(10_000, dtype=np.uint16) % 300
    prints = []
    for change in (0, 1):
        ids[7777] += change
        np.save(tmp_path / "ids.npy", ids)
        prints.append(open_small(tmp_path / "ids.npy", tmp_path / "cache").fingerprint)
    assert prints[0] != prints[1]


def test_a_second_start_reads_no_corpus_that_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = settled(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    np.save(tmp_path / "ids.npy", np.arange(1000) % 300)
    ids = settled(tmp_path / "ids.npy")
    first = [open_small(data, tmp_path / "cache") for data in (text, ids)]
    with monkeypatch.context() as patched:
        patched.setattr(corpus, "scan", None)
        patched.setattr(corpus.TextSource, "summary", None)
        second = [open_small(data, tmp_path / "cache") for data in (text, ids)]
    assert [d.fingerprint for d in second] == [d.fingerprint for d in first]
    # The same size and time of content, as after a restored backup.
    status = text.stat()
    text.write_text(text.read_text().replace("batman", "robin!"))
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_small(text, tmp_path / "cache").fingerprint != first[0].fingerprint
    with pytest.raises(UserError, match="outside the model's vocabulary of 299"):
        open_small(ids, tmp_path / "cache", vocab_size=299)


def test_a_file_that_was_just_written_is_scanned_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    calls = []
    for _ in range(2):
        remembered(tmp_path, "key", [tmp_path / "file"], lambda: {"calls": calls.append(1)})
    assert len(calls) == 2


@pytest.mark.parametrize("change", ["more", "fewer", "other", "gone"])
def test_a_corpus_that_changes_while_it_is_tokenised(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    changes: dict[str, Callable[[], object]] = {
        "more": lambda: write_jsonl(path, [*TEXTS, "one more"]),
        "fewer": lambda: write_jsonl(path, TEXTS[1:]),
        "other": lambda: write_jsonl(path, [*TEXTS[1:], TEXTS[0]]),
        "gone": path.unlink,
    }
    summary = corpus._summary

    def summary_then_change(*args):
        found = summary(*args)
        changes[change]()
        return found

    monkeypatch.setattr(corpus, "_summary", summary_then_change)
    with pytest.raises(UserError, match="a.jsonl.* (was changed while it was read|cannot be read)"):
        open_small(path, tmp_path / "cache")
    assert not [entry for entry in (tmp_path / "cache").iterdir() if not entry.name.startswith("scan")]


# Data that disappears while it is read


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_LOOK_EVERY_S", 0.0)


def replace_by_other(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    other.replace(path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (Path.unlink, "is gone while the run reads it: No such file"),
    "emptied": (lambda path: os.truncate(path, 0), "was changed or replaced.* 0 now"),
    "cut off": (lambda path: os.truncate(path, 50_000), "was changed or replaced.* 50,000 now"),
    "replaced": (replace_by_other, "was changed or replaced"),
    "rewritten": (lambda path: path.write_bytes(path.read_bytes()), "was changed or replaced"),
    "its folder deleted": (lambda path: shutil.rmtree(path.parent), "is gone while the run reads it"),
}


@pytest.mark.usefixtures("looks_always")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["ids.bin", "ids.npy"])
def test_a_token_file_that_disappears_is_named(name: str, damage: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / name
    ids = (np.arange(100_000) % 300).astype(np.uint16)
    ids.tofile(path) if name.endswith("bin") else np.save(path, ids)
    datasets = open_small(path, tmp_path / "cache")
    datasets.train.rows(0, range(4))
    change, message = DAMAGES[damage]
    change(path)
    with pytest.raises(UserError, match=rf"data/{name} {message}"):
        for step in range(50):
            datasets.train.rows(step, range(4))


@pytest.mark.usefixtures("looks_always")
def test_a_cache_that_is_deleted_under_the_run_is_named(tmp_path: Path) -> None:
    datasets = open_small(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "cache")
    datasets.train.rows(0, range(4))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=r"cache/tokens-.*/train\.npy is gone"):
        datasets.train.rows(1, range(4))


def test_a_read_past_the_end_is_an_error_without_a_look(tmp_path: Path) -> None:
    """A program that maps its data is killed by SIGBUS here."""
    np.arange(100_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    program = (
        "import sys, os, pathlib; from amsp_jax.run.data import open_dataset; from amsp_jax.errors import UserError\n"
        "path = sys.argv[1]\n"
        "train = open_dataset(path, vocab_size=1 << 16, seq_len=16, global_batch=4, seed=0,\n"
        "    cache_dir=pathlib.Path(sys.argv[2])).train\n"
        "train.rows(0, range(4)); os.truncate(path, 0)\n"
        "try: train.rows(1, range(4))\n"
        "except UserError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "ids.bin"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "was changed or replaced while the run reads it: 200,000 bytes at the start, 0 now" in done.stdout


def test_a_file_system_that_goes_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.arange(100_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    train = open_small(tmp_path / "ids.bin", tmp_path / "cache", vocab_size=1 << 16).train

    def stale(*_: int) -> bytes:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(token_files.os, "pread", stale)
    with pytest.raises(UserError, match=r"data file .*ids\.bin cannot be read: Stale file handle"):
        train.rows(0, range(4))


def test_reads_that_come_in_parts_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(1000, dtype=np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    tokens = token_files.open_tokens(str(tmp_path / "ids.bin"), 1 << 16)
    pread = os.pread
    monkeypatch.setattr(token_files.os, "pread", lambda file, size, at: pread(file, min(size, 7), at))
    np.testing.assert_array_equal(tokens[0, 100:900], ids[100:900])


@pytest.mark.parametrize("name", ["tokens", "tokenizer"])
def test_a_damaged_cache_entry_says_what_to_delete(name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    open_small(path, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").glob(f"{name}-*")
    os.truncate(next(entry.iterdir()), 40)
    with pytest.raises(UserError, match=f"delete {entry}"):
        open_small(path, tmp_path / "cache")


# What is no corpus


def test_what_has_no_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for data in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match="neither a file nor a folder"):
            open_small(data, tmp_path / "cache")


def test_names_that_no_path_has(tmp_path: Path) -> None:
    for data in ("a\0b", "~nobody-here/x", "\ud800"):
        with pytest.raises(UserError):
            open_small(data, tmp_path / "cache")


def test_columns_first_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.asfortranarray(np.arange(40).reshape(4, 10)))
    with pytest.raises(UserError, match="stored by columns"):
        open_small(tmp_path / "ids.npy", tmp_path / "cache")
