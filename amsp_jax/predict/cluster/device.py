"""Peak FLOP/s and memory of devices, from their data sheets, by the names that jax reports."""

from __future__ import annotations

import dataclasses
import re

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class DevicePeak:
    """What the maker says of one jax device.

    Attributes:
      flops: dense matrix FLOP/s in bf16 (V100: fp16), without sparsity.
      memory_bytes: the sheet's GB as GiB, which is what the drivers report to within 1 %.
      source: the data sheet.
    """

    flops: float
    memory_bytes: int
    source: str


_A100 = "NVIDIA A100 Tensor Core GPU data sheet, BF16 Tensor Core"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, BFLOAT16 Tensor Core, halved: the sheet counts sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, BFLOAT16 Tensor Core, halved: the sheet counts sparsity"

DEVICE_PEAKS: dict[str, DevicePeak] = {
    "V100-SXM2": DevicePeak(125e12, 16 * _GIB, "NVIDIA V100 Tensor Core GPU data sheet, FP16 Tensor performance"),
    "V100-SXM2-32GB": DevicePeak(125e12, 32 * _GIB, "NVIDIA V100 Tensor Core GPU data sheet, FP16 Tensor performance"),
    "V100-SXM3-32GB": DevicePeak(125e12, 32 * _GIB, "NVIDIA V100 Tensor Core GPU data sheet, FP16 Tensor performance"),
    "V100-PCIE": DevicePeak(112e12, 16 * _GIB, "NVIDIA V100 Tensor Core GPU data sheet, FP16 Tensor performance"),
    "A100-SXM4-40GB": DevicePeak(312e12, 40 * _GIB, _A100),
    "A100-PCIE-40GB": DevicePeak(312e12, 40 * _GIB, _A100),
    "A100": DevicePeak(312e12, 80 * _GIB, _A100),
    "A800": DevicePeak(312e12, 80 * _GIB, "NVIDIA A800: an A100 with slower NVLink; " + _A100),
    "H100": DevicePeak(989.4e12, 80 * _GIB, _H100 + ", SXM"),
    "H100 PCIe": DevicePeak(756e12, 80 * _GIB, _H100 + ", PCIe"),
    "H100 NVL": DevicePeak(835e12, 94 * _GIB, _H100 + ", NVL"),
    "H800": DevicePeak(989.4e12, 80 * _GIB, "NVIDIA H800: an H100 SXM with slower NVLink; " + _H100),
    "H200": DevicePeak(989.4e12, 141 * _GIB, _H200 + ", SXM"),
    "H200 NVL": DevicePeak(835.5e12, 141 * _GIB, _H200 + ", NVL"),
    "GH200": DevicePeak(
        989.4e12, 96 * _GIB, "NVIDIA GH200 Grace Hopper Superchip data sheet, halved: it counts sparsity"
    ),
    "B200": DevicePeak(2250e12, 180 * _GIB, "NVIDIA HGX B200 data sheet, BF16 Tensor Core, halved: it counts sparsity"),
    "GB200": DevicePeak(
        2500e12, 186 * _GIB, "NVIDIA GB200 NVL72 data sheet, BF16 Tensor Core, halved: it counts sparsity"
    ),
    "MI210": DevicePeak(181e12, 64 * _GIB, "AMD Instinct MI210 data sheet, peak bfloat16"),
    "MI250": DevicePeak(
        181.05e12, 64 * _GIB, "AMD Instinct MI250 data sheet, peak bfloat16, halved: a device is one GCD"
    ),
    "MI250X": DevicePeak(
        191.5e12, 64 * _GIB, "AMD Instinct MI250X data sheet, peak bfloat16, halved: a device is one GCD"
    ),
    "MI300A": DevicePeak(980.6e12, 128 * _GIB, "AMD Instinct MI300A data sheet, peak bfloat16"),
    "MI300X": DevicePeak(1307.4e12, 192 * _GIB, "AMD Instinct MI300X data sheet, peak bfloat16"),
    "MI325X": DevicePeak(1307.4e12, 256 * _GIB, "AMD Instinct MI325X data sheet, peak bfloat16"),
}
"""By a part of the name that jax reports; of several that fit, the longest counts."""


def device_peak(device_kind: str) -> DevicePeak | None:
    """The row of `DEVICE_PEAKS` for a name such as `NVIDIA A100-SXM4-80GB`; None for a device not listed."""
    fits = [name for name in DEVICE_PEAKS if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device_kind, re.IGNORECASE)]
    return DEVICE_PEAKS[max(fits, key=len)] if fits else None


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None for a device not listed, so that no MFU is made up.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989400000000000.0
    """
    row = device_peak(device_kind)
    return row.flops if row else None


_CAPABILITIES = {
    "V100": "7.0",
    "A100": "8.0",
    "A800": "8.0",
    "G?H[128]00": "9.0",
    "G?B200": "10.0",
    "MI2[15]0": "gfx90a",
    "MI300": "gfx942",
}


def compute_capability(device_kind: str) -> str | None:
    """A device's `compute_capability` as jax has it: a version on NVIDIA, an architecture on AMD; None for others.

    >>> compute_capability("NVIDIA H200")
    '9.0'
    >>> compute_capability("AMD Instinct MI250X")
    'gfx90a'
    """
    fits = (version for name, version in _CAPABILITIES.items() if re.search(rf"(?<!\w){name}", device_kind))
    return next(fits, None)
