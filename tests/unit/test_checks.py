"""The batch divides, everything fits into memory, and both say what would."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from amsp_jax.engine.plan import plan_parameters
from amsp_jax.errors import UserError
from amsp_jax.run.checks import batch_shape, require_compiled_memory, require_memory
from amsp_jax.strategy import DataRanks

GIB = 2**30


def test_batch_shape() -> None:
    batch = batch_shape(64, 2, 8, 128)
    assert batch.shape == (4, 16, 128)
    assert (batch.accumulation, batch.sequences, batch.tokens) == (4, 64, 64 * 128)
    assert str(batch) == "64 sequences of 128 = 8,192 tokens a step: 8 ranks x microbatch 2 x accumulation 4"


@pytest.mark.parametrize(
    ("global_batch", "microbatch", "message"),
    [
        (60, 2, "global_batch=60 is not a multiple of microbatch=2 x 8 .* = 16; global_batch=48 or 64 would do$"),
        (24, 2, "global_batch=16 or 32 would do, or microbatch=1 or 3$"),
        (4, 1, "global_batch=8 would do$"),
    ],
)
def test_a_batch_that_does_not_divide_says_which_would(global_batch: int, microbatch: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        batch_shape(global_batch, microbatch, 8, 128)


def test_memory_of_the_plan() -> None:
    # 2^28 parameters on 4 ranks: master 0.25 GiB, two moments 0.5, gradients 0.25, and no copy, as P = OS.
    params = {"w": jax.ShapeDtypeStruct((2**14, 2**14), jnp.float32)}
    plan = plan_parameters("zero3", params, DataRanks(4))
    require_memory(plan, GIB)
    message = (
        r"needs 1.00 GiB on each device .*P 0.00 GiB, G 0.25 GiB, master 0.25 GiB, moments 0.50 GiB.* has 0.99 GiB"
    )
    with pytest.raises(UserError, match=message):
        require_memory(plan, int(0.99 * GIB))


def test_memory_of_the_compiled_step() -> None:
    analysis = SimpleNamespace(
        argument_size_in_bytes=3 * GIB,
        output_size_in_bytes=3 * GIB + GIB // 2,
        alias_size_in_bytes=3 * GIB,
        temp_size_in_bytes=GIB,
    )
    compiled: Any = SimpleNamespace(memory_analysis=lambda: analysis)
    require_compiled_memory(compiled, 5 * GIB)
    with pytest.raises(UserError, match=r"needs 4.50 GiB .*batch 3.00 GiB, temporary 1.00 GiB.* has 4.00 GiB; lower"):
        require_compiled_memory(compiled, 4 * GIB)


def test_donated_arguments_count_once() -> None:
    x = jax.ShapeDtypeStruct((2**18,), jnp.float32)
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    require_compiled_memory(compiled, 2**20)
    with pytest.raises(UserError, match="compiled step"):
        require_compiled_memory(compiled, 2**20 - 1)
