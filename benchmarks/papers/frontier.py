"""Optimizing Distributed Training on Frontier for Large Language Models (arXiv 2312.12705).

Parameters, activations, FLOPs and bubbles there are Megatron's, see `megatron`.
"""

from __future__ import annotations

import dataclasses

from papers.megatron import Gpt

GCD_PEAK_FLOPS = 191.5e12
"""FLOP/s in 16 bits of one of the two dies of an MI250X; each counts as a device."""


def _gpt(num_layers: int, hidden: int, num_heads: int) -> Gpt:
    return Gpt(num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab_size=51200, seq_len=2048)


MODELS = {"22b": _gpt(48, 6144, 48), "175b": _gpt(96, 12288, 96), "1t": _gpt(128, 25600, 128)}
"""The three models of the paper, by size."""


UTILIZATION = {"22b": 0.3838, "175b": 0.3614, "1t": 0.3196}
"""Throughput of a device over `GCD_PEAK_FLOPS`, from the abstract; probably with recomputation, which is not said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """Efficiency of the largest run of a scaling study, 0 to 1: throughput of a device over that of the first run."""

    num_devices: int
    weak: float
    strong: float


SCALING = {
    "175b": Scaling(num_devices=1024, weak=1.0, strong=0.89),
    "1t": Scaling(num_devices=3072, weak=1.0, strong=0.87),
}
"""By size, from the abstract."""


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
