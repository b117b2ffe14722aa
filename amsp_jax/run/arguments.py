"""Checks of the objects that Python gives a `Trainer`: model, optimizer and hooks, which are no settings."""

from __future__ import annotations

from typing import Any

import optax
from flax import nnx

from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.run.hooks import Hook


def require_model(model: Any) -> None:
    """Raises UserError where this is no `Model`; the message names the call that makes one."""
    if isinstance(model, Model):
        return
    if isinstance(model, nnx.Module | type):
        advice = (
            ": amsp_jax.Model.from_nnx(embed=..., block=..., num_blocks=..., head=..., loss=...) makes one of Flax NNX "
            "modules, amsp_jax.Model.from_loss(loss, init) of any loss function"
        )
    elif callable(model):
        advice = ": amsp_jax.Model.from_loss(loss, init) makes one of a loss function"
    else:
        advice = ", as amsp_jax.Model.from_loss, amsp_jax.Model.from_nnx or amsp_jax.build_model('llama-tiny') make it"
    raise UserError(f"model={_named(model)} is {_kind(model)}; give a Model{advice}")


def require_optimizer(optimizer: Any) -> None:
    """Raises UserError where this is neither an optax transform, nor a name, nor None."""
    if optimizer is None or isinstance(optimizer, str):
        return
    if all(callable(getattr(optimizer, method, None)) for method in ("init", "update")):
        return
    if callable(optimizer):
        name = _named(optimizer)
        raise UserError(f"optimizer={name} is {_kind(optimizer)}, no optimizer yet; call it: {name}(3e-4)")
    raise UserError(
        f"optimizer={_named(optimizer)} is {_kind(optimizer)} without init and update; give an optax transform, such "
        "as optax.adamw(3e-4), or a name, such as 'adamw'"
    )


def checked_hooks(argument: str, hooks: Any) -> tuple[Hook, ...]:
    """The hooks of this argument.

    Raises:
      UserError: it is no sequence, or one of its members is no `Hook`; the message says how to write what was meant.
    """
    if isinstance(hooks, Hook):
        raise UserError(f"{argument}={_named(hooks)} is one hook; give a list: {argument}=[{_named(hooks)}]")
    if isinstance(hooks, str | bytes | dict) or not hasattr(hooks, "__iter__") or isinstance(hooks, type):
        raise UserError(f"{argument}={_named(hooks)} is {_kind(hooks)}, but it must be a list of hooks{_meant(hooks)}")
    found = tuple(hooks)
    for number, hook in enumerate(found):
        if not isinstance(hook, Hook):
            raise UserError(
                f"{argument}[{number}]={_named(hook)} is {_kind(hook)}, but it must be a hook{_meant(hook)}"
            )
    return found


def _meant(hook: Any) -> str:
    """The next step of a person who gave this in place of a hook."""
    if isinstance(hook, type) and issubclass(hook, Hook):
        return f"; make one of the class: {hook.__name__}()"
    every = f"amsp_jax.hooks.every(n, {_named(hook) if callable(hook) else 'function'})"
    return f"; {every} calls a function(run, metrics) every n steps, and other hooks are of a subclass of Hook"


def _named(value: Any) -> str:
    """The name of a function or class, as the person wrote it; a short text of anything else."""
    name = getattr(value, "__name__", None)
    if isinstance(name, str):
        return f"optax.{name}" if getattr(optax, name, None) is value else name
    try:
        text = " ".join(repr(value).split())
    # An object of anyone's, and its `__repr__` may be at fault.
    except Exception:
        text = type(value).__name__
    return text if len(text) <= 80 else f"{type(value).__name__}(...)"


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return "a class"
    name = type(value).__name__
    if name in ("function", "builtin_function_or_method", "method"):
        return "a function"
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
