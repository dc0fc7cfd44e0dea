"""What happens in a run, as facts. A listener is a callable of one event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class RunStarted:
    """The first step is about to run.

    Attributes:
        run_id: Name of the run folder.
        steps: Steps of the whole run.
        first: Steps that earlier attempts have done.
        evaluated: Whether the evaluation after the last of these has been done, too.
    """

    run_id: str
    steps: int
    first: int = 0
    evaluated: bool = True


@dataclass(frozen=True)
class StepDone:
    """A logged step.

    Times are means over the steps since the last logged one, in seconds a step; None: not measured.

    Attributes:
        step: Number of the step, from 1.
        samples: Samples trained since the run began.
        loss: Mean loss over all logical ranks.
        lr: Learning rate of the update; None: the optimizer has none.
        grad_norm: Norm of the whole gradient before clipping; None: not computed.
        skipped: Updates left out since the run began.
        data_seconds: Wait for data on this rank.
        step_seconds: Time of a step on each rank, without its wait for data.
        samples_per_second: Samples of all ranks.
        facts: What else the strategy tells.
        compute_seconds: Forward and backward on this rank.
        communication_seconds: Communication that nothing hides, on this rank.
        update_seconds: Update on this rank.
        exposed_seconds: Time for which every rank waits for communication: that of the rank that waits least.
        metrics: Metrics of training by name: sums over all logical ranks and all steps since the last logged one, over
            their counts.
        splits: For each rank and each step that was measured, the seconds of data, compute, communication and update;
            on rank 0 alone.
    """

    step: int
    samples: int
    loss: float
    lr: float | None
    grad_norm: float | None
    skipped: int
    data_seconds: float
    step_seconds: tuple[float, ...]
    samples_per_second: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    update_seconds: float | None = None
    exposed_seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    splits: Sequence[Sequence[Sequence[float]]] = ()

    def figures(self) -> dict[str, float]:
        """Return what loggers show of the step, by name; what was not computed or measured is left out."""
        figures = {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "data_seconds": self.data_seconds,
            "step_seconds": max(self.step_seconds),
            **self.metrics,
        }
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True)
class Evaluated:
    """An evaluation after ``step``: each metric over the evaluated data, by :func:`metric_key`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint of ``step`` is complete at ``path``."""

    step: int
    path: Path


@dataclass(frozen=True)
class Straggling:
    """A rank is slower than its peers, or the link of its host is.

    Attributes:
        step: Step at which this was noticed.
        rank: The slow rank, or one of the slow host.
        host: Its host.
        device: Its device.
        cause: What it is slow at; "network": the link of its host.
        slower: Times that it is busy as long as the median of its peers, or that its link carries less than most.
        since: First step of which this holds.
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
    """The run fails on this rank, for ``cause``."""

    cause: str


@dataclass(frozen=True)
class RunEnded:
    """The run has ended after ``step``; ``summary`` has its results as plain values."""

    step: int
    exit_reason: str
    summary: Mapping[str, Any] = field(default_factory=dict)


Event = RunStarted | StepDone | Evaluated | CheckpointSaved | Straggling | RunFailed | RunEnded
Listener = Callable[[Event], None]
Emit = Callable[["Event"], None]
