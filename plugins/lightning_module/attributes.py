"""Gives each micro-batch of a step its own attributes of the module, where several of them take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, final

from torch import nn

_T = TypeVar("_T")


@final
class Attributes:
    """The attributes of a module and its parts at one time, without parameters, buffers and parts."""

    def __init__(self, module: nn.Module) -> None:
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(part), dict(vars(part))) for part in module.modules()
        ]

    def restore(self) -> None:
        """Set attributes back that were set since, and delete new ones; changes in place are not undone."""
        for current, kept in self._parts:
            for name in current.keys() - kept.keys():
                del current[name]
            current.update(kept)


@final
class AttributeView:
    """The attributes of a module as one micro-batch sets them.

    Args:
        module: The module.
        own: The attributes with which the micro-batch begins; None: it uses those of the module, and sets them there.
    """

    def __init__(self, module: nn.Module, own: Attributes | None) -> None:
        self._module, self._own = module, own

    def during(self, call: Callable[[], _T]) -> _T:
        """Call ``call`` while the module has the attributes of this micro-batch, and return its result."""
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
    """The attributes of all micro-batches of a step: each begins with those that the module had before the step.

    The module keeps what the first micro-batch sets, as if it had been called once.
    """

    def __init__(self) -> None:
        self._in_progress = 0
        self._at_start: Attributes | None = None

    @contextmanager
    def of_next(self, module: nn.Module) -> Iterator[AttributeView]:
        """Yield the view of the micro-batch that begins, which ends with the context."""
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
