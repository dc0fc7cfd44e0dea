"""Preserve optimizer counters across dummy steps that only create optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_PLAIN = (bool, int, float, complex, str, type(None))
_OWN = ("state", "param_groups", "defaults")  # attributes of every optimizer


@contextmanager
def counters_kept(optimizer: Optimizer) -> Iterator[None]:
    """Set lr and weight decay to 0 within the block; then restore all options and counters.

    For a dummy step that only creates optimizer state. Weight decay is 0 because some optimizers add it to the
    gradient, which would change the moments. Counters may be numbers or tensors, in group options or attributes, also
    of nested optimizers.
    """
    all_ = find_nested_optimizers(optimizer)
    undo = [step for each in all_ for step in _create_restorers(each)]
    fresh = [each for each in all_ if each is not optimizer and not each.state]
    for each in all_:
        for group in each.param_groups:
            group.update({name: _create_zero(group[name]) for name in ("lr", "weight_decay") if name in group})
    try:
        yield
    finally:
        for step in undo:
            step()
        for each in fresh:
            if each.state is not optimizer.state:
                each.state.clear()


def find_nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return ``optimizer`` and all optimizers nested in its attributes, lists and dicts."""
    reached, new = list[Optimizer](), [optimizer]
    while new:
        reached += new
        held = [value for each in new for value in _attributes(each).values()]
        lists = (list(each.values()) if isinstance(each, Mapping) else each for each in held)
        listed = [inner for each in lists for inner in (each if isinstance(each, list | tuple) else [each])]
        unseen = {id(each): each for each in listed if isinstance(each, Optimizer)}
        new = [each for each in unseen.values() if not any(each is other for other in reached)]
    return reached


@contextmanager
def attributes_kept(optimizer: Optimizer) -> Iterator[None]:
    """Restore counters in attributes after the block, where torch may take a dummy step."""
    undo = [_attributes_restorer(each) for each in find_nested_optimizers(optimizer)]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _attributes_restorer(optimizer: Optimizer) -> Callable[[], None]:
    counters = {name: value for name, value in _attributes(optimizer).items() if _is_counter(value)}
    return _restorer(vars(optimizer), counters)


def _create_restorers(optimizer: Optimizer) -> list[Callable[[], None]]:
    """Return functions that restore options and counters, excluding nested optimizers."""
    undo = [_restorer(group, {**group}, skip="params") for group in optimizer.param_groups]
    return [*undo, _attributes_restorer(optimizer)]


def _restorer(target: dict[str, Any], values: Mapping[str, Any], skip: str = "") -> Callable[[], None]:
    """Return a function that resets ``target`` to ``values``, except for the key ``skip``."""
    numbers = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
    copies = {name: value.copy() for name, value in values.items() if isinstance(value, dict | list | set)}
    is_group = bool(skip)

    def restore_values() -> None:
        for name in target.keys() - values.keys() if is_group else ():
            del target[name]
        for name, value in values.items():
            if name == skip:
                continue
            if name in numbers:
                value.copy_(numbers[name])  # in place, since others may reference it
            target[name] = copies.get(name, value)

    return restore_values


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _OWN and not name.startswith("_opt")}


def _is_counter(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad  # not a parameter
    if isinstance(value, dict):
        return all(isinstance(each, _PLAIN) for each in value.values())
    return all(isinstance(each, _PLAIN) for each in value) if isinstance(value, list) else isinstance(value, _PLAIN)


def _create_zero(option: float | Tensor) -> float | Tensor:
    return torch.zeros_like(option) if isinstance(option, Tensor) else 0.0
