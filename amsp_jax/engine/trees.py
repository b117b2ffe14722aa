"""Types of the trees that the step works on, so that mypy tells a tree of plans from one of shards or sinks.

A tree has the structure of the model's parameters, or of one part of them. A leaf that gets no gradient has None in
its place in trees of sinks and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NewType, TypeVar, overload

import jax

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class Tree(Generic[T_co]):
    """A pytree with leaves of one type. Only for annotations: at run time it is the user's dict, list or dataclass."""


Master = NewType("Master", jax.Array)
"""The float32 OS shard of a parameter, which the optimizer updates."""
ParamShard = NewType("ParamShard", jax.Array)
"""The P shard of a parameter, kept for one step."""
Param = NewType("Param", jax.Array)
"""A parameter as the model sees it: gathered, in the compute dtype."""
Sink = NewType("Sink", jax.Array)
"""Float32 zeros of a gradient shard's shape; the cotangent of a sink is the reduced gradient."""
Grad = NewType("Grad", jax.Array)
"""The gradient of a gathered parameter."""
GradShard = NewType("GradShard", jax.Array)
"""The float32 G shard of a gradient, summed over the param and grad axes."""
OptGrad = NewType("OptGrad", jax.Array)
"""The float32 OS shard of a gradient, summed over all axes."""


@overload
def tree_map(function: Callable[[A], R], first: Tree[A], /) -> Tree[R]: ...
@overload
def tree_map(function: Callable[[A, B], R], first: Tree[A], second: Tree[B], /) -> Tree[R]: ...
@overload
def tree_map(function: Callable[[A, B, C], R], first: Tree[A], second: Tree[B], third: Tree[C], /) -> Tree[R]: ...
@overload
def tree_map(
    function: Callable[[A, B, C, D], R], first: Tree[A], second: Tree[B], third: Tree[C], fourth: Tree[D], /
) -> Tree[R]: ...
def tree_map(function: Callable[..., Any], first: Any, /, *others: Any) -> Any:
    """`jax.tree.map` with types. Where the first tree has a leaf, the others may have None."""
    return jax.tree.map(function, first, *others)
