"""Data: order, packing, split, cache, tokenizer, batches, and every mistake in one line."""

import json
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from amsp_jax.errors import UserError
from amsp_jax.run.data import (
    Datasets,
    Prefetcher,
    TokenDataset,
    Tokenizer,
    Windows,
    global_batch,
    open_dataset,
    sources,
)
from amsp_jax.run.data.cache import cached

DOCUMENTS = [f"document {i}: " + "na" * (i % 17) + " batman\n" for i in range(500)]
ODD_TEXT = "a<|endoftext|>b\r\n\té中\U0001f600 \x00 e\u0301\u200d\u202e\ufeff   \n\n\n"


def make_dataset(num_tokens: int = 1000, *, seq_len: int = 16, batch: int = 8, seed: int | None = 3) -> TokenDataset:
    tokens = np.arange(num_tokens, dtype=np.uint16)[None]
    return TokenDataset(windows=Windows(tokens=tokens, seq_len=seq_len), global_batch=batch, seed=seed)


def first_tokens(dataset: TokenDataset, num_steps: int) -> list[int]:
    """The first token of every row: it names the window of a corpus that counts up."""
    batches = [dataset.rows(step, range(dataset.global_batch)) for step in range(num_steps)]
    return np.concatenate([batch["tokens"][:, 0] for batch in batches]).tolist()


def ids(dataset: TokenDataset) -> np.ndarray:
    """All ids of a corpus of one row."""
    return dataset.windows.tokens[0, :]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def open_small(data, cache, **changes) -> Datasets:
    return open_dataset(
        str(data), **{"vocab_size": 300, "seq_len": 16, "global_batch": 4, "seed": 0, "cache_dir": cache, **changes}
    )


# Order


def test_a_row_depends_on_seed_step_and_row_only():
    dataset = make_dataset()
    whole = dataset.rows(5, range(8))
    for rows in ([3], [7, 0], np.array([2, 2, 1])):
        part = make_dataset().rows(5, rows)
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][np.asarray(rows)])
    assert not np.array_equal(make_dataset(seed=4).rows(5, range(8))["tokens"], whole["tokens"])
    assert not np.array_equal(dataset.rows(6, range(8))["tokens"], whole["tokens"])


def test_the_step_counts_in_rows_of_the_global_batch():
    small, large = make_dataset(batch=4), make_dataset(batch=8)
    assert first_tokens(small, 6) == first_tokens(large, 3)


def test_rows_have_the_promised_types():
    rows = make_dataset().rows(0, range(8))
    assert {name: (array.dtype.name, array.shape) for name, array in rows.items()} == {
        "tokens": ("int32", (8, 16)),
        "targets": ("int32", (8, 16)),
        "weights": ("float32", (8, 16)),
    }
    assert {name: (array.dtype.name, array.shape) for name, array in make_dataset().rows(0, []).items()} == {
        "tokens": ("int32", (0, 16)),
        "targets": ("int32", (0, 16)),
        "weights": ("float32", (0, 16)),
    }


def test_every_window_once_an_epoch_and_another_order_in_the_next():
    dataset = make_dataset(16 * 64 + 1)
    assert dataset.num_windows == 64
    epochs = np.array(first_tokens(dataset, 24)).reshape(3, 64).tolist()
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 16 * 64, 16))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    # The epochs of neighbouring seeds are not the same shuffles in another order.
    other = np.array(first_tokens(make_dataset(16 * 64 + 1, seed=4), 24)).reshape(3, 64).tolist()
    assert not any(epoch in epochs for epoch in other)


def test_rows_outside_the_global_batch_are_refused():
    for step, rows in ((0, [8]), (0, [-1]), (-1, [0])):
        with pytest.raises(IndexError, match="rows go to 7"):
            make_dataset().rows(step, rows)


# Packing


def test_windows_of_a_hand_made_corpus():
    # Two documents, `1 2 3` and `4 5 6 7`, each ended by 9.
    tokens = np.array([[1, 2, 3, 9, 4, 5, 6, 7, 9]], np.uint16)
    windows = Windows(tokens=tokens, seq_len=3, end_of_document=9)
    expected = [
        ([1, 2, 3], [2, 3, 9], [1, 1, 1]),
        ([9, 4, 5], [4, 5, 6], [0, 1, 1]),
        ([6, 7, 0], [7, 9, 0], [1, 1, 0]),
    ]
    assert len(windows) == 3 and windows.num_targets() == 8
    for index, arrays in enumerate(expected):
        row = windows[index]
        for name, array in zip(("tokens", "targets", "weights"), arrays, strict=True):
            assert row[name].tolist() == array, (index, name)


def test_two_dimensions_are_documents_of_one_length():
    tokens = np.arange(12).reshape(2, 6)
    windows = Windows(tokens=tokens, seq_len=3)
    rows = [windows[i] for i in range(len(windows))]
    assert [row["tokens"].tolist() for row in rows] == [[0, 1, 2], [3, 4, 0], [6, 7, 8], [9, 10, 0]]
    assert [row["weights"].tolist() for row in rows] == [[1, 1, 1], [1, 1, 0]] * 2
    assert windows.num_targets() == 10


@pytest.mark.parametrize("num_tokens", [17, 18, 32, 33, 34, 100])
def test_no_token_is_lost(num_tokens):
    dataset = make_dataset(num_tokens, batch=1, seed=None)
    rows = [dataset.rows(step, [0]) for step in range(dataset.num_windows)]
    targets = np.concatenate([row["targets"][row["weights"] > 0] for row in rows])
    assert sorted(targets.tolist()) == list(range(1, num_tokens))
    assert dataset.num_tokens == num_tokens - 1


def test_validation_ends_in_rows_of_weight_zero():
    dataset = make_dataset(16 * 5 + 1, batch=4, seed=None)
    assert dataset.num_rows == 5
    batches = [dataset.rows(step, range(4)) for step in range(3)]
    assert [batch["weights"].sum() for batch in batches] == [64, 16, 0]
    assert sorted(first_tokens(dataset, 2)[:5]) == [0, 16, 32, 48, 64]


# The corpora


def test_jsonl_splits_by_documents_that_share_nothing(jsonl, tmp_path):
    datasets = open_small(jsonl, tmp_path / "cache", validation_fraction=0.1)
    assert (datasets.train.num_documents, datasets.validation.num_documents) == (450, 50)
    texts = []
    for part in (datasets.train, datasets.validation):
        tokens = ids(part)
        assert (tokens == datasets.tokenizer.end_of_document).sum() == part.num_documents
        ends = np.flatnonzero(tokens == datasets.tokenizer.end_of_document)
        texts.append({datasets.tokenizer.decode(chunk) for chunk in np.split(tokens, ends + 1)[:-1]})
    train, validation = texts
    assert not train & validation
    assert train | validation == set(DOCUMENTS)
    # By a hash, not by position: neither the first nor the last tenth.
    numbers = sorted(int(text.split()[1][:-1]) for text in validation)
    assert numbers[0] < 100 and numbers[-1] >= 400
    assert (
        open_small(jsonl, tmp_path / "cache", validation_fraction=0.1, seed=7)
        .validation.rows(0, [0])["tokens"][0]
        .tolist()
        == datasets.validation.rows(0, [0])["tokens"][0].tolist()
    )


def test_few_documents_split_by_windows(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    odd_text = ODD_TEXT.replace("\0", "")  # A NUL near the start is the mark of a binary file.
    (folder / "b" / "one.txt").write_text("one " * 200)
    (folder / "a.md").write_bytes(("two " * 200 + odd_text).encode())
    (folder / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (folder / ".git" / "config").write_text("hidden")
    datasets = open_small(folder, tmp_path / "cache", validation_fraction=0.1)
    stream = datasets.tokenizer.decode(ids(datasets.train))
    assert stream == "two " * 200 + odd_text + "one " * 200
    places = [set(part.windows.chosen.tolist()) for part in (datasets.train, datasets.validation)]
    assert not places[0] & places[1] and all(places)
    assert places[0] | places[1] == set(range(sum(map(len, places))))
    assert datasets.train.num_tokens + datasets.validation.num_tokens == datasets.train.windows.tokens.size - 1
    assert "1 of 3 files are not UTF-8 text" in datasets.description
    assert "split by windows" in datasets.description


@pytest.mark.parametrize("name", ["t.npy", "t.bin", "t.uint32.bin", "t.uint16.bin"])
def test_token_files(tmp_path, name):
    tokens = (np.arange(1000) % 50).astype(np.uint32 if "uint32" in name else np.uint16)
    np.save(tmp_path / name, tokens) if name.endswith("npy") else tokens.tofile(tmp_path / name)
    datasets = open_small(tmp_path / name, None, vocab_size=50, end_of_document=49)
    assert datasets.tokenizer is None
    np.testing.assert_array_equal(ids(datasets.train), tokens)
    rows = datasets.train.rows(0, range(4))
    np.testing.assert_array_equal(rows["weights"] == 0, rows["tokens"] == 49)


def test_a_name_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="cannot be reached: File name too long"):
        open_small("x" * 300, tmp_path)


def test_an_end_of_document_that_cannot_be(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(40) % 50)
    with pytest.raises(UserError, match="end of document 50 is not in the vocabulary, ids 0 to 49"):
        open_small(tmp_path / "ids.npy", None, vocab_size=50, end_of_document=50)
    (tmp_path / "a.txt").write_text("text " * 40)
    with pytest.raises(UserError, match="is text, whose tokenizer has its own"):
        open_small(tmp_path / "a.txt", tmp_path, end_of_document=0)


def test_a_file_of_packed_rows_gives_back_its_rows(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 300, (40, 17))
    np.save(tmp_path / "t.npy", tokens)
    datasets = open_small(tmp_path / "t.npy", None, validation_fraction=0)
    assert (datasets.train.num_windows, datasets.validation.num_rows) == (40, 0)
    assert datasets.validation.rows(0, [0])["weights"].sum() == 0
    rows = [datasets.train.rows(step, range(4)) for step in range(10)]
    read = np.concatenate([np.concatenate([r["tokens"], r["targets"][:, -1:]], axis=1) for r in rows])
    assert sorted(read.tolist()) == sorted(tokens.tolist())


def test_the_standard_library_is_a_corpus(tmp_path):
    datasets = open_small("stdlib", tmp_path, vocab_size=512, seq_len=128)
    assert datasets.train.num_tokens > 1_000_000
    assert datasets.train.num_documents > 100
    assert datasets.validation.num_rows > 50
    assert datasets.tokenizer.vocab_size == 512


# The cache


def test_a_second_start_reads_the_cache_and_gives_the_same(jsonl, tmp_path, monkeypatch):
    first = open_small(jsonl, tmp_path / "cache")
    fresh = open_small(jsonl, tmp_path / "other")
    monkeypatch.setattr("amsp_jax.run.data.corpus.train_tokenizer", None)
    monkeypatch.setattr(Tokenizer, "encode_documents", None)
    second = open_small(jsonl, tmp_path / "cache")
    for other in (fresh, second):
        assert other.tokenizer.to_json() == first.tokenizer.to_json()
        np.testing.assert_array_equal(ids(other.train), ids(first.train))
        np.testing.assert_array_equal(ids(other.validation), ids(first.validation))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_another_text_or_vocabulary_is_another_entry(jsonl, tmp_path):
    cache = tmp_path / "cache"
    open_small(jsonl, cache)
    assert open_small(jsonl, cache, vocab_size=257).tokenizer.vocab_size == 257
    jsonl.write_text(jsonl.read_text().replace("batman", "robin!"))
    datasets = open_small(jsonl, cache)
    assert "robin!" in datasets.tokenizer.decode(datasets.train.windows.tokens[0, :200])
    assert len(list(cache.glob("tokens-*"))) == 3


def test_two_processes_may_race(jsonl, tmp_path):
    program = (
        "import sys, pathlib, hashlib; from amsp_jax.run.data import open_dataset; "
        "print('ready', flush=True); sys.stdin.readline(); "
        "d = open_dataset(sys.argv[1], vocab_size=300, seq_len=16, global_batch=4, seed=0, "
        "cache_dir=pathlib.Path(sys.argv[2])); "
        "print(hashlib.sha256(d.train.windows.tokens[0, :].tobytes() + d.tokenizer.to_json().encode()).hexdigest())"
    )
    command = [sys.executable, "-c", program, str(jsonl), str(tmp_path / "cache")]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    outputs = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir())
    assert [kind for kind in kinds if kind != "scan"] == ["tokenizer", "tokens"]


def test_the_one_who_comes_second_uses_the_first_result(tmp_path):
    def build(folder, text):
        (folder / "file").write_text(text)

    def overtaken(folder):
        cached(tmp_path, "x", lambda other: build(other, "first"))
        build(folder, "second")

    assert (cached(tmp_path, "x", overtaken) / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device.*XDG_CACHE_HOME"):
        cached(tmp_path, "x", fail)
    assert not list(tmp_path.iterdir())


def test_the_default_cache_follows_xdg_or_is_temporary(jsonl, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    open_small(jsonl, None)
    assert list((tmp_path / "xdg" / "amsp_jax").glob("tokens-*"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    datasets = open_small(jsonl, None)
    assert "cannot be written, so nothing is cached for the next start" in datasets.description
    assert datasets.train.num_tokens
    with pytest.raises(UserError, match="cache folder .*file.* cannot be written"):
        open_small(jsonl, tmp_path / "file")


# The tokenizer


@pytest.mark.parametrize("vocab_size", [257, 300, 1000])
def test_tokenizer_gives_the_text_back(jsonl, tmp_path, vocab_size):
    tokenizer = open_small(jsonl, tmp_path / "cache", vocab_size=vocab_size).tokenizer
    assert 257 <= tokenizer.vocab_size <= vocab_size
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    for text in (ODD_TEXT, "", "".join(map(chr, range(0xD800)))):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert loaded.encode(text) == ids
        assert tokenizer.end_of_document not in ids
        assert all(0 <= i < vocab_size for i in ids)
    assert tokenizer.decode([*tokenizer.encode("x"), tokenizer.end_of_document, 10**6]) == "x"


def test_long_documents_are_encoded_in_pieces(jsonl, tmp_path, monkeypatch):
    tokenizer = open_small(jsonl, tmp_path / "cache").tokenizer
    monkeypatch.setattr("amsp_jax.run.data.tokenizer._PIECE_CHARS", 10)
    monkeypatch.setattr("amsp_jax.run.data.tokenizer._BATCH_CHARS", 50)
    documents = ["short", "line one\nline two\n\nand a long third one " * 4, "x" * 35, ODD_TEXT]
    encoded: list[list[int]] = [[] for _ in documents]
    for number, ids in tokenizer.encode_documents(documents):
        encoded[number] += ids
    assert [tokenizer.decode(ids) for ids in encoded] == documents
    assert all(ids.index(tokenizer.end_of_document) == len(ids) - 1 for ids in encoded)


def test_a_bad_tokenizer_file_is_named(tmp_path):
    with pytest.raises(UserError, match="missing.json cannot be read"):
        Tokenizer.load(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="bad.json is not a tokenizer"):
        Tokenizer.load(tmp_path / "bad.json")


# Mistakes


@pytest.mark.parametrize(
    ("files", "data", "changes", "message"),
    [
        ({}, "nowhere", {}, r"^data='.*nowhere': no such file or folder \(looked at .*a folder of text files"),
        ({}, "nowhere.npy", {}, "no such file or folder"),
        ({}, "nowhere", {"vocab_size": 256}, "no such file or folder"),
        ({}, "nowhere.npy", {"end_of_document": 300}, "no such file or folder"),
        ({}, ".", {}, "holds no text: 0 of its 0 files"),
        ({"a.png": b"\xff\0"}, ".", {}, "holds no text: 0 of its 1 files"),
        ({"a.png": b"\xff\0"}, "a.png", {}, "a.png' is not UTF-8 text"),
        ({"a.txt": b"x" * 9000 + b"\xff"}, ".", {}, "a.txt begins as UTF-8 text but has byte 0xff at position 9,000"),
        ({"a.txt": b""}, "a.txt", {}, "holds no text: 0 documents"),
        ({"a.jsonl": b'{"text": ""}\n\n'}, "a.jsonl", {}, "holds no text: 0 documents"),
        (
            {"a.jsonl": b'{"text": "x"}\n{"te\n3\n'},
            "a.jsonl",
            {},
            r"a.jsonl:2: not JSON \(.*\). 2 of 3 records are corr",
        ),
        ({"a.jsonl": b'{"texts": "x"}\n'}, "a.jsonl", {}, 'a.jsonl:1: no string "text". 1 of 1 records'),
        ({"a.jsonl": b'{"text": 3}\n'}, ".", {}, 'a.jsonl:1: no string "text"'),
        ({"a.jsonl": b'{"text": "\xff"}\n'}, "a.jsonl", {}, "a.jsonl:1: not UTF-8"),
        ({"a.jsonl": b'{"text": "\\ud800"}\n'}, "a.jsonl", {}, "a.jsonl:1: .*surrogate"),
        ({"a.txt": b"abc"}, "a.txt", {}, r"sequence of 16 tokens is longer .* needs 17 tokens and there are [2-4]\."),
        ({"a.txt": b"abc"}, "a.txt", {"vocab_size": 256}, "vocabulary of 256 is too small .* need 257"),
        ({"a.txt": b"abc"}, "a.txt", {"seq_len": 0}, "sequences of 0 tokens"),
        ({"a.txt": b"abc"}, "a.txt", {"seed": -1}, "seed -1 is out of range"),
        ({"a.txt": b"abc"}, "a.txt", {"validation_fraction": 1.0}, "validation fraction 1.0 is out of range"),
        ({"a.npy": b"no array"}, "a.npy", {}, "is not a numpy array of integers"),
        ({"a.npy": np.zeros(40)}, "a.npy", {}, r"holds float64 of shape \[40\]"),
        ({"a.npy": np.zeros((2, 2, 9), int)}, "a.npy", {}, r"holds int64 of shape \[2, 2, 9\]"),
        ({"a.npy": np.array([{}])}, "a.npy", {}, "is not a numpy array of integers"),
        ({"a.npy": np.zeros(0, int)}, "a.npy", {}, "is empty"),
        ({"a.npy": np.zeros((5, 1), int)}, "a.npy", {}, "there are 1"),
        ({"a.npy": np.zeros(16, int)}, "a.npy", {}, "needs 17 tokens and there are 16"),
        ({"a.npy": np.arange(301)}, "a.npy", {}, r"id 300 at \[300\], outside the model's vocabulary of 300"),
        ({"a.npy": np.array([[1, 2], [3, -1]])}, "a.npy", {}, r"id -1 at \[1, 1\]"),
        ({"a.bin": b"abc"}, "a.bin", {}, "3 bytes, which is no multiple of 2 "),
        ({"a.bin": b""}, "a.bin", {}, "0 bytes"),
        (
            {"a.bin": np.arange(40, dtype="<u4")},
            "a.bin",
            {},
            "every second id is 0. It holds uint32: rename it to a.uint32.bin",
        ),
    ],
)
def test_mistakes(tmp_path, monkeypatch, files, data, changes, message):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (corpus / name).write_bytes(content)
        elif name.endswith(".npy"):
            np.save(corpus / name, content)
        else:
            content.tofile(corpus / name)
    monkeypatch.chdir(corpus)
    with pytest.raises(UserError, match=message):
        open_small(data, tmp_path / "cache", **changes)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources.Path, "open", refuse)
    for name in ("a.txt", "a.jsonl"):
        path.rename(path := tmp_path / name)
        with pytest.raises(UserError, match=f"{name} cannot be read: Permission denied"):
            open_small(path, tmp_path / "cache")


# Batches


@pytest.mark.parametrize(
    "spec",
    [PartitionSpec(None, ("a", "b")), PartitionSpec("a", "b"), PartitionSpec(None, "b", "a"), PartitionSpec()],
    ids=str,
)
def test_global_batch_equals_rows(spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    dataset = make_dataset(5000, batch=32)
    sharding = NamedSharding(mesh, spec)
    batch = global_batch(dataset, 2, num_microbatches=4, rows_per_microbatch=8, sharding=sharding)
    rows = dataset.rows(2, range(32))
    assert batch.keys() == rows.keys()
    for name, array in batch.items():
        assert array.sharding == sharding and array.dtype == rows[name].dtype
        np.testing.assert_array_equal(np.asarray(array), rows[name].reshape(4, 8, 16))


def test_global_batch_reads_each_row_once(monkeypatch):
    read = []
    rows = TokenDataset.rows
    monkeypatch.setattr(TokenDataset, "rows", lambda self, step, n: (read.extend(n), rows(self, step, n))[1])
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "b"))
    global_batch(make_dataset(batch=16), 0, num_microbatches=2, rows_per_microbatch=8, sharding=sharding)
    assert sorted(read) == list(range(16))


def test_global_batch_must_be_the_datasets():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match="2 microbatches of 3 rows are not the global batch of 8 rows"):
        global_batch(make_dataset(), 0, num_microbatches=2, rows_per_microbatch=3, sharding=sharding)


def test_prefetcher_keeps_the_order_and_stays_two_ahead():
    made = []

    def make(step):
        made.append((step, threading.current_thread() is threading.main_thread()))
        return step

    with Prefetcher(make, 3, 9) as batches:
        assert next(batches) == 3
        assert list(batches) == [4, 5, 6, 7, 8]
        assert next(batches, None) is None
    assert made == [(step, False) for step in range(3, 9)]


def test_prefetcher_begins_to_look_ahead_with_the_second_item():
    made = []
    with Prefetcher(made.append, 0, 100) as batches:
        next(batches)
        time.sleep(0.05)
        assert made == [0]
        next(batches)
        batches.settle(10)
        assert made == [0, 1, 2, 3]


def test_prefetcher_raises_at_the_step_that_failed():
    def make(step):
        if step == 2:
            raise OSError("disk")
        return step

    with Prefetcher(make, 0, 5) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="disk"):
            next(batches)


def test_prefetcher_closes_at_any_time():
    threads = threading.active_count()
    for taken in range(3):
        with Prefetcher(lambda step: step, 0, 1000) as batches:
            for _ in range(taken):
                next(batches)
        batches.close()
        assert next(batches, None) is None
    with pytest.raises(KeyError), Prefetcher(lambda step: step, 0, 1000):
        raise KeyError
    assert list(Prefetcher(lambda step: step, 5, 5)) == []
    assert threading.active_count() == threads
