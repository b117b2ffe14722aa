"""Zigzag order, and attention around the ring against attention on one device. Whole models are in test_tensor."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from amsp_jax.compile.hlo import collectives
from amsp_jax.engine import context
from amsp_jax.engine.rematerialization import Remat, policy
from amsp_jax.errors import UserError

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


def on_ring(function, num_ranks, in_specs, out_specs):
    mesh = jax.make_mesh((num_ranks,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


# --- the order of the sequence


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_rank_holds_an_early_and_a_late_chunk(num_ranks):
    chunk = 5
    seq_len = 2 * num_ranks * chunk
    pieces = context.zigzag(seq_len, num_ranks).reshape(num_ranks, 2, chunk)
    for rank, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece[:, 0], [rank * chunk, (2 * num_ranks - 1 - rank) * chunk])
        np.testing.assert_array_equal(piece - piece[:, :1], [np.arange(chunk)] * 2)
    # A token's work is the number of tokens it sees.
    assert len(set((pieces + 1).sum(axis=(1, 2)).tolist())) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_inverse_undoes_zigzag(num_ranks):
    x = np.arange(24)
    there = x[context.zigzag(24, num_ranks)]
    np.testing.assert_array_equal(there[context.zigzag_inverse(24, num_ranks)], x)
    assert (num_ranks == 1) == np.array_equal(there, x)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_positions_and_pieces_are_those_of_zigzag(num_ranks):
    table = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)

    def local(table):
        return context.positions(16 // num_ranks), context.local_sequence(table, dim=0)

    positions, pieces = on_ring(local, num_ranks, P(), P("context"))(table)
    np.testing.assert_array_equal(positions, context.zigzag(16, num_ranks))
    np.testing.assert_array_equal(pieces, table[context.zigzag(16, num_ranks)])


def test_without_the_axis_positions_are_in_order():
    assert context.size() == 1
    np.testing.assert_array_equal(context.positions(5), np.arange(5))


@pytest.mark.parametrize(
    ("seq_len", "num_context", "num_tensor"), [(7, 1, 1), (6, 1, 3), (8, 4, 1), (24, 2, 3), (16, 4, 4)]
)
def test_sequences_that_divide(seq_len, num_context, num_tensor):
    context.check_sequence(seq_len, num_context, num_tensor)


@pytest.mark.parametrize(
    ("seq_len", "num_context", "num_tensor", "message"),
    [
        (1001, 1, 4, "seq_len=1001 .* tensor=4: .* multiple of 4; use 1000 or 1004$"),
        (1020, 4, 1, "seq_len=1020 .* context=4 .*two chunks.* multiple of 8; use 1016 or 1024$"),
        (1000, 2, 3, "context=2 .* tensor=3: .* multiple of 12; use 996 or 1008$"),
        (3, 8, 1, "use 16$"),
    ],
)
def test_a_sequence_that_does_not_divide_is_an_error(seq_len, num_context, num_tensor, message):
    with pytest.raises(UserError, match=message):
        context.check_sequence(seq_len, num_context, num_tensor)


# --- the ring


def draw(seq_len, dtype):
    """Queries, keys, values and the gradient of the result; scores are large enough to matter."""
    rng = np.random.default_rng(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    return [jnp.asarray(rng.normal(0, 2, (2, seq_len, n, HEAD_DIM)), dtype) for n in heads]


def one_device(q, k, v, grad):
    out, backward = jax.vjp(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), q, k, v)
    return (out, *backward(grad))


def ring(q, k, v, grad):
    out, backward = jax.vjp(context.ring_attention, q, k, v)
    return (out, *backward(grad))


def around(num_ranks, arrays):
    order, back = (f(arrays[0].shape[1], num_ranks) for f in (context.zigzag, context.zigzag_inverse))
    spec = P(None, "context")
    results = on_ring(ring, num_ranks, (spec,) * 4, (spec,) * 4)(*(x[:, order] for x in arrays))
    return [np.asarray(x, np.float32)[:, back] for x in results]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_ring_equals_one_device(num_ranks):
    arrays = draw(48, jnp.float32)
    for got, expected in zip(around(num_ranks, arrays), jax.jit(one_device)(*arrays), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_in_bfloat16_the_ring_is_near_float32(num_ranks):
    arrays = draw(32, jnp.bfloat16)
    exact = jax.jit(one_device)(*(x.astype(jnp.float32) for x in arrays))
    for got, expected in zip(around(num_ranks, arrays), exact, strict=True):
        # Weights and the gradients of scores are rounded to bfloat16, whose unit is 2^-8, for their products.
        assert np.linalg.norm(got - expected) < 2**-7 * np.linalg.norm(expected)


def test_beside_pipeline_stages_nothing_is_permuted():
    arrays, num_ranks = draw(32, jnp.float32), 4
    order, back = (f(32, num_ranks) for f in (context.zigzag, context.zigzag_inverse))
    mesh = jax.make_mesh((2, num_ranks), ("stage", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (P(None, "context"),) * 4
    step = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))
    compiled = step.lower(*(x[:, order] for x in arrays)).compile()
    assert {c.kind for c in collectives(compiled.as_text())} == {"all-gather", "reduce-scatter"}
    for got, expected in zip(compiled(*(x[:, order] for x in arrays)), jax.jit(one_device)(*arrays), strict=True):
        np.testing.assert_allclose(got[:, back], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# --- what it costs


def compiled(num_ranks, num_local, remat=None):
    """The gradients of attention to a function of its operands, rematerialised or not."""
    attention = lambda q, k, v: context.ring_attention(2 * q, k, v)  # noqa: E731
    if remat:
        attention = jax.checkpoint(attention, policy=remat)
    gradients = jax.grad(lambda q, k, v: jnp.sum(jnp.square(attention(q, k, v))), argnums=(0, 1, 2))
    spec = P(None, "context")
    shapes = [jax.ShapeDtypeStruct((1, num_ranks * num_local, n, HEAD_DIM), jnp.float32) for n in (4, 2, 2)]
    return on_ring(gradients, num_ranks, (spec,) * 3, spec).lower(*shapes).compile()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("saved", [(context.RING_ATTENTION,), ()])
def test_hops(num_ranks, saved):
    """Keys and values c - 1 forward and c - 1 backward, their gradients c; and forward again if that is recomputed."""
    remat = jax.checkpoint_policies.save_only_these_names(*saved)
    found = collectives(compiled(num_ranks, 16, remat).as_text())
    kv_hops, grad_hops = (2 if saved else 3) * (num_ranks - 1), num_ranks
    assert {c.kind for c in found} == {"collective-permute"}
    assert sum(c.num_runs for c in found) == 2 * (kv_hops + grad_hops)


def test_memory_is_that_of_a_rank_s_part():
    sizes = [compiled(num_ranks, 128, policy(Remat.NONE)).memory_analysis().temp_size_in_bytes for num_ranks in (4, 8)]
    assert sizes[1] <= 1.05 * sizes[0]


def test_scores_that_causality_makes_empty_are_not_computed():
    """In products of two chunks: three of a rank's own four, then two of four a step."""
    num_ranks, num_local = 4, 32
    spec = P(None, "context")
    q, k = (jnp.ones((1, num_ranks * num_local, n, HEAD_DIM)) for n in (1, 1))
    jaxpr = jax.make_jaxpr(on_ring(context.ring_attention, num_ranks, (spec,) * 3, spec))(q, k, k)
    runs = Counter()
    _count_products(jaxpr.jaxpr, 1, runs)
    half = num_local // 2
    assert runs == {(half, half): 3 + 2 * (num_ranks - 1)}


def _count_products(jaxpr, num_runs, runs):
    """Scores, [queries, keys], of the products of queries and keys."""
    for eqn in jaxpr.eqns:
        inner = num_runs * eqn.params.get("length", 1)
        for sub in jaxprs_in_params(eqn.params):
            _count_products(sub, inner, runs)
        if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape[-1] != HEAD_DIM:
            runs[eqn.outvars[0].aval.shape[-2:]] += num_runs
