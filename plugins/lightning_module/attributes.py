"""Gives each micro-batch of a step attributes of the module of its own, where several of them take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, final

from torch import nn

_T = TypeVar("_T")


@final
class Attributes:
    """The attributes of a module and its parts at one time; parameters, buffers and parts are none."""

    def __init__(self, module: nn.Module) -> None:
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(part), dict(vars(part))) for part in module.modules()
        ]

    def restore(self) -> None:
        """Set what is another since, and delete what is new; what was changed in place stays so."""
        for current, kept in self._parts:
            for name in current.keys() - kept.keys():
                del current[name]
            current.update(kept)


@final
class AttributeView:
    """The attributes as one micro-batch sets them.

    Args:
        module: The module.
        own: Those that it begins with; None: those that the module has, and keeps as this one sets them.
    """

    def __init__(self, module: nn.Module, own: Attributes | None) -> None:
        self._module, self._own = module, own

    def during(self, call: Callable[[], _T]) -> _T:
        """Let the module have them while ``call`` is called."""
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
    """The attributes of all micro-batches that are in a step: each finds what the step began with.

    What the first sets stays, as if the module had been called once.
    """

    def __init__(self) -> None:
        self._in_progress = 0
        self._at_start: Attributes | None = None

    @contextmanager
    def of_next(self, module: nn.Module) -> Iterator[AttributeView]:
        """Give the micro-batch that begins its view."""
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
