"""What happens in a run, as facts. A listener is a callable of one event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class RunStarted:
    """The first step is about to run; ``first`` steps were done by earlier attempts, and, if ``evaluated``, the
    evaluation after the last of them.
    """

    run_id: str
    steps: int
    first: int = 0
    evaluated: bool = True


@dataclass(frozen=True)
class StepDone:
    """A logged step: global mean loss, and where the time since the last logged step went.

    ``skipped`` counts the updates left out since the run began.

    ``step_seconds`` has one entry a rank: the mean time of a step there, its wait for data excluded. What of it this
    rank computed, waited for others and updated stands beside it; None: not measured. ``exposed_seconds``: the time
    of a step for which every rank waits for communication, that of the one that waits least. ``splits``, on rank 0
    alone: for each rank and each step that was measured, seconds of data, compute, communication and update.
    """

    step: int
    samples: int
    loss: float
    lr: float
    grad_norm: float | None
    skipped: int
    data_seconds: float
    step_seconds: tuple[float, ...]
    samples_per_second: float
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else the strategy tells
    compute_seconds: float | None = None  # forward and backward
    communication_seconds: float | None = None  # what nothing hides
    update_seconds: float | None = None
    exposed_seconds: float | None = None
    splits: Sequence[Sequence[Sequence[float]]] = ()


@dataclass(frozen=True)
class Evaluated:
    """An evaluation after ``step``: each metric over the whole evaluation set."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint of ``step`` is complete at ``path``."""

    step: int
    path: Path


@dataclass(frozen=True)
class Straggling:
    """A rank is busy ``slower`` times as long as the median of its peers, or the link of its host (cause "network")
    carries so many times less than most; since step ``since``, found at ``step``.
    """

    step: int
    rank: int
    host: str
    device: str
    cause: Literal["data", "compute", "network"]
    slower: float
    since: int


@dataclass(frozen=True)
class RunFailed:
    cause: str


@dataclass(frozen=True)
class RunEnded:
    step: int
    exit_reason: str
    summary: Mapping[str, Any] = field(default_factory=dict)


Event = RunStarted | StepDone | Evaluated | CheckpointSaved | Straggling | RunFailed | RunEnded
Listener = Callable[[Event], None]
Emit = Callable[["Event"], None]
