"""Checks of what a person gives to the functions of the engine: one line in place of an error from deep inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from amsp_jax.engine.leaves import path_name
from amsp_jax.engine.plan import Plan, is_of_parameters_alone
from amsp_jax.errors import UserError


def check_plan(plan: Any, call: str) -> None:
    """Raises UserError unless `plan` is a plan.

    Args:
      plan: what was given for one.
      call: the function and its arguments, such as `init_state(plan, optimizer)`.
    """
    if not isinstance(plan, Plan):
        raise UserError(f"{call}: plan is {_kind(plan)}; give the Plan that make_plan(strategy, model) returns")


def check_has_model(plan: Plan, call: str) -> None:
    """Raises UserError where the plan is of parameters that belong to no model."""
    if is_of_parameters_alone(plan):
        raise UserError(
            f"{call}: the plan was made by plan_parameters, of parameters without a model, and has nothing to compute; "
            "make it with make_plan(strategy, model)"
        )


def check_optimizer(optimizer: Any, call: str) -> None:
    """Raises UserError unless `optimizer` is an optax transform; see `check_plan`."""
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    made = callable(optimizer) and not isinstance(optimizer, type)
    name = getattr(optimizer, "__name__", "optimizer")
    step = f"call it, as {name}(1e-3)" if made else "give an optax transform, as optax.adamw(1e-3) or make_optimizer"
    raise UserError(f"{call}: optimizer is {_kind(optimizer)}, no optax.GradientTransformation; {step}")


def check_state(state: Any, stored: Any) -> None:
    """Raises UserError where a state has not the structure and the shapes of the step's.

    Args:
      state: what was given, arrays or tracers; read while a step is traced, which costs later steps nothing.
      stored: the step's own state, as `abstract_state` describes it.
    """
    if not isinstance(state, type(stored)):
        raise UserError(f"step(state, batch): state is {_kind(state)}; give the TrainState of init_state or of a step")
    check_params(state.params, stored.params)
    if problem := _difference(state.opt_state, stored.opt_state):
        raise UserError(
            f"the state was made with another optimizer than the step, or with other `frozen` parameters: {problem}; "
            "give both the same optimizer, or make the state with init_state(plan, optimizer)"
        )


def check_params(params: Any, stored: Any) -> None:
    """Raises UserError where parameters have not the structure and the shapes that the plan stores."""
    if problem := _difference(params, stored):
        raise UserError(
            f"the parameters of the state belong to another plan than the step: {problem}; move the state with "
            "reshard(state, plan), or make it with init_state(plan, optimizer) if the model is another one"
        )


def _difference(given: Any, own: Any) -> str:
    """The first difference of two trees, for a message; empty if they have one structure and equal shapes."""
    ours, theirs = (dict(_shapes(tree)) for tree in (own, given))
    if lacking := [name for name in ours if name not in theirs]:
        return f"it lacks {lacking[0]}"
    if surplus := [name for name in theirs if name not in ours]:
        return f"it has {surplus[0]}, which the step has not"
    structures: list[Any] = [jax.tree.structure(tree) for tree in (given, own)]
    if structures[0] != structures[1]:
        return "its values are nested in another way"
    for name, shape in ours.items():
        if theirs[name] != shape:
            return f"{name} is {theirs[name]}, and the step has {shape}"
    return ""


def _shapes(tree: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        yield path_name(path) or "the value", tuple(jnp.shape(x) if not hasattr(x, "shape") else x.shape)


@contextlib.contextmanager
def naming_arrays(model_name: str, batch: Mapping[str, Any]) -> Iterator[None]:
    """Turns a model's KeyError, for a name that no array of the batch has, into an error that names the arrays."""
    try:
        yield
    except KeyError as error:
        name = error.args[0] if error.args else None
        if not isinstance(name, str) or name in batch:
            raise
        raise UserError(
            f"{model_name} asks for {name!r}, and the batch has {', '.join(batch)}; give the batch an array of this "
            "name, unless the name is one of a parameter"
        ) from error


def _kind(value: Any) -> str:
    """What a value is, without its content, which may be long."""
    name = getattr(value, "__name__", None)
    if name and callable(value):
        return f"{'the class' if isinstance(value, type) else 'the function'} {name}"
    return repr(value) if isinstance(value, str | int | float | type(None)) else f"of type {type(value).__name__}"
