"""The loss in chunks of tokens is the loss of all logits: values, gradients, and what of it is alive at a time."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import parallel_rows
import pytest
from cut_models import CASES, assert_near, draw, loss_and_grads, make, make_batch, parallel
from parallel_table import Row

from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.models.loss import ChunkedLoss, cross_entropy

ROWS, SEQ, HIDDEN, VOCAB = 2, 11, 24, 61


def chunked(config, num_chunks):
    return make(dataclasses.replace(config, loss_chunks=num_chunks))


def operands(dtype=jnp.float32):
    """Hidden states, targets and weights; tokens of weight 0 have targets outside the vocabulary."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, SEQ, HIDDEN)), dtype)
    weights = rng.choice(np.float32([0, 0.5, 1]), (ROWS, SEQ))
    targets = np.where(weights > 0, rng.integers(0, VOCAB, (ROWS, SEQ)), -100).astype(np.int32)
    return x, targets, weights


def draw_matrix(vocab_dim, dtype=jnp.float32, num_columns=VOCAB):
    matrix = np.random.default_rng(1).normal(size=(HIDDEN, num_columns))
    return jnp.asarray(matrix if vocab_dim == 1 else matrix.T, dtype)


@pytest.mark.parametrize(
    "case",
    [
        *("llama, t=4, 5 words", "llama, c=2, t=4"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("llama, t=4", "gpt, t=4", "gpt, c=4")),
    ],
)
def test_a_cut_model_with_chunks_equals_one_device_without(case):
    config, sizes = CASES[case]
    params, batch = draw(make(config)), make_batch(config.vocab_size)
    expected = jax.jit(lambda p, b: loss_and_grads(make(config), p, b))(params, batch)
    assert_near(parallel(chunked(config, 3), params, batch, sizes), expected)


@pytest.mark.parametrize("num_chunks", [2, 5, ROWS * SEQ])
@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("num_columns", [VOCAB, VOCAB + 3])
def test_any_number_of_chunks_gives_the_loss_and_gradients_of_all_logits(num_chunks, vocab_dim, num_columns):
    x, targets, weights = operands()
    matrix = draw_matrix(vocab_dim, num_columns=num_columns)
    form = ChunkedLoss(num_chunks, vocab_dim, VOCAB)

    def whole(x, matrix):
        return cross_entropy(x @ (matrix if vocab_dim == 1 else matrix.T), targets, weights, VOCAB)

    def run(loss):
        def three_times(x, matrix):
            # A cotangent other than 1 scales what the forward pass made.
            total, weight = loss(x, matrix)
            return 3 * total, weight

        return jax.jit(jax.value_and_grad(three_times, (0, 1), has_aux=True))(x, matrix)

    assert_near(run(lambda x, m: form(x, m, targets, weights)), run(whole))
    assert_near(jax.jit(form)(x, matrix, targets, weights), whole(x, matrix))


def test_a_gradient_in_bfloat16_is_summed_over_chunks_in_float32():
    x, targets, weights = operands(jnp.bfloat16)
    matrix = draw_matrix(1, jnp.bfloat16)

    def gradient(num_chunks, dtype):
        loss = jax.jit(jax.grad(lambda m: ChunkedLoss(num_chunks, 1, VOCAB)(x.astype(dtype), m, targets, weights)[0]))
        grad = loss(matrix.astype(dtype))
        assert grad.dtype == dtype
        return np.asarray(grad, np.float32)

    # One rounding is 0.0017 here, on the average; the same 22 chunks summed in bfloat16 are 0.0040 off.
    exact, many = gradient(1, jnp.float32), gradient(ROWS * SEQ, jnp.bfloat16)
    assert np.mean(np.abs(many - exact)) < 0.0025 * np.mean(np.abs(exact))


def products(function, *args):
    """The shapes of the results of all products of a function."""
    return re.findall(r":(\w+\[[\d,]+\]) = dot_general", str(jax.make_jaxpr(function)(*args)))


def test_no_product_is_computed_twice_and_evaluation_computes_no_gradient():
    x, targets, weights = operands()
    loss = lambda x, m: ChunkedLoss(2, 1, VOCAB)(x, m, targets, weights)[0]  # noqa: E731
    chunk = ROWS * SEQ // 2
    logits, dx, dmatrix = f"f32[{chunk},{VOCAB}]", f"f32[{chunk},{HIDDEN}]", f"f32[{HIDDEN},{VOCAB}]"
    assert products(loss, x, draw_matrix(1)) == [logits] * 2
    assert products(jax.grad(loss, (0, 1)), x, draw_matrix(1)) == [logits, dx, dmatrix] * 2


def test_one_chunk_is_the_program_without():
    batch = make_batch(61)
    config, _ = CASES["llama, t=2"]
    model = chunked(config, 1)
    assert "custom_vjp" not in str(jax.make_jaxpr(lambda p: model.head.apply(*p))(head_arguments(model, batch)))


def head_arguments(model, batch):
    params = draw(model)
    x = jnp.ones((*batch["tokens"].shape, 48))
    return params["head"], None, x, batch, None


LAYOUTS = {
    "three chunks of a microbatch on stages": Row("zero3", 4, ("1f1b", 1), (2, 4), 2, 2, 1, False, "llama"),
    "a tied table on two context ranks": Row("zero1", 3, ("", 1), (2, 4), 1, 1, 2, True, "gpt"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_with_chunks_as_one_device_does_without(name):
    row = LAYOUTS[name]
    assert row.is_feasible
    model = parallel_rows.model(row.model, row.tied, row.num_layers)
    settings = StepSettings(pipeline_schedule=row.schedule[0] or "1f1b", virtual_stages=row.schedule[1])
    own = parallel_rows.model(row.model, row.tied, row.num_layers, loss_chunks=3)
    plan = parallel_rows.plan_of(row)
    parallel_rows.check_layout(own, plan, row.microbatches, settings, ("sgd",), like=model)


def test_more_chunks_than_tokens_is_an_error():
    x, targets, weights = operands()
    with pytest.raises(UserError, match=r"loss_chunks=23 is more than the 22 tokens.*\(2, 11\).*22 or less"):
        ChunkedLoss(23, 1, VOCAB)(x, draw_matrix(1), targets, weights)
