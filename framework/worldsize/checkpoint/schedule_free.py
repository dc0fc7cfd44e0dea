"""What a checkpoint of a schedule-free optimizer says of the weights that are to be evaluated (arXiv 2405.15682)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def evaluated_shares(optimizer: Any) -> dict[str, float]:
    """Return, by parameter, how far it lies from its weights to those that the optimizer steps (its state ``z``).

    Args:
        optimizer: The part ``optimizer`` of a checkpoint's values, as :mod:`worldsize.checkpoint.tree` encodes it.
    """
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return dict(pair for group in groups if isinstance(group, Mapping) for pair in _of_group(group)) if groups else {}


def _of_group(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    match group:
        case {"train_mode": True, "params": list(names), "betas": {"$tuple": [float(beta), _]} | [float(beta), _]}:
            pass
        case {"train_mode": True, "params": list(names), "momentum": float(beta)}:
            pass
        case _:
            return
    if 0 < beta < 1:
        yield from ((str(name), 1 - 1 / beta) for name in names)
