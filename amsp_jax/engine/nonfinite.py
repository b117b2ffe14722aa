"""Where numbers went bad: the leaves whose value or gradient is not finite.

A step that passes a batch over says only that. Its gradient is computed once more here, when a person wants to know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amsp_jax.engine.plan import Plan
from amsp_jax.engine.train_step import DEFAULT, StepSettings, make_grad_fn, mean_scale
from amsp_jax.model import Batch, Model, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite:
    """What is not finite in one step; leaves by their paths, in the order in which the backward pass reaches them.

    Attributes:
      loss: whether the loss is not.
      params: leaves whose values are not.
      grads: leaves whose gradients are not; the first is where it began.
      num_leaves: of the model.
    """

    loss: bool
    params: tuple[str, ...]
    grads: tuple[str, ...]
    num_leaves: int

    def __str__(self) -> str:
        found = ["the loss"] if self.loss else []
        found += [f"the values of {self._some(self.params)}"] if self.params else []
        found += [f"the gradients of {self._some(self.grads)}"] if self.grads else []
        return f"not finite: {'; '.join(found)}" if found else "loss, leaves and gradients are finite, each by itself"

    def _some(self, paths: tuple[str, ...]) -> str:
        more = f", ... ({len(paths)} of {self.num_leaves} leaves)" if len(paths) > 3 else ""
        return ", ".join(paths[:3]) + more


def make_find_nonfinite(plan: Plan, settings: StepSettings = DEFAULT) -> Callable[[Params, Batch, Any, Any], NonFinite]:
    """`(params, batch, seed, step) -> NonFinite`; it compiles at its first call, and all processes call it together.

    The arguments are those of the step: its batch, and as `step` the steps before it. Where later steps have changed
    the parameters, the answer is that of the new ones.
    """
    grads_of, model = make_grad_fn(plan, settings), plan.model

    def is_bad(params: Params, batch: Batch, seed: Any, step: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        sums, grads = grads_of(params, batch, seed, step)
        scale = mean_scale(sums.weight)
        values = [~jnp.all(jnp.isfinite(x)) for x in _backward_order(model, params)]
        # By the norm, as in the step: a finite gradient whose square is not finite counts, too.
        norms = [~jnp.isfinite(jnp.sum(jnp.square(x * scale))) for x in _backward_order(model, grads)]
        return ~jnp.isfinite(sums.loss * scale), jnp.stack(values), jnp.stack(norms)

    compiled = jax.jit(is_bad, out_shardings=plan.replicated)
    paths = [leaf.path for leaf in _backward_order(model, plan.leaves)]

    def named(bad: np.ndarray) -> tuple[str, ...]:
        return tuple(paths[i] for i in np.flatnonzero(bad))

    def find(params: Params, batch: Batch, seed: Any, step: Any) -> NonFinite:
        loss, values, grads = jax.device_get(compiled(params, batch, seed, step))
        return NonFinite(loss=bool(loss), params=named(values), grads=named(grads), num_leaves=len(paths))

    return find


def _backward_order(model: Model, tree: Params) -> list[Any]:
    embed, blocks, head = model.split(tree)
    return jax.tree.leaves((head, blocks[::-1], embed))
