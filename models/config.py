"""What the configurations of all transformers share: their sizes, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

from amsp_jax.errors import UserError

AttentionImplementation = Literal["auto", "xla", "cudnn", "pallas"]

# Far above any model. Each layer is in the plan by itself, and arrays are counted in 32 bits.
_LARGEST = {"num_layers": 10_000}
_LARGEST_SIZE = 100_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of a decoder-only transformer.

    Attributes:
      num_layers: number of blocks.
      hidden: width of the residual stream.
      ffn: inner width of the MLP.
      num_heads: query heads; each is hidden / num_heads wide.
      vocab_size: rows of the embedding table.
      tied: the head multiplies by the embedding table instead of a matrix of its own.
      norm_eps: added to the variance before the square root.
      init_std: standard deviation of the initial weights.
      attention: whose kernels attend; "auto" takes the fastest that work on the first device of the process
        (`attention.choose_attention`), which is asked for when a step is traced.
      loss_chunks: into how many chunks a device cuts the tokens of a microbatch for the loss, as the logits of one are
        alive at a time; for large vocabularies.

    Raises:
      UserError: a size has the wrong type, is not positive, is absurdly large or does not divide.
    """

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    vocab_size: int
    tied: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    attention: AttentionImplementation = "auto"
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(type(self)).items():
            self._check_field(name, kind, getattr(self, name))
        self.check_divides("num_heads", "hidden")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.num_heads

    @property
    def residual_init_std(self) -> float:
        """Initial standard deviation of the projections that write into the residual stream: 2 L of them add up."""
        return float(self.init_std / (2 * self.num_layers) ** 0.5)

    def check_divides(self, divisor: str, dividend: str) -> None:
        """Raises UserError unless the field `divisor` divides the field `dividend`."""
        small, large = getattr(self, divisor), getattr(self, dividend)
        if large % small:
            choices = sorted((d for d in range(1, large + 1) if large % d == 0), key=lambda d: abs(d - small))[:3]
            raise UserError(
                f"{type(self).__name__}: {divisor} {small} does not divide {dividend} {large} "
                f"(remainder {large % small}); the nearest that do are {', '.join(map(str, sorted(choices)))}."
            )

    def _check_field(self, name: str, kind: Any, value: Any) -> None:
        """Raises UserError unless `value` is of the type `kind` and, if it is a number, positive."""
        where = f"{type(self).__name__}: {name}={value!r}"
        if typing.get_origin(kind) is Literal:
            if value not in typing.get_args(kind):
                raise UserError(f"{where} must be one of {', '.join(map(repr, typing.get_args(kind)))}.")
            return
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{where} is of type {type(value).__name__}; it must be of type {kind.__name__}.")
        if kind is not bool and not value > 0:
            raise UserError(f"{where} must be greater than 0.")
        largest = _LARGEST.get(name, _LARGEST_SIZE)
        if kind is int and value > largest:
            raise UserError(f"{where} must be at most {largest:,}.")
        if kind is float and not value < math.inf:
            raise UserError(f"{where} must be finite.")
