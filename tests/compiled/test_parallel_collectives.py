"""The compiled step of a model that is cut: what travels over tensor ranks and stages, how often, and what never."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import parallel_rows
import pytest

from amsp_jax.compile import hlo
from amsp_jax.engine.parallel import STAGE, TENSOR, ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.state import abstract_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step

ROWS, SEQ = 8, 8
HIDDEN = parallel_rows.SIZES["hidden"]


def compiled(strategy, num_layers, microbatches, **parallel):
    """(plan, the collectives of arrays) of a step on eight devices without rematerialisation."""
    model, cut = parallel_rows.model("llama", False, num_layers), ModelParallel(**parallel)
    plan = make_plan(
        strategy, model, ranks=cut.data_ranks(1, 8), devices=jax.devices()[:8], compute_dtype=jnp.float32, parallel=cut
    )
    optimizer = oracle.optimizer("sgd")
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    shape = (microbatches, ROWS, SEQ)
    batch = {name: jax.ShapeDtypeStruct(shape, d, sharding=plan.batch_sharding) for name, d in dtypes.items()}
    step = make_train_step(plan, optimizer, StepSettings(remat=Remat.NONE))
    text = step.lower(abstract_state(plan, optimizer), batch).compile().as_text()
    return plan, [c for c in hlo.collectives(text) if not c.is_scalar]


def over(plan, axis, collectives):
    """Those whose groups are larger for the axis, alone or with others."""
    devices = np.arange(plan.mesh.size).reshape(tuple(plan.mesh.shape.values()))
    place = {int(n): where for where, n in np.ndenumerate(devices)}
    number = list(plan.mesh.shape).index(axis)
    return [c for c in collectives if any(len({place[n][number] for n in group}) > 1 for group in c.groups)]


@pytest.mark.parametrize(("num_layers", "tensor"), [(2, 4), (3, 2)])
def test_activations_alone_are_gathered_over_tensor_ranks(num_layers, tensor):
    """Four all-gathers and four reduce-scatters of [rows, seq, hidden] a layer, and one for the embedding and head."""
    plan, found = compiled("ddp", num_layers, 1, tensor=tensor)
    rows = ROWS // plan.degrees.ranks.total
    found = over(plan, TENSOR, found)
    gathered, scattered = ([c.shape for c in found if c.kind == kind] for kind in ("all-gather", "reduce-scatter"))
    assert gathered == [(rows, SEQ, HIDDEN)] * (4 * num_layers + 2)
    assert scattered == [(rows, SEQ // tensor, HIDDEN)] * (4 * num_layers + 2)


def test_stages_reduce_once_and_send_twice_a_tick():
    plan, found = compiled("zero1", 4, 4, pipeline=2, tensor=2)
    inside, outside = ([c for c in found if c.in_loop is in_loop] for in_loop in (True, False))
    # Over the ticks: activations, and the loss of a vocabulary that is cut.
    assert {c.kind for c in inside} == {"collective-permute", "all-gather", "reduce-scatter", "all-reduce"}
    rows = ROWS // plan.degrees.ranks.total
    sends = [c for c in inside if c.kind == "collective-permute"]
    assert over(plan, STAGE, inside) == sends
    assert [c.shape for c in sends] == [(rows, SEQ // 2, HIDDEN)] * 2
    assert over(plan, TENSOR, inside) == [c for c in inside if c not in sends]
    assert {c.shape for c in inside if c.kind == "all-reduce"} == {(rows, SEQ)}
    # Once a step: the exchange of blocks there and back, and what the strategy says.
    assert not [c for c in over(plan, TENSOR, outside) if c.kind != "all-reduce"]
    exchanged = [c for c in outside if c.kind == "all-to-all"]
    num_leaves = len(jax.tree.leaves(plan.leaves["blocks"][0]))
    assert len({c.op for c in exchanged}) == 2 * 2 * num_leaves
    assert {c.kind for c in outside} == {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
