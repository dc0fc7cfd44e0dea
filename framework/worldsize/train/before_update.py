"""Lets the training loop act inside a step of a replica: when the losses are known, and no weight has changed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor


@final
class BeforeUpdate:
    """Passes the losses and metrics of a step on to the loop, which exists only after the replica."""

    def __init__(self) -> None:
        self._call: Callable[[Sequence[Tensor], Mapping[str, Tensor]], None] | None = None

    @contextmanager
    def calling(self, call: Callable[[Sequence[Tensor], Mapping[str, Tensor]], None]) -> Iterator[None]:
        """Call ``call`` in every step inside the context; it is not kept alive any longer.

        It is given the losses (scalars) and metrics (micro-batches, 2) of the step, as in a StepResult.
        """
        self._call = call
        try:
            yield
        finally:
            self._call = None

    def __call__(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
        """Take the losses and metrics of a step, as in a StepResult; called by the replica."""
        if self._call is not None:
            self._call(losses, metrics)
