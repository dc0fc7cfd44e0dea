"""Runs reductions of several collectives so that those of different buckets overlap.

Collectives of one group must begin in the same order on every rank, so none begins from a callback: a reduction is a
generator that yields while its collective is under way, and all go on together when the next bucket comes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import final

from torch import Tensor
from torch.futures import Future

Phases = Generator[None, None, Tensor]


def finished(phases: Phases) -> Tensor:
    """Run a reduction to its end."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            result: Tensor = end.value
            return result


@final
class Staged:
    """The buckets of one backward pass that are being reduced."""

    def __init__(self) -> None:
        self._flights: list[_Flight] = []

    def add(self, buffer: Tensor, phases: Phases, *, last: bool) -> Future[Tensor]:
        """Begin to reduce ``buffer`` into itself, and advance all others by one collective; finish with the last."""
        self._advance()
        self._flights.append(flight := _Flight(buffer, phases))
        flight.advance()
        while last and self._flights:
            self._advance()
        return flight.future

    def _advance(self) -> None:
        self._flights = [flight for flight in self._flights if flight.advance()]


@final
class _Flight:
    def __init__(self, buffer: Tensor, phases: Phases) -> None:
        self._buffer, self._phases = buffer, phases
        self.future: Future[Tensor] = Future()

    def advance(self) -> bool:
        """Go on to the next collective; tell whether there is more to do."""
        try:
            next(self._phases)
        except StopIteration as end:
            self.future.set_result(self._buffer if end.value is self._buffer else self._buffer.copy_(end.value))
            return False
        return True
