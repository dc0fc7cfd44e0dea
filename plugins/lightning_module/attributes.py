"""Isolate a module's attributes between micro-batches that run in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, final

from torch import nn

_T = TypeVar("_T")


@final
class Attributes:
    """Snapshot of a module's and submodules' attributes, except parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(part), dict(vars(part))) for part in module.modules()
        ]

    def restore(self) -> None:
        """Restore reassigned attributes and delete new ones. In-place changes are not undone."""
        for current, kept in self._parts:
            for name in current.keys() - kept.keys():
                del current[name]
            current.update(kept)


@final
class AttributeView:
    """The module attributes of one micro-batch.

    Args:
        module: The module.
        own: The attributes at the start of the micro-batch. None to use the module's attributes directly.
    """

    def __init__(self, module: nn.Module, own: Attributes | None) -> None:
        self._module, self._own = module, own

    def call_with_attributes(self, call: Callable[[], _T]) -> _T:
        """Call ``call`` with this micro-batch's attributes on the module, and return its result."""
        if self._own is None:
            return call()
        others = Attributes(self._module)
        self._own.restore()
        try:
            return call()
        finally:
            self._own = Attributes(self._module)
            others.restore()


@final
class StepAttributes:
    """Gives each micro-batch of a step the module's attributes from before the step.

    The module keeps the values set by the first micro-batch, as if it had run alone.
    """

    def __init__(self) -> None:
        self._in_progress = 0
        self._at_start: Attributes | None = None

    @contextmanager
    def isolate_micro_batch(self, module: nn.Module) -> Iterator[AttributeView]:
        """Yield the attributes for the next micro-batch, which ends with the context."""
        is_first = not self._in_progress
        if is_first:
            self._at_start = Attributes(module)
        self._in_progress += 1
        try:
            yield AttributeView(module, None if is_first else self._at_start)
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._at_start = None
