"""Wrong arguments of the engine's functions, and batches and states that are not of the step: one line for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from amsp_jax.engine.eval_step import make_eval_step
from amsp_jax.engine.plan import make_plan, plan_parameters
from amsp_jax.engine.state import abstract_state, init_state
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.errors import UserError
from amsp_jax.model import Model, token_loss
from amsp_jax.strategy import DataRanks

RANKS = DataRanks(4)
ADAMW = optax.adamw(1e-3)


def linear(width=8, name="linear"):
    def loss(params, batch, rng):
        return token_loss(params["table"][batch["tokens"]] @ params["out"], batch)

    def init(key):
        return {"table": jax.random.normal(key, (16, width)), "out": jnp.zeros((width, 16))}

    return Model.from_loss(loss, init, name=name)


MODEL = linear()
PLAN = make_plan("zero1", MODEL, ranks=RANKS)
ALONE = plan_parameters("zero1", {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, RANKS)


def batch(shape=(1, 4, 6), names=("tokens", "targets", "weights")):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "weights" else jnp.int32) for name in names}


def said(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value).split("\n---")[0]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: make_plan(MODEL, "zero1"), "the order is make_plan(strategy, model)"),
        (lambda: make_plan("zero1", "llama-tiny"), "model is of type str; give a Model"),
        (lambda: make_plan("zero1", linear), "model is of type function; give a Model"),
        (lambda: make_plan(3, MODEL), "strategy=3: it is a text or a Strategy"),
        (lambda: init_state(MODEL, ADAMW), "init_state(plan, optimizer): plan is of type Model; give the Plan"),
        (lambda: init_state(ADAMW, PLAN), "plan is of type GradientTransformation"),
        (
            lambda: init_state(PLAN, optax.adamw),
            "optimizer is the function adamw, no optax.GradientTransformation",
        ),
        (lambda: init_state(PLAN, "adamw"), "optimizer is 'adamw', no optax.GradientTransformation; give an optax"),
        (lambda: make_train_step(MODEL, ADAMW), "make_train_step(plan, optimizer): plan is of type Model"),
        (lambda: make_train_step(PLAN, optax.sgd), "optimizer is the function sgd"),
        (lambda: make_train_step(ALONE, ADAMW), "was made by plan_parameters, of parameters without a model"),
        (lambda: make_eval_step(MODEL), "make_eval_step(plan): plan is of type Model"),
        (lambda: make_eval_step(ALONE), "was made by plan_parameters"),
    ],
)
def test_arguments_of_wrong_types(call, told):
    assert told in said(call)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"tokens": (8, 6), "targets": (8, 6)}, "tokens is (1, 8, 6), which batch['tokens'][None] makes"),
        ({"tokens": (8, 6), "x": (8, 6, 2)}, "its sequences are [microbatches, rows, seq], three dimensions"),
        ({"weights": (8, 6)}, "weights is (1, 8, 6)"),
    ],
)
def test_rows_without_the_dimension_of_microbatches(rows, told):
    plan = make_plan("zero1", MODEL, devices=jax.devices()[:2])
    arrays = {name: np.zeros(shape, np.int32) for name, shape in rows.items()}
    assert told in said(lambda: plan.shard(arrays))
    step, state = make_train_step(PLAN, ADAMW), abstract_state(PLAN, ADAMW)
    assert told in said(lambda: jax.eval_shape(step, state, arrays))


def test_a_batch_that_is_no_dict():
    plan = make_plan("zero1", MODEL, devices=jax.devices()[:2])
    assert "a batch is of type list; it is a dict" in said(lambda: plan.shard([1]))
    step, state = make_train_step(PLAN, ADAMW), abstract_state(PLAN, ADAMW)
    assert "a batch is an array; it is a dict" in said(lambda: jax.eval_shape(step, state, np.zeros((1, 4, 6))))


def test_tokens_without_weights_count_one_each():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    targets = jnp.ones((2, 3), jnp.int32)
    (loss, weight), _ = token_loss(logits, {"targets": targets})
    (expected, _), _ = token_loss(logits, {"targets": targets, "weights": jnp.ones((2, 3))})
    assert (float(loss), float(weight)) == (float(expected), 6.0)


def test_an_array_that_the_batch_lacks_is_named():
    state, lacking = abstract_state(PLAN, ADAMW), batch(names=("tokens",))
    told = "linear asks for 'targets', and the batch has tokens; give the batch an array of this name"
    assert told in said(lambda: jax.eval_shape(make_train_step(PLAN, ADAMW), state, lacking))
    assert told in said(lambda: jax.eval_shape(make_eval_step(PLAN), state.params, lacking))


OTHERS = [
    (PLAN, optax.sgd(1e-3)),
    (PLAN, optax.chain(optax.identity(), ADAMW)),
    (make_plan("zero1", MODEL, ranks=RANKS, frozen="out"), ADAMW),
    (make_plan("zero1", linear(12), ranks=RANKS), ADAMW),
    (make_plan("zero3", MODEL, ranks=DataRanks(3)), ADAMW),
]
OPTIMIZER, OF_A_PLAN = "the state was made with another optimizer than the step", "belong to another plan than the step"


@pytest.mark.parametrize(("other", "told"), [*zip(OTHERS, [OPTIMIZER] * 3 + [OF_A_PLAN] * 2, strict=True)])
def test_a_state_of_another_optimizer_or_plan(other, told):
    for of_state, of_step in ((other, (PLAN, ADAMW)), ((PLAN, ADAMW), other)):
        step, state = make_train_step(*of_step), abstract_state(*of_state)
        text = said(functools.partial(step.lower, state, batch((1, 12, 6))))
        assert told in text and "init_state(plan, optimizer)" in text


def test_parameters_of_another_plan_are_refused_by_evaluation():
    plan, optimizer = OTHERS[-1]
    text = said(lambda: jax.eval_shape(make_eval_step(PLAN), abstract_state(plan, optimizer).params, batch()))
    assert OF_A_PLAN in text and "out is (9, 16), and the step has (8, 16)" in text


def test_what_is_no_state():
    step = make_train_step(PLAN, ADAMW)
    text = said(lambda: jax.eval_shape(step, abstract_state(PLAN, ADAMW).params, batch()))
    assert "state is of type dict; give the TrainState" in text


def test_the_table_says_what_a_frozen_leaf_keeps():
    frozen = make_plan("zero1", MODEL, ranks=RANKS, frozen="out")
    assert "of a frozen leaf its float32 master alone" in str(frozen) and "frozen" not in str(PLAN)
