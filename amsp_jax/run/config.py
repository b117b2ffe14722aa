"""The settings of a training run as one frozen, checked dataclass.

Type, default and explanation of a setting stand here and nowhere else. The command line makes its gin macros and its
help from these fields: `learning_rate` is `LEARNING_RATE`. Nothing in this module knows gin.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from amsp_jax.errors import UserError
from amsp_jax.runtime.launch.grid import MOST_SIMULATED

DType = Literal["float32", "bfloat16"]
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]

_EXAMPLES = {int: "100", float: "0.1", bool: "True", str: "'word'", dict: "{'num_layers': 8}", tuple: "('embed.*',)"}


def _setting(default: Any, text: str) -> Any:
    """A field with its default and its line of help."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The description of a run: `TrainConfig(model="llama-tiny", strategy="zero3")`.

    The text beside each default is the setting's line in `python train.py --help`. `rules` is a dict here, in the order
    in which its patterns are tried; `Strategy(rules=...)` in Python takes pairs, too.

    Raises:
      UserError: a value of the wrong type, outside its choices or out of range; it says the right spelling.
    """

    strategy: str = _setting("auto", "auto, a preset, or 'params=... grads=... opt_state=...'; see below")
    rules: dict = _setting({}, "strategies of parameters that differ, by pattern of their names, {'embed.*': 'zero1'}")
    frozen: tuple | list | str = _setting((), "patterns of the names of parameters that are not trained, ('embed.*',)")
    tensor: int = _setting(
        1, "devices that share each matrix and the sequence between them; a group lies inside a node"
    )
    pipeline: int = _setting(1, "stages of the pipeline, each with a part of the blocks")
    pipeline_schedule: Literal["1f1b", "gpipe"] = _setting("1f1b", "order of the pipeline's work")
    virtual_stages: int = _setting(1, "parts of the model that each stage has; more than 1 interleaves them")
    context: int = _setting(1, "devices that share each sequence, for ring attention")
    cluster: str | None = _setting(
        None, "file of `amsp_jax calibrate` for strategy='auto'; None: measures once and keeps it"
    )
    model: str = _setting("llama-tiny", "name of a model")
    model_overrides: dict = _setting({}, "fields of the model to change, {'num_layers': 8}")
    data: str = _setting(
        "stdlib", "training text: 'stdlib', a folder, a text or .jsonl file; or token ids, .npy or .bin"
    )
    corrupt_records: Literal["stop", "skip"] = _setting("stop", "when records are corrupt: an error, or leave them out")
    end_of_document: int | None = _setting(None, "id that ends a document in a file of token ids; None: it has none")
    steps: int = _setting(1000, "optimizer steps of the whole run")
    run_dir: str | None = _setting(None, "run folder; None: a fresh numbered one under runs/")
    seed: int = _setting(0, "of the initial parameters, the sample order and dropout")
    global_batch: int = _setting(8, "sequences in a step, over all devices")
    microbatch: int = _setting(1, "sequences a data-parallel rank computes at once")
    microbatch_group: int = _setting(1, "microbatches that go through each block before the next block; 1: depth-first")
    seq_len: int = _setting(1024, "tokens in a sequence")
    learning_rate: float = _setting(3e-4, "highest learning rate, reached after the warm-up")
    warmup_steps: int = _setting(100, "steps of linear warm-up before the schedule")
    lr_schedule: LrSchedule = _setting("cosine", "learning rate after the warm-up; wsd stays and falls at the end")
    lr_final_fraction: float | None = _setting(
        None, "learning rate at the end, as a fraction of the highest; None: 0.1"
    )
    lr_decay_fraction: float | None = _setting(None, "part of all steps in which wsd falls; None: 0.2")
    weight_decay: float = _setting(0.1, "on matrices only")
    clip_norm: float | None = _setting(1.0, "largest global gradient norm; None: no clipping")
    optimizer: str = _setting("adamw", "name of an optimizer")
    beta1: float | None = _setting(None, "decay of the mean of gradients; None: the optimizer's own")
    beta2: float | None = _setting(None, "decay of the mean of squared gradients; None: the optimizer's own")
    epsilon: float | None = _setting(None, "added to the denominator of an update; None: the optimizer's own")
    momentum: float | None = _setting(None, "of sgd, adafactor and muon's hidden matrices; None: the optimizer's own")
    compute_dtype: DType = _setting("bfloat16", "of activations and gathered parameters")
    reduce_dtype: DType = _setting("float32", "of gradients on the wire, and of their sums")
    inter_node_dtype: DType | None = _setting(
        None, "of gradients between the nodes that share them; None: like all gradients"
    )
    remat: Literal["none", "projections", "full"] = _setting("projections", "what the backward pass computes again")
    peel: bool = _setting(True, "first and last microbatch outside the accumulation loop, to overlap communication")
    checkpoint_every: int = _setting(500, "steps between checkpoints; 0: at the end only")
    keep_checkpoints: int = _setting(2, "newest checkpoints to keep")
    keep_every: int = _setting(0, "checkpoints at multiples of this step are kept as well; 0: none")
    on_damaged: Literal["stop", "previous"] = _setting(
        "stop", "when the newest checkpoint is damaged: an error, or go back"
    )
    eval_every: int = _setting(500, "steps between validations; 0: before the first and after the last step only")
    eval_batches: int | None = _setting(20, "global batches of a validation; None: the whole validation set")
    stop_after: int | None = _setting(None, "save at this step and exit")
    on_nonfinite: Literal["stop", "skip"] = _setting(
        "stop", "when loss or gradient is not finite: end, or pass over the batch"
    )
    max_skipped: int = _setting(10, "updates passed over in a row before the run ends")
    check_replicas_every: int = _setting(0, "steps between checks that replicas are equal, bit for bit; 0: never")
    hang_timeout_s: float | None = _setting(
        None, "seconds a step may take before its process counts as hung; None: by steps"
    )
    init_from: str | None = _setting(None, "run folder or checkpoint whose weights a fresh run starts from")
    simulated_nodes: int | None = _setting(None, "nodes to simulate on CPU, where there is no accelerator")
    simulated_devices_per_node: int | None = _setting(None, "CPU devices of each simulated node")
    devices_per_node: int | None = _setting(None, "splits real devices into logical nodes of this many")

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype", "inter_node_dtype"):
            object.__setattr__(self, name, _dtype_name(getattr(self, name)))
        for name, (kind, _) in FIELDS.items():
            _check_type(name, getattr(self, name), kind)
            _check_word(name, getattr(self, name))
        for name in _AT_LEAST_ONE:
            _check_least(name, getattr(self, name), 1)
        for name in _AT_LEAST_ZERO:
            _check_least(name, getattr(self, name), 0)
        object.__setattr__(self, "frozen", (self.frozen,) if isinstance(self.frozen, str) else tuple(self.frozen))
        for name, words in (("rules", [*self.rules, *self.rules.values()]), ("frozen", self.frozen)):
            if wrong := [word for word in words if not isinstance(word, str)]:
                raise UserError(f"{name}={getattr(self, name)!r}: {wrong[0]!r} is no text; it holds patterns and names")
        if self.rules and self.is_auto:
            raise UserError(
                f"rules={self.rules!r} with strategy='auto': the planner does not know rules; name the strategy of the "
                "other parameters, which `amsp-jax plan` suggests"
            )
        if self.cluster is not None and not self.is_auto:
            raise UserError(
                f"cluster={self.cluster} has no effect with strategy={self.strategy}; it is for strategy=auto"
            )
        if (self.inter_node_dtype, self.reduce_dtype) == ("float32", "bfloat16"):
            raise UserError(
                f"inter_node_dtype={self.inter_node_dtype!r} is wider than reduce_dtype={self.reduce_dtype!r}, in "
                "which gradients are summed; leave it at None, or set reduce_dtype='float32'"
            )
        if self.seed > _MAX_SEED:
            raise UserError(f"seed={self.seed}: it must be at most {_MAX_SEED}")
        simulated = (self.simulated_nodes or 1) * (self.simulated_devices_per_node or 1)
        if simulated > MOST_SIMULATED:
            raise UserError(
                f"simulated_nodes={self.simulated_nodes} x simulated_devices_per_node="
                f"{self.simulated_devices_per_node} are {simulated:,} simulated devices, more than the "
                f"{MOST_SIMULATED:,} that one host can run; simulate fewer"
            )
        if self.clip_norm == 0:
            raise UserError(f"clip_norm={self.clip_norm!r}: no gradient has that norm; None turns clipping off")
        if self.stop_after is not None and self.stop_after > self.steps:
            raise UserError(
                f"stop_after={self.stop_after} is past the last step, steps={self.steps}; stop earlier or at it"
            )

    @property
    def is_auto(self) -> bool:
        """Whether the planner chooses the strategy."""
        return self.strategy.strip().lower() == "auto"

    def settings(self) -> dict[str, str]:
        """The Python text of every setting, by its name."""
        return {name: repr(getattr(self, name)) for name in FIELDS}

    def to_gin(self) -> str:
        """The gin file that gives exactly this config: a macro and its value for each setting."""
        return "".join(f"{name.upper()} = {value}\n" for name, value in self.settings().items())


_MAX_SEED = (1 << 32) - 1
# Far above what anyone trains, and the numbers of all steps still fit into memory.
_MAX_COUNT = 100_000_000
_AT_LEAST_ONE = (
    *("steps", "global_batch", "microbatch", "seq_len", "keep_checkpoints", "eval_batches", "stop_after"),
    *("microbatch_group", "tensor", "pipeline", "virtual_stages", "context"),
    *("max_skipped", "hang_timeout_s"),
    *("simulated_nodes", "simulated_devices_per_node", "devices_per_node"),
)
_AT_LEAST_ZERO = (
    *("seed", "end_of_document", "warmup_steps", "checkpoint_every", "keep_every", "eval_every"),
    "check_replicas_every",
    *("learning_rate", "weight_decay", "clip_norm"),
)


def _fields() -> dict[str, tuple[Any, str]]:
    hints = typing.get_type_hints(TrainConfig)
    return {field.name: (hints[field.name], field.metadata["help"]) for field in dataclasses.fields(TrainConfig)}


FIELDS: dict[str, tuple[Any, str]] = _fields()
"""Type and one line of explanation of each field, in order."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """` (did you mean x?)`, or nothing where no choice is near."""
    near = difflib.get_close_matches(name, list(choices), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _dtype_name(value: Any) -> Any:
    """The name of a dtype such as `jnp.float32`; anything else as it is, to be checked as a setting."""
    if value is None or isinstance(value, str):
        return value
    # The command line's helps read this module, and are to be fast.
    import numpy as np

    return np.dtype(value).name if isinstance(value, type | np.dtype) else value


def _check_type(name: str, value: Any, kind: Any) -> None:
    alternatives = kinds_of(kind)
    if any(_matches(value, alternative) for alternative in alternatives):
        return
    first = alternatives[0]
    or_none = " or None" if type(None) in alternatives else ""
    if typing.get_origin(first) is Literal:
        choices = typing.get_args(first)
        near = did_you_mean(str(value), choices)
        raise UserError(f"{name}={value!r}: it must be one of {', '.join(choices)}{or_none}{near}")
    raise UserError(
        f"{name}={value!r} is {_article(type(value).__name__)}, but it must be {_article(first.__name__)}{or_none}; "
        f"write {name}={_spelling(value, first)}"
    )


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """The types that a field takes: both of a union, else its one type."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _matches(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _spelling(value: Any, kind: type) -> str:
    """`value` as `kind` where the meaning is plain, else an example."""
    text = str(value)
    if kind is bool and text.lower() in ("true", "yes", "on", "1"):
        return "True"
    if kind is bool and text.lower() in ("false", "no", "off", "0"):
        return "False"
    if kind is int and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if kind is int and text.strip().isdecimal():
        return text.strip()
    if kind is str:
        return repr(text)
    if kind is tuple and isinstance(value, str):
        return repr((value,))
    if text.lower() == "none":
        return "None"
    return _EXAMPLES[kind]


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _check_word(name: str, value: Any) -> None:
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{name}={value!r} is empty; leave it out for its default, or give it a value")


def _check_least(name: str, value: float | None, least: int) -> None:
    if isinstance(value, int) and value > _MAX_COUNT and name != "seed":
        raise UserError(f"{name}={value}: it must be at most {_MAX_COUNT:,}")
    if value is not None and not least <= value < math.inf:
        finite = " and finite" if value == math.inf else ""
        raise UserError(f"{name}={value!r}: it must be at least {least}{finite}")
