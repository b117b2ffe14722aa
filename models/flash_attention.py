"""Flash attention (Dao et al., arXiv 2205.14135) with jax's Pallas kernel, which Triton compiles for AMD and NVIDIA.

The scores stay on the chip: forward keeps the result and the log-sum-exp of each query, backward computes the scores
again (Dao, arXiv 2307.08691).

Shape suffixes: B rows, S sequence, N query heads, K key and value heads, H head dim.
"""

from __future__ import annotations

import warnings
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from amsp_jax.errors import UserError

_SMALLEST_TILE = 16
"""Rows and columns of the smallest product that Triton takes."""
_QUERIES = (64, 16 * 1024)
_KEYS = (64, 8 * 1024)
_BACKWARD = (32, 8 * 1024)
"""The most rows and bytes of a tile.

Forward holds one tile of queries and two each of keys and values, as loads run one tile ahead; backward two each of
what it loops over and one each of the other pair. All of it is below the 64 KiB that a CDNA compute unit has, the
smallest of the GPUs that this is for.
"""
_MOST_ROW_BYTES = 512
"""So that the smallest tile of keys is within its bytes."""


def refusal(head_dim: int, compute_dtype: DTypeLike) -> str | None:
    """What the kernel needs and does not get; None where it can run."""
    dtype = jnp.dtype(compute_dtype)
    if dtype.name not in ("bfloat16", "float16", "float32"):
        return f"Pallas's needs bfloat16, float16 or float32, the compute dtype is {dtype.name}"
    most = _MOST_ROW_BYTES // dtype.itemsize
    if not _SMALLEST_TILE <= head_dim <= most:
        return f"Pallas's needs a head dim of {_SMALLEST_TILE} to {most} in {dtype.name}, this is {head_dim}"
    try:
        _kernels()
    except ImportError:
        return f"Pallas's is not in jax {jax.__version__}"
    return None


def flash_attention(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Causal attention in q's dtype: [B, S, N, H]. N is a multiple of K, and S any number.

    Scores, statistics and sums are float32; probabilities are rounded to q's dtype before their product with v.

    Args:
      q_BSNH, k_BSKH, v_BSKH: of one dtype, which `refusal` accepts with their head dim.
      interpret: run the kernel as plain jax operations, on any device and slowly.

    Raises:
      UserError: the kernel does not take this dtype or head dim.
    """
    seq_len, num_heads, head_dim = q_BSNH.shape[1:]
    if reason := refusal(head_dim, q_BSNH.dtype):
        raise UserError(f"attention='pallas': {reason}; set the model's attention to 'xla'")
    kernels, group = _kernels(), num_heads // k_BSKH.shape[2]
    q, k, v = (_padded(x) for x in (q_BSNH, k_BSKH, v_BSKH))
    if group > 1:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    out_BSNH: jax.Array = kernels.mha(
        q,
        k,
        v,
        segment_ids=None,
        sm_scale=head_dim**-0.5,
        causal=True,
        block_sizes=_block_sizes(kernels, q.shape[1], head_dim, q.dtype),
        interpret=interpret,
    )
    return out_BSNH[:, :seq_len]


def _padded(x_BSNH: jax.Array) -> jax.Array:
    """With zeros after the sequence, up to a multiple of the most rows of a tile, or of less if it is shorter.

    Padded keys come after every query, so the causal mask hides them.
    """
    seq_len = x_BSNH.shape[1]
    multiple = min(max(_QUERIES[0], _KEYS[0], _BACKWARD[0]), max(_SMALLEST_TILE, _power_of_two(seq_len)))
    padding = -seq_len % multiple
    return jnp.pad(x_BSNH, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x_BSNH


def _block_sizes(kernels: ModuleType, seq_len: int, head_dim: int, dtype: jnp.dtype) -> object:
    """The kernels' tiles, whose numbers of rows are powers of two, as Triton wants."""

    def rows(most_rows: int, most_bytes: int) -> int:
        return min(most_rows, seq_len, most_bytes // (_power_of_two(head_dim) * dtype.itemsize))

    backward = rows(*_BACKWARD)
    return kernels.BlockSizes(
        block_q=rows(*_QUERIES),
        block_k=rows(*_KEYS),
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )


def _power_of_two(number: int) -> int:
    """The next one, at or above it."""
    return 1 << (number - 1).bit_length()


def _kernels() -> ModuleType:
    """jax's module of the kernels, imported when needed: it takes a second, and a later jax may lack it.

    Raises:
      ImportError: this jax has none.
    """
    with warnings.catch_warnings():
        # Of jax 0.11, which names a library that takes its place.
        warnings.filterwarnings("ignore", r"jax\.experimental\.pallas\.ops\.gpu\.attention is", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    return attention
