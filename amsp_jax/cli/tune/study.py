"""The search: Optuna chooses points, a runner tries them, and the study on disk remembers all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from amsp_jax.cli.tune.forecast import Forecast
from amsp_jax.cli.tune.point import DIMENSIONS, OF_PIPELINES, Point
from amsp_jax.cli.tune.space import SearchSpace
from amsp_jax.cli.tune.trial import RAN, Kind, Outcome
from amsp_jax.cli.tune.trial_setup import TrialSetup
from amsp_jax.errors import UserError

JOURNAL, TRIALS = "study.journal", "trials"
_LOCK = ".lock"
_NAME = "tune"
_POINT, _OUTCOME, _IDENTITY = "point", "outcome", "identity"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A trial that is over."""

    number: int
    point: Point
    outcome: Outcome


RunTrial = Callable[[Point, Path], Outcome]
"""`(point, fresh folder) -> outcome`; raises `Interrupted` where it was asked to stop."""


class Study:
    """A study in a folder; the same folder goes on with it.

    Trials that fail, and points that are left out, are Optuna's PRUNED trials: its sampler ranks them behind every
    measured one without a number being made up for them. FAIL is for what says nothing of a point: interrupted trials,
    which run again, and suggestions of points that were tried before.
    """

    def __init__(
        self, folder: Path, space: SearchSpace, setup: TrialSetup, identity: Mapping[str, Any], seed: int
    ) -> None:
        """Opens or begins the study.

        Args:
          folder: of the study, held by `held`.
          space: what is searched.
          setup: what decides which points can run.
          identity: JSON values that must be those of the study that the folder holds.
          seed: of the sampler.

        Raises:
          UserError: the folder holds a study of something else.
        """
        self._folder, self._space, self._trial_setup = folder, space, setup
        path = folder / JOURNAL
        _drop_partial_line(path)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna.create_study(
            study_name=_NAME, storage=JournalStorage(JournalFileBackend(str(path))), load_if_exists=True
        )
        self._require_same(json.loads(json.dumps(identity)))
        trials = self.optuna.get_trials(deepcopy=False)
        self.is_new = not trials
        # With the seed alone a study that goes on would repeat its first draws.
        self.optuna.sampler = _sampler(seed + len(trials))
        self._seen = {self._trial_setup.key(record.point) for record in self.records()}
        self._take_up(trials)

    def records(self) -> list[Record]:
        """Every trial that is over, in order, repeats and interrupted ones left out."""
        return [_record(trial) for trial in self.optuna.get_trials(deepcopy=False) if _OUTCOME in trial.user_attrs]

    def num_run(self) -> int:
        """Trials that had a process."""
        return sum(record.outcome.kind in RAN for record in self.records())

    def begin_with(self, points: Sequence[Point]) -> None:
        """Queues the first points of a new study; of those that are the same run, the first."""
        firsts: dict[str, Point] = {}
        for point in points:
            firsts.setdefault(self._trial_setup.key(point), point)
        for point in firsts.values():
            self.optuna.enqueue_trial(self._params(point))

    def search(self, num_trials: int, run: RunTrial, forecast: Forecast, told: Callable[[Record], None]) -> bool:
        """Runs trials until the study has `num_trials`, those of before included.

        Args:
          num_trials: that have a process.
          run: runs one.
          forecast: what is known before.
          told: called with each trial that is over.

        Returns:
          False if every point that can run was tried before that.

        Raises:
          Interrupted: by `run`; its point will be the next one of the study.
        """
        while self.num_run() < num_trials:
            trial = self.optuna.ask()
            point = self._suggest(trial)
            if self._trial_setup.key(point) in self._seen:
                self.optuna.tell(trial, state=TrialState.FAIL)
                if (nearest := self._nearest_untried(point, forecast)) is None:
                    return False
                self.optuna.enqueue_trial(self._params(nearest))
                continue
            outcome = self._left_out(point, forecast) or self._run(trial, point, run)
            self._tell(trial, point, outcome)
            told(Record(number=trial.number, point=point, outcome=outcome))
        return True

    def _run(self, trial: optuna.Trial, point: Point, run: RunTrial) -> Outcome:
        trial.set_user_attr(_POINT, dataclasses.asdict(point))
        try:
            return run(point, self._folder / TRIALS / f"{trial.number:04}")
        except BaseException:
            self._put_back(trial.number, point)
            raise

    def _put_back(self, number: int, point: Point) -> None:
        """A trial that came to nothing; its point is queued again."""
        self.optuna.tell(number, state=TrialState.FAIL)
        self.optuna.enqueue_trial(self._params(point))

    def _tell(self, trial: optuna.Trial, point: Point, outcome: Outcome) -> None:
        self._seen.add(self._trial_setup.key(point))
        trial.set_user_attr(_POINT, dataclasses.asdict(point))
        trial.set_user_attr(_OUTCOME, dataclasses.asdict(outcome))
        if outcome.kind is Kind.MEASURED:
            self.optuna.tell(trial, outcome.step_s)
        else:
            self.optuna.tell(trial, state=TrialState.PRUNED)

    def _left_out(self, point: Point, forecast: Forecast) -> Outcome | None:
        """Why a point is not run."""
        if reason := self._trial_setup.why_invalid(point):
            return Outcome(kind=Kind.INVALID, reason=reason)
        if reason := forecast.too_large.get(point):
            return Outcome(kind=Kind.TOO_LARGE, reason=reason)
        return None

    def _suggest(self, trial: optuna.Trial) -> Point:
        """The sampler's choice; what belongs to pipelines is asked only where there are stages."""
        chosen: dict[str, Any] = {}
        for name in DIMENSIONS:
            values = self._space.values[name]
            if name in OF_PIPELINES and chosen["pipeline"] == 1:
                chosen[name] = values[0]
            else:
                chosen[name] = trial.suggest_categorical(name, values) if len(values) > 1 else values[0]
        return self._space.canonical(Point(**chosen))

    def _params(self, point: Point) -> dict[str, Any]:
        """The point as `_suggest` asks for it."""
        asked = set(self._space.searched) - (set(OF_PIPELINES) if point.pipeline == 1 else set())
        return {name: getattr(point, name) for name in DIMENSIONS if name in asked}

    def _nearest_untried(self, point: Point, forecast: Forecast) -> Point | None:
        """Of the points that can run the one with the fewest other values, the fastest by the forecast among equals.

        Points with a value that has only failed so far come last.
        """
        untried = (other for other in self._space.points() if self._trial_setup.key(other) not in self._seen)
        runnable = [other for other in untried if self._left_out(other, forecast) is None]
        only_failed = self._only_failed()

        def order(other: Point) -> tuple[bool, int, float]:
            is_risky = not only_failed.isdisjoint(dataclasses.asdict(other).items())
            differing = sum(getattr(point, name) != getattr(other, name) for name in DIMENSIONS)
            return is_risky, differing, forecast.step_s.get(other, math.inf)

        return min(runnable, key=order, default=None)

    def _only_failed(self) -> set[tuple[str, Any]]:
        """Names and values that trials ran with, but none that was measured."""
        failed, measured = set[tuple[str, Any]](), set[tuple[str, Any]]()
        for record in self.records():
            if record.outcome.kind in RAN:
                where = measured if record.outcome.kind is Kind.MEASURED else failed
                where.update(dataclasses.asdict(record.point).items())
        return failed - measured

    def _take_up(self, trials: Sequence[FrozenTrial]) -> None:
        """Puts back what was running when a search was killed."""
        for trial in trials:
            if trial.state == TrialState.RUNNING and _POINT in trial.user_attrs:
                self._put_back(trial.number, Point(**trial.user_attrs[_POINT]))
            elif trial.state == TrialState.RUNNING:
                self.optuna.tell(trial.number, state=TrialState.FAIL)

    def _require_same(self, identity: Mapping[str, Any]) -> None:
        before = self.optuna.user_attrs.get(_IDENTITY)
        if before is None:
            self.optuna.set_user_attr(_IDENTITY, dict(identity))
            return
        for name in {**before, **identity}:
            old, new = before.get(name), identity.get(name)
            if old != new:
                raise UserError(
                    f"--out {self._folder} holds a study with {name}={old!r}, not {new!r}; its step times would not "
                    "compare: name another folder"
                )


@contextlib.contextmanager
def held(folder: Path) -> Iterator[IO[bytes]]:
    """The study's folder, made if need be, held against other searches until the lock's last descriptor is closed.

    Raises:
      UserError: it cannot be written, it has other files, or another search, or a trial that one left, holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / _LOCK).exists():
            raise UserError(f"--out {folder} has files but no study; name a new folder")
        lock = (folder / _LOCK).open("ab")
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}; name a folder of yours") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {folder} is in use by another search, or by a trial that a killed one left; wait for its end, "
                "or end it"
            ) from None
        yield lock


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    """Settings jointly; those of pipelines in a group of their own, as they exist only with stages."""
    with warnings.catch_warnings():
        # It says that the interface of `group` may change.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(multivariate=True, group=True, seed=seed)


def _record(trial: FrozenTrial) -> Record:
    point, outcome = trial.user_attrs[_POINT], dict(trial.user_attrs[_OUTCOME])
    outcome["kind"] = Kind(outcome["kind"])
    return Record(number=trial.number, point=Point(**point), outcome=Outcome(**outcome))


def _drop_partial_line(path: Path) -> None:
    """What a killed search was writing: the next line would be appended to it."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
