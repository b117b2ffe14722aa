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

from amsp_jax.engine.parts import Uses, split
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.state import trained
from amsp_jax.engine.step_settings import DEFAULT, StepSettings
from amsp_jax.engine.train_step import make_grad_fn, mean_scale
from amsp_jax.engine.trees import Master, Tree
from amsp_jax.model import Batch


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


def make_find_nonfinite(
    plan: Plan, settings: StepSettings = DEFAULT
) -> Callable[[Tree[Master], Batch, Any, Any], NonFinite]:
    """`(params, batch, seed, step) -> NonFinite`; it compiles at its first call, and all processes call it together.

    The arguments are those of the step: its batch, and as `step` the steps before it. Where later steps have changed
    the parameters, the answer is that of the new ones.
    """
    grads_of, model = make_grad_fn(plan, settings), plan.model

    uses, optimized = Uses(model, plan.leaves), trained(plan, plan.leaves)

    # The first leaf in this order is where a bad gradient began; a shared leaf is named once.
    def in_backward_order(tree: Tree[Any]) -> list[Any]:
        return jax.tree.leaves(uses.first_only(split(model, tree))[::-1])

    def is_bad(params: Tree[Master], batch: Batch, seed: Any, step: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        sums, grads = grads_of(params, batch, seed, step)
        scale = mean_scale(sums.weight)
        values = [~jnp.all(jnp.isfinite(x)) for x in in_backward_order(params)]
        # By the norm, as in the step: a finite gradient whose square is not finite counts, too.
        norms = [~jnp.isfinite(jnp.sum(jnp.square(x * scale))) for x in in_backward_order(grads)]
        return ~jnp.isfinite(sums.loss * scale), jnp.stack(values), jnp.stack(norms)

    compiled = jax.jit(is_bad, out_shardings=plan.replicated)
    paths = [leaf.path for leaf in in_backward_order(plan.leaves)]
    trained_paths = [leaf.path for leaf in in_backward_order(optimized)]

    def find(params: Tree[Master], batch: Batch, seed: Any, step: Any) -> NonFinite:
        loss, values, grads = jax.device_get(compiled(params, batch, seed, step))
        return NonFinite(
            loss=bool(loss),
            params=tuple(paths[i] for i in np.flatnonzero(values)),
            grads=tuple(trained_paths[i] for i in np.flatnonzero(grads)),
            num_leaves=len(paths),
        )

    return find
