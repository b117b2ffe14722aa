"""Which integers a `.bin` file holds: the name or the vocabulary says, and the content must not say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from amsp_jax.errors import UserError

HEAD_BYTES = 1 << 22
"""What is looked at: a part that every type divides."""

_TYPES = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8", "int16": "<i2", "int32": "<i4", "uint64": "<u8"}
# No tokenizer writes these; they are recognised, to be named in a message.
_FOREIGN = {
    "float32": "<f4",
    "float64": "<f8",
    "big-endian int64": ">i8",
    "big-endian int32": ">i4",
    "big-endian uint16": ">u2",
}
# The least likely to fit by chance comes first: any bytes are ids of 16 bits, where the vocabulary is that large.
_GUESSES = (
    *("float64", "float32", "int64", "uint64", "uint32", "int32", "big-endian int64", "big-endian int32"),
    *("uint16", "int16", "big-endian uint16"),
)
# Upper halves of ids are at most this, and lower halves above the other; ids of their own are not alike in pairs.
_MAX_UPPER, _MIN_LOWER = 15, 255
_LLM_C_HEADER_BYTES = 1024
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
_MAGICS = (
    (b"\x93NUMPY", "it is a .npy file", "Rename it to .npy"),
    (b"PK\x03\x04", "it is a zip file, as .npz files and checkpoints of PyTorch are", "Save its ids with numpy.save"),
    (b"\x1f\x8b", "it is compressed by gzip", "Unpack it"),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd", "Unpack it"),
    (b"PAR1", "it is a Parquet file", "Save its ids with numpy.save"),
    (b"MMIDIDX\0\0", "it is the index of a Megatron data set", "Name the file of ids beside it"),
)


def named_dtype(path: Path, vocab_size: int) -> np.dtype:
    """The type that the name says (`ids.int64.bin`), else uint16 for up to 65,536 ids and uint32 above."""
    middle = path.name.lower().rsplit(".", 2)[-2]
    if middle in _TYPES:
        return np.dtype(_TYPES[middle])
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def check_content(path: Path, head: bytes, num_bytes: int, dtype: np.dtype, vocab_size: int) -> None:
    """Compares what a file holds with the type that it is read as.

    Args:
      path: for the message.
      head: its first `HEAD_BYTES`, or all of it.
      num_bytes: of the whole file.
      dtype: what it is to be read as.
      vocab_size: every id is below.

    Raises:
      UserError: it holds something else; the message says what, as far as that can be told.
    """
    for magic, what, advice in _MAGICS:
        if head.startswith(magic):
            raise UserError(f"token file {path} holds no bare ids: {what}. {advice}.")
    _refuse_llm_c(path, head)
    others = [name for name in _GUESSES if _fits(head, num_bytes, name, vocab_size)]
    if num_bytes % dtype.itemsize:
        raise UserError(
            f"token file {path} has {num_bytes:,} bytes, which is no multiple of {dtype.itemsize} ({dtype.name}). "
            + _advice(path, others)
        )
    why = _wrong(head, dtype, vocab_size)
    # Without another type that fits, ids that are too large are of another tokenizer: `check_ids` says so.
    if why and (others or "second" in why):
        raise UserError(f"token file {path} was read as {dtype.name} and {why}. {_advice(path, others)}")


def _advice(path: Path, fitting: Sequence[str]) -> str:
    if not fitting:
        return f"Name it after the type it holds, {_renamed(path, 'uint16')} or another of {', '.join(_TYPES)}."
    if fitting[0] in _FOREIGN:
        return f"As {fitting[0]} all ids are in the vocabulary: save it as int32, numpy.save(..., ids.astype('int32'))."
    return f"It holds {fitting[0]}: rename it to {_renamed(path, fitting[0])} to say so."


def _renamed(path: Path, type_name: str) -> str:
    parts = path.name.split(".")[:-1]
    stem = parts[:-1] if len(parts) > 1 and parts[-1].lower() in _TYPES else parts
    return ".".join([*stem, type_name, "bin"])


def _fits(head: bytes, num_bytes: int, name: str, vocab_size: int) -> bool:
    dtype = np.dtype({**_TYPES, **_FOREIGN}[name])
    if name == "big-endian uint16" and vocab_size > 1 << 15:
        return False
    return not num_bytes % dtype.itemsize and not _wrong(head, dtype, vocab_size)


def _wrong(head: bytes, dtype: np.dtype, vocab_size: int) -> str:
    """What is wrong with the first ids when they are read as `dtype`; empty if they can be ids."""
    ids = np.frombuffer(head[: len(head) // dtype.itemsize * dtype.itemsize], dtype)
    if dtype.kind in "iu" and len(ids) > 1 and (most := _upper_halves(ids)) is not None:
        return f"every second id is {f'at most {most}' if most else 0}"
    if dtype.kind == "f":
        # Bytes of integers, read as floats, are tiny or no whole numbers.
        with np.errstate(invalid="ignore"):
            whole = np.isfinite(ids).all() and (ids == np.floor(ids)).all() and ids.any()
        return "" if whole and ids.min() >= 0 and ids.max() < vocab_size else "its numbers are no ids"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        return f"its ids go from {low} to {high}, outside the vocabulary of {vocab_size}"
    return ""


def _upper_halves(ids: np.ndarray) -> int | None:
    """The largest of every second number, if these are the upper halves of wider integers; else None."""
    lower, upper = ids[::2], ids[1::2]
    # A negative filler such as -100 has an upper half of ones.
    ones = -1 if ids.dtype.kind == "i" else (1 << 8 * ids.dtype.itemsize) - 1
    positive = upper[upper != ones]
    if not len(positive) or not lower.any():
        return None
    most = int(positive.max())
    is_upper = most == 0 or (int(positive.min()) >= 0 and most <= _MAX_UPPER and int(lower.max()) > _MIN_LOWER)
    return most if is_upper else None


def _refuse_llm_c(path: Path, head: bytes) -> None:
    if len(head) < _LLM_C_HEADER_BYTES:
        return
    magic, version, num_ids = (int(x) for x in np.frombuffer(head[:12], "<i4"))
    if magic in _LLM_C and 0 < version < 16:
        raise UserError(
            f"token file {path} begins with a header of {_LLM_C_HEADER_BYTES:,} bytes, as llm.c writes it, before "
            f"{num_ids:,} ids. Cut it off: tail -c +{_LLM_C_HEADER_BYTES + 1} {path.name} > "
            f"{_renamed(path, _LLM_C[magic])}"
        )
