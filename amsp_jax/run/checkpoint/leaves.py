"""The leaves of a state by their names, and the two kinds that a file cannot hold as they are.

An array without elements has nothing to store. A typed random key is stored as the integers it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from amsp_jax.errors import UserError

Shapes = Mapping[str, Sequence[int]]
"""The true shape of each leaf, without padding, by its path (`leaf_paths`)."""

Leaves = dict[str, Any]
"""Arrays or `jax.ShapeDtypeStruct`s by their paths."""


class Kind(NamedTuple):
    """What must agree between a saved leaf and a wanted one."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def leaf_paths(tree: Any) -> list[str]:
    """The name of every leaf in the order of `jax.tree.leaves`: `params/blocks/0/mlp/up`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def by_path(tree: Any) -> Leaves:
    """Every leaf by its name.

    Raises:
      UserError: two leaves have one name.
    """
    paths = leaf_paths(tree)
    twice = sorted({path for path in paths if paths.count(path) > 1}) if len(set(paths)) < len(paths) else []
    if twice:
        raise UserError(
            f"two leaves of the state are both named {some(twice)}. Use keys without '/' in parameter trees."
        )
    return dict(zip(paths, jax.tree.leaves(tree), strict=True))


def part_of(path: str) -> str:
    """The part of the state that a leaf belongs to: its name at the top."""
    return path.split("/", 1)[0]


def some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_stored(leaves: Leaves) -> Leaves:
    """The arrays to write."""
    return {path: jax.random.key_data(x) if is_key(x) else x for path, x in leaves.items() if x.size}


def stored_struct(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What is read for a leaf: for a key its integers, in one more dimension that is not sharded."""
    if not is_key(leaf):
        return leaf
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def from_stored(path: str, leaf: jax.ShapeDtypeStruct, stored: Leaves) -> jax.Array:
    """The leaf again, from what was read."""
    if leaf.size == 0:
        return _empty(leaf)
    return _to_key(leaf, stored[path]) if is_key(leaf) else stored[path]


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements, on every device of its sharding."""
    if is_key(leaf):
        return _to_key(leaf, _empty(stored_struct(leaf)))
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def _to_key(leaf: jax.ShapeDtypeStruct, data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=_impl(leaf))


def _impl(leaf: jax.ShapeDtypeStruct) -> Any:
    """The generator that a key's dtype stands for: asked of a traced key, as there is no array yet."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]
