"""Detects parameters without a gradient in a step, before DistributedDataParallel would train on sums that lack it.

Torch notices it only when the next forward pass begins: the update of the step has then been taken with gradients that
no rank has sent.
"""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import ConfigError

_SHOWN = 4  # names in a message
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def check_reduced(module: nn.Module) -> None:
    """Check that all gradients have been summed, after the last backward pass of a step; others are not wrapped.

    It asks for nothing from other ranks. The private method is that of torch 2.1 to 2.15.

    Raises:
        ConfigError: ``module`` waits for the gradient of a parameter that the pass has not reached.
    """
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    try:
        module._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _unused(module, str(error)) from None
    first = next((each for each in module.module.parameters() if each.requires_grad), None)
    if first is not None and first.grad is None:  # the pass has reached none of them
        raise _unused(module, "")


def _unused(module: DistributedDataParallel, said: str) -> ConfigError:
    own = module.module.named_parameters()
    named = {name.removeprefix("model."): each for name, each in own if each.requires_grad}  # in a CallingRoot
    names = [name for name, each in named.items() if each.grad is None]
    if not names and (match := _INDICES.search(said)):  # it had one in an earlier micro-batch
        names = [list(named)[int(index)] for index in match[1].split() if int(index) < len(named)]
    return ConfigError(
        f"{listed(names)} got no gradient in the last micro-batch of this process, and every process must have a "
        "gradient of every parameter. Set strategy.find_unused_parameters=true, freeze them with "
        "requires_grad_(False), or let the loss depend on them."
    )


def listed(names: list[str]) -> str:
    """Return some of ``names`` for a message."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "") if names else "some parameters"
