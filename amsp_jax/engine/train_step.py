"""The training step of every strategy, and evaluation, which gathers as it does.

The algorithm is in docs/design/architecture.md; `collectives` holds its communication, `stack` the loop over blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from amsp_jax.engine.blocks import Gather, Remat, policy, run_blocks, together
from amsp_jax.engine.collectives import Reduction, param_shard, reduce_accumulated
from amsp_jax.engine.context import zigzag, zigzag_inverse
from amsp_jax.engine.microbatch_groups import Group, check_group, group_grads
from amsp_jax.engine.optimizer import num_updates, to_storage, to_true
from amsp_jax.engine.parallel import CONTEXT, STAGE
from amsp_jax.engine.pipeline import make_pipeline
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.engine.plan import LeafPlan, Plan
from amsp_jax.engine.state import TrainState, abstract_state, true_state
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, LossOutput, Model, Params, Part


@flax.struct.dataclass
class LossSums:
    """Sums over the global batch: of the loss, of the weights, and of each leaf of the model's aux."""

    loss: jax.Array
    weight: jax.Array
    aux: Any


@flax.struct.dataclass
class StepMetrics:
    """Global values of one step, equal on every device.

    Attributes:
      loss: mean over the valid tokens of the global batch.
      grad_norm: 2-norm of the mean gradient, before clipping.
      num_tokens: sum of the weights of the global batch.
      is_finite: whether loss and gradient norm are, and so whether the update was applied.
      num_updates: int32, updates applied before this step: which entry of the learning rates it used.
      aux: the model's, summed.
    """

    loss: jax.Array
    grad_norm: jax.Array
    num_tokens: jax.Array
    is_finite: jax.Array
    num_updates: jax.Array
    aux: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step computes.

    Attributes:
      reduce_dtype: in which gradients are summed across devices, and travel.
      inter_node_dtype: in which they travel between nodes, where they are sharded over them; None: `reduce_dtype`.
      remat: what blocks keep for the backward pass.
      peel_first, peel_last: run the first and the last microbatch outside the loop, so that the gathers and the
        reductions of once a step overlap them; without effect where there are none, and where there are stages.
      pipeline_schedule: order of the pipeline's work, `1f1b` or `gpipe`, where the plan has stages.
      virtual_stages: parts of the model that a stage has; more than one interleaves them.
      microbatch_group: microbatches that go through each block before the next block, where there are no stages; it
        divides the microbatches of a step.

    Raises:
      UserError: another `remat`, a number that is not whole; what depends on the batch shows when a step is traced.
    """

    reduce_dtype: Any = jnp.float32
    inter_node_dtype: Any = None
    remat: Remat = Remat.PROJECTIONS
    peel_first: bool = True
    peel_last: bool = True
    pipeline_schedule: str = "1f1b"
    virtual_stages: int = 1
    microbatch_group: int = 1

    def __post_init__(self) -> None:
        if self.remat not in list(Remat):
            raise UserError(f"remat={self.remat!r}: it must be one of {', '.join(Remat)}")
        object.__setattr__(self, "remat", Remat(self.remat))
        for name in ("virtual_stages", "microbatch_group"):
            if not isinstance(value := getattr(self, name), int):
                raise UserError(f"{name}={value!r}: it must be a whole number")

    @property
    def reduction(self) -> Reduction:
        """How gradients are summed.

        Raises:
          UserError: one of the dtypes is none of floating point, or `inter_node_dtype` wider than `reduce_dtype`.
        """
        return Reduction.of(self.reduce_dtype, self.inter_node_dtype)


DEFAULT = StepSettings()
"""Settings of a step for which nothing else is asked."""
GradFn = Callable[[Params, Batch, Any, Any], tuple[LossSums, Params]]


def make_train_step(
    plan: Plan, optimizer: optax.GradientTransformation, settings: StepSettings = DEFAULT
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The jitted training step `(state, batch) -> (state, metrics)`; the state is donated.

    Args:
      plan: of the model.
      optimizer: any optax transform, the one of the state.
      settings: how the step computes.

    Returns:
      A function whose batch is a dict of arrays [microbatches, rows, ...] at `plan.batch_sharding` and whose state
      keeps its shardings. It compiles once for each shape of batch. Where loss or gradient norm is not finite, the
      batch is passed over: `state.step` counts it, parameters and optimizer state keep their bits.
    """
    grads_of, update = make_grad_fn(plan, settings), make_update_fn(plan, optimizer)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        sums, grads = grads_of(state.params, batch, state.seed, state.step)
        return update(state, grads, sums)

    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(plan, optimizer))
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, plan.replicated))


def make_update_fn(
    plan: Plan, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Params, LossSums], tuple[TrainState, StepMetrics]]:
    """`(state, summed gradients, sums) -> (state, metrics)`: the mean gradient, and optax on leaves of true shape."""
    true, stored = true_state(plan, optimizer), abstract_state(plan, optimizer)

    def update(state: TrainState, grads: Params, sums: LossSums) -> tuple[TrainState, StepMetrics]:
        scale = mean_scale(sums.weight)
        grads = jax.tree.map(lambda g: g * scale, to_true(grads, true.params))
        params = to_true(state.params, true.params)
        with jax.numpy_dtype_promotion("standard"):
            norm = optax.tree.norm(grads)
            updates, opt_state = optimizer.update(grads, to_true(state.opt_state, true.opt_state), params)
            params = optax.apply_updates(params, updates)
        metrics = StepMetrics(
            loss=sums.loss * scale,
            grad_norm=norm,
            num_tokens=sums.weight,
            is_finite=jnp.isfinite(sums.loss * scale) & jnp.isfinite(norm),
            num_updates=num_updates(state.opt_state, state.step),
            aux=sums.aux,
        )
        applied = to_storage(params, stored.params), to_storage(opt_state, stored.opt_state)
        kept = _select(metrics.is_finite, applied, (state.params, state.opt_state))
        return TrainState(step=state.step + 1, seed=state.seed, params=kept[0], opt_state=kept[1]), metrics

    return update


def mean_scale(weight: jax.Array) -> jax.Array:
    """From a sum over the global batch to the mean; without a valid token a gradient is zero, not 0/0."""
    return jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)


def _select(is_finite: jax.Array, applied: Any, before: Any) -> Any:
    """`applied` where loss and gradient norm are finite, `before` where not.

    A finite norm vouches for every value and its square, which is what second moments are made of; finite gradients
    whose norm overflows float32 would leave infinities in them, so they count as not finite.

    `where` and not `cond`: XLA on GPUs copies the predicate of a `cond` to the host and waits for it. The select is
    fused into the update, which reads and writes the same buffers anyway: compiled for H100, the step has no more
    kernels than without it, and its temporaries are the same within 256 bytes. The predicate comes of global sums, so
    it is equal on every device.
    """
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), applied, before)


def make_grad_fn(plan: Plan, settings: StepSettings = DEFAULT) -> GradFn:
    """`(params, batch, seed, step) -> (sums, gradients of the summed loss at the OS sharding)`.

    `params` are the stored master; batch as in `make_train_step`; sums are global. To be called under `jit`.
    """
    model = _summing_in_float32(plan.model)

    def stage(params: Params, batch: Batch, rows: jax.Array, seed: Any, step: Any) -> tuple[LossSums, Params]:
        schedule = PipelineSchedule(
            settings.pipeline_schedule, plan.parallel.pipeline, settings.virtual_stages, len(rows)
        )
        pipeline = make_pipeline(model, plan.leaves, schedule, _gather_tree(plan, settings), settings.remat)
        shards = pipeline.param_shards(params, plan.compute_dtype)
        outputs, grads = pipeline.grads(shards, (batch, rows), lambda rows: row_keys(seed, step, rows))
        sums = lax.psum(_as_sums(outputs), STAGE)
        return _global_sums(plan, sums), pipeline.reduce(grads, settings.reduction)

    def local(params: Params, batch: Batch, rows: jax.Array, seed: Any, step: Any) -> tuple[LossSums, Params]:
        microbatches = _Microbatches(model, plan, settings, seed, step)
        sums, grads = _accumulate(
            microbatches, _in_groups(settings.microbatch_group, (batch, rows)), params, unknown_zero(step)
        )
        return _global_sums(plan, sums), grads

    def grads_of(params: Params, batch: Batch, seed: Any, step: Any) -> tuple[LossSums, Params]:
        specs = jax.tree.map(lambda leaf: leaf.opt_spec, plan.leaves)
        in_specs = specs, plan.batch_spec, plan.rows_spec, P(), P()
        whole = stage if plan.parallel.pipeline > 1 else local
        mapped = jax.shard_map(whole, mesh=plan.mesh, in_specs=in_specs, out_specs=(P(), specs), check_vma=False)
        batch = in_context_order(plan, batch)
        rows = _row_numbers(batch)
        check_group(settings.microbatch_group, len(rows), plan.parallel.pipeline)
        PipelineSchedule(settings.pipeline_schedule, plan.parallel.pipeline, settings.virtual_stages, len(rows))
        return mapped(params, batch, rows, jnp.asarray(seed), jnp.asarray(step))

    return grads_of


def _summing_in_float32(model: Model) -> Model:
    """The model with sums of losses and weights in float32, in which they are added up over microbatches and ranks:
    bfloat16 stands still at 256 tokens that are added one by one."""

    def apply(*args: Any) -> LossOutput:
        output = model.head.apply(*args)
        try:
            (total, weight), aux = output
        except (TypeError, ValueError):
            raise _not_sums(output) from None
        if jnp.shape(total) or jnp.shape(weight):
            raise _not_sums(output)
        return (jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32)), aux

    return dataclasses.replace(model, head=dataclasses.replace(model.head, apply=apply))


def _not_sums(output: Any) -> UserError:
    return UserError(
        f"the model's loss gave arrays of shapes {jax.tree.map(jnp.shape, output)}; it returns ((sum of losses, sum of "
        "weights), aux), of all rows and tokens that it gets, each sum one number, and aux {} where there is none"
    )


def in_context_order(plan: Plan, batch: Batch) -> Batch:
    """Arrays [microbatches, rows, seq] with the sequence in the order in which `context` ranks share it."""
    num_ranks = plan.parallel.context
    if num_ranks == 1:
        return batch
    return {name: x[:, :, zigzag(x.shape[2], num_ranks)] for name, x in batch.items()}


def _in_groups(size: int, data: Any) -> Any:
    """Arrays [microbatches, ...] as [groups, size, ...]; groups of one are the microbatches."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), data) if size > 1 else data


def _row_numbers(batch: Batch) -> jax.Array:
    """[microbatches, rows] int32: the number of each row in the global batch."""
    shapes = {name: jnp.shape(x) for name, x in batch.items()}
    shape = next((shape[:2] for shape in shapes.values()), ())
    if len(shape) != 2 or 0 in shape or any(each[:2] != shape for each in shapes.values()):
        told = ", ".join(f"{name} {each}" for name, each in shapes.items()) or "no arrays"
        raise UserError(f"a batch of {told}: its arrays are [microbatches, rows, ...], with equal numbers of both")
    return jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)


def row_keys(seed: Any, step: Any, rows: jax.Array) -> jax.Array:
    """One PRNG key per row of the global batch: a function of (seed, step, row), so the same on every mesh."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def _param_shards(plan: Plan, params: Params) -> Params:
    return jax.tree.map(lambda leaf, x: param_shard(leaf, x, plan.compute_dtype), plan.leaves, params)


@dataclasses.dataclass(frozen=True)
class _Microbatches:
    """What a step does with one microbatch `data`, its batch and the numbers of its rows; or with a group of them."""

    model: Model
    plan: Plan
    settings: StepSettings
    seed: Any
    step: Any

    def peels(self) -> tuple[bool, bool]:
        """Whether the first and the last are outside the loop."""
        once = bool(self.plan.axes.grad or self.plan.axes.opt or self.plan.axes.replica)
        return once and self.settings.peel_first, once and self.settings.peel_last

    def first_grads(self, params: Params, data: Any, is_last: bool) -> tuple[LossSums, Params, Params]:
        """Those of the first microbatch, from the master's shards, as `last_grads` if it is the last; and P shards."""
        if self.settings.microbatch_group > 1:
            return self._group_grads(params, None, data, is_first=True, is_last=is_last)
        shards = _param_shards(self.plan, params)
        return *(self.last_grads(shards, None, data) if is_last else self.grads(shards, data)), shards

    def grads(self, shards: Params, data: Any) -> tuple[LossSums, Params]:
        """Local sums and float32 G shards."""
        if self.settings.microbatch_group > 1:
            return self._group_grads(shards, None, data, is_first=False, is_last=False)[:2]
        return self._grads(_gather_tree(self.plan, self.settings), shards, data)

    def last_grads(self, shards: Params, total: Params | None, data: Any) -> tuple[LossSums, Params]:
        """Local sums, and the OS shards of the sum of the microbatches before and this one."""
        if self.settings.microbatch_group > 1:
            return self._group_grads(shards, total, data, is_first=False, is_last=True)[:2]
        leaves = self.plan.leaves
        pairs = jax.tree.map(lambda _, w, *t: (w, t[0] if t else None), leaves, shards, *([total] if total else []))
        return self._grads(_gather_tree(self.plan, self.settings, is_last=True), pairs, data)

    def reduced(self, total: Params) -> Params:
        """The OS shards of the sum of all, with nothing beside the reductions."""
        reduction = self.settings.reduction
        return jax.tree.map(lambda leaf, g: reduce_accumulated(leaf, g, reduction), self.plan.leaves, total)

    def _group_grads(
        self, shards: Params, totals: Params | None, data: Any, is_first: bool, is_last: bool
    ) -> tuple[LossSums, Params, Params]:
        batch, rows = data
        keys = jax.vmap(lambda rows: row_keys(self.seed, self.step, rows))(rows)
        blocks = range(1, len(self.model.blocks) + 1)
        part_keys = [keys, *(jax.vmap(lambda k, i=i: _block_keys(k, i))(keys) for i in blocks), keys]
        dtype, settings = self.plan.compute_dtype, self.settings
        group = Group(dtype, settings.reduction, settings.remat, is_first, is_last)
        leaves, zero = self.plan.leaves, unknown_zero(self.step)
        sums, grads, shards = group_grads(self.model, leaves, group, shards, totals, batch, part_keys, zero)
        return _as_sums(sums), grads, shards

    def _grads(self, gather_tree: Gather, shards: Params, data: Any) -> tuple[LossSums, Params]:
        batch, rows = data
        keys = row_keys(self.seed, self.step, rows)

        def loss(sinks: Params) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            remat = self.settings.remat
            (total, weight), aux = _apply(self.model, self.plan, gather_tree, remat, shards, sinks, batch, keys)
            return total, (weight, aux)

        sinks = jax.tree.map(lambda leaf: _sink(leaf, gather_tree.is_last), self.plan.leaves)
        (total, (weight, aux)), gradient = jax.value_and_grad(loss, has_aux=True)(sinks)
        return _as_sums(((total, weight), aux)), gradient


def unknown_zero(step: Any) -> jax.Array:
    """0, which XLA does not know to be one."""
    return jnp.minimum(step, 0)


def _sink(leaf: LeafPlan, is_last: bool) -> jax.Array:
    axes = leaf.param_axes + leaf.grad_axes + (leaf.opt_axes if is_last else ())
    return jnp.zeros(leaf.shard_shape(axes), jnp.float32)


def _gather_tree(plan: Plan, settings: StepSettings, is_last: bool = False) -> Gather:
    return Gather(plan.compute_dtype, settings.reduction, is_last)


def _as_sums(output: LossOutput) -> LossSums:
    (loss, weight), aux = output
    return LossSums(loss=loss, weight=weight, aux=aux)


def _apply(
    model: Model, plan: Plan, gather_tree: Gather, remat: Remat, shards: Params, sinks: Params, batch: Batch, keys: Any
) -> LossOutput:
    """The model on one microbatch: each part's parameters gathered where it is used."""
    (embed_l, blocks_l, head_l), (embed_w, blocks_w, head_w), (embed_s, blocks_s, head_s) = map(
        model.split, (plan.leaves, shards, sinks)
    )
    embed = gather_tree(embed_l, embed_w, embed_s)
    x = model.embed.apply(embed, batch, keys)
    block_keys = [_block_keys(keys, i) for i in range(1, len(model.blocks) + 1)]
    x = run_blocks(model.blocks, blocks_l, gather_tree, remat, blocks_w, blocks_s, x, batch, block_keys)
    head = _head_of(model, gather_tree, remat, head_l)
    return head(head_s, head_w, embed if model.tied else None, x, batch, keys)


def _block_keys(keys: jax.Array, number: int) -> jax.Array:
    """Of each row; blocks count from 1."""
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def _head_of(model: Model, gather_tree: Gather, remat: Remat, leaves: Params) -> Callable[..., LossOutput]:
    # The blocks' backward gathers, where there are any, are not to wait for the head's matrix gradient.
    has_gathers = any(leaf.param_axes for leaf in jax.tree.leaves(leaves))

    def head(sinks: Params, shards: Params, embed: Params | None, x: Any, batch: Batch, keys: Any) -> LossOutput:
        params = gather_tree(leaves, shards, sinks)
        if not has_gathers:
            x, params = together(x, params)
        return model.head.apply(params, embed, x, batch, keys)

    if model.blocks:
        return head
    # The whole model: it must not keep its gathered parameters, and the names of projections mean nothing in it.
    return jax.checkpoint(head, policy=policy(Remat.FULL if remat is Remat.FULL else Remat.NONE), prevent_cse=False)


def _accumulate(microbatches: _Microbatches, data: Any, params: Params, zero: jax.Array) -> tuple[LossSums, Params]:
    """Local sums and the OS shards of the summed gradient, over the leading dimension of `data`.

    `params` are the master's shards.

    The barriers keep XLA from hoisting the parameter gathers out of the loop, from merging those of different
    microbatches (whole parameters would stay alive), and from starting the last microbatch before the loop.

    `zero` is 0, which XLA must not know: a slice whose place it computes from the loop's counter becomes an
    asynchronous copy on GPUs, with which a run on one H200 (jax 0.11.2) failed in its first step.
    """
    count = jax.tree.leaves(data)[0].shape[0]

    def run(shards: Params, item: Any) -> tuple[LossSums, Params]:
        return microbatches.grads(*lax.optimization_barrier((shards, item)))

    def body(_: Any, carry: Any) -> Any:
        total, i = carry
        return _add(total, run(shards, item(i))), i + 1

    def loop(start: int, stop: int, total: Any) -> Any:
        return lax.fori_loop(start, stop, body, (total, start + zero))[0]

    def item(i: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), data)

    peels_first, peels_last = microbatches.peels()
    if count == 1:
        return microbatches.first_grads(params, item(0), is_last=True)[:2]
    stop = count - 1 if peels_last else count
    if peels_first:
        # Without a barrier: the first microbatch may start on the blocks whose once-a-step gathers have arrived.
        *first, shards = microbatches.first_grads(params, item(0), is_last=False)
        total, start = tuple(first), 1
    else:
        shards = _param_shards(microbatches.plan, params)
        shapes = jax.eval_shape(run, shards, item(0))
        total, start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), 0
    if stop - start == 1:
        # A loop of one trip is inlined. XLA would begin it beside the first microbatch, whose activations are still
        # there, and would add the two gradients before it reduces them, both whole.
        total, shards = lax.optimization_barrier((total, shards))
    if stop > start:
        total = loop(start, stop, total)
    if not peels_last:
        return total[0], microbatches.reduced(total[1])
    (sums, grads), late_shards, last = lax.optimization_barrier((total, shards, item(count - 1)))
    last_sums, grads = microbatches.last_grads(late_shards, grads, last)
    return _add(sums, last_sums), grads


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _global_sums(plan: Plan, sums: LossSums) -> LossSums:
    """Over the data ranks and the parts of a sequence; tensor ranks and stages have equal sums."""
    axes = plan.axes.all + ((CONTEXT,) if plan.parallel.context > 1 else ())
    return jax.tree.map(lambda x: lax.psum(x, axes), sums) if axes else sums


def make_eval_step(plan: Plan, settings: StepSettings = DEFAULT) -> Callable[[Params, Batch], LossSums]:
    """The jitted `(params, batch) -> global sums`, the batch as in `make_train_step`; keys are those of step 0."""
    model = _summing_in_float32(plan.model)

    def local(params: Params, batch: Batch, rows: jax.Array) -> LossSums:
        sums = _as_sums(_forward(model, plan, settings, params, batch, rows))
        return _global_sums(plan, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums))

    return _mapped(plan, local, P())


def make_logits_step(plan: Plan, settings: StepSettings = DEFAULT) -> Callable[[Params, Batch], jax.Array]:
    """The jitted `(params, batch) -> logits [microbatches, rows, seq, vocab]`, rows sharded as the batch's.

    Only for a model with `logits`.
    """
    model, logits = plan.model, plan.model.logits
    assert logits is not None, f"{model.name} has no logits"
    head = Part(model.head.init, lambda params, embed, x, batch, rng: logits(params, embed, x))
    speaking = dataclasses.replace(model, head=head)

    def local(params: Params, batch: Batch, rows: jax.Array) -> jax.Array:
        return _forward(speaking, plan, settings, params, batch, rows)

    def in_order(logits: jax.Array) -> jax.Array:
        num_ranks = plan.parallel.context
        return logits if num_ranks == 1 else logits[:, :, zigzag_inverse(logits.shape[2], num_ranks)]

    return _mapped(plan, local, plan.batch_spec, in_order)


def _forward(model: Model, plan: Plan, settings: StepSettings, params: Params, batch: Batch, rows: jax.Array) -> Any:
    """What the head gives for each microbatch, [microbatches, ...], from the OS shards; keys are those of step 0."""
    gather_tree = _gather_tree(plan, settings)
    if plan.parallel.pipeline > 1:
        schedule = PipelineSchedule("gpipe", plan.parallel.pipeline, 1, plan.parallel.pipeline)
        pipeline = make_pipeline(model, plan.leaves, schedule, gather_tree, settings.remat)
        shards = pipeline.param_shards(params, plan.compute_dtype)
        return pipeline.forward(shards, (batch, rows), lambda rows: row_keys(0, 0, rows))
    shards = _param_shards(plan, params)
    # Sinks are never read here, so they may be empty scalars.
    sinks = jax.tree.map(lambda leaf: jnp.float32(0), plan.leaves)

    def one(item: Any) -> Any:
        batch, rows = item
        return _apply(model, plan, gather_tree, settings.remat, shards, sinks, batch, row_keys(0, 0, rows))

    return lax.map(one, (batch, rows))


def _unchanged(x: Any) -> Any:
    return x


def _mapped(
    plan: Plan, local: Callable[..., Any], out_specs: Any, finish: Callable[[Any], Any] = _unchanged
) -> Callable[[Params, Batch], Any]:
    def call(params: Params, batch: Batch) -> Any:
        specs = jax.tree.map(lambda leaf: leaf.opt_spec, plan.leaves)
        in_specs = specs, plan.batch_spec, plan.rows_spec
        mapped = jax.shard_map(local, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        batch = in_context_order(plan, batch)
        return finish(mapped(params, batch, _row_numbers(batch)))

    return jax.jit(call)
