"""Explain, per tensor, the first update in which recipe and reference differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from worldsize.core import Recipe
from worldsize.testing.port_runs import (
    PortConfig,
    Reference,
    copy_to_cpu,
    initial_model,
    recipe_trained,
    reference_trained,
)

_SAME = 1e-3  # maximum relative difference of updates considered equal, in float32
_FITS = 0.05  # maximum fraction of a difference that an explanation may leave unexplained


@final
@dataclass(frozen=True)
class _Update:
    """One update of one tensor, by the recipe and by the reference.

    Attributes:
        name: Name in the recipe's model.
        before: The tensor before the update, in both.
        ours: The recipe's increment.
        theirs: The reference's increment.
    """

    name: str
    before: Tensor
    ours: Tensor
    theirs: Tensor

    @property
    def differs(self) -> bool:
        """Whether the recipe's and the reference's update differ by more than rounding."""
        return _compute_norm(self.ours - self.theirs) > _SAME * max(
            _compute_norm(self.ours), _compute_norm(self.theirs)
        )

    @property
    def factor(self) -> float | None:
        """Ratio of the reference's update to the recipe's. None if the directions differ."""
        return _multiple(self.theirs, self.ours)

    @property
    def decay(self) -> float | None:
        """Additional weight decay of the reference, as a fraction. None if the updates differ otherwise."""
        fit = _multiple(self.ours - self.theirs, self.before)
        return fit if fit is not None and abs(fit) < 1 else None


def _compute_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _multiple(tensor: Tensor, of: Tensor) -> float | None:
    """Return c if ``tensor`` is c times ``of``, up to rounding, else None."""
    square = float((of * of).sum())
    if square == 0.0:
        return None
    multiple = float((tensor * of).sum()) / square
    return multiple if _compute_norm(tensor - multiple * of) <= _FITS * _compute_norm(tensor) else None


def update_causes(recipe: Recipe, reference: Reference, config: PortConfig, step: int) -> list[str]:
    """Explain, in sentences, why the loss first differs in ``step``, from the update in the previous step."""
    updates = _compute_updates(recipe, reference, config, step - 1)
    where = f"The update of step {step - 1} differs"
    if updates is None:
        return [f"{where}. Return the model at the end of the reference to compare the weights after that step."]
    different = [update for update in updates if update.differs]
    if not different:
        return [
            f"The weights after step {step - 1} match. The loss of step {step} differs because of its batch, its "
            "dropout, or the code between the two steps."
        ]
    return [f"{where} {_format_differing_tensors(updates, different)}.", f"Cause: {_explain_difference(different)}"]


def different_update(recipe: Recipe, reference: Reference, config: PortConfig, step: int) -> str | None:
    """Return a sentence with the names of the tensors whose update in ``step`` differs.

    Returns None if all updates agree, or the reference does not return a model.
    """
    updates = _compute_updates(recipe, reference, config, step) or []
    different = [update for update in updates if update.differs]
    return f"The update of step {step} differs {_format_differing_tensors(updates, different)}." if different else None


def _compute_updates(recipe: Recipe, reference: Reference, config: PortConfig, last: int) -> list[_Update] | None:
    """Return update ``last`` of each tensor, or None without matching reference weights."""
    until = replace(config, steps=last)
    theirs = reference_trained(recipe, reference, until).weights
    ours = recipe_trained(recipe, until).weights
    if last == 1:
        before: Mapping[str, Tensor] = copy_to_cpu(initial_model(recipe, config).state_dict())
    else:
        before = recipe_trained(recipe, replace(config, steps=last - 1)).weights
    if [tensor.shape for tensor in theirs.values()] != [tensor.shape for tensor in ours.values()]:
        return None
    theirs = theirs if theirs.keys() == ours.keys() else dict(zip(ours, theirs.values(), strict=True))
    return [
        _Update(
            name, before[name].double(), (ours[name] - before[name]).double(), (theirs[name] - before[name]).double()
        )
        for name in ours
        if ours[name].is_floating_point()
    ]


def _format_differing_tensors(updates: Sequence[_Update], different: Sequence[_Update]) -> str:
    first = different[0]
    largest = float((first.ours - first.theirs).abs().max())
    if len(different) == len(updates):
        return f"in all tensors, first {first.name} (by up to {largest:.1e})"
    names = [update.name for update in different]
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"in {len(different)} of {len(updates)} tensors: {shown} (the first by up to {largest:.1e})"


def _explain_difference(different: Sequence[_Update]) -> str:
    if still := [update.name for update in different if _compute_norm(update.theirs) == 0.0]:
        return f"the reference does not train {', '.join(still)}: frozen, or missing from the optimizer's groups."
    if moved := [update.name for update in different if _compute_norm(update.ours) == 0.0]:
        return f"the recipe does not train {', '.join(moved)}: frozen, or missing from the optimizer's groups."
    factors = [update.factor for update in different]
    if (factor := _find_common_value(factors)) is not None:
        return (
            f"the size of the update: the reference's is {factor:.6g} times the recipe's. Compare the learning rate of "
            "these parameters, and the division of the loss by the number of micro-batches."
        )
    decays = [update.decay for update in different if _compute_norm(update.before) > 0.0]
    if (decay := _find_common_value(decays)) is not None:
        side, other = ("reference", "recipe") if decay > 0 else ("recipe", "reference")
        return (
            f"weight decay: the {side} decays these weights by {abs(decay):.3g} more than the {other}. Compare "
            "weight_decay of the optimizer's groups."
        )
    return (
        "the direction of the update, after equal losses. Compare the optimizer and its arguments (momentum, betas, "
        "eps), clipping, and the loss passed to backward."
    )


def _find_common_value(values: Sequence[float | None]) -> float | None:
    """Return the common value of ``values``, up to rounding, or None if they differ."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values) or known[0] == 0.0:
        return None
    return known[0] if all(abs(value / known[0] - 1) < _FITS for value in known) else None
