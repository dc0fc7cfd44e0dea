"""Optimizers that evaluate the loss in their step, several times, by a closure: refused before the start."""

from __future__ import annotations

import re

from torch.optim import Optimizer

from worldsize.core import ConfigError
from worldsize.strategies.step_hooks import without_recipe_hooks
from worldsize.world.fork import gpus_hidden


def refuse_closures(optimizer: Optimizer) -> None:
    """Raise ConfigError if ``optimizer``, which no run needs any more, cannot step without a closure.

    Such a step, for example of LBFGS or of sharpness-aware minimization, repeats the forward and backward pass with
    other weights. Its state between steps is lists of tensors, which no checkpoint has.
    """
    try:
        with gpus_hidden(), without_recipe_hooks(optimizer):
            optimizer.step()  # without gradients it changes nothing
    except Exception as error:  # any exception: an optimizer may be the recipe's own
        if re.search(r"\bclosure\b", str(error)) is None:
            return  # another check, or the first step, explains it
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure, with which its step computes the loss several times; "
            "training computes it once for each update, summed over all processes. Use an optimizer that steps by "
            "gradients alone, such as AdamW or Muon."
        ) from None
