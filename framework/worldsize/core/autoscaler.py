"""The contract of a policy that changes the number of processes of a run while it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from worldsize.core.limits import SECONDS, Range


@dataclass(frozen=True)
class GangState:
    """A gang that heals, as a policy sees it.

    Attributes:
        run_dir: The run folder.
        step: Newest step that a process has begun; 0: none.
        processes: Number of processes that train, or are about to join.
        seconds: Seconds since the attempt began.
        least: Least number of processes: ``Role.min_processes``, in whole blocks; strategies take it from
            ``cluster.min_processes``.
        most: Largest number of processes: ``max_processes`` of the policy, else the number of logical ranks.
    """

    run_dir: Path
    step: int
    processes: int
    seconds: float
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Autoscaler(ABC):
    """Says how many processes are to train; derive a frozen dataclass from it, whose fields are its options.

    It is asked in a process of its own beside those that train: it may wait for a network, and start threads. If it
    raises an error, that is logged, and the number of processes stays.

    Args:
        every: Seconds from one question to the next.
        max_processes: Largest number of processes; None: the number of logical ranks.
    """

    every: Annotated[float, SECONDS] = 10.0
    max_processes: Annotated[int | None, Range(least=1)] = None

    @abstractmethod
    def wanted(self, state: GangState) -> int:
        """Return the number of processes that are to train; it is moved into the bounds of ``state``."""
