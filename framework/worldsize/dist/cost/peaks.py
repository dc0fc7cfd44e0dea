"""The most that common GPUs compute, for the share of it that a model uses."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Dense operations a second without sparsity, from NVIDIA's data sheets of each product. Names are torch's.
_PEAKS: Mapping[str, Mapping[str, float]] = {
    r"H100 NVL|H200 NVL": {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835.5e12, "fp16": 835.5e12, "fp8": 1670.5e12},
    r"H100 PCIe": {"fp32": 51e12, "tf32": 378e12, "bf16": 756e12, "fp16": 756e12, "fp8": 1513e12},
    r"H100|H200": {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
    r"B200": {"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12},
    r"A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    r"L40S": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362.05e12, "fp16": 362.05e12, "fp8": 733e12},
    r"L4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12, "fp16": 121e12, "fp8": 242.5e12},
    r"A10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12, "fp16": 125e12},
    r"V100-SXM2": {"fp32": 15.7e12, "fp16": 125e12},
    r"T4": {"fp32": 8.1e12, "fp16": 65e12},
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return the dense peak of a GPU in operations a second; None: it, or its peak in ``precision``, is not known.

    Args:
        device: Name of the GPU as torch gives it, such as "NVIDIA A100-SXM4-80GB".
        precision: "fp32", "tf32", "bf16", "fp16" or "fp8".
    """
    for pattern, peaks in _PEAKS.items():
        if re.search(rf"\b({pattern})\b", device):
            return peaks.get(precision)
    return None
