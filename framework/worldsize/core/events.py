"""Events of a run, as immutable values. A listener is a callable that receives one event."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class RunStarted:
    """The first step is about to run.

    Attributes:
        run_id: Name of the run folder.
        steps: Total number of steps in the run.
        first: Number of steps completed by earlier attempts.
        evaluated: Whether the evaluation after the last of these steps is also complete.
    """

    run_id: str
    steps: int
    first: int = 0
    evaluated: bool = True


@dataclass(frozen=True)
class StepDone:
    """The measurements of a logged step.

    Times are means over the steps since the previous logged step, in seconds per step; None if not measured.

    Attributes:
        step: Number of the step, from 1.
        samples: Samples trained since the start of the run.
        loss: Mean loss over all logical ranks.
        lr: Learning rate of the update; None if the optimizer has none.
        grad_norm: Norm of the whole gradient before clipping; None if the strategy cannot compute it.
        skipped: Number of updates skipped since the start of the run.
        data_seconds: Time this rank spends waiting for data.
        step_seconds: Step time of each rank, excluding the wait for data.
        samples_per_second: Throughput of all ranks together.
        facts: Further values reported by the strategy.
        compute_seconds: Time of the forward and backward passes on this rank.
        communication_seconds: Time this rank spends waiting for communication that does not overlap computation.
        update_seconds: Time of the update on this rank.
        exposed_seconds: Communication time that every rank waits for: the minimum over ranks.
        metrics: Training metrics by name: sum divided by count, over all logical ranks and all steps since the previous
            logged step.
        tokens_per_second: Tokens per second of all ranks together; None if samples have no fixed number of tokens.
        mfu: Model FLOPs utilization: fraction of all devices' peak FLOPs that the model's forward and backward passes
            use; None if the peak is unknown.
        update_samples: Samples per update; None if unknown.
        tokens: Tokens trained since the start of the run; None if samples have no fixed number of tokens.
        epoch: Passes over the training data since the start of the run, including skipped samples; None if the data are
            a stream.
        splits: Seconds of data, compute, communication and update for each rank and each measured step; only on rank 0.
        losses_sha256: SHA-256 of this step's losses of all logical ranks, as little-endian float64, sorted by their
            bytes.
        indices_sha256: SHA-256 of the sample indices of the steps since the previous logged step, in order of steps and
            logical ranks, as little-endian int64; None for streams, with parameter servers, and on other processes than
            the first.
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
    tokens: int | None = None
    epoch: float | None = None
    losses_sha256: str = ""
    indices_sha256: str | None = None

    def collect_log_values(self) -> dict[str, float]:
        """Return the values for loggers by name, omitting those not computed or measured."""
        figures = {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "samples": self.samples,
            "tokens": self.tokens,
            "epoch": self.epoch,
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
    """Results of an evaluation after ``step``; ``metrics`` has :func:`metric_key` names."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint of ``step`` is complete at ``path``."""

    step: int
    path: Path


@dataclass(frozen=True)
class CheckpointFailed:
    """Writing a checkpoint failed; training continues unless ``checkpoint.on_failure=stop``.

    Attributes:
        step: Step of the checkpoint.
        reason: The storage errors, with their ranks.
        newest: Step of the newest complete checkpoint, from which a restart resumes; None if none is complete.
        in_a_row: Number of consecutive failed saves in this attempt, including this one.
    """

    step: int
    reason: str
    newest: int | None
    in_a_row: int


@dataclass(frozen=True)
class Straggling:
    """A rank, or the network link of its host, is slower than its peers.

    Attributes:
        step: Step at which the straggler was detected.
        rank: The slow rank, or a rank on the slow host.
        host: Host of the rank.
        device: Device of the rank.
        cause: The slow phase, or "network" for the host's link.
        slower: Slowdown factor: the rank's busy time relative to the median of its peers, or for a link, its peers'
            bandwidth relative to its own.
        since: First step of the slowdown.
        health: Description of the host's health problems in that time; empty if there are none or they are unknown.
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
class GradientsAudited:
    """Processes have compared the gradients of ``step``, and found no difference.

    ``digest``: Checksum of the step's losses, gradients and saved buffers, as 16 hexadecimal digits; independent of the
    number of processes.
    """

    step: int
    digest: str


@dataclass(frozen=True)
class BitMismatch:
    """Processes that must have the same bits have different ones.

    Attributes:
        step: The step that was computed, or was to be computed next.
        tensor: The first differing tensor, such as "loss" or "gradient of head.weight".
        ranks: Global ranks of the processes whose bits differ from the majority's; empty if there is no majority.
        hosts: Their hosts, in the same order.
        devices: Their devices, in the same order.
        suspects: Global ranks of all processes that took part if there is no majority.
        logical_rank: Logical rank of the micro-batch; None if the tensor does not belong to one.
    """

    step: int
    tensor: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    suspects: tuple[int, ...] = ()
    logical_rank: int | None = None

    def describe(self) -> str:
        """Describe the mismatch in one sentence."""
        places = zip(self.ranks or self.suspects, self.hosts, self.devices, strict=True)
        named = ", ".join(f"rank {rank} on {host} ({device})" for rank, host, device in places)
        where = self.tensor if self.logical_rank is None else f"{self.tensor}, logical rank {self.logical_rank}"
        if self.ranks:
            return f"step {self.step}: wrong bits on {named}: {where}."
        return f"step {self.step}: different bits on {named}, without a majority: {where}."

    @property
    def remedy(self) -> str:
        """What the user can do."""
        if self.ranks:
            return "Test the memory and the processor of this host, and resume the run without it."
        return "Resume the run on other hosts, or with three or more processes, which identify the wrong one."


@dataclass(frozen=True)
class Spike:
    """The loss or the gradient norm of a logged step is far above its own history.

    Attributes:
        step: The logged step.
        name: "loss" or "grad_norm".
        value: The value; it may be infinite or NaN.
        median: Median of the earlier values; None if there are too few.
        count: Number of earlier finite values.
        since: The previous logged step; the spike began after it.
        action: "warn" continues; "rewind" goes back to the last checkpoint before the spike.
    """

    step: int
    name: str
    value: float
    median: float | None
    count: int
    since: int
    action: Literal["warn", "rewind"]

    def describe(self) -> str:
        """Describe the spike in one sentence."""
        name = "gradient norm" if self.name == "grad_norm" else self.name
        if self.median is None or not math.isfinite(self.value):
            return f"step {self.step}: the {name} is {self.value:.4g}."
        return (
            f"step {self.step}: the {name} is {self.value:.4g}, {self.value / self.median:.3g} times the median of "
            f"the {self.count} values before it."
        )


@dataclass(frozen=True)
class NodeAlert:
    """A node's health metric exceeds its limit.

    Attributes:
        node: Index of the node.
        host: Host name of the node.
        what: Name of the metric: "memory", "process_memory", "swap", "disk", "network", "cpus", "temperature",
            "throttled" or "ecc".
        value: Measured value, in the unit of its limit in :class:`HealthLimits`.
        limit: The limit.
        rank: Global rank of the affected process; None if the alert concerns the whole node.
        gpu: Index of the affected GPU on the node; None if no GPU is affected.
        detail: Further details to display; may be empty.
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
    """A float16 overflow: an update of ``step`` was skipped, and the loss scale is lowered."""

    step: int


@dataclass(frozen=True)
class DataWorkersChanged:
    """``data_workers=auto`` changed a process's number of data workers.

    Attributes:
        step: Last step before this decision.
        rank: Rank of the process.
        workers: New number of data workers.
        before: Previous number of data workers. If larger, the extra workers did not shorten steps.
        waited: Fraction of the step time spent waiting for data, with the previous number of workers.
    """

    step: int
    rank: int
    workers: int
    before: int
    waited: float


@dataclass(frozen=True)
class SaveIntervalChanged:
    """``checkpoint.every=auto`` changed the number of steps between checkpoints.

    Attributes:
        step: Step of the last checkpoint at the previous interval.
        steps: New number of steps between two saves.
        seconds: Expected duration of these steps.
        save_seconds: Measured delay of training per save, in seconds.
        mtbf: Expected seconds between two failures of the run, from the declared and the observed failure rate.
    """

    step: int
    steps: int
    seconds: float
    save_seconds: float
    mtbf: float


@dataclass(frozen=True)
class MembershipChanged:
    """The run continues with different processes.

    Logical ranks, batch size and learning rate do not change.

    Attributes:
        step: Last step completed by the previous members.
        number: Number of this membership in the attempt, from 1.
        members: Global ranks of the processes that train from now on.
        lost: Cause of death of each lost process, by its global rank.
        joined: Global ranks of the new members.
        seconds: Time from the interruption of this process until it resumes.
        asked: Who asked a process to join or leave ("workers" or "autoscale"), by the process's global rank.
        update_samples: Samples per update, before and after this change; None if unknown.
        waiting: Global ranks of former members that do not form a whole block and wait for others to join.
        axes: Sizes of the mesh axes from now on, by name; empty if all members are data-parallel.
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
    axes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TransportFellBack:
    """The collectives use a slower transport than the cluster declares.

    For example, sockets instead of InfiniBand.

    Attributes:
        reason: A message with the actual transport, the declared transport and the remedy.
        ranks: Number of processes per transport: "nvlink", "shm", "ib", "socket".
        interface: Interface or adapter of the first process; None if unknown.
    """

    reason: str
    ranks: Mapping[str, int]
    interface: str | None


@dataclass(frozen=True)
class RunFailed:
    """The run failed on this rank with ``cause``."""

    cause: str


@dataclass(frozen=True)
class RunEnded:
    """The run ended after ``step``; ``summary`` holds its results as plain values."""

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
    | GradientsAudited
    | BitMismatch
    | Spike
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
