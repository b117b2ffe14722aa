"""`Trainer` from Python: hooks, a model's own sums, a hook that raises, and arguments that are wrong."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import amsp_jax as amsp
from amsp_jax.errors import BadNumbersError, HookError, UserError
from amsp_jax.model import Batch
from amsp_jax.run.checkpoint.manifest import MANIFEST
from amsp_jax.run.metrics import read_rows

IDS = 11
SMALL: dict[str, Any] = {"global_batch": 8, "seq_len": 4, "steps": 6, "compute_dtype": "float32", "run_dir": "run"}


class Rows:
    """Rows that count up, in steps of 1 to 3."""

    fingerprint = "counting"

    def rows(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        starts = (7 * rows + 3 * step)[:, None]
        ids = (starts + (1 + rows % 3)[:, None] * np.arange(5)) % IDS
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


class Validation(Rows):
    num_rows = 12


def bigrams(vocab_size: int | None = None) -> amsp.Model:
    """A table of logits for each pair of ids; its own sum counts the tokens that it has right."""

    def loss(params: Any, batch: Batch, rng: jax.Array) -> Any:
        logits = jax.nn.log_softmax(params["table"][batch["tokens"]].astype(jnp.float32))
        wrong = -jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        right = jnp.where(logits.argmax(-1) == batch["targets"], batch["weights"], 0.0)
        return ((wrong * batch["weights"]).sum(), batch["weights"].sum()), {"right": right.sum()}

    def init(key: jax.Array) -> Any:
        return {"table": jax.random.normal(key, (IDS, IDS))}

    return amsp.Model.from_loss(loss, init, name="bigrams", vocab_size=vocab_size)


def trainer(**changes: Any) -> amsp.Trainer:
    return amsp.Trainer(bigrams(), optax.adam(0.05), **{**SMALL, "strategy": "zero3", "data": Rows(), **changes})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Events(amsp.hooks.Hook):
    """Notes what it is called for, and checks what it is given."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, run: amsp.Run) -> None:
        assert (run.run_dir / "config.gin").exists() and run.is_process_0 and run.step == run.first_step
        self.seen.append(f"start at {run.first_step}")

    def on_step(self, run: amsp.Run, metrics: Any) -> None:
        assert run.step == metrics.step == run.metrics[-1]["step"]
        self.seen.append(f"step {metrics.step}")

    def on_eval(self, run: amsp.Run, metrics: Any) -> None:
        assert run.validations[-1]["loss"] == metrics.loss and 0 <= metrics.aux["right"] <= metrics.num_tokens == 48
        assert int(run.state.step) == metrics.step
        self.seen.append(f"eval {metrics.step}")

    def on_checkpoint(self, run: amsp.Run, path: Path) -> None:
        assert path.is_dir() and (path / MANIFEST).exists()
        self.seen.append(f"checkpoint {path.name}")

    def on_end(self, run: amsp.Run) -> None:
        self.seen.append(f"end, {type(run.error).__name__}")


def in_order(seen: list[str], *events: str) -> None:
    """These events were seen once each, in this order; others may stand between them."""
    assert [event for event in seen if event in events] == list(events)


def test_hooks_are_called_in_order() -> None:
    events = Events()
    run = trainer(validation=Validation(), checkpoint_every=2, eval_every=4, hooks=[events]).fit()
    seen = events.seen
    in_order(seen, "start at 0", "eval 0", *(f"step {i}" for i in range(1, 7)), "end, NoneType")
    # A checkpoint is complete some time after it began.
    in_order(seen, "checkpoint 2", "checkpoint 4", "checkpoint 6", "end, NoneType")
    # What is due at a step comes before the hooks that see it.
    in_order(seen, "step 3", "eval 4", "step 4", "eval 6", "step 6", "end, NoneType")
    assert run.step == 6 and int(run.state.step) == 6 and [row["step"] for row in run.metrics] == list(range(1, 7))
    assert (run.run_dir / "loss.png").exists()


def test_a_models_own_sums_and_an_unknown_schedule_in_the_metrics() -> None:
    """On 8 ranks the sums are those of all rows: of one device."""
    schedule = optax.linear_schedule(0.1, 0.0, 6)
    rows = trainer(learning_rate=schedule).fit().metrics
    alone = trainer(run_dir="other", strategy="ddp", microbatch=1).fit().metrics
    assert [row["aux"] for row in rows] == [row["aux"] for row in alone] and rows[-1]["aux"]["right"] > 0
    assert [row["learning_rate"] for row in rows] == pytest.approx([float(schedule(i)) for i in range(6)])
    assert all(row["learning_rate"] is None for row in alone)


def test_a_hook_may_read_the_state_of_its_step() -> None:
    steps = []
    trainer(hooks=[amsp.hooks.every(2, lambda run, metrics: steps.append((metrics.step, int(run.state.step))))]).fit()
    assert steps == [(2, 2), (4, 4), (6, 6)]


class EarlyReader(amsp.hooks.Hook):
    def on_step(self, run: amsp.Run, metrics: Any) -> None:
        _ = run.params


def test_a_state_that_is_gone_is_refused() -> None:
    with pytest.raises(
        HookError, match=r"hook EarlyReader failed in on_step at step 1: run.state is of step 2 .*every"
    ):
        trainer(hooks=[EarlyReader()]).fit()


def test_a_hook_saves_a_checkpoint() -> None:
    events = Events()
    trainer(checkpoint_every=0, hooks=[amsp.hooks.every(3, lambda run, metrics: run.save()), events]).fit()
    in_order(events.seen, "checkpoint 3", "checkpoint 6", "end, NoneType")


class Fails(amsp.hooks.Hook):
    """Raises in one method, at one step."""

    def __init__(self, event: str, step: int) -> None:
        def fail(run: amsp.Run, *values: Any) -> None:
            if run.step == step:
                raise KeyError("planted")

        setattr(self, event, fail)


@pytest.mark.parametrize(
    ("event", "step", "saved"),
    [("on_step", 3, 4), ("on_step", 6, 6), ("on_eval", 4, 4), ("on_checkpoint", 6, 6), ("on_end", 6, 6)],
)
def test_a_hook_that_raises_ends_the_run_with_a_checkpoint(event: str, step: int, saved: int) -> None:
    events = Events()
    failing = trainer(validation=Validation(), eval_every=4, checkpoint_every=0, hooks=[Fails(event, step), events])
    with pytest.raises(HookError, match=f"^hook Fails failed in {event} at step {step}: KeyError: 'planted'") as raised:
        failing.fit()
    assert isinstance(raised.value.__cause__, KeyError) and "\n" not in str(raised.value)
    assert [int(path.name) for path in Path("run/checkpoints").iterdir()] == [saved]
    # The other hooks heard of every step that is saved.
    assert f"step {saved}" in events.seen and [row["step"] for row in read_rows("run/metrics.jsonl")][-1] == saved
    # And the same run goes on as if nothing had been.
    run = trainer(validation=Validation(), eval_every=4).fit()
    assert [row["step"] for row in run.metrics] == list(range(1, 7))
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in trainer(run_dir="again").fit().metrics]


def test_a_hook_that_raises_at_the_start() -> None:
    with pytest.raises(HookError, match="hook Fails failed in on_start at step 0: KeyError"):
        trainer(hooks=[Fails("on_start", 0)]).fit()


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing more can be written into the metrics."""
    from amsp_jax.run import metrics

    def full(self: Any, name: str, row: Any) -> None:
        if row.step == 3:
            self.close()
            raise UserError(f"{name} cannot be written: No space left on device.")
        write(self, name, row)

    write = metrics.MetricsWriter._write
    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricsWriter, "_write", full)
        yield


def test_metrics_on_a_full_disk_end_the_run_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"hook JsonLines failed in on_step at step 3: metrics.jsonl cannot be written: No space .*; step 4 is saved"
    with full_disk(monkeypatch), pytest.raises(HookError, match=told):
        trainer(checkpoint_every=0).fit()
    assert [int(path.name) for path in Path("run/checkpoints").iterdir()] == [4]


def test_metrics_and_checkpoints_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is told, with its own next step, and that nothing could be saved either."""

    def full(self: Any, step: int, *values: Any) -> None:
        raise UserError("a checkpoint could not be written: No space left on device.")

    monkeypatch.setattr("amsp_jax.run.checkpoint.Checkpointer.save", full)
    told = r"hook JsonLines failed in on_step at step 3: metrics.jsonl .* device; a checkpoint could not be written: No"
    with full_disk(monkeypatch), pytest.raises(HookError, match=told):
        trainer(checkpoint_every=0).fit()


def test_a_finished_run_gives_its_state() -> None:
    first, again = trainer().fit(), trainer(strategy="ddp").fit()
    np.testing.assert_array_equal(np.asarray(again.params["table"]), np.asarray(first.params["table"][:IDS, :IDS]))
    with pytest.raises(UserError, match="the run has ended"):
        again.save()


def test_check_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trainer().check()
    assert "dry run: it would train steps 1 to 6 in run" in capsys.readouterr().out and not Path("run").exists()


class Changed(Rows):
    """Rows to which something is done."""

    num_rows = 48

    def __init__(self, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
        self._change = change

    def rows(self, step: int, rows: np.ndarray) -> Any:
        return self._change(super().rows(step, rows))


def raises(arrays: dict[str, np.ndarray]) -> None:
    raise ConnectionError("the server\nis gone")


FAULTS: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "raises": (raises, "it raised ConnectionError: the server is gone"),
    "no targets": (lambda arrays: {"tokens": arrays["tokens"]}, r"it gives \['tokens'\]; it must give"),
    "floats": (lambda arrays: {**arrays, "tokens": arrays["tokens"] * 1.0}, "tokens are float64"),
    "ragged": (lambda arrays: {**arrays, "tokens": [[1], [1, 2]]}, "it raised ValueError: "),
    "ids": (lambda arrays: {**arrays, "targets": arrays["targets"] + IDS}, "model's ids are 0 to 10"),
}


@pytest.mark.parametrize("argument", ["data", "validation"])
@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_wrong_rows(argument: str, fault: str) -> None:
    change, message = FAULTS[fault]
    model = bigrams(vocab_size=IDS)
    sources: dict[str, Any] = {"data": Rows(), argument: Changed(change)}
    with pytest.raises(UserError, match=f"^{argument}=Changed, step 1: .*{message}") as raised:
        amsp.Trainer(model, optax.adam(0.05), **{**SMALL, "strategy": "zero3", **sources}).check()
    assert isinstance(raised.value.__cause__, ConnectionError) == (fault == "raises")
    assert not Path("run").exists()


@pytest.mark.parametrize("attribute", ["num_rows", "fingerprint"])
def test_attributes_of_a_source_that_raise(attribute: str) -> None:
    def raising(self: Rows) -> None:
        raise OSError("no such table")

    source = type("Table", (Rows,), {attribute: property(raising)})()
    with pytest.raises(UserError, match=f"^data=Table, {attribute}: it raised OSError: no such table"):
        trainer(data=source).check()


class Resumed:
    """An iterator that cannot be set to where it was."""

    def __next__(self) -> dict[str, np.ndarray]:
        return Rows().rows(0, np.arange(8))

    def __iter__(self) -> "Resumed":
        return self

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: dict[str, int]) -> None:
        raise KeyError("page")


def test_an_iterator_that_raises_when_a_run_goes_on() -> None:
    trainer(data=amsp.data.from_iterator(Resumed()), stop_after=2, hooks=()).fit()
    told = r"^data=from_iterator\(Resumed\), continuing after batch 2: it raised KeyError: 'page'"
    with pytest.raises(UserError, match=told):
        trainer(data=amsp.data.from_iterator(Resumed())).check()


def test_check_leaves_an_iterator_alone() -> None:
    batches = iter([Rows().rows(step, np.arange(8)) for step in range(6)])
    trainer(data=amsp.data.from_iterator(batches)).check()
    assert len(list(batches)) == 6


def test_nan_where_ids_are_not_checked_names_vocab_size() -> None:
    wrong = Changed(lambda arrays: {**arrays, "targets": arrays["targets"] + IDS})
    with pytest.raises(BadNumbersError, match="ids of data=Changed were not checked, .* vocab_size given to Model"):
        trainer(data=wrong, hooks=()).fit()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Nameless(amsp.hooks.Hook):
    """A hook at fault in all that a message about it asks for."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    @property
    def name(self) -> str:
        raise RuntimeError("no name")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def _fail(self, *values: Any) -> None:
        raise Unspeakable


@pytest.mark.parametrize("event", ["on_step", "needs_state"])
def test_a_hook_whose_error_cannot_be_told(event: str) -> None:
    told = f"^hook Nameless failed in {event} at step .: Unspeakable: its message cannot be printed; step . is saved"
    with pytest.raises(HookError, match=told):
        trainer(hooks=[Nameless(event)]).fit()


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"stepz": 3}, r"stepz=3 is no setting \(did you mean steps\?\)"),
    ({"steps": "3"}, "steps='3' is a str, but it must be an int; write steps=3"),
    ({"clip_norm": 1.0}, "clip_norm=1.0 has no effect with an optimizer of your own"),
    ({"learning_rate": 1e-3}, "learning_rate=0.001 has no effect with an optimizer of your own"),
    ({"data": "stdlib"}, "data='stdlib' names a corpus.*give vocab_size"),
    ({"config": amsp.TrainConfig()}, "beside config"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[next(iter(changes)) for changes, _ in MISTAKES])
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(**changes)


def test_what_is_no_model() -> None:
    with pytest.raises(UserError, match=r"model='llama-tiny' is a str; give a Model, .*build_model\('llama-tiny'\)"):
        amsp.Trainer("llama-tiny")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="learning_rate is a function; it needs an optimizer of your own"):
        amsp.Trainer(bigrams(), data=Rows(), learning_rate=optax.constant_schedule(0.1))
    with pytest.raises(UserError, match=r"every\(0, ...\): the number of steps must be a whole number above 0"):
        amsp.hooks.every(0, print)


def test_parameters_are_of_true_shape() -> None:
    """Where the stored leaf is padded as well: 39 rows over 8 devices."""

    def loss(params: Any, batch: Batch, rng: jax.Array) -> Any:
        return (params["table"][batch["tokens"], batch["targets"]].sum(), batch["weights"].sum()), {}

    model = amsp.Model.from_loss(loss, lambda key: {"table": jax.random.normal(key, (39, 17))})
    run = amsp.Trainer(model, optax.sgd(0.0), **{**SMALL, "strategy": "zero3", "data": Rows(), "steps": 1}).fit()
    assert run.state.params["table"].shape == (40, 17)
    one = amsp.init_state(amsp.make_plan("ddp", model), optax.sgd(0.0)).params["table"]
    np.testing.assert_array_equal(run.params["table"], one)


def test_a_run_goes_on_with_the_same_frozen_parameters() -> None:
    trainer(run_dir="x", stop_after=1).fit()
    with pytest.raises(UserError, match=r"different run: frozen=\[\] there and frozen=\['tab.*'\] here"):
        trainer(run_dir="x", frozen=("tab.*",)).fit()
