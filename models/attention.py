"""Causal attention, and the choice between its implementations: cuDNN's, Pallas's, and XLA's.

Shape suffixes: B rows, S sequence, N query heads, K key and value heads, H head dim.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from amsp_jax.engine import context
from amsp_jax.errors import UserError
from amsp_jax.models import flash_attention
from amsp_jax.models.config import AttentionImplementation

_NAMES: dict[AttentionImplementation, str] = {
    "cudnn": "cuDNN flash attention",
    "pallas": "Pallas flash attention",
    "xla": "XLA attention",
}
_GPUS = ("gpu", "cuda", "rocm")
"""Names that jax has had for their platforms."""
_AMD = ("gfx90a", "gfx942")
"""MI200 and MI300."""


def causal_attention(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, implementation: AttentionImplementation
) -> jax.Array:
    """Each token attends to itself and the tokens before it; returns [B, S, N x H]. N is a multiple of K.

    With context ranks it is `context.ring_attention`, whatever the implementation.
    """
    if context.size() > 1:
        out_BSNH = context.ring_attention(q_BSNH, k_BSKH, v_BSKH)
        return out_BSNH.reshape(*out_BSNH.shape[:2], -1)
    if implementation == "auto":
        implementation = _fastest_here(q_BSNH)
    if implementation == "pallas":
        out_BSNH = flash_attention.flash_attention(q_BSNH, k_BSKH, v_BSKH)
    else:
        out_BSNH = _jax_attention(q_BSNH, k_BSKH, v_BSKH, implementation)
    return out_BSNH.reshape(*out_BSNH.shape[:2], -1)


def _fastest_here(q_BSNH: jax.Array) -> AttentionImplementation:
    """The choice for the first device of this process; shapes and dtype are the queries'."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    _, seq_len, _, head_dim = q_BSNH.shape
    return choose_attention(device.platform, capability, head_dim, q_BSNH.dtype, seq_len).implementation


def _jax_attention(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, implementation: AttentionImplementation
) -> jax.Array:
    # Its XLA form asks for the common dtype of bfloat16 and float32, which jax_numpy_dtype_promotion=strict refuses.
    kind: Literal["xla", "cudnn"] = "cudnn" if implementation == "cudnn" else "xla"
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True, implementation=kind)


class AttentionChoice(NamedTuple):
    """An implementation of attention and the reason for it, to be printed."""

    implementation: AttentionImplementation
    reason: str


class _Case(NamedTuple):
    """What a choice depends on; `capability` without AMD's suffixes, as in gfx90a:sramecc+."""

    platform: str
    capability: str
    head_dim: int
    dtype: str
    seq_len: int

    @property
    def nvidia_generation(self) -> int | None:
        """The major number of "9.0"; None for AMD's "gfx942" and for no answer."""
        major = self.capability.split(".")[0]
        return int(major) if self.platform in _GPUS and major.isdigit() else None


def choose_attention(
    platform: str,
    compute_capability: str | None,
    head_dim: int,
    compute_dtype: DTypeLike,
    seq_len: int,
    *,
    forced: AttentionImplementation | None = None,
    num_context: int = 1,
) -> AttentionChoice:
    """On NVIDIA cuDNN's flash attention, on AMD Pallas's; else XLA's, which holds a [B, N, S, S] matrix of scores.

    On NVIDIA Pallas's is for those who ask for it: cuDNN's is faster, and its float32 products are TF32.

    Args:
      platform: a device's `platform`: "gpu", "cuda", "rocm", "cpu", ...
      compute_capability: a device's `compute_capability`: "9.0" on NVIDIA, "gfx942" on AMD, None where it has none.
      head_dim: width of a head.
      compute_dtype: dtype of the activations.
      seq_len: tokens of a sequence.
      forced: what the user wants, whatever is fastest; "auto" and None leave the choice open.
      num_context: context ranks; from two on their ring attends, whatever is chosen.

    Raises:
      UserError: what is forced does not work here.

    Example:
      >>> choose_attention("gpu", "9.0", 128, "bfloat16", 4096).implementation
      'cudnn'
    """
    forced = None if forced == "auto" else forced
    capability = (compute_capability or "").split(":")[0]
    case = _Case(platform, capability, head_dim, jnp.dtype(compute_dtype).name, seq_len)
    if num_context > 1:
        instead = f", not the model's attention={forced!r}" if forced else ""
        return AttentionChoice(forced or "xla", f"ring attention over {num_context} context ranks{instead}")
    if forced:
        return _forced(forced, case)
    if platform not in _GPUS:
        return AttentionChoice("xla", f"{_NAMES['xla']}; a flash attention needs a GPU, the platform is {platform}")
    refusals: list[str] = []
    candidates: tuple[AttentionImplementation, ...] = ("cudnn", "pallas")
    for implementation in candidates:
        reason = _refusal(implementation, case)
        if implementation == "pallas" and case.nvidia_generation is not None:
            reason = reason or "Pallas's only where it is asked for, by model_overrides={'attention': 'pallas'}"
        if reason is None:
            return AttentionChoice(implementation, _describe(implementation, case, refusals))
        refusals.append(reason)
    return AttentionChoice("xla", f"{_NAMES['xla']}: {'; '.join(refusals)}")


def _forced(implementation: AttentionImplementation, case: _Case) -> AttentionChoice:
    reason = _refusal(implementation, case)
    if reason is not None:
        raise UserError(f"attention={implementation!r}: {reason}; model_overrides without it take what works")
    return AttentionChoice(implementation, f"{_NAMES[implementation]}, as the model's settings say")


def _describe(implementation: AttentionImplementation, case: _Case, refusals: list[str]) -> str:
    """What it is and for; on NVIDIA also why not the one before it."""
    chosen = f"{_NAMES[implementation]}: {case.dtype}, head dim {case.head_dim}"
    if case.nvidia_generation is None:
        return f"{chosen}, AMD {case.capability}"
    return "; ".join([f"{chosen}, NVIDIA {case.capability}", *refusals])


def _refusal(implementation: AttentionImplementation, case: _Case) -> str | None:
    """Why an implementation does not work; None where it does."""
    if implementation == "cudnn":
        return _cudnn_refusal(case)
    return _pallas_refusal(case) if implementation == "pallas" else None


def _cudnn_refusal(case: _Case) -> str | None:
    generation = case.nvidia_generation
    if generation is None:
        return f"cuDNN's needs an NVIDIA GPU; the platform is {case.platform}"
    if generation < 8:
        return f"cuDNN's needs compute capability 8.0 or later, this is {case.capability}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"cuDNN's needs bfloat16 or float16, the compute dtype is {case.dtype}"
    limit = 256 if generation >= 9 else 128
    if case.head_dim % 8 or case.head_dim > limit:
        return f"cuDNN's needs a head dim that divides by 8 and is at most {limit}, this is {case.head_dim}"
    if case.seq_len % 2:
        return f"cuDNN's needs an even sequence length, this is {case.seq_len}"
    return None


def _pallas_refusal(case: _Case) -> str | None:
    generation = case.nvidia_generation
    if case.capability not in _AMD and generation is None:
        return f"Pallas's needs an NVIDIA GPU or AMD's {' or '.join(_AMD)}, this is {case.capability or case.platform}"
    if generation is not None and generation < 8:
        return f"Pallas's needs compute capability 8.0 or later, this is {case.capability}"
    return flash_attention.refusal(case.head_dim, case.dtype)
