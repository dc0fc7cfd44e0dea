"""Random numbers that a constructor requested, but that are not generated yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from worldsize.seeds import GeneratorStates
from worldsize.strategies.deferred.tape import Tape

_HOST = torch.device("cpu")
_STATE_BYTES = torch.default_generator.get_state().nbytes
_AWAY = 997  # numbers to skip after a pending draw, for a state that occurs nowhere else


@final
class SeededError(Exception):
    """The constructor seeds a generator with pending draws, or accesses its state."""


@final
@dataclass(frozen=True)
class InitialStates:
    """The initial states of the random generators for a model's tensors.

    Attributes:
        process: States of the process's default generators.
        own: States of other generators.
    """

    process: GeneratorStates
    own: Mapping[torch.Generator, Tensor]

    @staticmethod
    def capture_states(own: Mapping[torch.Generator, Tensor] | None = None) -> InitialStates:
        """Return the current states of the default generators, and ``own``, uint8 (n,) each."""
        return InitialStates(GeneratorStates.from_device(_HOST), own or {})

    def restore(self) -> None:
        """Set the generators to these states."""
        for generator, state in self.own.items():
            generator.set_state(state)
        self.process.restore(_HOST)


@final
class PendingDraws:
    """The pending random operations (draws) at the end of ``tape``.

    Until they run, their generators have arbitrary placeholder states, different after each draw. This detects a
    constructor that sets a generator's state, even to an earlier one.

    ``at_once``: generate numbers when the constructor requests them, discard them, and generate them again when needed.
    This takes longer, but supports constructors that set generator states.
    """

    def __init__(self, tape: Tape, *, at_once: bool) -> None:
        self._tape, self._at_once = tape, at_once
        self.seen: dict[torch.Generator, Tensor] = {}
        """The state of each generator before the constructor first sampled from it."""
        self._begins: dict[torch.Generator, Tensor] = {}  # state before the first pending draw
        self._stands: dict[torch.Generator, Tensor] = {}  # current placeholder state
        self._places: set[bytes] = set()  # digests of all placeholder states

    def record_generator(self, generator: torch.Generator) -> None:
        """Record a generator before the constructor uses it.

        Raises:
            SeededError: as in :meth:`check_states`, or its state is the placeholder of a different generator.
        """
        self.check_states()
        if generator not in self._stands:
            state = generator.get_state()
            if _hash_state(state) in self._places:
                raise SeededError
            self.seen.setdefault(generator, state)

    def record_draw(self, generator: torch.Generator) -> None:
        """Record a draw from ``generator`` on the tape; raise like :meth:`record_generator`."""
        self.record_generator(generator)
        if self._at_once:
            self._tape.draw_all()
            return
        if generator not in self._begins:
            self._begins[generator] = generator.get_state()
        torch.empty(_AWAY, dtype=torch.float32).random_(generator=generator)
        self._stands[generator] = generator.get_state()
        self._places.add(_hash_state(self._stands[generator]))

    def run_pending(self) -> None:
        """Run pending draws, so that generators have their expected states. Raises SeededError."""
        self.rewind_generators()
        self._tape.draw_all()

    def rewind_generators(self) -> Mapping[torch.Generator, Tensor]:
        """Restore and return the states before the first pending draw, uint8 (n,) each.

        Raises:
            SeededError: as in :meth:`check_states`.
        """
        self.check_states()
        begins, self._begins, self._stands = self._begins, {}, {}
        for generator, state in begins.items():
            generator.set_state(state)
        return begins

    def check_kept(self, tensors: Iterable[Tensor]) -> None:
        """Raise SeededError if one of ``tensors``, of any shape, is a placeholder state."""
        states = [tensor for tensor in tensors if tensor.dtype == torch.uint8 and tensor.nbytes == _STATE_BYTES]
        if any(_hash_state(state) in self._places for state in states if not state.is_meta):
            raise SeededError

    def check_states(self) -> None:
        """Raise SeededError if a generator's placeholder state has changed."""
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._stands.items()):
            raise SeededError


def _hash_state(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().data, digest_size=16).digest()
