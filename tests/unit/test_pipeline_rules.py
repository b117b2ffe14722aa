"""Pipeline stages run one program, so blocks in one place of two stages must be sharded alike."""

import dataclasses

import jax
import pytest

from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.parts import Gather
from amsp_jax.engine.pipeline import make_pipeline
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks

MODEL = build_model("llama-tiny", {"num_layers": 4})
SCHEDULE = PipelineSchedule("1f1b", 2, 1, 2)


def pipeline(leaves, plan):
    return make_pipeline(
        MODEL, leaves, SCHEDULE, Gather(plan.compute_dtype, StepSettings().reduction), Remat.PROJECTIONS
    )


def test_blocks_in_one_place_are_sharded_alike_or_named():
    plan = make_plan("zero1", MODEL, ranks=DataRanks(4), parallel=ModelParallel(pipeline=2))
    pipeline(plan.leaves, plan)
    # Blocks 0 and 2 are the first of their stages.
    cut = [dataclasses.replace(leaf, param_axes=leaf.opt_axes, opt_axes=()) for leaf in jax.tree.leaves(plan.leaves)]
    other = jax.tree.unflatten(jax.tree.structure(plan.leaves), cut)
    mixed = {**plan.leaves, "blocks": [other["blocks"][0], *plan.leaves["blocks"][1:]]}
    with pytest.raises(UserError, match=r"blocks\.0\.\S+ and blocks\.2\.\S+ are sharded differently"):
        pipeline(mixed, plan)


def test_a_block_may_be_frozen_on_one_stage():
    plan = make_plan("zero1", MODEL, ranks=DataRanks(4), parallel=ModelParallel(pipeline=2), frozen=r"blocks\.0\..*")
    stage = pipeline(plan.leaves, plan).stage_leaves()
    assert not any(leaf.frozen for part in stage for leaf in jax.tree.leaves(part))
    both = make_plan("zero1", MODEL, ranks=DataRanks(4), parallel=ModelParallel(pipeline=2), frozen=r"blocks\.[02]\..*")
    _, first, second, _ = pipeline(both.leaves, both).stage_leaves()
    assert all(leaf.frozen for leaf in jax.tree.leaves(first))
    assert not any(leaf.frozen for leaf in jax.tree.leaves(second))
