"""`Trainer`: a run from Python, from its settings to its last checkpoint.

run = Trainer(model, optax.adamw(3e-4), strategy="zero3", data=source, global_batch=64, steps=1000).fit()
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax._src import xla_bridge

from amsp_jax.engine.learning_rate import LearningRate
from amsp_jax.errors import HookError, Stopped, UserError
from amsp_jax.model import Model
from amsp_jax.run import auto, hooks
from amsp_jax.run.arguments import checked_hooks, require_model, require_optimizer
from amsp_jax.run.config import FIELDS, TrainConfig, did_you_mean
from amsp_jax.run.data import Source
from amsp_jax.run.data.paths import require_corpus
from amsp_jax.run.data.source import can_read_again, source_name
from amsp_jax.run.hooks import Hook
from amsp_jax.run.job import Job, compile_step, prepare
from amsp_jax.run.loop import Loop
from amsp_jax.run.resolved import compiler_options, resolve
from amsp_jax.run.resume import Saved, foreign_checkpoint, fresh, own_checkpoint, proceed, require_same_data
from amsp_jax.run.run import Run
from amsp_jax.run.run_folder import CONFIG_FILE, TOKENIZER_FILE, RunFolder, find_run_folder
from amsp_jax.run.sample import ClosingNotes
from amsp_jax.runtime import launch, output
from amsp_jax.runtime.launch import DeviceLayout, from_process_0, own_watch, say
from amsp_jax.strategy import Strategy, parse

_OWN_OPTIMIZER = "own"
_OF_NAMED_OPTIMIZERS = (
    *("learning_rate", "warmup_steps", "lr_schedule", "lr_final_fraction", "lr_decay_fraction"),
    *("weight_decay", "clip_norm", "beta1", "beta2", "epsilon", "momentum"),
)


class Trainer:
    """A run described in Python; `fit` trains it.

    The process needs no start-up of its own: `fit` finds the devices of this host, or of all hosts that SLURM
    started. It works the same on one CPU and on many hosts, where every process runs the same script.

    Example:
      >>> run = Trainer(model, optax.adamw(3e-4), data=source, global_batch=64, steps=1000, run_dir="runs/x").fit()
      >>> run.metrics[-1]["loss"], run.params
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation | str | None = None,
        *,
        strategy: Strategy | str | None = None,
        data: Source | str | None = None,
        validation: Source | None = None,
        learning_rate: LearningRate | float | None = None,
        hooks: Sequence[Hook] = (),
        default_hooks: Sequence[Hook] | None = None,
        layout: DeviceLayout | None = None,
        config: TrainConfig | None = None,
        notes: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """Checks the settings; no device is looked at.

        Args:
          model: what is trained.
          optimizer: any optax transform, used as it is; a name, or None, takes the optimizer that the settings
            describe.
          strategy: or its text; `auto`, the default, takes the fastest for these devices.
          data: rows of training, an object with `rows(step, rows)`; or the text that names a corpus.
          validation: rows of validation, if `data` is an object.
          learning_rate: the highest one, a setting; with an optimizer of your own its schedule, for the metrics.
          hooks: called after the checkpoint and the validation of their step.
          default_hooks: in place of `hooks.defaults()`; called before them.
          layout: the devices, of `amsp_jax.runtime.launch.setup`; None finds them.
          config: all settings at once, in place of the arguments that are settings.
          notes: lines to print with the plan.
          settings: any other field of `TrainConfig`.

        Raises:
          UserError: a value of the wrong type or out of range, an unknown setting, or one that has no effect.
        """
        require_model(model)
        require_optimizer(optimizer)
        self._model, self._layout, self._notes = model, layout, tuple(notes)
        self._optimizer = None if isinstance(optimizer, str) else optimizer
        self._schedule = learning_rate if callable(learning_rate) else None
        self._source = None if isinstance(data, str) else data
        self._validation = validation
        self._default_hooks = None if default_hooks is None else checked_hooks("default_hooks", default_hooks)
        self._hooks = checked_hooks("hooks", hooks)
        if isinstance(strategy, Strategy) and strategy.rules:
            # A setting has one level: the rules of a strategy are settings of their own.
            settings = {"rules": {pattern: str(one) for pattern, one in strategy.rules}, **settings}
            strategy = dataclasses.replace(strategy, rules=())
        given: dict[str, Any] = {
            "strategy": None if strategy is None else str(strategy),
            "optimizer": optimizer if isinstance(optimizer, str) else None,
            "data": data if isinstance(data, str) else None,
            "learning_rate": None if callable(learning_rate) else learning_rate,
        }
        settings |= {name: value for name, value in given.items() if value is not None}
        self.config = self._config_of(settings) if config is None else self._whole(config, settings)

    def fit(self) -> Run:
        """Trains until `steps` or `stop_after`; goes on with the run that `run_dir` holds.

        SIGTERM, SIGINT and SIGUSR1 stop the run in order, if this is the main thread.

        Raises:
          UserError: anything that cannot work, before a file is written.
          HookError: a hook raised; what was trained is saved.
          Stopped: a signal asked for it; what was trained is saved.
          BadNumbersError: the numbers went bad beyond what the settings allow.
        """
        output.print_any_text()
        with _signals_caught():
            start = self._prepare()
            return _ended_before(start) if start.first >= start.last else _trained(start)

    def check(self) -> None:
        """Checks all that `fit` would check before it compiles, prints the plan, and writes nothing.

        It also reads the first batch of `data` and of `validation`, so that rows that raise or do not fit are found
        here. A source made by `from_iterator` is not read: its first batch would be lost for `fit`.

        Raises:
          UserError: as `fit`, or the first batch is wrong.
        """
        with _signals_caught():
            start = self._prepare(shows_layout=True)
            if start.first >= start.last:
                _ended_before(start)
                return
            for dataset, step in ((start.job.datasets.train, start.first), (start.job.datasets.validation, 0)):
                if can_read_again(dataset):
                    start.job.load_batch(dataset, step)
            steps = f"steps {start.first + 1} to {start.last}"
            say(f"dry run: it would train {steps} in {start.folder.path}; nothing is written")

    def _config_of(self, settings: dict[str, Any]) -> TrainConfig:
        unknown = [name for name in settings if name not in FIELDS]
        if unknown:
            raise UserError(f"{unknown[0]}={settings[unknown[0]]!r} is no setting{did_you_mean(unknown[0], FIELDS)}")
        if "model" in settings:
            raise UserError(f"model={settings['model']!r}: the model is the first argument")
        if self._optimizer is not None:
            idle = [name for name in settings if name in _OF_NAMED_OPTIMIZERS]
            if idle:
                raise UserError(
                    f"{idle[0]}={settings[idle[0]]!r} has no effect with an optimizer of your own; set it in there, or "
                    "give the optimizer's name"
                )
            settings["optimizer"] = _OWN_OPTIMIZER
        elif self._schedule is not None:
            raise UserError("learning_rate is a function; it needs an optimizer of your own, or choose lr_schedule=")
        if self._source is not None:
            settings["data"] = source_name(self._source)
        config = TrainConfig(**settings, model=self._model.name)
        self._require_vocabulary(config)
        return config

    def _whole(self, config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
        for name, value in settings.items():
            raise UserError(f"{name}={value!r} beside config: a setting is given once; put it into the config")
        self._require_vocabulary(config)
        return config if self._source is None else dataclasses.replace(config, data=source_name(self._source))

    def _require_vocabulary(self, config: TrainConfig) -> None:
        """A corpus is tokenised for, or compared with, the number of ids that the model knows."""
        if self._source is not None or self._model.vocab_size is not None:
            return
        # Of two mistakes the one that is nearer to what the person wrote comes first.
        require_corpus(config.data)
        raise UserError(
            f"data={config.data!r} names a corpus, and the model does not say how many token ids it knows: give "
            "vocab_size to Model.from_nnx, Model.from_loss or Model"
        )

    def _prepare(self, shows_layout: bool = False) -> _Start:
        """All that can be wrong before a file is written; nothing is compiled."""
        config, watch = self.config, own_watch()
        if not config.is_auto:
            parse(config.strategy, config.rules)
        layout = self._layout or _find_devices(config)
        watch.doing("choosing the strategy")
        resolved = resolve(config, self._model, layout, self._optimizer, self._schedule)
        chosen = auto.choose(resolved) if config.is_auto else None
        if chosen:
            resolved = resolved.with_strategy(chosen.strategy)
        watch.doing("preparing the data")
        folder = _find_folder(resolved.config)
        job = prepare(resolved, self._source, self._validation)
        notes = [*(chosen.lines if chosen else ()), *self._notes, *layout.notes, *job.notes]
        about = str(job.plan), job.datasets.description, job.batch_line, *notes
        say(*([str(layout)] if shows_layout else []), *about)
        require_same_data(folder, job)
        before = own_checkpoint(folder, job)
        if folder.is_same_run and not before:
            say(f"{folder.path} has no complete checkpoint: starts from the beginning")
        weights = foreign_checkpoint(config.init_from, job) if config.init_from and not before else None
        defaults = hooks.defaults() if self._default_hooks is None else self._default_hooks
        return _Start(
            given=config,
            job=job,
            folder=folder,
            before=before,
            weights=weights,
            chosen=chosen,
            files=tuple(defaults),
            hooks=self._hooks,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Start:
    """A run that can begin: everything that `_trained` needs.

    Attributes:
      given: the settings as given, before a strategy was chosen.
      before: the checkpoint to go on from.
      weights: those that a fresh run starts with.
      chosen: the planner's choice, if it had one.
      files, hooks: called before and after the checkpoint of a step.
    """

    given: TrainConfig
    job: Job
    folder: RunFolder
    before: Saved | None
    weights: Saved | None
    chosen: auto.Choice | None
    files: tuple[Hook, ...]
    hooks: tuple[Hook, ...]

    @property
    def first(self) -> int:
        """Steps that are done."""
        return self.before.step if self.before else 0

    @property
    def last(self) -> int:
        """The step to train up to."""
        return self.given.stop_after or self.given.steps


@contextlib.contextmanager
def _signals_caught() -> Iterator[None]:
    """Signals stop the run in order; Python lets the main thread alone catch them."""
    is_main = threading.current_thread() is threading.main_thread()
    with own_watch().catch_signals() if is_main else contextlib.nullcontext():
        yield


_found: list[tuple[tuple[int | None, ...], DeviceLayout]] = []
"""The devices of this process once a Trainer has found them, and the settings that it had: they are set up once."""


def _find_devices(config: TrainConfig) -> DeviceLayout:
    """The devices that these settings ask for; on the CPU, without settings, as many as jax has or was told to make.

    Raises:
      UserError: as `launch.setup`.
    """
    asked = (config.simulated_nodes, config.simulated_devices_per_node, config.devices_per_node)
    if _found and _found[0][0] == asked:
        return _found[0][1]
    is_running, per_node = xla_bridge.backends_are_initialized(), config.simulated_devices_per_node
    if per_node is None and not (is_running and jax.default_backend() != "cpu"):
        asked_for: Any = jax.config
        num_local = jax.local_device_count() if is_running else asked_for.jax_num_cpu_devices
        per_node = max(num_local // (config.simulated_nodes or 1), 1) if num_local > 1 else None
    layout = launch.setup(
        simulated_nodes=config.simulated_nodes,
        simulated_devices_per_node=per_node,
        devices_per_node=config.devices_per_node,
        same=config.settings(),
    )
    if is_running and layout.platform != "cpu":
        note = "jax ran before the Trainer, so XLA's flags could not be set: communication may not overlap computation"
        layout = dataclasses.replace(layout, notes=(*layout.notes, f"{note}; call fit before jax is used"))
    _found[:] = [(asked, layout)]
    return layout


def _trained(start: _Start) -> Run:
    job, watch = start.job, own_watch()
    watch.nothing_to_save(f"the last checkpoint is {start.before}" if start.before else "there is no checkpoint yet")
    watch.doing("compiling the step")
    step = compile_step(job)
    watch.doing("making the state")
    state = proceed(job, start.before) if start.before else fresh(job, start.weights)
    with _claimed(start) as folder:
        if start.before:
            start.before.set_damaged_aside()
        run = Run(job, folder.path, start.first, state)
        closing = [ClosingNotes(start.last), *([auto.Comparison(start.chosen)] if start.chosen else [])]
        # The line of the picture is the last.
        files = sorted([*start.files, *closing], key=lambda hook: isinstance(hook, hooks.LossPlot))
        loop = Loop(run, step, start.last, files=files, hooks=start.hooks)
        try:
            loop.train(folder.checkpoints)
            if run.started_step < start.last:
                raise _stopped(run)
            watch.nothing_to_save(f"all is saved at step {start.last}")
        except BaseException as error:
            loop.end(error)
            raise
        loop.end(None)
    return run


def _stopped(run: Run) -> Exception:
    """Why the run ended before its last step, all being saved."""
    why, saved = own_watch().stop_signal, f"step {run.started_step} of {run.config.steps}, which is saved"
    again = f"the same command, with run_dir={run.run_dir}, goes on from there"
    if why is not None and why.startswith("hook "):
        return HookError(f"{why} failed; this process stopped at {saved}; {again}")
    return Stopped(f"stopped by {why} at {saved}; {again}")


def _ended_before(start: _Start) -> Run:
    """A run that has nothing left to do; its state is read when it is asked for."""
    assert start.before is not None
    what = "stop_after" if start.given.stop_after else "steps"
    path = start.folder.path
    say(f"{path} is at step {start.first} already: nothing to do; raise {what}={start.last} to train on")
    return Run(start.job, path, start.first, start.before.read)


def _find_folder(config: TrainConfig) -> RunFolder:
    """Process 0's choice, as a folder may change between two looks."""

    def find() -> dict[str, Any]:
        found = find_run_folder(config)
        return {**dataclasses.asdict(found), "path": str(found.path)}

    found = from_process_0(find)
    return RunFolder(**{**found, "path": Path(found["path"])})


@contextlib.contextmanager
def _claimed(start: _Start) -> Iterator[RunFolder]:
    """The folder as process 0 made it, with its first files, held against other commands."""
    job = start.job
    options = compiler_options(job.plan, job.settings, job.layout)
    # Every process asks: some of the answers come from all of them.
    environment = {**launch.environment(), "compiler_options": options}
    with contextlib.ExitStack() as stack:

        def claim() -> str:
            mine = stack.enter_context(start.folder.claimed(job.config, job.datasets.fingerprint))
            for name, text in _files_of(start, environment).items():
                mine.write(name, text)
            return str(mine.path)

        yield dataclasses.replace(start.folder, path=Path(from_process_0(claim)))


def _files_of(start: _Start, environment: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of the files that a run folder has from the start."""
    job = start.job
    files = {
        CONFIG_FILE: start.given.to_gin(),
        "environment.json": json.dumps(environment, indent=2) + "\n",
        "plan.txt": f"{job.plan}\n",
    }
    if start.chosen:
        files["prediction.json"] = start.chosen.to_json()
    if job.datasets.corrupt:
        files["corrupt_records.txt"] = "\n".join(job.datasets.corrupt) + "\n"
    if job.datasets.tokenizer is not None:
        files[TOKENIZER_FILE] = job.datasets.tokenizer.to_json()
    return files
