"""Tries whether entries that an optimizer adds to its ``state_dict()`` are the same on ranks with other parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from worldsize.checkpoint.tree import split
from worldsize.strategies.optimizer_trial import Trial, part_of, same
from worldsize.strategies.train_state import extra_state

_Split = tuple[dict[str, Tensor], Any]  # tensors of any shapes by path, and other values


def has_extra_state(trial: Trial) -> bool:
    """Return whether an optimizer adds entries to its ``state_dict()``, besides its state and groups."""
    return any(tensors or values for tensors, values in _extra_states(trial))


def divides_extra_state(trial: Trial) -> bool:
    """Return whether these entries differ if an optimizer updates some parameters, or parts of them."""
    if not has_extra_state(trial):
        return False
    names = list(trial.values)
    parts = [partial(part_of, dim=dim, is_second=is_second) for dim in range(2) for is_second in (False, True)]
    try:
        complete = _extra_states(trial)
        divided = [_extra_states(trial, part=lambda _, tensor: part(tensor)) for part in parts]  # noqa: B023
        divided += [_extra_states(trial, own=own) for own in (names[::2], names[1::2])]
        return not all(_equal(one, other) for each in divided for one, other in zip(complete, each, strict=True))
    except Exception:  # of any kind: optimizers are user code
        return True


def _extra_states(trial: Trial, **options: Any) -> list[_Split]:
    """Return the extra state of each optimizer after all steps."""
    states = list[_Split]()
    trial.updated(finish=lambda optimizer: states.append(split(extra_state(optimizer))), **options)
    return states


def _equal(one: _Split, other: _Split) -> bool:
    (tensors, values), (others, other_values) = one, other
    return (
        values == other_values
        and tensors.keys() == others.keys()
        and all(each.shape == others[name].shape and same(each, others[name]) for name, each in tensors.items())
    )
