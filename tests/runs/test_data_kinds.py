"""Files that hold something else than they seem to: types of ids, JSON lines, links, unreadable folders; progress."""

import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from amsp_jax.errors import UserError
from amsp_jax.run.data import Datasets, open_dataset, progress
from amsp_jax.run.data.paths import visible_files

RNG = np.random.default_rng(0)


def open_small(data: Path | str, cache: Path, **changes: object) -> Datasets:
    numbers = {"vocab_size": 300, "seq_len": 16, "global_batch": 4, "seed": 0, "cache_dir": cache, **changes}
    return open_dataset(str(data), **numbers)


# Which integers a .bin holds

VOCABULARIES = [300, 50_000, 65_536, 65_537, 130_000, 200_000]
FITTING = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8", "uint64": "<u8"}


def ids(vocab_size: int, dtype: str) -> np.ndarray:
    return RNG.integers(0, min(vocab_size, np.iinfo(dtype).max + 1), 4000).astype(dtype)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("name", ["ids", *(f"ids.{kind}" for kind in FITTING)])
@pytest.mark.parametrize("held", FITTING)
def test_ids_are_read_as_they_were_written_or_refused_with_the_name_that_helps(held, name, vocab_size, tmp_path):
    """Every type under every name: never other ids than were written, and the advice works."""
    tokens = ids(vocab_size, FITTING[held])
    path = tmp_path / f"{name}.bin"
    tokens.tofile(path)
    try:
        datasets = open_small(path, tmp_path / "cache", vocab_size=vocab_size)
    except UserError as error:
        advised = str(error).split("rename it to ")[1].split(" ")[0]
        path.rename(tmp_path / advised)
        datasets = open_small(tmp_path / advised, tmp_path / "cache", vocab_size=vocab_size)
    np.testing.assert_array_equal(datasets.train.windows.tokens[0, :].astype(np.int64), tokens.astype(np.int64))


@pytest.mark.parametrize(
    ("held", "vocab_size"),
    [*itertools.product(("<f4", "<f8", ">i4", ">i8"), (300, 130_000)), (">u2", 300)],
)
def test_types_that_no_tokenizer_writes_are_named(held, vocab_size, tmp_path):
    RNG.integers(0, min(vocab_size, 60_000), 4000).astype(held).tofile(tmp_path / "a.bin")
    word = {"f": f"float{8 * int(held[2])}"}.get(held[1], "big-endian")
    with pytest.raises(UserError, match=rf"a\.bin.*{word}.*int32"):
        open_small(tmp_path / "a.bin", tmp_path / "cache", vocab_size=vocab_size)


def test_negative_fillers_do_not_hide_int64(tmp_path):
    tokens = ids(300, "<i8")
    tokens[::7] = -100
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match="every second id is 0"):
        open_small(tmp_path / "a.bin", tmp_path / "cache")


def llm_c(version: int, dtype: str) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = {"<u2": 20240520, "<u4": 20240801}[dtype], version, 4000
    return header.tobytes() + ids(300, dtype).tobytes()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, ids(300, "<i8"))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy(), "it is a .npy file. Rename it to .npy"),
        (b"PK\x03\x04" + bytes(100), "zip file"),
        (b"\x1f\x8b" + bytes(100), "gzip. Unpack"),
        (b"PAR1" + bytes(100), "Parquet"),
        (b"MMIDIDX\0\0" + bytes(100), "Megatron"),
        (llm_c(1, "<u2"), "header of 1,024 bytes.*4,000 ids.*tail -c \\+1025 a.bin > a.uint16.bin"),
        (llm_c(7, "<u4"), "tail -c \\+1025 a.bin > a.uint32.bin"),
        (b"", "empty"),
        (b"abc", "3 bytes, which is no multiple of 2"),
    ],
    ids=["npy", "zip", "gzip", "parquet", "megatron", "llm.c", "llm.c of uint32", "empty", "odd"],
)
def test_files_that_are_no_bare_ids_are_named(content, words, tmp_path):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=words):
        open_small(tmp_path / "a.bin", tmp_path / "cache")


def test_ids_of_another_tokenizer_are_not_taken_for_another_type(tmp_path):
    RNG.integers(0, 200_000, 4000).astype("<u4").tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match="outside the model's vocabulary of 130000"):
        open_small(tmp_path / "a.bin", tmp_path / "cache", vocab_size=130_000)


def test_suffixes_in_capitals(tmp_path):
    np.save(tmp_path / "a.npy", ids(300, "<u2"))
    (tmp_path / "a.npy").rename(tmp_path / "a.NPY")
    ids(300, "<u2").tofile(tmp_path / "b.BIN")
    for name in ("a.NPY", "b.BIN"):
        assert "4,000 token ids" in open_small(tmp_path / name, tmp_path / "cache").description


# JSON lines

TEXTS = [f"text {i} " + "na" * i for i in range(60)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
LONG = json.dumps({"id": "x" * 20_000, "text": "first"}) + "\n" + LINES


@pytest.mark.parametrize(
    ("name", "content", "num_documents"),
    [
        ("a.jsonl", LINES, 60),
        ("a.JSONL", LINES, 60),
        ("a.ndjson", LINES, 60),
        ("a.json", LINES, 60),
        ("a.txt", "\n" + LINES, 60),
        ("a", LINES, 60),
        ("a.json", LONG, 61),
        ("a.json", json.dumps([{"id": 1, "text": text} for text in TEXTS], indent=1), 60),
        # No records: text as it stands.
        ("a.json", json.dumps({"name": "x", "values": list(range(500))}), 1),
        ("a.json", json.dumps([{"name": text} for text in TEXTS]), 1),
        ("a.json", json.dumps({"text": TEXTS}, indent=1), 1),
        ("a.txt", "{ a brace\n" * 50, 1),
    ],
)
def test_records_are_told_by_name_or_content(name, content, num_documents, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / name).write_text(content)
    for data in (folder, folder / name):
        datasets = open_small(data, tmp_path / "cache")
        assert f", {num_documents} documents," in datasets.description
    tokens = datasets.train.windows.tokens
    text = datasets.tokenizer.decode(tokens[0, :].tolist())
    assert ("{" in text) == (num_documents == 1)


def test_corrupt_records_of_an_array_are_named(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "good"}, {"text": 3}]))
    with pytest.raises(UserError, match=r"a\.json, record 2: no string \"text\". 1 of 2 records"):
        open_small(tmp_path / "a.json", tmp_path / "cache")
    (tmp_path / "a.json").write_text('[{"text": "cut')
    with pytest.raises(UserError, match=r"a\.json, record 1: "):
        open_small(tmp_path / "a.json", tmp_path / "cache")


# Links and folders


def test_links_are_followed_and_nothing_is_read_twice(tmp_path):
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    for folder in (corpus / "sub", other / "deep"):
        folder.mkdir(parents=True)
    (corpus / "sub" / "a.txt").write_text("a " * 100)
    (other / "deep" / "b.txt").write_text("b " * 100)
    (corpus / "linked").symlink_to(other)
    plain = visible_files(corpus)
    assert ([path.name for path in plain[0]], plain[1]) == (["b.txt", "a.txt"], 0)
    (corpus / "linked too").symlink_to(other / "deep")
    (corpus / "sub" / "round").symlink_to(corpus)
    (corpus / "sub" / "c.txt").symlink_to(other / "deep" / "b.txt")
    os.link(corpus / "sub" / "a.txt", corpus / "sub" / "d.txt")
    assert visible_files(corpus) == (plain[0], 4)
    description = open_small(corpus, tmp_path / "cache").description
    assert "2 documents" in description and "4 links to what is read already are left out" in description


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a " * 100)
    (tmp_path / "part 2").symlink_to("/mnt/gone")
    with pytest.raises(UserError, match="part 2 is a link to /mnt/gone, which does not exist"):
        open_small(tmp_path, tmp_path.parent / "cache")


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "private").mkdir()
    (tmp_path / "a.txt").write_text("a " * 100)
    list_folder = Path.iterdir

    def iterdir(path):
        if path.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(UserError, match="private cannot be read: Permission denied"):
        open_small(tmp_path, tmp_path.parent / "cache")


# What the start says


def test_a_batch_larger_than_the_corpus_is_told(tmp_path):
    ids(300, "<u2")[:170].tofile(tmp_path / "a.bin")
    note = (
        "note: global_batch=25 is more than the 10 training windows of the corpus: a step reads each window 2.5 times"
    )
    assert note in open_small(tmp_path / "a.bin", tmp_path / "cache", global_batch=25).description
    assert "note: global" not in open_small(tmp_path / "a.bin", tmp_path / "cache", global_batch=10).description


def test_a_long_pass_says_how_far_it_is(monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    reading = progress.Progress("tokenising", 200_000_000, "bytes")
    for elapsed_s in (9, 11, 12, 50):
        now_s[0] = 100.0 + elapsed_s
        reading.add(20_000_000)
    assert capsys.readouterr().out.splitlines() == [
        "tokenising: 40 of 200 M bytes, 20%, about 44 s left",
        "tokenising: 80 of 200 M bytes, 40%, about 75 s left",
    ]


def test_every_pass_over_a_corpus_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    (tmp_path / "a.jsonl").write_text(LINES)
    ids(300, "<u2").tofile(tmp_path / "b.bin")
    open_small(tmp_path / "a.jsonl", tmp_path / "cache")
    open_small(tmp_path / "b.bin", tmp_path / "cache")
    said = capsys.readouterr().out
    assert all(f"{doing}: " in said for doing in ("reading text", "tokenising", "reading token ids"))
    assert "tokenising: 0 of 0 M bytes, 100%, about 0 s left" in said
