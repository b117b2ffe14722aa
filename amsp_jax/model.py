"""The model contract: what the engine needs to know of a model, as pure functions of parameter trees.

A model is an embedding, a tuple of blocks and a head. The engine gathers the parameters of one part,
calls it with whole parameters as on a single device, and never looks inside. A model that declares no
blocks is a head alone (`Model.from_loss`).

`params` may be any pytree: `split` says which parts of it are which. Everything is traced, so a part
must be a pure function; randomness comes from `rng`, one key per row of the microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from amsp_jax.errors import UserError

Params = Any
"""A pytree of parameter arrays."""
Batch = Mapping[str, jax.Array]
"""Arrays whose first dimension is the row: `tokens`, `targets` [rows, seq] int32, `weights` [rows, seq] float32."""
LossOutput = tuple[tuple[jax.Array, jax.Array], Any]
"""`((sum of losses, sum of weights), aux)`: sums over the rows given, never means; aux leaves are added up, too."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Along which dimension a parameter is cut between tensor ranks, and into how many units it may be cut.

    Attributes:
      dim: the dimension.
      units: numbers of equal units that its length may be seen as, heads or columns. The first that is at least the
        number of ranks is taken, and padded to a multiple of it.
      replicate: keep the parameter whole on each rank if there are more ranks than units; otherwise that is an error.
      name: of the units, for messages.
    """

    dim: int
    units: tuple[int, ...]
    replicate: bool = False
    name: str = "units"

    def num_units(self, num_ranks: int) -> int | None:
        """The units that are dealt to the ranks, before padding; None if there are too few of them."""
        return next((n for n in self.units if n >= num_ranks), None)

    def padded(self, length: int, num_ranks: int) -> int | None:
        """The length of `dim` with padding; None where the parameter is kept whole."""
        num_units = self.num_units(num_ranks)
        return None if num_units is None else -(-num_units // num_ranks) * num_ranks * (length // num_units)


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
      init: `init(key) -> params`, float32. Parts that share one `init` object share one compilation.
      apply: the mathematics on one device, with whole parameters in the compute dtype:
        embed `apply(params, batch, rng) -> x`, block `apply(params, x, batch, rng) -> x`,
        head `apply(params, embed_params, x, batch, rng) -> ((loss_sum, weight_sum), aux)`.
        Blocks that share one `apply` object, and whose parameters have equal shapes, are traced once.
      splits: a `Split` or None in place of each parameter; None altogether if the part knows no tensor parallelism.
        With it, `apply` gets each rank's piece of the split parameters and communicates by `amsp_jax.engine.tensor`.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., Any]
    splits: Params | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def from_nnx(cls, make: Callable[[nnx.Rngs], nnx.Module], call: Callable[..., Any] | None = None) -> Part:
        """Wraps a Flax NNX module whose variables are all `nnx.Param`.

        A module that knows tensor parallelism says so on each parameter: `nnx.Param(value, split=Split(...))`, or
        `split=None` for one that every rank has whole. One without it, and the part has no `splits`.

        Args:
          make: `make(rngs) -> module`.
          call: `call(module, *args)`; the module's `__call__` if None.

        Raises:
          UserError: the module holds state that is not a parameter (batch statistics, RNG counters).
        """
        pure = _PureModule.of(make)

        def apply(tree: Params, *args: Any) -> Any:
            module = pure.module(tree)
            return call(module, *args) if call else module(*args)

        return cls(pure.init, apply, pure.splits)


@dataclasses.dataclass(frozen=True, eq=False)
class _PureModule:
    """A Flax NNX module apart from its parameters.

    Attributes:
      make: makes the module from its random streams.
      graph, like: the module without values, and its abstract parameters.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    graph: Any
    like: nnx.State

    @classmethod
    def of(cls, make: Callable[[nnx.Rngs], nnx.Module]) -> _PureModule:
        """Raises UserError where the module holds state that is not a parameter."""
        abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        graph, params, others = nnx.split(abstract, nnx.Param, ...)  # type: ignore[misc]
        variables = jax.tree.leaves(others, is_leaf=lambda v: isinstance(v, nnx.Variable))
        if kinds := {type(v).__name__ for v in variables}:
            raise UserError(
                f"{type(abstract).__name__} holds variables that are not nnx.Param ({', '.join(sorted(kinds))}); a "
                "part is a pure function of its parameters. Take randomness from the `rng` argument, keep no state."
            )
        return cls(make, graph, params)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters."""
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))

    def module(self, tree: Params) -> Any:
        """The module with these parameters."""
        return nnx.merge(self.graph, _as_state(self.like, tree))

    @property
    def splits(self) -> Params | None:
        """A `Split` or None in place of each parameter; None if one says nothing of it."""
        return _splits(self.like)


def _splits(params: nnx.State) -> Params | None:
    """What the metadata of the parameters say, a pure dict; None if one says nothing."""
    variables = jax.tree.leaves(params, is_leaf=lambda v: isinstance(v, nnx.Variable))
    if not variables or not all(variable.has_metadata("split") for variable in variables):
        return None
    return nnx.to_pure_dict(params, lambda variable: variable.get_metadata("split"))


def _as_state(like: nnx.State, tree: Params) -> nnx.State:
    """The NNX state of `like` with the values of the pure dict `tree`."""
    state = jax.tree.map(lambda x: x, like)
    nnx.replace_by_pure_dict(state, tree)
    return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """The shape numbers behind FLOPs and MFU.

    Attributes:
      num_params: all parameters.
      num_matmul_params: parameters of matrix products, the head included, the embedding table not
        (a tied table counts once, as the head).
      num_layers: number of blocks.
      attention_width: num_heads x head_dim; the hidden size in plain multi-head attention.
    """

    num_params: int
    num_matmul_params: int
    num_layers: int
    attention_width: int

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs of a token without recomputation, causal attention counted once:
        6 x matmul parameters + 6 x layers x attention width x seq."""
        return 6 * self.num_matmul_params + 6 * self.num_layers * self.attention_width * seq_len

    def flops_per_token_paper(self, seq_len: int) -> int:
        """As AMSP and PaLM count: 6 N + 12 L h s, all parameters and no causal discount."""
        return 6 * self.num_params + 12 * self.num_layers * self.attention_width * seq_len


def _split_dict(params: Params) -> tuple[Params, list[Params], Params]:
    return params["embed"], list(params["blocks"]), params["head"]


def _join_dict(embed: Params, blocks: list[Params], head: Params) -> Params:
    return {"embed": embed, "blocks": blocks, "head": head}


def _nothing(key: jax.Array) -> Params:
    del key
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model as the engine sees it.

    Attributes:
      name: for messages and run folders.
      embed, blocks, head: the parts.
      tied: the head also receives the embedding's gathered parameters (else None).
      logits: `logits(head_params, embed_params, x) -> [rows, seq, vocab]`, for generation; None if it has none.
      numbers: for FLOPs; None leaves MFU out of the metrics.
      vocab_size: number of token ids that the model knows; None where its data are no tokens. Text is tokenised with at
        most as many ids.
      split, join: between the user's parameter tree and `(embed, blocks, head)`.
    """

    name: str
    head: Part
    embed: Part = Part(_nothing, lambda params, batch, rng: None)
    blocks: tuple[Part, ...] = ()
    tied: bool = False
    logits: Callable[[Params, Params | None, jax.Array], jax.Array] | None = None
    numbers: ModelNumbers | None = None
    vocab_size: int | None = None
    split: Callable[[Params], tuple[Params, list[Params], Params]] = _split_dict
    join: Callable[[Params, list[Params], Params], Params] = _join_dict

    @classmethod
    def from_loss(
        cls,
        loss: Callable[[Params, Batch, jax.Array], LossOutput],
        init: Callable[[jax.Array], Params],
        *,
        name: str = "model",
        numbers: ModelNumbers | None = None,
        vocab_size: int | None = None,
    ) -> Model:
        """A model that declares no blocks: `loss(params, batch, rng) -> ((loss_sum, weight_sum), aux)` on any pytree.

        `rng` has one key per row, made of (seed, step, row), so dropout is the same on every mesh.

        Args:
          loss: the loss function.
          init: `init(key)`, fresh parameters.
          name: for messages and run folders.
          numbers: for FLOPs.
          vocab_size: number of token ids that the model knows. Text data need it, and ids of data from Python are
            checked only where it is given: without it an id outside becomes a wrong loss, or NaN.
        """
        head = Part(init, lambda params, embed, x, batch, rng: loss(params, batch, rng))
        return cls(
            name=name, head=head, numbers=numbers, vocab_size=vocab_size, split=lambda p: ({}, [], p),
            join=lambda e, b, h: h,
        )  # fmt: skip

    @classmethod
    def from_nnx(
        cls,
        *,
        embed: Callable[..., nnx.Module],
        block: Callable[..., nnx.Module] | Sequence[Callable[..., nnx.Module]],
        head: Callable[..., nnx.Module],
        loss: Callable[[Any, Batch], LossOutput],
        num_blocks: int | None = None,
        tied: bool = False,
        name: str = "model",
        numbers: ModelNumbers | None = None,
        vocab_size: int | None = None,
    ) -> Model:
        """A model of Flax NNX modules: an embedding, blocks and a head, each a class or a function of `rngs`.

        A module's `__call__` names what it takes. The embedding takes `tokens`, or other arrays of the batch by their
        names; a block and the head take first what the module before them gives. All may take `batch`, and `rng`, one
        random key per row: `jax.vmap(lambda key, row: self.dropout(row, rngs=key))(rng, x)`. Under every strategy
        one block's parameters at a time are gathered.

        Args:
          embed, head: the first and the last module.
          block: the blocks' module, `num_blocks` times; or a list with a module for each block.
          loss: `loss(what the head gives, batch) -> ((loss_sum, weight_sum), aux)`; for tokens, `token_loss`.
          num_blocks: number of blocks.
          tied: the head's `__call__` takes `embed`, the embedding's module.
          name: for messages and run folders.
          numbers: for FLOPs.
          vocab_size: number of token ids that the model knows. Text data need it, and ids of data from Python are
            checked only where it is given: without it an id outside becomes a wrong loss, or NaN.

        Raises:
          UserError: a number of blocks that contradicts the list, or a module that holds state.

        Example:
          >>> Model.from_nnx(embed=Embed, block=Block, num_blocks=24, head=Head, loss=token_loss)
        """
        makers = _block_makers(block, num_blocks)
        first, last = _PureModule.of(_maker(embed)), _PureModule.of(_maker(head))
        parts = {make: _block_part(_PureModule.of(_maker(make))) for make in dict.fromkeys(makers)}

        def embedded(params: Params, batch: Batch, rng: jax.Array) -> Any:
            module, offered = first.module(params), {"batch": batch, "rng": rng, **batch}
            if "tokens" in batch and next(iter(inspect.signature(module.__call__).parameters), "") not in offered:
                # As nnx.Embed, which calls them `inputs`.
                return module(batch["tokens"], **_chosen(module, offered, skip=1))
            return module(**_chosen(module, offered))

        def output(head_params: Params, embed_params: Params | None, x: Any, offered: Mapping[str, Any]) -> Any:
            module = last.module(head_params)
            more = {"embed": first.module(embed_params)} if tied else {}
            return module(x, **_chosen(module, {**offered, **more}, skip=1))

        def head_loss(params: Params, embed_params: Params | None, x: Any, batch: Batch, rng: jax.Array) -> LossOutput:
            return loss(output(params, embed_params, x, {"batch": batch, "rng": rng, **batch}), batch)

        return cls(
            name=name,
            embed=Part(first.init, embedded, first.splits),
            blocks=tuple(parts[make] for make in makers),
            head=Part(last.init, head_loss, last.splits),
            tied=tied,
            logits=lambda params, embed_params, x: output(params, embed_params, x, {}),
            numbers=numbers,
            vocab_size=vocab_size,
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """Embedding, blocks, head."""
        return (self.embed, *self.blocks, self.head)

    def splits(self) -> Params | None:
        """The tree of parameters, each a `Split` or None instead; None if a part knows no tensor parallelism."""
        trees = [part.splits for part in self.parts]
        if any(tree is None for tree in trees):
            return None
        return self.join(trees[0], trees[1:-1], trees[-1])

    def block_numbers(self) -> Params:
        """The tree of parameters with the number of its block in place of each, -1 for embedding and head."""
        embed, blocks, head = self.split(self.abstract_params())

        def all_of(tree: Params, number: int) -> Params:
            return jax.tree.map(lambda _: number, tree)

        return self.join(all_of(embed, -1), [all_of(block, i) for i, block in enumerate(blocks)], all_of(head, -1))

    def abstract_params(self) -> Params:
        """The parameter tree as `jax.ShapeDtypeStruct`s, float32, on no device.

        Raises:
          UserError: a leaf is no floating-point array, or holds nothing.
        """
        key = jax.eval_shape(lambda: jax.random.key(0))
        shapes = {init: jax.eval_shape(init, key) for init in {part.init for part in self.parts}}
        tree = self.join(shapes[self.embed.init], [shapes[block.init] for block in self.blocks], shapes[self.head.init])
        return jax.tree_util.tree_map_with_path(_float32, tree)


def token_loss(logits: jax.Array, batch: Batch) -> LossOutput:
    """Cross-entropy of logits [rows, seq, vocab] and `targets`, summed with `weights`, in float32.

    In a batch without `weights` every token has the weight 1.
    """
    logits = logits.astype(jnp.float32)
    right = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - right
    weights = batch["weights"] if "weights" in batch else jnp.ones_like(losses)
    return (jnp.sum(losses * weights), jnp.sum(weights)), {}


def _maker(make: Callable[..., nnx.Module]) -> Callable[[nnx.Rngs], nnx.Module]:
    """`make(rngs)`, also of a class that takes `rngs` by name alone, as those of Flax do."""
    function: Any = make
    while isinstance(function, functools.partial):
        function = function.func
    # The signature of an NNX class is that of its metaclass, which takes anything.
    function = function.__init__ if inspect.isclass(function) else function
    parameter = inspect.signature(function).parameters.get("rngs")
    is_named = parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    return (lambda rngs: make(rngs=rngs)) if is_named else make


def _block_makers(
    block: Callable[..., nnx.Module] | Sequence[Callable[..., nnx.Module]], num_blocks: int | None
) -> list[Callable[..., nnx.Module]]:
    if not callable(block):
        if num_blocks not in (None, len(block)):
            raise UserError(f"num_blocks={num_blocks} beside a list of {len(block)} blocks; leave num_blocks out")
        return list(block)
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 0:
        raise UserError(f"num_blocks={num_blocks!r}: with one module for all blocks it must be a number of them")
    return [block] * num_blocks


def _block_part(pure: _PureModule) -> Part:
    def apply(params: Params, x: Any, batch: Batch, rng: jax.Array) -> Any:
        module = pure.module(params)
        return module(x, **_chosen(module, {"batch": batch, "rng": rng, **batch}, skip=1))

    return Part(pure.init, apply, pure.splits)


def _chosen(module: Any, offered: Mapping[str, Any], skip: int = 0) -> dict[str, Any]:
    """Of what is offered, the arguments that the module's `__call__` names; the first `skip` are given otherwise.

    Raises:
      UserError: it needs what is not offered.
    """
    chosen = {}
    for parameter in list(inspect.signature(module.__call__).parameters.values())[skip:]:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.name in offered:
            chosen[parameter.name] = offered[parameter.name]
        elif parameter.default is inspect.Parameter.empty:
            raise UserError(
                f"{type(module).__name__}.__call__ takes {parameter.name!r}, but what it can take here is "
                f"{', '.join(sorted(offered)) or 'nothing more'}{_TIED_HINT if parameter.name == 'embed' else ''}"
            )
    return chosen


_TIED_HINT = "; a head that uses the embedding needs tied=True"


def _float32(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise UserError(
            f"parameter {jax.tree_util.keystr(path)} is {leaf.dtype}; parameters are trained, so they are "
            "floating-point. Keep integers and tables in the model's code"
        )
    if 0 in leaf.shape:
        raise UserError(
            f"parameter {jax.tree_util.keystr(path)} has shape {leaf.shape} and holds nothing; leave it out of the tree"
        )
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
