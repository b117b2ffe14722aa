"""Optax optimizers by name, and their state on sharded and padded leaves.

An optimizer runs on global arrays of true shape, outside `shard_map`: clipping by the global norm, Adafactor, LAMB
and Muon are then right on every placement. Storage may be padded, so `to_true` slices before the update and
`to_storage` pads after it, inside one program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from amsp_jax.engine.plan import LeafPlan, Plan, crop, key_name, pad
from amsp_jax.errors import UserError
from amsp_jax.model import Params

Schedule = Callable[[Any], Any]


def warmup_cosine(peak: float, warmup_steps: int, num_steps: int, final_fraction: float = 0.1) -> Schedule:
    """Learning rate by step: linear to `peak`, not from 0, then a cosine to `final_fraction` of it at `num_steps`."""
    warmup_steps = min(warmup_steps, num_steps)
    first = peak / warmup_steps if warmup_steps else peak
    return optax.warmup_cosine_decay_schedule(
        first, peak, warmup_steps, max(num_steps, warmup_steps + 1), final_fraction * peak
    )


def _is_matrix(params: Params) -> Params:
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def _muon(rate: Schedule, decay: float) -> optax.GradientTransformation:
    def hidden_matrices(params: Params) -> Params:
        """Muon orthogonalises hidden matrices; embedding, head and vectors take AdamW, as its authors advise."""

        def numbers(path: Any, x: jax.Array) -> contrib.MuonDimensionNumbers | None:
            outer = bool(path) and key_name(path[0]) in ("embed", "head")
            return contrib.MuonDimensionNumbers() if x.ndim == 2 and not outer else None

        return jax.tree_util.tree_map_with_path(numbers, params)

    return contrib.muon(
        rate, weight_decay=decay, weight_decay_mask=_is_matrix, adam_weight_decay=decay,
        muon_weight_dimension_numbers=hidden_matrices,
    )  # fmt: skip


def _adafactor(rate: Schedule, decay: float) -> optax.GradientTransformation:
    # optax does not multiply this decay by the learning rate, as it does in adamw: a schedule that does.
    decay_rate = (lambda step: decay * rate(step)) if decay else None
    return optax.adafactor(rate, weight_decay_rate=decay_rate, weight_decay_mask=_is_matrix)


OPTIMIZERS: dict[str, Callable[[Schedule, float], optax.GradientTransformation]] = {
    "adamw": lambda rate, decay: optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay, mask=_is_matrix),
    "sgd": lambda rate, decay: optax.sgd(rate),
    "adafactor": _adafactor,
    "lion": lambda rate, decay: optax.lion(rate, weight_decay=decay, mask=_is_matrix),
    "lamb": lambda rate, decay: optax.lamb(rate, weight_decay=decay, mask=_is_matrix),
    "muon": _muon,
}
"""Optimizers by name, `make(learning_rate, weight_decay)`; decay falls on matrices only, sgd has none."""


def make_optimizer(
    name: str, learning_rate: Schedule | float, *, weight_decay: float = 0.0, clip_norm: float | None = None
) -> optax.GradientTransformation:
    """An optimizer by name, clipped by the global norm of the gradient.

    Raises:
      UserError: the name is unknown.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"OPTIMIZER '{name}' is unknown; one of {', '.join(OPTIMIZERS)}")
    rate = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    # Clipped or not, the state has one structure: a run may turn clipping on or off when it resumes.
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[name](rate, weight_decay))


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
