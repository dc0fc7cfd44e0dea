"""SHA-256 of model state: equal digests mean equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensor_digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest dtype, shape and bytes of each tensor; SHA-256 by name."""
    return {name: _digest(state[name].detach().cpu().contiguous()) for name in sorted(state)}


def state_digest(digests: Mapping[str, str]) -> str:
    """Combine the digests of all tensors and their names into one."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
