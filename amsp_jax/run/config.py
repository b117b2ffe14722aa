"""The settings of a training run as one frozen, checked dataclass.

Each field is a macro of the config files: `learning_rate` is `LEARNING_RATE`. `configs/base.gin` holds
the defaults, so a field here has none. Nothing in this module knows gin.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from amsp_jax.errors import UserError

DType = Literal["float32", "bfloat16"]
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]

_EXAMPLES = {int: "100", float: "0.1", bool: "True", str: "'word'", dict: "\"{'num_layers': 8}\""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a run is. The text beside each type is its line in `python train.py --help`.

    Raises:
      UserError: a value of the wrong type, outside its choices or out of range; it says the right spelling.
    """

    strategy: Annotated[str, "auto, a preset, or 'params=... grads=... opt_state=...'; see below"]
    tensor: Annotated[int, "devices that share each matrix and the sequence between them; a group lies inside a node"]
    pipeline: Annotated[int, "stages of the pipeline, each with a part of the blocks"]
    schedule: Annotated[Literal["1f1b", "gpipe"], "order of the pipeline's work"]
    virtual_stages: Annotated[int, "parts of the model that each stage has; more than 1 interleaves them"]
    context: Annotated[int, "devices that share each sequence, for ring attention"]
    cluster: Annotated[str | None, "file of `amsp_jax calibrate` for STRATEGY='auto'; None: measures once and keeps it"]
    model: Annotated[str, "name of a model"]
    model_overrides: Annotated[dict, "fields of the model to change, {'num_layers': 8}"]
    data: Annotated[str, "training text: 'stdlib', a folder, a text or .jsonl file; or token ids, .npy or .bin"]
    corrupt_records: Annotated[Literal["stop", "skip"], "when records are corrupt: an error, or leave them out"]
    end_of_document: Annotated[int | None, "id that ends a document in a file of token ids; None: it has none"]
    steps: Annotated[int, "optimizer steps of the whole run"]
    run_dir: Annotated[str | None, "run folder; None: a fresh numbered one under runs/"]
    seed: Annotated[int, "of the initial parameters, the sample order and dropout"]
    global_batch: Annotated[int, "sequences in a step, over all devices"]
    microbatch: Annotated[int, "sequences a data-parallel rank computes at once"]
    microbatch_group: Annotated[int, "microbatches that go through each block before the next block; 1: depth-first"]
    seq_len: Annotated[int, "tokens in a sequence"]
    learning_rate: Annotated[float, "highest learning rate, reached after the warm-up"]
    warmup_steps: Annotated[int, "steps of linear warm-up before the schedule"]
    lr_schedule: Annotated[LrSchedule, "learning rate after the warm-up; wsd stays and falls at the end"]
    lr_final_fraction: Annotated[float | None, "learning rate at the end, as a fraction of the highest; None: 0.1"]
    lr_decay_fraction: Annotated[float | None, "part of all steps in which wsd falls; None: 0.2"]
    weight_decay: Annotated[float, "on matrices only"]
    clip_norm: Annotated[float | None, "largest global gradient norm; None: no clipping"]
    optimizer: Annotated[str, "name of an optimizer"]
    beta1: Annotated[float | None, "decay of the mean of gradients; None: the optimizer's own"]
    beta2: Annotated[float | None, "decay of the mean of squared gradients; None: the optimizer's own"]
    epsilon: Annotated[float | None, "added to the denominator of an update; None: the optimizer's own"]
    momentum: Annotated[float | None, "of sgd, adafactor and muon's hidden matrices; None: the optimizer's own"]
    compute_dtype: Annotated[DType, "of activations and gathered parameters"]
    reduce_dtype: Annotated[DType, "of gradients on the wire, and of their sums"]
    inter_node_dtype: Annotated[DType | None, "of gradients between the nodes that share them; None: REDUCE_DTYPE"]
    remat: Annotated[Literal["none", "projections", "full"], "what the backward pass computes again"]
    peel: Annotated[bool, "first and last microbatch outside the accumulation loop, to overlap communication"]
    checkpoint_every: Annotated[int, "steps between checkpoints; 0: at the end only"]
    keep_checkpoints: Annotated[int, "newest checkpoints to keep"]
    keep_every: Annotated[int, "checkpoints at multiples of this step are kept as well; 0: none"]
    on_damaged: Annotated[Literal["stop", "previous"], "when the newest checkpoint is damaged: an error, or go back"]
    eval_every: Annotated[int, "steps between validations; 0: before the first and after the last step only"]
    eval_batches: Annotated[int | None, "global batches of a validation; None: the whole validation set"]
    stop_after: Annotated[int | None, "save at this step and exit"]
    on_nonfinite: Annotated[Literal["stop", "skip"], "when loss or gradient is not finite: end, or pass over the batch"]
    max_skipped: Annotated[int, "updates passed over in a row before the run ends"]
    check_replicas_every: Annotated[int, "steps between checks that replicas are equal, bit for bit; 0: never"]
    hang_timeout_s: Annotated[float | None, "seconds a step may take before its process counts as hung; None: by steps"]
    init_from: Annotated[str | None, "run folder or checkpoint whose weights a fresh run starts from"]
    simulated_nodes: Annotated[int | None, "nodes to simulate on CPU, where there is no accelerator"]
    simulated_devices_per_node: Annotated[int | None, "CPU devices of each simulated node"]
    devices_per_node: Annotated[int | None, "splits real devices into logical nodes of this many"]

    def __post_init__(self) -> None:
        for name, (kind, _) in FIELDS.items():
            _check_type(name.upper(), getattr(self, name), kind)
            _check_word(name.upper(), getattr(self, name))
        for name in _AT_LEAST_ONE:
            _check_least(name, getattr(self, name), 1)
        for name in _AT_LEAST_ZERO:
            _check_least(name, getattr(self, name), 0)
        if self.cluster is not None and not self.is_auto:
            raise UserError(
                f"CLUSTER={self.cluster} has no effect with STRATEGY={self.strategy}; it is for STRATEGY=auto"
            )
        if (self.inter_node_dtype, self.reduce_dtype) == ("float32", "bfloat16"):
            raise UserError(
                f"INTER_NODE_DTYPE={self.inter_node_dtype!r} is wider than REDUCE_DTYPE={self.reduce_dtype!r}, in "
                "which gradients are summed; leave it at None, or set REDUCE_DTYPE='float32'"
            )
        if self.seed > _MAX_SEED:
            raise UserError(f"SEED={self.seed}: it must be at most {_MAX_SEED}")
        simulated = (self.simulated_nodes or 1) * (self.simulated_devices_per_node or 1)
        if simulated > _MAX_SIMULATED:
            raise UserError(
                f"{simulated:,} simulated devices (SIMULATED_NODES x SIMULATED_DEVICES_PER_NODE) are more than the "
                f"{_MAX_SIMULATED:,} that one host bears; simulate fewer"
            )
        if self.clip_norm == 0:
            raise UserError(f"CLIP_NORM={self.clip_norm!r}: no gradient has that norm; None is no clipping")
        if self.stop_after is not None and self.stop_after > self.steps:
            raise UserError(
                f"STOP_AFTER={self.stop_after} is past the last step, STEPS={self.steps}; stop earlier or at it"
            )

    @property
    def is_auto(self) -> bool:
        """Whether the planner chooses the strategy."""
        return self.strategy.strip().lower() == "auto"

    def settings(self) -> dict[str, str]:
        """Every setting as text, by its macro's name."""
        return {name.upper(): repr(getattr(self, name)) for name in FIELDS}


_MAX_SEED = (1 << 32) - 1
# Far above what anyone trains, and the numbers of all steps still fit into memory.
_MAX_COUNT = 100_000_000
# A host runs out of threads and memory soon after.
_MAX_SIMULATED = 1024
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
    hints = typing.get_type_hints(TrainConfig, include_extras=True)
    return {f.name: (hints[f.name].__origin__, hints[f.name].__metadata__[0]) for f in dataclasses.fields(TrainConfig)}


FIELDS: dict[str, tuple[Any, str]] = _fields()
"""Type and one line of explanation of each field, in order."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """` (did you mean x?)`, or nothing where no choice is near."""
    near = difflib.get_close_matches(name, list(choices), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _check_type(macro: str, value: Any, kind: Any) -> None:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    alternatives = typing.get_args(kind) if is_union else (kind,)
    if any(_matches(value, alternative) for alternative in alternatives):
        return
    first = alternatives[0]
    or_none = " or None" if type(None) in alternatives else ""
    if typing.get_origin(first) is Literal:
        choices = typing.get_args(first)
        near = did_you_mean(str(value), choices)
        raise UserError(f"{macro}={value!r}: {macro} is one of {', '.join(choices)}{or_none}{near}")
    raise UserError(
        f"{macro}={value!r} is {_article(type(value).__name__)}, but {macro} is {_article(first.__name__)}{or_none}"
        f"; write --gin.{macro}={_spelling(value, first)}"
    )


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
        return f"\"'{text}'\""
    if text.lower() == "none":
        return "None"
    return _EXAMPLES[kind]


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _check_word(macro: str, value: Any) -> None:
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{macro} is empty; leave it out for its default, or give it a value")


def _check_least(name: str, value: float | None, least: int) -> None:
    if isinstance(value, int) and value > _MAX_COUNT and name != "seed":
        raise UserError(f"{name.upper()}={value}: it must be at most {_MAX_COUNT:,}")
    if value is not None and not least <= value < math.inf:
        finite = " and finite" if value == math.inf else ""
        raise UserError(f"{name.upper()}={value!r}: it must be at least {least}{finite}")
