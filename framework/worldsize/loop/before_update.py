"""Callback of the training loop inside a replica's step, between losses and update.

Also passes the replica a flag: whether the step may be logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor


@final
class BeforeUpdate:
    """Passes a step's losses and metrics from the replica to the loop, which is created later.

    Attributes:
        may_log: Whether the current step may be logged, set by the loop.
    """

    def __init__(self) -> None:
        self.may_log = False
        self._call: Callable[[Sequence[Tensor], Mapping[str, Tensor]], None] | None = None

    @contextmanager
    def register_callback(self, call: Callable[[Sequence[Tensor], Mapping[str, Tensor]], None]) -> Iterator[None]:
        """Call ``call`` in every step within this block; the reference to it is dropped afterwards.

        It receives the losses (scalars) and metrics (micro-batches, 2) of the step, as in a StepResult.
        """
        self._call = call
        try:
            yield
        finally:
            self._call = None

    def __call__(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
        """Forward the losses and metrics of a step, as in a StepResult; called by the replica."""
        if self._call is not None:
            self._call(losses, metrics)
