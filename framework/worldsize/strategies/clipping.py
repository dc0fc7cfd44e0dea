"""The factor of gradient clipping, for gradients that torch sees only in part."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the scalar factor that reduces a gradient of ``norm`` (a scalar) to at most ``limit``.

    It is that of torch.nn.utils.clip_grads_with_norm_.
    """
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
