"""Moves batches of any type to a device: tensors in containers, and objects that have ``to(device)`` themselves."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from worldsize.core import Batch, ConfigError
from worldsize.devices import on_device


def map_tensors(batch: Batch, function: Callable[[Tensor], Any], own: Callable[[Any], Any]) -> Batch:
    """Return a batch with ``function`` of every tensor in its lists, tuples, mappings and dataclasses.

    Args:
        batch: The batch, which is not changed.
        function: Takes and returns a tensor of any shape.
        own: Takes and returns any other object; those with ``to(device)`` are always passed to it.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return own(batch)

    def mapped(each: Any) -> Any:
        return map_tensors(each, function, own)

    match batch:
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*map(mapped, batch))
        case list() | tuple():
            values = list(map(mapped, batch))
            return values if type(batch) is list else type(batch)(values)
        case defaultdict():
            return defaultdict(batch.default_factory, {key: mapped(value) for key, value in batch.items()})
        case Mapping():
            values_by_key = {key: mapped(value) for key, value in batch.items()}
            return values_by_key if type(batch) is dict else type(batch)(values_by_key)  # type: ignore[call-arg]
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for each in fields(batch):
            if hasattr(batch, each.name):
                object.__setattr__(changed, each.name, mapped(getattr(batch, each.name)))  # it may be frozen
        return changed
    return own(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to ``device``; for the CPU return it as it is.

    Raises:
        ConfigError: the batch has an object with tensors, and no method ``to``.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(batch, lambda tensor: on_device(tensor, device), lambda own: _moved(own, device))


def _moved(own: Any, device: torch.device) -> Any:
    if not callable(getattr(own, "to", None)):
        _check_holds_no_tensor(own)
        return own
    moved = own.to(device, non_blocking=True) if _takes_non_blocking(type(own)) else own.to(device)
    return own if moved is None else moved  # it may have changed itself


def _check_holds_no_tensor(own: Any) -> None:
    held = next((name for name, value in getattr(own, "__dict__", {}).items() if isinstance(value, Tensor)), None)
    if held is not None:
        kind = type(own).__name__
        raise ConfigError(
            f"batches hold a {kind}, whose tensor {held!r} would stay on the CPU: it has no method to. Give {kind} a "
            "method to(device), which returns it on the device, or make it a dataclass, a tuple or a dict of tensors."
        )


def _takes_non_blocking(kind: type) -> bool:
    """Return whether ``to`` of a type takes non_blocking; one of any arguments hands them on to tensors."""
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def pinned(own: Any) -> Any:
    """Return an object of its own type in page-locked memory if it has a method for that, else as it is."""
    return own.pin_memory() if callable(getattr(own, "pin_memory", None)) else own
