"""A cluster: what a strategy is resolved on and a planner computes with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster.network import Network
from amsp_jax.predict.cluster.rates import Rates
from amsp_jax.strategy import DataRanks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a strategy is resolved on.

    Attributes:
      name: for messages.
      num_nodes: nodes of equal size.
      devices_per_node: devices in each.
      device_kind: as `jax.Device.device_kind` says it.
      memory_bytes: of one device, usable by a process.
      peak_flops: dense bf16 FLOP/s of one device; None where unknown, which leaves MFU out.
      source: where the numbers come from: a data sheet, the running devices, or a measurement.
      network: seconds of collectives; None where nothing is known.
      rates: what one device reaches; None where nothing is known.
      assumptions: what was not measured on this cluster, one line each, to be printed beside what is computed from it.
      versions: of jax and the like, where the numbers were measured.
      date: of the measurement, YYYY-MM-DD.
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device_kind: str
    memory_bytes: int
    peak_flops: float | None
    source: str
    network: Network | None = None
    rates: Rates | None = None
    assumptions: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    date: str | None = None

    def __post_init__(self) -> None:
        for field in ("num_nodes", "devices_per_node", "memory_bytes"):
            if getattr(self, field) < 1:
                raise UserError(
                    f"cluster {self.name}: {field}={getattr(self, field)}, but it counts from 1. Correct it."
                )
        if self.peak_flops is not None and not (math.isfinite(self.peak_flops) and self.peak_flops > 0):
            raise UserError(
                f"cluster {self.name}: peak_flops={self.peak_flops}, but it is a finite number above 0, or none. "
                "Correct it."
            )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    @property
    def ranks(self) -> DataRanks:
        """All devices as data ranks."""
        return DataRanks(self.devices_per_node, self.num_nodes)

    def with_nodes(self, num_nodes: int) -> Cluster:
        """The same with `num_nodes` nodes; what was measured stays as it is."""
        return dataclasses.replace(self, num_nodes=num_nodes)
