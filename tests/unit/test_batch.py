"""A batch that a plan cannot divide ends in a message that names the argument, when a step is traced."""

import jax
import jax.numpy as jnp
import optax
import pytest

from amsp_jax.engine.eval_step import make_eval_step
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.state import abstract_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks

MODEL = build_model("llama-tiny", {"num_layers": 2})
ADAMW = optax.adamw(1e-3)


def batch(shape):
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


@pytest.mark.parametrize(
    ("parallel", "shape", "message"),
    [
        ({"tensor": 2}, (1, 4, 15), "^seq_len=15 .* tensor=2: it must be a multiple of 2; use 14 or 16"),
        ({"tensor": 4}, (1, 4, 2), "^seq_len=2 .* tensor=4: it must be a multiple of 4; use 4"),
        ({"context": 2}, (1, 4, 18), "^seq_len=18 .* context=2 .*multiple of 4; use 16 or 20"),
        ({"context": 2, "tensor": 2}, (1, 4, 15), "^seq_len=15 .* context=2 .* tensor=2: .* use 12 or 16"),
        ({"context": 2}, (1, 4), r"sequences are \[microbatches, rows, seq\].*one microbatch tokens is \(1, 1, 4\)"),
        ({"pipeline": 2, "tensor": 2}, (2, 4, 15), "^seq_len=15 .* tensor=2"),
        ({}, (1, 6, 16), r"a batch of .*tokens \(1, 6, 16\).*6 rows must divide by the 4 data ranks"),
        ({}, (0, 4, 16), r"a batch of .*tokens \(0, 4, 16\)"),
    ],
)
def test_what_does_not_divide_is_named(parallel, shape, message):
    plan = make_plan("zero1", MODEL, ranks=DataRanks(4), parallel=ModelParallel(**parallel))
    state = abstract_state(plan, ADAMW)
    with pytest.raises(UserError, match=message):
        jax.eval_shape(make_train_step(plan, ADAMW), state, batch(shape))
    with pytest.raises(UserError, match=message):
        jax.eval_shape(make_eval_step(plan), state.params, batch(shape))


@pytest.mark.parametrize(
    ("settings", "parallel", "message"),
    [
        ({"microbatch_group": 2}, {}, "^microbatch_group=2 does not divide the 3 microbatches .* use 3 or 1"),
        ({"microbatch_group": 3}, {"pipeline": 2}, "^microbatch_group=3 with pipeline=2: .* use microbatch_group=1"),
        ({"virtual_stages": 2}, {}, "^virtual_stages=2 with pipeline=1"),
        ({"pipeline_schedule": "zigzag"}, {}, "^pipeline_schedule='zigzag': it must be one of gpipe, 1f1b"),
    ],
)
def test_settings_that_the_batch_does_not_fit_are_named(settings, parallel, message):
    plan = make_plan("zero1", MODEL, ranks=DataRanks(4), parallel=ModelParallel(**parallel))
    step = make_train_step(plan, ADAMW, StepSettings(**settings))
    with pytest.raises(UserError, match=message):
        jax.eval_shape(step, abstract_state(plan, ADAMW), batch((3, 4, 16)))
