"""The factor of gradient clipping, for gradients that torch sees only in part."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, Numerics
from worldsize.optimizers.names import all_parameters
from worldsize.strategies.unused_parameters import listed


def refuse_norms_of_others(model: nn.Module, optimizer: Optimizer, numerics: Numerics) -> None:
    """Refuse a norm over parameters that nothing updates: ``zero_grad`` leaves their gradients to the next steps.

    Raises:
        ConfigError: a parameter requires a gradient, and ``optimizer`` does not have it.
    """
    own = {id(parameter) for parameter in all_parameters(optimizer)}
    others = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in own]
    if others:
        clips = numerics.clip_norm is not None
        raise ConfigError(
            f"{'clip_norm' if clips else 'nonfinite=skip'}: the norm would count gradients of {listed(others)}, in no "
            "parameter group of the optimizer, whose zero_grad() does not reset them: it would grow with those of all "
            "earlier steps. Freeze them with requires_grad_(False), give them to the optimizer, or set "
            f"{'clip_norm=null' if clips else 'nonfinite=stop'}."
        )


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the scalar factor that reduces a gradient of ``norm`` (a scalar) to at most ``limit``.

    It is that of torch.nn.utils.clip_grads_with_norm_.
    """
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def aligned_norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm of ``gradient``, a scalar, with bits that do not depend on its address.

    A view of a bucket may begin anywhere. CUDA's kernel reads four numbers at once where they are aligned, and adds
    them in another order where they are not; it chooses for all tensors of a call.
    """
    is_aligned = gradient.data_ptr() % (4 * gradient.element_size()) == 0
    norm: Tensor = torch._foreach_norm([gradient if is_aligned else gradient.clone()])[0]
    return norm
