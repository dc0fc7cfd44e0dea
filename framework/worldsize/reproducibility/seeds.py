"""Seed streams: every random number of a run comes from (seed, purpose, indices), never from the process.

Purposes in use: ``init`` (model initialisation, the same on every rank), ``order`` (epoch),
``data`` (step, logical rank; augmentation and data workers) and ``step`` (step, logical rank; dropout).
"""

from __future__ import annotations

import hashlib
import random

import numpy
import torch


def stream(seed: int, purpose: str, *indices: int) -> int:
    """63-bit seed of one stream: BLAKE2b of the run's seed, the purpose and the indices."""
    name = f"{seed}/{purpose}/{indices}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def seed_generators(value: int, device: torch.device) -> None:
    """Seed Python, NumPy, torch on the CPU and, on CUDA, this process's device.

    Sets torch's generators directly: ``torch.manual_seed`` costs 90 µs, this about 8 µs.
    """
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
