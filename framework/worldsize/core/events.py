"""Events of a run, as immutable values. A listener is a callable that takes one event."""

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
        first: Number of steps that earlier attempts completed.
        evaluated: Whether the evaluation after the last of them is done, too.
    """

    run_id: str
    steps: int
    first: int = 0
    evaluated: bool = True


@dataclass(frozen=True)
class StepDone:
    """A logged step.

    Times are means over the steps since the last logged one, in seconds per step; None: not measured.

    Attributes:
        step: Number of the step, from 1.
        samples: Samples trained since the run began.
        loss: Mean loss over all logical ranks.
        lr: Learning rate of the update; None: the optimizer has none.
        grad_norm: Norm of the whole gradient before clipping; None: not computed.
        skipped: Number of updates skipped since the run began.
        data_seconds: Time that this rank waits for data.
        step_seconds: Time of a step without waiting for data, for each rank.
        samples_per_second: Samples of all ranks per second.
        facts: Further values that the strategy reports.
        compute_seconds: Time of forward and backward on this rank.
        communication_seconds: Time that this rank waits for communication that no computation hides.
        update_seconds: Time of the update on this rank.
        exposed_seconds: Communication time that every rank waits for: the minimum over ranks.
        metrics: Training metrics by name: the sum over all logical ranks and all steps since the last logged one,
            divided by the count.
        tokens_per_second: Tokens of all ranks per second; None: samples have no fixed number of tokens.
        mfu: Model FLOP utilisation: the share of the peak of all devices that the model's forward and backward pass
            use; None: the peak is not known.
        update_samples: Samples of one update; None: not known.
        splits: For each rank and each measured step, the seconds of data, compute, communication and update; only on
            rank 0.
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
    tokens_per_second: float | None = None
    mfu: float | None = None
    update_samples: float | None = None

    def figures(self) -> dict[str, float]:
        """Return the values that loggers show, by name; values that were not computed or measured are left out."""
        figures = {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "samples": self.samples,
            "update_samples": self.update_samples,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "data_seconds": self.data_seconds,
            "step_seconds": max(self.step_seconds),
            **self.metrics,
        }
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True)
class Evaluated:
    """An evaluation after ``step``: each metric over the evaluated data, named by :func:`metric_key`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint of ``step`` is complete at ``path``."""

    step: int
    path: Path


@dataclass(frozen=True)
class CheckpointFailed:
    """Storage refused the checkpoint of ``step``; training goes on unless ``checkpoint.on_failure=stop``.

    Attributes:
        step: Step of the checkpoint.
        reason: What was refused, and to whom.
        newest: Step of the newest complete checkpoint, to which a restart goes back; None: there is none.
        in_a_row: Number of saves, with this one, that failed since the last one that succeeded in this attempt.
    """

    step: int
    reason: str
    newest: int | None
    in_a_row: int


@dataclass(frozen=True)
class Straggling:
    """A rank, or the network link of its host, is slower than its peers.

    Attributes:
        step: Step at which this was noticed.
        rank: The slow rank, or a rank of the slow host.
        host: Host of the rank.
        device: Device of the rank.
        cause: The phase that is slow; "network": the link of its host.
        slower: Slowdown factor: busy time relative to the median of its peers, or the peers' bandwidth relative to that
            of its link.
        since: First step at which the rank was slow.
        health: What was wrong with its host in that time, in words; empty: nothing, or nothing is known.
    """

    step: int
    rank: int
    host: str
    device: str
    cause: Literal["data", "compute", "network"]
    slower: float
    since: int
    health: str = ""


@dataclass(frozen=True)
class NodeAlert:
    """A figure of a node's health is beyond its limit.

    Attributes:
        node: Index of the node.
        host: Name of its host.
        what: The figure: "memory", "process_memory", "swap", "disk", "network", "cpus", "temperature", "throttled" or
            "ecc".
        value: The figure, in the unit of its limit in :class:`HealthLimits`.
        limit: The limit.
        rank: Global rank of the process that it is about; None: it is about the node.
        gpu: The node's GPU that it is about; None: none.
        detail: What else is known, in words.
    """

    node: int
    host: str
    what: str
    value: float
    limit: float
    rank: int | None = None
    gpu: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class UpdateOverflowed:
    """An update of ``step`` was left out: its gradient left the range of float16, and the loss scale decreases."""

    step: int


@dataclass(frozen=True)
class DataWorkersChanged:
    """A process loads its data in another number of worker processes from now on, as ``data_workers=auto`` decides.

    Attributes:
        step: Step after which this was decided.
        rank: The process.
        workers: Worker processes from now on.
        before: Those until now; more of them than now did not make steps shorter.
        waited: Share of the time of a step, with those before, that was a wait for data.
    """

    step: int
    rank: int
    workers: int
    before: int
    waited: float


@dataclass(frozen=True)
class SaveIntervalChanged:
    """Checkpoints are saved after another number of steps from now on, as ``checkpoint.every=auto`` decides.

    Attributes:
        step: Step whose checkpoint is the last at the interval before.
        steps: Steps between two saves from now on.
        seconds: What they are expected to take.
        save_seconds: Seconds by which a save holds up training, as measured.
        mtbf: Expected seconds between two failures of the run, as declared and seen.
    """

    step: int
    steps: int
    seconds: float
    save_seconds: float
    mtbf: float


@dataclass(frozen=True)
class MembershipChanged:
    """The run goes on with other processes, which compute the same logical ranks; batch and learning rate stay.

    Attributes:
        step: Last step that the processes before have completed.
        number: Number of the membership in this attempt, from 1.
        members: Global ranks of the processes that train from now on.
        lost: Causes by the global ranks of those that died.
        joined: Global ranks of those that are new.
        seconds: Time from the interruption of this process until it goes on.
        asked: Who asked for it ("workers" or "autoscale"), by the global ranks of those that join or leave on request.
        update_samples: Samples of one update, before and from now on; None: not known.
        waiting: Global ranks of those that trained, and are too many for whole parts of the data until others join.
    """

    step: int
    number: int
    members: tuple[int, ...]
    lost: Mapping[int, str]
    joined: tuple[int, ...]
    seconds: float
    asked: Mapping[int, str] = field(default_factory=dict)
    update_samples: float | None = None
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransportFellBack:
    """The collectives use a slower transport than the cluster declares, such as sockets instead of InfiniBand.

    Attributes:
        reason: What is used and what is declared, in a sentence, and the remedy.
        ranks: Number of processes that use each transport: "nvlink", "shm", "ib", "socket".
        interface: Interface or adapter that the first process uses; None: not known.
    """

    reason: str
    ranks: Mapping[str, int]
    interface: str | None


@dataclass(frozen=True)
class RunFailed:
    """The run failed on this rank, because of ``cause``."""

    cause: str


@dataclass(frozen=True)
class RunEnded:
    """The run has ended after ``step``; ``summary`` has its results as plain values."""

    step: int
    exit_reason: str
    summary: Mapping[str, Any] = field(default_factory=dict)


Event = (
    RunStarted
    | StepDone
    | Evaluated
    | CheckpointSaved
    | CheckpointFailed
    | Straggling
    | NodeAlert
    | UpdateOverflowed
    | DataWorkersChanged
    | SaveIntervalChanged
    | MembershipChanged
    | TransportFellBack
    | RunFailed
    | RunEnded
)
Listener = Callable[[Event], None]
Emit = Callable[["Event"], None]
