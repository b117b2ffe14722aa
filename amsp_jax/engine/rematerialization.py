"""What a block keeps for its backward pass, as `jax.checkpoint` policies."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import jax

from amsp_jax.engine.collectives import GATHERED
from amsp_jax.engine.context import RING_ATTENTION
from amsp_jax.engine.parallel import TENSOR

PROJECTIONS = ("qkv", "attention_residual", "mlp_gate", "mlp_up")
"""The `checkpoint_name`s that the policy `projections` keeps: results of matrix products. Queries and keys are kept
rotated, and the output of attention added to the residual stream, as the backward pass reads them in that form."""

PALLAS_ATTENTION = "mha"
"""The function of jax's Pallas attention; its results are the output and the log-sum-exp of attention."""


class Remat(StrEnum):
    """What a block keeps for its backward pass; gathered parameters are never kept."""

    NONE = "none"
    PROJECTIONS = "projections"
    FULL = "full"


def checkpointed(apply: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Wraps a block's function so that it keeps for its backward pass what `remat` says."""

    def run(*args: Any) -> Any:
        # jax asks a policy about a product before the policy can see the name of the product's result. So the block is
        # traced once beforehand to find out whether it names any.
        keeps_products = remat is Remat.PROJECTIONS and not _has_names(jax.make_jaxpr(apply)(*args).jaxpr)
        # prevent_cse would tie every residual to the incoming cotangent: `block_backward` has its own barriers.
        return jax.checkpoint(apply, policy=policy(remat, keeps_products), prevent_cse=False)(*args)

    return run


def policy(remat: Remat, keeps_products: bool = False) -> Callable[..., Any]:
    """Returns the `jax.checkpoint` policy of a setting.

    FULL keeps the block's input alone. PROJECTIONS also keeps the values that `PROJECTIONS` names and the results of
    fused attention. NONE keeps everything but gathered parameters.

    Args:
      remat: the setting.
      keeps_products: PROJECTIONS also keeps results of matrix products without a batch dimension, which leaves out
        attention scores and stacked experts. For blocks that name nothing.
    """
    if remat is Remat.FULL:
        return jax.checkpoint_policies.nothing_saveable
    if remat is Remat.NONE:
        return _all_but_gathered
    keep = jax.checkpoint_policies.save_only_these_names(*PROJECTIONS, RING_ATTENTION)
    if keeps_products:
        products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        keep = jax.checkpoint_policies.save_from_both_policies(keep, products)
    # The fused kernel's own outputs include its softmax statistics. Without them its forward pass would run twice.
    return jax.checkpoint_policies.save_from_both_policies(keep, _is_fused_attention)


def _has_names(jaxpr: Any) -> bool:
    """Whether a policy meets one of `PROJECTIONS` in this program, or in a function that the program calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] in PROJECTIONS:
            return True
        # A function with a gradient of its own reaches a policy as one call: names inside it are never asked for.
        params = [] if eqn.primitive.name.startswith("custom_vjp") else list(eqn.params.values())
        bodies = [getattr(body, "jaxpr", body) for body in jax.tree.leaves(params)]
        if any(hasattr(body, "eqns") and _has_names(body) for body in bodies):
            return True
    return False


def _is_fused_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    return "dot_product_attention_fwd" in primitive.name or _is_call_of(PALLAS_ATTENTION, params)


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    # An all-gather over `tensor` brings activations together, any other brings parameters.
    is_params = primitive.name == "all_gather" and TENSOR not in params["axis_name"]
    return not is_params and params.get("name") != GATHERED and not _is_call_of(GATHERED, params)


def _is_call_of(name: str, params: dict[str, Any]) -> bool:
    """Whether a primitive calls a function that holds an equation of this name.

    A function with a gradient of its own reaches a policy as one call: its results are saved or not, whatever is named
    inside it.
    """
    body = params.get("call_jaxpr")
    return body is not None and any(eqn.params.get("name") == name for eqn in body.eqns)
