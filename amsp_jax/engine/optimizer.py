"""Optax optimizers by name, and their state on sharded and padded leaves.

An optimizer runs on global arrays of true shape, outside `shard_map`: clipping by the global norm, Adafactor, LAMB
and Muon are then right on every placement. Storage may be padded, so `to_true` slices before the update and
`to_storage` pads after it, inside one program.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from amsp_jax.engine.learning_rate import LearningRate
from amsp_jax.engine.leaves import LeafPlan, crop, key_name, pad
from amsp_jax.engine.plan import Plan
from amsp_jax.errors import UserError
from amsp_jax.model import Params


def _is_matrix(params: Params) -> Params:
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def _adamw(
    rate: LearningRate, decay: float, *, beta1: float = 0.9, beta2: float = 0.95, epsilon: float = 1e-8
) -> optax.GradientTransformation:
    return optax.adamw(rate, b1=beta1, b2=beta2, eps=epsilon, weight_decay=decay, mask=_is_matrix)


def _sgd(rate: LearningRate, decay: float, *, momentum: float = 0.0) -> optax.GradientTransformation:
    # As in adamw, the decay is no part of the gradient: momentum does not accumulate it.
    return optax.chain(
        optax.trace(momentum) if momentum else optax.identity(),
        optax.add_decayed_weights(decay, _is_matrix),
        optax.scale_by_learning_rate(rate),
    )


def _adafactor(
    rate: LearningRate, decay: float, *, epsilon: float = 1e-30, momentum: float = 0.0
) -> optax.GradientTransformation:
    # optax does not multiply this decay by the learning rate, as it does in adamw: a schedule that does.
    decay_rate = (lambda step: decay * rate(step)) if decay else None
    return optax.adafactor(
        rate, eps=epsilon, momentum=momentum or None, weight_decay_rate=decay_rate, weight_decay_mask=_is_matrix
    )


def _lion(rate: LearningRate, decay: float, *, beta1: float = 0.9, beta2: float = 0.99) -> optax.GradientTransformation:
    return optax.lion(rate, b1=beta1, b2=beta2, weight_decay=decay, mask=_is_matrix)


def _lamb(
    rate: LearningRate, decay: float, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-6
) -> optax.GradientTransformation:
    return optax.lamb(rate, b1=beta1, b2=beta2, eps=epsilon, weight_decay=decay, mask=_is_matrix)


def _muon(
    rate: LearningRate,
    decay: float,
    *,
    momentum: float = 0.95,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> optax.GradientTransformation:
    """Muon orthogonalises hidden matrices; embedding, head and vectors take AdamW, as Muon's authors advise."""

    def label(path: Any, x: jax.Array) -> str:
        is_outer = bool(path) and key_name(path[0]) in ("embed", "head")
        return "muon" if x.ndim == 2 and not is_outer else "adamw"

    return optax.partition(
        {
            "muon": contrib.muon(rate, beta=momentum, eps=epsilon, weight_decay=decay),
            # As the AdamW inside contrib.muon, which would decay every leaf: norm scales and biases, too.
            "adamw": optax.adamw(
                rate, b1=beta1, b2=beta2, eps=epsilon, weight_decay=decay, mask=_is_matrix, nesterov=True
            ),
        },
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "lion": _lion,
    "lamb": _lamb,
    "muon": _muon,
}
"""Optimizers by name, `make(learning_rate, weight_decay, **own)`; weight decay falls on matrices only.

The keyword arguments of `make` are the settings that the optimizer has, with its defaults.
"""


def make_optimizer(
    name: str,
    learning_rate: LearningRate | float,
    *,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    epsilon: float | None = None,
    momentum: float | None = None,
) -> optax.GradientTransformation:
    """Builds an optimizer by name, clipped by the global norm of the gradient.

    Args:
      name: one of `OPTIMIZERS`.
      learning_rate: a number, or one value for each step (`make_learning_rate`).
      weight_decay: on matrices only, multiplied by the learning rate.
      clip_norm: the largest global norm of the gradient; None does not clip.
      beta1, beta2: decay of the running means of the gradient and of its square; None is the optimizer's own.
      epsilon: added to the denominator; None is the optimizer's own.
      momentum: of `sgd`, `adafactor` and the hidden matrices of `muon`; None is the optimizer's own.

    Raises:
      UserError: the name is unknown, a setting is out of range, or the optimizer has no such setting.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer={name!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    given = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "momentum": momentum}
    own = {setting: value for setting, value in given.items() if value is not None}
    _check_own(name, own)
    rate = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    # Clipped or not, the state has one structure: a run may turn clipping on or off when it resumes.
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[name](rate, weight_decay, **own))


def _check_own(name: str, own: Mapping[str, float]) -> None:
    takes = [parameter.name for parameter in _own_settings(name)]
    for setting, value in own.items():
        if setting not in takes:
            others = [other for other in OPTIMIZERS if setting in {p.name for p in _own_settings(other)}]
            raise UserError(
                f"{setting}={value} has no effect with optimizer={name!r}, which takes {', '.join(takes)}; leave it "
                f"out, or use one of {', '.join(others)}"
            )
        least, most = (0.0, math.inf) if setting == "epsilon" else (0.0, 1.0)
        if not least <= value < most:
            raise UserError(f"{setting}={value} is out of range: it is at least {least:g} and below {most:g}")


def _own_settings(name: str) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(OPTIMIZERS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]


def abstract_opt_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state for these abstract parameters, of true shape."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.eval_shape(optimizer.init, params)


def num_updates(opt_state: Any, default: jax.Array) -> jax.Array:
    """Updates applied so far, int32, as the learning rate's schedule counts them; `default` where there is none."""

    def is_schedule(x: Any) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    schedules = [x for x in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(x)]
    return schedules[0].count if schedules else default


def moment_plans(plan: Plan, like: Params | None = None) -> Callable[[Any, Any], LeafPlan | None]:
    """`find(path, leaf)`: the plan of the parameter whose moment a state leaf is, None for any other leaf.

    A state leaf is a moment of the parameter whose path ends its own path, the longest such, if it has its shape.

    Args:
      plan: of the parameters.
      like: the parameters whose shapes the state has, in true or storage form; None: true shapes.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(plan.leaves)
    shapes = [leaf.shape for _, leaf in flat] if like is None else [tuple(x.shape) for x in jax.tree.leaves(like)]
    by_path = {
        tuple(key_name(k) for k in path): (leaf, shape) for (path, leaf), shape in zip(flat, shapes, strict=True)
    }

    def find(path: Any, leaf: Any) -> LeafPlan | None:
        names = tuple(key_name(k) for k in path)
        for start in range(len(names) + 1):
            if names[start:] in by_path:
                found, shape = by_path[names[start:]]
                return found if shape == tuple(leaf.shape) else None
        return None

    return find


def abstract_storage(plan: Plan, tree: Any) -> Any:
    """`ShapeDtypeStruct`s, with OS shardings, of parameters or optimizer state of true shape as they are stored.

    State that belongs to no parameter (counters, factored statistics) is replicated.
    """
    find = moment_plans(plan)

    def one(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        leaf = find(path, x)
        shape, spec = (leaf.storage_shape, leaf.opt_spec) if leaf else (tuple(x.shape), P())
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(plan.mesh, spec))

    return jax.tree_util.tree_map_with_path(one, tree)


def to_true(tree: Any, like: Any) -> Any:
    """Storage form to the true shapes of `like`: padding sliced off."""
    return jax.tree.map(lambda x, true: crop(x, true.shape), tree, like)


def to_storage(tree: Any, like: Any) -> Any:
    """True shapes to the storage shapes of `like`: padded with zeros at the end."""
    return jax.tree.map(lambda x, stored: pad(x, stored.shape), tree, like)
