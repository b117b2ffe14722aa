"""Whole models cut between tensor and context ranks by hand, against one device; the operators' collectives."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cut_models import (
    CASES,
    GPT,
    LLAMA,
    SEQ_LEN,
    Cut,
    assert_near,
    draw,
    loss_and_grads,
    make,
    make_batch,
    make_mesh,
    mapped_grads,
    parallel,
)
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from amsp_jax.compile.hlo import collectives
from amsp_jax.engine import context, tensor
from amsp_jax.model import Part, Split
from amsp_jax.models import gpt, llama

QUICK = ["llama, t=4", "llama, t=2, 3 KV heads", "llama, t=4, 5 words", "gpt, t=2", "gpt, c=4", "llama, c=2, t=4"]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_cut_model_equals_one_device(case):
    config, sizes = CASES[case]
    model, batch = make(config), make_batch(config.vocab_size)
    params = draw(model)
    expected = jax.jit(lambda p, b: loss_and_grads(model, p, b))(params, batch)
    assert_near(parallel(model, params, batch, sizes), expected)


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_dtypes_of_a_cut_model(config):
    """In the compute dtype, with float32 sums; strict promotion lets nothing else pass."""
    model, sizes = make(config), {"context": 2, "tensor": 4}
    params, cut = draw(model), Cut(model.splits(), 4)
    stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), cut.stored(params))
    (total, (weight, logits)), grads = jax.eval_shape(
        mapped_grads(model, cut, params, sizes), stored, make_batch(config.vocab_size)
    )
    assert (total.dtype, weight.dtype, logits.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(lambda x: (x.shape, x.dtype), stored)


# --- collectives of a compiled block


def block_text(config, num_tensor, policy=None):
    """The compiled forward and backward pass of one block, and its arguments' shapes."""
    model = make(config)
    part = model.blocks[0]
    params = model.split(model.abstract_params())[1][0]
    cut = Cut(part.splits, num_tensor)
    specs = cut.specs(params)
    apply = jax.checkpoint(part.apply, policy=policy) if policy else part.apply

    def local(params, x):
        return jax.grad(lambda p, x: jnp.sum(jnp.square(apply(p, x, {}, None))), argnums=(0, 1))(params, x)

    data = P(None, "tensor")
    mapped = jax.shard_map(
        local, mesh=make_mesh(tensor=num_tensor), in_specs=(specs, data), out_specs=(specs, data), check_vma=False
    )
    stored = jax.eval_shape(lambda: cut.stored(jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)))
    x = jax.ShapeDtypeStruct((2, SEQ_LEN, config.hidden), jnp.float32)
    return jax.jit(mapped).lower(stored, x).compile().as_text()


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable], ids=["plain", "all-saved"])
def test_a_layer_gathers_four_times_and_reduces_four_times(config, policy):
    found = collectives(block_text(config, 4, policy))
    rows, hidden = 2, config.hidden
    assert Counter((c.kind, c.shape) for c in found) == {
        ("all-gather", (rows, SEQ_LEN, hidden)): 4,
        ("reduce-scatter", (rows, SEQ_LEN // 4, hidden)): 4,
    }


# --- operators


def test_without_the_axis_operators_are_the_identity():
    def all_of(x):
        x = tensor.gather(tensor.local_sequence(tensor.leave(tensor.enter(x)), 1), 2)
        return tensor.maximum(tensor.total(x)), tensor.rank() + context.rank() + context.positions(4)

    def jaxprs():
        x = jnp.ones((2, 4, 4))
        yield jax.make_jaxpr(all_of)(x)
        for manual in ({"data"}, {"data", "tensor"}):
            # Not manual over `tensor`, or an axis of length 1.
            mesh = make_mesh(data=2, tensor=4 if "tensor" not in manual else 1)
            mapped = jax.shard_map(
                all_of, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()), axis_names=manual, check_vma=False
            )
            yield jax.make_jaxpr(mapped)(x)

    for jaxpr in jaxprs():
        assert not re.search(r"all_gather|reduce_scatter|psum|pmax|axis_index", str(jaxpr))


def test_the_axis_is_seen_in_every_kind_of_traced_code():
    """Loops, branches, rematerialised functions and backward passes of one's own."""
    seen = []

    @jax.custom_vjp
    def operator(x):
        seen.append(tensor.size())
        return x

    def forward(x):
        return operator(x), None

    def backward(_, cotangent):
        seen.append(tensor.size())
        return (cotangent,)

    operator.defvjp(forward, backward)

    def local(x):
        branches = (operator, lambda x: x)
        body = jax.checkpoint(lambda x, i: (lax.switch(i % 2, branches, x), None))
        return jax.grad(lambda x: jnp.sum(lax.scan(body, x, jnp.arange(2))[0]))(x)

    mapped = jax.shard_map(
        local, mesh=make_mesh(tensor=4), in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
    )
    jax.eval_shape(mapped, jnp.ones(4))
    assert len(seen) >= 2
    assert set(seen) == {4}


# --- what models say of their parameters


def test_splits_of_llama():
    splits = llama(LLAMA).splits()
    queries = {"dim": 1, "units": (2, 6)}
    attention = {k: v["kernel"] for k, v in splits["blocks"][0]["attention"].items()}
    assert attention["q"] == Split(**queries, name="heads")
    assert attention["k"] == attention["v"] == Split(1, (2,), replicate=True, name="heads")
    assert attention["o"] == Split(0, (2, 6), name="heads")
    assert splits["blocks"][0]["attention_norm"]["scale"] is None
    assert splits["embed"]["table"] == Split(0, (61,), name="vocabulary entries")
    assert splits["head"]["output"]["kernel"] == Split(1, (61,), name="vocabulary entries")


def test_biases_are_split_as_their_columns_and_whole_behind_rows():
    block = gpt(GPT).splits()["blocks"][1]
    assert block["attention"]["q"]["bias"] == Split(0, (6,), name="heads")
    assert block["mlp"]["up"]["bias"] == Split(0, (50,), name="MLP columns")
    assert block["attention"]["o"]["bias"] is None
    assert block["mlp"]["down"]["bias"] is None


@pytest.mark.parametrize("config", [LLAMA, GPT, dataclasses.replace(LLAMA, tied=True)])
def test_splits_have_the_structure_of_the_parameters(config):
    model = make(config)
    jax.tree.map(lambda split, x: None, model.splits(), model.abstract_params(), is_leaf=lambda x: x is None)


def test_a_module_that_says_nothing_of_a_parameter_has_no_splits():
    class Half(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.ones(2), split=None), nnx.Param(jnp.ones(2))

    assert Part.from_nnx(lambda rngs: Half()).splits is None
    assert Part.from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs)).splits is None
