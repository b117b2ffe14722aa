"""Data from Python: a source's rows are checked, an iterator's state is that of the batch that was trained on."""

import functools
import json

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from amsp_jax import UserError
from amsp_jax.run.data import Prefetcher, from_iterator, from_map, global_batch, open_sources
from amsp_jax.run.data.iterator_state import decode, encode
from amsp_jax.run.data.source import resume, state_after

BATCH, SEQ, VOCAB = 8, 4, 50
SIZES = {"global_batch": BATCH, "seq_len": SEQ, "vocab_size": VOCAB, "steps": 10}


def row(step, number):
    return (np.arange(SEQ, dtype=np.int64) + 7 * step + 3 * number) % VOCAB


class Rows:
    fingerprint = "rows 1"

    def rows(self, step, rows):
        tokens = np.stack([row(step, number) for number in rows])
        return {"tokens": tokens, "targets": (tokens + 1) % VOCAB}


class Counter:
    """An iterator with state, which gives one buffer again and again."""

    def __init__(self):
        self.step, self.buffer = 0, np.zeros((BATCH, SEQ), np.int32)

    def __iter__(self):
        return self

    def __next__(self):
        self.buffer[:] = [row(self.step, number) for number in range(BATCH)]
        self.step += 1
        return {"tokens": self.buffer, "targets": self.buffer}

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]


class Loader:
    """An iterable that begins at its own state, as torchdata's loaders do."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        while True:
            self.step += 1
            tokens = np.stack([row(self.step - 1, number) for number in range(BATCH)])
            yield {"tokens": tokens, "targets": tokens}

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def grain_iterator():
    def batch(step):
        tokens = np.stack([row(step, number) for number in range(BATCH)])
        return {"tokens": tokens, "targets": tokens}

    return iter(grain.MapDataset.range(100).map(batch).to_iter_dataset())


def plain_iterator():
    step = 0
    while True:
        tokens = np.stack([row(step, number) for number in range(BATCH)])
        yield {"tokens": tokens, "targets": tokens}
        step += 1


ALL_ROWS = np.arange(BATCH)


def test_a_source_needs_nothing_but_rows():
    datasets = open_sources(Rows(), None, **SIZES)
    found = datasets.train.rows(3, np.array([1, 6]))
    np.testing.assert_array_equal(found["tokens"], [row(3, 1), row(3, 6)])
    assert {name: (x.dtype.name, x.shape) for name, x in found.items()} == {
        "tokens": ("int32", (2, SEQ)), "targets": ("int32", (2, SEQ)), "weights": ("float32", (2, SEQ)),
    }  # fmt: skip
    assert (found["weights"] == 1).all()
    assert datasets.fingerprint == {"source": "rows 1"} and datasets.tokenizer is None
    assert "Rows" in datasets.description and datasets.validation.num_rows == 0


def test_a_batch_is_read_in_one_call_of_a_process():
    calls = []

    class Watched(Rows):
        def rows(self, step, rows):
            calls.append((step, rows.tolist()))
            return super().rows(step, rows)

    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple("abc")), P(None, ("a", "b"), "c"))
    dataset = open_sources(Watched(), None, **SIZES).train
    batch = global_batch(dataset, 2, num_microbatches=2, rows_per_microbatch=4, sharding=sharding)
    np.testing.assert_array_equal(batch["tokens"].reshape(BATCH, SEQ), [row(2, number) for number in range(BATCH)])
    assert calls == [(2, list(range(BATCH)))] and batch["tokens"].sharding == sharding


def test_a_validation_source_that_ends_is_filled_up_with_rows_of_weight_0():
    source = Rows()
    source.num_rows = 11
    dataset = open_sources(Rows(), source, **SIZES).validation
    assert dataset.num_rows == 11
    weights = np.concatenate([dataset.rows(step, ALL_ROWS)["weights"] for step in range(3)])
    assert (weights[:11] == 1).all() and not weights[11:].any()
    np.testing.assert_array_equal(dataset.rows(1, ALL_ROWS)["tokens"][2], row(1, 2))


def numbered(number):
    return {"tokens": row(0, number), "targets": row(0, number), "weights": np.full(SEQ, number % 2)}


def test_numbered_rows_need_no_state_and_end_where_they_end():
    shuffled = grain.MapDataset.range(40).map(numbered).seed(3).shuffle()
    datasets = open_sources(from_map(shuffled.repeat(2), fingerprint="40"), from_map(shuffled[:11]), **SIZES)
    assert datasets.fingerprint == {"source": "40"} and "from_map(" in datasets.description
    for step in (7, 0):
        expected = shuffled.repeat(2)[step * BATCH + 5]
        found = datasets.train.rows(step, np.array([5]))
        assert all((found[name][0] == expected[name]).all() for name in expected)
    weights = datasets.validation.rows(1, ALL_ROWS)["weights"]
    assert datasets.validation.num_rows == 11 and not weights[3:].any()
    with pytest.raises(UserError, match=r"from_map\(list\) has num_rows=3"):
        open_sources(from_map([numbered(0)] * 3), None, **SIZES)
    with pytest.raises(UserError, match=r"from_map\(generator\).*from_iterator"):
        from_map(plain_iterator())


GOOD = {"tokens": np.zeros((2, SEQ), int), "targets": np.zeros((2, SEQ), int)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1, 2], ["list", "dict"]),
        ({"tokens": GOOD["tokens"]}, ["['tokens']", "targets"]),
        ({**GOOD, "labels": 1}, ["labels"]),
        ({**GOOD, "tokens": np.zeros((3, SEQ), int)}, ["tokens are int64[3, 4]", "[2, 4]", "seq_len=4"]),
        ({**GOOD, "targets": np.zeros((2, SEQ))}, ["targets are float64", "integers"]),
        ({**GOOD, "weights": np.zeros(2)}, ["weights are float64[2]", "[2, 4]"]),
        ({**GOOD, "weights": np.full((2, SEQ), "a")}, ["weights are <U1"]),
        ({**GOOD, "tokens": np.full((2, SEQ), VOCAB)}, ["tokens go from 50 to 50", "0 to 49"]),
        ({**GOOD, "targets": np.full((2, SEQ), -100)}, ["targets go from -100", "0 to 49"]),
    ],
)
def test_rows_that_do_not_fit_are_an_error_that_names_source_and_step(given, words):
    class Mine:
        def rows(self, step, rows):
            return given

    with pytest.raises(UserError) as error:
        open_sources(Mine(), None, **SIZES).train.rows(4, np.array([0, 1]))
    assert all(word in str(error.value) for word in ["data=Mine, step 5", *words]), error.value


def ending(num_rows):
    source = Rows()
    source.num_rows = num_rows
    return source


@pytest.mark.parametrize(
    ("train", "validation", "more", "words"),
    [
        ([1, 2], None, {}, ["data=[1, 2]", "list", "rows(step, rows)", "from_iterator"]),
        (Rows(), {}, {}, ["validation={}", "dict"]),
        (ending(79), None, {}, ["num_rows=79", "steps=10", "global_batch=8", "80"]),
        (Rows(), Rows(), {}, ["validation=Rows", "num_rows", "eval_batches"]),
        (Rows(), from_iterator(Counter()), {"eval_batches": 1}, ["from_iterator(Counter)", "once"]),
    ],
)
def test_sources_that_cannot_be_used_are_an_error_at_the_start(train, validation, more, words):
    with pytest.raises(UserError) as error:
        open_sources(train, validation, **SIZES, **more)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("make", [Counter, Loader, grain_iterator], ids=["iterator", "loader", "grain"])
def test_the_state_is_that_of_the_batch_that_was_trained_on(make):
    """The prefetcher is two batches ahead of the step whose checkpoint is saved; the next run begins right after it."""
    datasets = open_sources(from_iterator(make()), None, **SIZES)
    saved = {}
    with Prefetcher(lambda step: datasets.train.rows(step, ALL_ROWS), 0, 10) as batches:
        for done, batch in enumerate(batches, start=1):
            np.testing.assert_array_equal(batch["tokens"], [row(done - 1, number) for number in ALL_ROWS])
            batches.settle(10.0)
            saved[done] = state_after(datasets, done)
    for done, state in saved.items():
        again = open_sources(from_iterator(make()), None, **SIZES)
        assert resume(again, done, state)
        for step in range(done, 12):
            found = again.train.rows(step, ALL_ROWS)
            np.testing.assert_array_equal(found["tokens"], [row(step, number) for number in ALL_ROWS])


def test_the_newest_batches_can_be_read_again():
    """What made a number not finite is looked for when the prefetcher is ahead."""
    dataset = open_sources(from_iterator(plain_iterator()), None, **SIZES).train
    batches = [dataset.rows(step, ALL_ROWS)["tokens"] for step in range(5)]
    for step in (1, 3):
        np.testing.assert_array_equal(dataset.rows(step, ALL_ROWS)["tokens"], batches[step])
    np.testing.assert_array_equal(dataset.rows(5, ALL_ROWS)["tokens"][0], row(5, 0))


def test_an_iterator_without_state_refuses_to_resume_or_skips():
    with pytest.raises(UserError, match=r"from_iterator\(generator\).*after batch 3.*get_state.*on_resume='skip'"):
        resume(open_sources(from_iterator(plain_iterator()), None, **SIZES), 3, None)
    with pytest.raises(UserError, match="checkpoint holds no state"):
        resume(open_sources(from_iterator(Counter()), None, **SIZES), 3, None)
    datasets = open_sources(from_iterator(plain_iterator(), on_resume="skip"), None, **SIZES)
    (line,) = resume(datasets, 3, None)
    assert "3 batches" in line and "dropped" in line
    np.testing.assert_array_equal(datasets.train.rows(3, ALL_ROWS)["tokens"][0], row(3, 0))


def test_an_iterator_that_ends_says_after_how_many_batches():
    few = [{"tokens": GOOD["tokens"], "targets": GOOD["targets"]}] * 2
    dataset = open_sources(from_iterator(few), None, **{**SIZES, "global_batch": 2}).train
    for step in range(2):
        dataset.rows(step, np.arange(2))
    with pytest.raises(UserError, match=r"from_iterator\(list\) ended after 2 batches, and step 3"):
        dataset.rows(2, np.arange(2))


def test_rows_that_processes_share_are_no_iterators():
    dataset = open_sources(from_iterator(Counter()), None, **SIZES).train
    with pytest.raises(UserError, match=r"hold 4 of the 8 rows.*rows\(step, rows\)"):
        dataset.rows(0, np.arange(4))


@pytest.mark.parametrize(("given", "word"), [(3, "int is no iterator"), (Counter(), "on_resume='restart'")])
def test_arguments_of_from_iterator(given, word):
    with pytest.raises(UserError, match=word):
        from_iterator(given, on_resume="restart")


STATES = [
    None, True, 3, 2.5, "text", b"\x00\xff", [1, [2]], (1, (2,), [3]), {"a": {"tuple": [1]}, 3: None, (1, 2): b""},
    np.arange(6, dtype=np.uint16).reshape(2, 3), {"at": np.int64(5), "rng": ("MT19937", np.arange(4), 1, 0, 0.0)},
]  # fmt: skip


def same(x, y):
    if isinstance(x, np.ndarray | np.generic):
        return type(x) is type(y) and x.dtype == y.dtype and np.array_equal(x, y)
    if isinstance(x, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, dict):
        return isinstance(y, dict) and same(list(x.items()), list(y.items()))
    return type(x) is type(y) and x == y


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_states_come_back_as_they_were(state):
    text = encode(state, "mine")
    json.loads(text)
    assert "\n" not in text and same(decode(text), state)


@pytest.mark.parametrize("state", [object(), {"f": functools.partial(int)}, np.array([object()]), {1, 2}])
def test_a_state_that_would_need_pickle_is_an_error(state):
    with pytest.raises(UserError, match=r"from_iterator\(mine\): its state cannot be saved: it holds a"):
        encode(state, "mine")
