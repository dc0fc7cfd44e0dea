"""Overlap of the reductions of different buckets, each consisting of several collectives.

Collectives of one group must start in the same order on every rank, so callbacks cannot start them. A reduction is a
generator that yields while its collective is in flight; all reductions advance together when the next bucket is added.
On a GPU they run on a side stream, so that the backward pass does not wait for them.

:class:`Summation` is the interface of all-reduces that send compressed values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

Phases = Generator[None, None, Tensor]


def finish_reduction(phases: Phases) -> Tensor:
    """Run a reduction to completion and return its result, of any shape."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            result: Tensor = end.value
            return result


@final
class Staged:
    """The reductions in flight during one backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._flights: list[_Flight] = []

    def add(self, buffer: Tensor, phases: Phases, *, last: bool) -> Future[Tensor]:
        """Start to reduce ``buffer`` (n,) in place, and advance all others by one collective.

        With ``last``, finish all reductions.
        """
        with self._enter_side_stream():
            self._advance_all()
            self._flights.append(flight := _Flight(buffer, phases))
            flight.advance_reduction()
            while last and self._flights:
                self._advance_all()
        return flight.future

    def _enter_side_stream(self) -> AbstractContextManager[object]:
        """Switch to the side stream, after work queued so far; the future synchronizes them again."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._side)

    def _advance_all(self) -> None:
        self._flights = [flight for flight in self._flights if flight.advance_reduction()]


@final
class _Flight:
    def __init__(self, buffer: Tensor, phases: Phases) -> None:
        self._buffer, self._phases = buffer, phases
        self.future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)

    def advance_reduction(self) -> bool:
        """Advance to the next collective; return False if the reduction is complete."""
        try:
            next(self._phases)
        except StopIteration as end:
            self.future.set_result(self._buffer if end.value is self._buffer else self._buffer.copy_(end.value))
            return False
        return True


class Summation(ABC):
    """Approximate all-reduce. May add the compression error to the next call (error feedback)."""

    keeps_errors = False  # whether it needs a tensor for its compression errors (error feedback)

    @abstractmethod
    def all_reduce(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        """Sum a tensor over the ranks of ``group``, with bitwise identical results on all ranks.

        Args:
            flat_n: this rank's values, of shape (n,). Its memory may be reused for the result.
            group: the participating ranks.
            error_n: compression errors of this rank's earlier messages, float32 (n,), updated in place; None without
                ``keeps_errors``.
            seed: seed for all random choices, the same on all ranks.
        """
