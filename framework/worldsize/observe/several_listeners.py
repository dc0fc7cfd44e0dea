"""Several listeners that are told of every event, none of which can take the others along when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import final

from worldsize.core import Event, Listener

_logger = logging.getLogger(__name__)


@final
class SeveralListeners:
    """Makes listeners and tells each of them every event, in their order.

    One that cannot be made, or fails, is named in a warning and left alone from then on.

    Args:
        makers: Make the listeners, by the name under which a warning speaks of each.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Listener]]) -> None:
        self._listeners: dict[str, Listener] = {}
        for name, make in makers.items():
            try:
                self._listeners[name] = make()
            except Exception as error:  # any: a third party's code, which must not end the others
                _warn(name, error)

    def __call__(self, event: Event) -> None:
        for name, listener in list(self._listeners.items()):
            try:
                listener(event)
            except Exception as error:
                del self._listeners[name]
                _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    _logger.warning("the %s failed and is off for the rest of the run: %s: %s", name, type(error).__name__, error)
