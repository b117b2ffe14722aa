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
                raise UserError(f"{field.name}={value!r}: it must be an integer of at least 1")

    @property
    def total(self) -> int:
        """Devices of one data rank."""
        return self.pipeline * self.context * self.tensor

    def axis_sizes(self) -> dict[str, int]:
        """The mesh axes, those of size 1 included."""
        return {STAGE: self.pipeline, CONTEXT: self.context, TENSOR: self.tensor}

    def data_ranks(self, num_nodes: int, devices_per_node: int, max_stages: int | None = None) -> DataRanks:
        """The data ranks of one stage: on its own nodes, or inside a node that holds several stages.

        Args:
          num_nodes, devices_per_node: the cluster.
          max_stages: as many as the model has blocks for; no error suggests more.

        Raises:
          UserError: the devices do not divide, or a tensor or context group would span nodes.
        """
        total, inner = num_nodes * devices_per_node, self.context * self.tensor
        stages = _stages(num_nodes, devices_per_node, inner, max_stages)
        if total % self.total:
            fit = [n * inner for n in stages] or _divisors(total)
            raise UserError(
                f"{self} take {self.total} devices, which do not divide the {total} devices of {num_nodes} nodes x "
                f"{devices_per_node}; {_nearest(fit, self.total)} would"
            )
        if devices_per_node % inner:
            raise UserError(
                f"tensor={self.tensor} x context={self.context} = {inner} must divide the {devices_per_node} devices "
                f"of a node, so that each group lies inside one; {_nearest(_divisors(devices_per_node), inner)} would"
            )
        per_stage = total // self.pipeline
        if per_stage % devices_per_node and devices_per_node % per_stage:
            raise UserError(
                f"pipeline={self.pipeline} stages of {per_stage} devices fill neither whole nodes of "
                f"{devices_per_node} nor equal parts of one; {_nearest(stages, self.pipeline)} would"
            )
        return DataRanks(min(per_stage, devices_per_node) // inner, max(1, per_stage // devices_per_node))

    def __str__(self) -> str:
        sizes = {"pipeline": self.pipeline, "context": self.context, "tensor": self.tensor}
        return " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "pipeline=1"


def _stages(num_nodes: int, devices_per_node: int, inner: int, max_stages: int | None) -> list[int]:
    """The numbers of stages that `data_ranks` takes; none where groups of `inner` devices do not fill a node."""
    if devices_per_node % inner:
        return []
    most = num_nodes * devices_per_node if max_stages is None else max(1, max_stages)
    within_nodes = {num_nodes * n for n in _divisors(devices_per_node // inner)}
    return sorted(n for n in within_nodes.union(_divisors(num_nodes)) if n <= most)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(choices: list[int], wanted: int) -> str:
    return " or ".join(map(str, sorted(sorted(choices, key=lambda d: abs(d - wanted))[:2])))
