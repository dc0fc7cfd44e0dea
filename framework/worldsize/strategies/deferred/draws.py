"""Random numbers that a constructor asked for and that are not drawn yet."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from worldsize.strategies.deferred.tape import Tape


@final
class SeededError(Exception):
    """The constructor sets a generator of random numbers from which some were still to be drawn."""


@final
class PendingDraws:
    """The draws at the end of ``tape``, whose generators stand where the first of them begins.

    ``at_once``: draw when the constructor does, throw the numbers away, and draw them again when they are needed. It
    takes more time, and allows a constructor to set generators.
    """

    def __init__(self, tape: Tape, *, at_once: bool) -> None:
        self._tape, self._at_once = tape, at_once
        self._states: dict[torch.Generator, Tensor] = {}

    def note(self, generator: torch.Generator) -> None:
        """Take note of a draw from ``generator`` that is on the tape now. Raises SeededError as :meth:`check` does."""
        self.check()
        self._states.setdefault(generator, generator.get_state())
        if self._at_once:
            self.make()

    def make(self) -> None:
        """Draw, so that generators stand where the constructor has them. Raises SeededError as :meth:`check` does."""
        self.check()
        self._tape.draw_all()
        self._states.clear()

    def check(self) -> None:
        """Raise SeededError if a generator does not stand where the first of these draws begins."""
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._states.items()):
            raise SeededError
