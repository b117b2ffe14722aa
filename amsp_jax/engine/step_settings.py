"""The settings of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from amsp_jax.engine.collectives import Reduction
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step computes.

    Attributes:
      reduce_dtype: in which gradients are summed across devices, and travel.
      inter_node_dtype: in which they travel between nodes, where they are sharded over nodes; None: `reduce_dtype`.
      remat: what blocks keep for the backward pass.
      peel_first, peel_last: run the first and the last microbatch outside the loop, so that the gathers and the
        reductions of once a step overlap them. No effect where there are no such collectives, and with a pipeline.
      pipeline_schedule: order of the pipeline's work, `1f1b` or `gpipe`, where the plan has stages.
      virtual_stages: parts of the model that a stage has; more than one interleaves them.
      microbatch_group: microbatches that go through each block before the next block, where there are no stages; it
        divides the microbatches of a step.

    Raises:
      UserError: another `remat`, a number that is not whole. What depends on the batch is checked when a step is
        traced.
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
          UserError: a dtype that is not of floating point, or an `inter_node_dtype` wider than `reduce_dtype`.
        """
        return Reduction.of(self.reduce_dtype, self.inter_node_dtype)


DEFAULT = StepSettings()
"""The settings of a step that was given none."""
