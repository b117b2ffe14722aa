"""How devices are divided between pipeline stages, context, tensor and data ranks.

Outer to inner: stages, data ranks, context, tensor. So a tensor group lies inside a node, on adjacent devices, and
stages, which talk least, lie farthest apart.
"""

from __future__ import annotations

import dataclasses

from amsp_jax.errors import UserError
from amsp_jax.strategy import DataRanks

STAGE, CONTEXT, TENSOR = "stage", "context", "tensor"
"""The names of the mesh axes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """Into how many parts one copy of the model is cut, beside the strategy.

    Attributes:
      pipeline: stages, each with a part of the blocks.
      context: parts of a sequence, for ring attention.
      tensor: parts of each matrix, and of the sequence between them.

    Raises:
      UserError: a number is no positive integer.
    """

    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise UserError(f"{field.name.upper()}={value!r}: it must be an integer of at least 1")

    @property
    def total(self) -> int:
        """Devices of one data rank."""
        return self.pipeline * self.context * self.tensor

    def axis_sizes(self) -> dict[str, int]:
        """The mesh axes, those of size 1 included."""
        return {STAGE: self.pipeline, CONTEXT: self.context, TENSOR: self.tensor}

    def data_ranks(self, num_nodes: int, devices_per_node: int) -> DataRanks:
        """The data ranks of one stage: on its own nodes, or inside a node that holds several stages.

        Raises:
          UserError: the devices do not divide, or a tensor or context group would span nodes.
        """
        total = num_nodes * devices_per_node
        if total % self.total:
            raise UserError(
                f"{self} take {self.total} devices, which do not divide the {total} devices of {num_nodes} nodes x "
                f"{devices_per_node}; {_nearest(total, self.total)} would"
            )
        inner = self.context * self.tensor
        if devices_per_node % inner:
            raise UserError(
                f"TENSOR={self.tensor} x CONTEXT={self.context} = {inner} must divide the {devices_per_node} devices "
                f"of a node, so that each group lies inside one; {_nearest(devices_per_node, inner)} would"
            )
        per_stage = total // self.pipeline
        if per_stage % devices_per_node and devices_per_node % per_stage:
            within = [n for n in range(num_nodes, total + 1, num_nodes) if total % (n * inner) == 0]
            fit = [n for n in range(1, num_nodes) if num_nodes % n == 0] + within
            raise UserError(
                f"PIPELINE={self.pipeline} stages of {per_stage} devices fill neither whole nodes of "
                f"{devices_per_node} nor equal parts of one; {_nearest_of(fit, self.pipeline)} would"
            )
        return DataRanks(min(per_stage, devices_per_node) // inner, max(1, per_stage // devices_per_node))

    def __str__(self) -> str:
        sizes = {"PIPELINE": self.pipeline, "CONTEXT": self.context, "TENSOR": self.tensor}
        return " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "PIPELINE=1"


def _nearest(total: int, wanted: int) -> str:
    return _nearest_of([d for d in range(1, total + 1) if total % d == 0], wanted)


def _nearest_of(choices: list[int], wanted: int) -> str:
    return " or ".join(map(str, sorted(sorted(choices, key=lambda d: abs(d - wanted))[:2])))
