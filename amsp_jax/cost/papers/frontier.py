"""Optimizing Distributed Training on Frontier for Large Language Models (arXiv 2312.12705).

Parameters, activations, FLOPs and bubbles there are Megatron's, see `megatron`.
"""

from __future__ import annotations

import dataclasses

from amsp_jax.cost.papers.megatron import Gpt

GCD_PEAK_FLOPS = 191.5e12
"""FLOP/s in 16 bits of one of the two dies of an MI250X; each counts as a device."""


def _gpt(num_layers: int, hidden: int, num_heads: int) -> Gpt:
    return Gpt(num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab_size=51200, seq_len=2048)


MODELS = {"22b": _gpt(48, 6144, 48), "175b": _gpt(96, 12288, 96), "1t": _gpt(128, 25600, 128)}
"""The three models of the paper, by size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What the paper's abstract says of a model's training.

    Attributes:
      utilization: share of `GCD_PEAK_FLOPS`, 0 to 1; it is not said whether recomputation counts, and probably it does.
      num_devices: GCDs of the largest run of its scaling studies; None where it is in none.
      weak_scaling, strong_scaling: efficiency there, 0 to 1.
    """

    utilization: float
    num_devices: int | None = None
    weak_scaling: float | None = None
    strong_scaling: float | None = None


RESULTS = {
    "22b": Result(utilization=0.3838),
    "175b": Result(utilization=0.3614, num_devices=1024, weak_scaling=1.0, strong_scaling=0.89),
    "1t": Result(utilization=0.3196, num_devices=3072, weak_scaling=1.0, strong_scaling=0.87),
}
"""By size, as in `MODELS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Model states before any sharding, 14 bytes a parameter."""

    params: float
    grads: float
    opt_state: float

    @property
    def total(self) -> float:
        """The three together."""
        return self.params + self.grads + self.opt_state


def state_bytes(num_params: float) -> StateBytes:
    """6 bytes of parameters, 4 of gradients, 4 of optimizer states for each parameter.

    It lacks Adam's variance: ZeRO, AMSP and this engine count 16 bytes.
    """
    return StateBytes(params=6 * num_params, grads=4 * num_params, opt_state=4 * num_params)


def training_flops(num_params: float, num_tokens: float) -> float:
    """FLOPs of a whole training without recomputation and attention's products: 6 N T."""
    return 6 * num_params * num_tokens
