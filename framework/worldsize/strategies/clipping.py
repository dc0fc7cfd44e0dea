"""The factor by which clipping scales a gradient, where torch does not see the whole of it."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Brings a gradient of ``norm`` (a scalar) to at most ``limit``, as torch.nn.utils.clip_grads_with_norm_ does."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
