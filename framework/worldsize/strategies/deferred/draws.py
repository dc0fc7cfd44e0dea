"""Random numbers that a constructor requested and that are not drawn yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from worldsize.record.determinism import GeneratorStates
from worldsize.strategies.deferred.tape import Tape

_HOST = torch.device("cpu")
_STATE_BYTES = torch.default_generator.get_state().nbytes
_AWAY = 997  # numbers: an own state for each pending draw, which a constructor is not likely to come to by itself


@final
class SeededError(Exception):
    """The constructor sets a random generator from which numbers are still to be drawn, or reads its state."""


@final
@dataclass(frozen=True)
class InitialStates:
    """The states of generators from which a model's tensors are drawn.

    Attributes:
        process: States of the process's generators.
        own: State of each other generator.
    """

    process: GeneratorStates
    own: Mapping[torch.Generator, Tensor]

    @staticmethod
    def now(own: Mapping[torch.Generator, Tensor] | None = None) -> InitialStates:
        """Return the current states of the process's generators, and those of ``own`` (uint8 (n,)) as given."""
        return InitialStates(GeneratorStates.of(_HOST), own or {})

    def restore(self) -> None:
        """Set the generators to these states."""
        for generator, state in self.own.items():
            generator.set_state(state)
        self.process.restore(_HOST)


@final
class PendingDraws:
    """The draws at the end of ``tape`` that are still to be made.

    Meanwhile their generators are set to arbitrary states, a different one after each draw, to detect a constructor
    that sets them, even to an earlier state.

    ``at_once``: draw when the constructor does, discard the numbers, and draw them again when they are needed. It takes
    more time, and allows a constructor to set generators.
    """

    def __init__(self, tape: Tape, *, at_once: bool) -> None:
        self._tape, self._at_once = tape, at_once
        self.seen: dict[torch.Generator, Tensor] = {}
        """The state of each generator before the constructor drew from it."""
        self._begins: dict[torch.Generator, Tensor] = {}  # where the first pending draw begins
        self._stands: dict[torch.Generator, Tensor] = {}  # where it is kept meanwhile
        self._places: set[bytes] = set()  # digests of all states in which generators were kept

    def meet(self, generator: torch.Generator) -> None:
        """Record a generator from which the constructor is about to draw.

        Raises:
            SeededError: as in :meth:`check`, or the generator was given the temporary state of another one.
        """
        self.check()
        if generator not in self._stands:
            state = generator.get_state()
            if _digest(state) in self._places:
                raise SeededError
            self.seen.setdefault(generator, state)

    def note(self, generator: torch.Generator) -> None:
        """Record a draw from ``generator`` that is now on the tape. Raises SeededError like :meth:`meet`."""
        self.meet(generator)
        if self._at_once:
            self._tape.draw_all()
            return
        if generator not in self._begins:
            self._begins[generator] = generator.get_state()
        torch.empty(_AWAY, dtype=torch.float32).random_(generator=generator)
        self._stands[generator] = generator.get_state()
        self._places.add(_digest(self._stands[generator]))

    def make(self) -> None:
        """Draw, so that generators have the states that the constructor expects. Raises SeededError."""
        self.rewind()
        self._tape.draw_all()

    def rewind(self) -> Mapping[torch.Generator, Tensor]:
        """Set generators to their states before the first of these draws; return these states, uint8 (n,) each.

        Raises:
            SeededError: as in :meth:`check`.
        """
        self.check()
        begins, self._begins, self._stands = self._begins, {}, {}
        for generator, state in begins.items():
            generator.set_state(state)
        return begins

    def check_kept(self, tensors: Iterable[Tensor]) -> None:
        """Raise SeededError if one of ``tensors``, of any shape, is a temporary state of a generator."""
        states = [tensor for tensor in tensors if tensor.dtype == torch.uint8 and tensor.nbytes == _STATE_BYTES]
        if any(_digest(state) in self._places for state in states if not state.is_meta):
            raise SeededError

    def check(self) -> None:
        """Raise SeededError if a generator does not have the temporary state that it was given."""
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._stands.items()):
            raise SeededError


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().data, digest_size=16).digest()
