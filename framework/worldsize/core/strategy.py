"""How replicas agree: the value that a configuration describes, and the replica that it makes in a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from worldsize.core.cluster import Cluster, Role, World
from worldsize.core.recipe import EvaluationBatch, MicroBatch, Recipe
from worldsize.errors import ConfigError

StateDict = dict[str, Any]
Precision = Literal["fp32", "bf16", "fp16"]
Nonfinite = Literal["stop", "skip", "ignore"]
Reduction = Literal["flat", "ordered", "hierarchical"]  # torch's own sums, the fixed tree of logical ranks, by node


@dataclass(frozen=True)
class Workload:
    """A step of training, before it is known how it will be divided. Bytes are of the whole model.

    ``unit_bytes``: of the largest part that a sharded model gathers at once; ``activation_bytes``: of a micro-batch;
    ``boundary_bytes``: of what one block hands to the next, for a micro-batch; ``compute_seconds``: forward, backward
    and update of what one rank does in a step, by itself; ``update_seconds``: of these the update; ``overlap``: share
    of them behind which communication hides; ``sum_seconds``: to add up as many numbers as there are parameters;
    ``micro_batches``: of each data-parallel part in a step (0: as many as the strategy takes by default).
    """

    parameter_bytes: float
    optimizer_bytes: float
    unit_bytes: float = 0.0
    activation_bytes: float = 0.0
    boundary_bytes: float = 0.0
    blocks: int = 0
    compute_seconds: float = 0.0
    update_seconds: float = 0.0
    overlap: float = 0.0
    sum_seconds: float = 0.0
    micro_batches: int = 0


@dataclass(frozen=True)
class Cost:
    """What a strategy makes of a :class:`Workload`, for each rank: memory, bytes sent and seconds of communication a
    step; ``across_bytes`` are what a node sends to others. ``exposed_seconds``: of that communication, what cannot
    hide behind compute (None: what is longer than the share of it that can be hidden behind). ``added_seconds``: what
    a rank computes beside the workload, or less if negative (an update that others share). ``idle``: share
    of a step in which a rank waits its turn. ``same``: a step's result is that of one process, up to rounding.
    """

    memory_bytes: float
    sent_bytes: float
    across_bytes: float
    communication_seconds: float
    idle: float = 0.0
    exposed_seconds: float | None = None
    added_seconds: float = 0.0
    same: bool = True


@dataclass(frozen=True)
class Numerics:
    """How an update is computed: precision of forward and backward, clipping, and what NaN does.

    ``nonfinite``: "stop" ends the run when a logged loss is NaN or infinite; "skip" leaves the
    parameters alone in a step whose gradient norm is not finite; "ignore" does neither.
    """

    precision: Precision = "fp32"
    clip_norm: float | None = None
    nonfinite: Nonfinite = "stop"

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"precision={self.precision!r} is unknown. Known: fp32, bf16, fp16.")
        if self.nonfinite not in ("stop", "skip", "ignore"):
            raise ConfigError(f"nonfinite={self.nonfinite!r} is unknown. Known: stop, skip, ignore.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm} must be positive, or null for no clipping.")

    @property
    def needs_norm(self) -> bool:
        """Whether an update waits for the norm of the whole gradient: it is clipped, or must be finite."""
        return self.clip_norm is not None or self.nonfinite == "skip"

    @property
    def norm_limit(self) -> float:
        """The largest norm of a gradient; infinite without clipping."""
        return float("inf") if self.clip_norm is None else self.clip_norm

    def skips(self, norm: Tensor) -> bool:
        """Whether the step whose gradient has ``norm`` (a scalar) leaves the parameters alone; waits for a device."""
        return self.nonfinite == "skip" and not bool(norm.isfinite())


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did here: the loss of each local micro-batch (scalars, detached) and the rate used."""

    losses: Sequence[Tensor]
    lr: float
    grad_norm: Tensor | None = None
    skipped: bool = False


class Replica(ABC):
    """A live model on one worker, made by a :class:`Strategy`."""

    @abstractmethod
    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Forward, backward, agree with the other replicas, update."""

    @abstractmethod
    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        """Metrics over all ranks' batches: sums and counts reduced in batch order, then divided."""

    @abstractmethod
    def state(self) -> StateDict:
        """``model``, ``optimizer`` ...; the model's keys are those of ``recipe.model()``, whatever wraps it.

        The same names, shapes and plain values on every rank. A tensor may be a DTensor; one on the meta device is
        held by other ranks. Part ``strategy``, if there is one, is what only this strategy at this world size can
        use: it is loaded where it fits, and left as it was built elsewhere.
        """

    @abstractmethod
    def load(self, state: StateDict) -> None: ...

    def facts(self) -> Mapping[str, Any]:
        """What else there is to log of the steps since the last call; plain values."""
        return {}

    step_reached: int | None = None  # where it stands by itself; None: at 0, or where the loaded checkpoint stood

    def close(self, *, complete: bool) -> None:  # noqa: B027 - most replicas hold nothing to release
        """The run ends, or pauses to be resumed: release what the replica holds beyond memory."""


@dataclass(frozen=True)
class Duty:
    """What a process that serves may ask of its run.

    ``folder``: all processes of this attempt see it, and only they and their user may read it.
    ``restore``: fills a state like the one it can ask for from the newest checkpoint, and names the step; None if
    there is none.
    ``micro_batch(step, logical_rank)``, ``evaluation(part, parts)``: data, of any part of the run.
    ``address``: of this host, as the others reach it.
    ``begins(step)``, ``passes(point)``: where faults may have been planned.
    ``measured(step)``: within is what this process computes of a step, whose data it has drawn; its times are logged.
    """

    folder: Path
    workers: int  # at the start
    steps: int
    logical_ranks: int
    timeout: float
    restore: Callable[[Callable[[], StateDict]], tuple[StateDict, int] | None]
    micro_batch: Callable[[int, int], MicroBatch]
    evaluation: Callable[[int, int], Iterable[EvaluationBatch]]
    wants_stop: Callable[[], bool]
    begins: Callable[[int], None]
    passes: Callable[[str], None]
    measured: Callable[[int], AbstractContextManager[None]]
    address: str = "127.0.0.1"


class Strategy(ABC):
    """How replicas agree. An immutable description: touches no device and no process group."""

    reductions: ClassVar[Sequence[Reduction]] = ("flat", "ordered")  # that its field `reduce` may name

    @abstractmethod
    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        """Processes by role.

        Raises:
            ConfigError: the cluster's size cannot carry this strategy.
        """

    @abstractmethod
    def replica(self, recipe: Recipe, world: World) -> Replica:
        """The live replica of the process that ``world`` describes."""

    @property
    def default_micro_batches(self) -> int:
        """Logical ranks that each part of the data has, unless the run says how many there are."""
        return 1

    def check_micro_batches(self, count: int) -> None:  # noqa: B027 - most strategies take any number
        """Raise ConfigError if a step of ``count`` logical ranks in each part of the data cannot be computed."""

    def groups(self, cluster: Cluster) -> Mapping[str, list[list[int]]]:
        """Axes along which processes that train work together: for each, disjoint groups of global ranks. A rank's
        coordinate on an axis is its place in its group.
        """
        start = 0
        for name, role in self.roles(cluster).items():
            if name == "worker":
                break
            start += role.processes
        return {"data": [list(range(start, start + self.roles(cluster)["worker"].processes))]}

    def data_parallel(self, cluster: Cluster) -> int:
        """Parts that the data of a step are divided into: one a worker, unless several share a model."""
        return self.roles(cluster)["worker"].processes

    def data_rank(self, world: World) -> int:
        """Which of these parts this process trains."""
        return world.rank

    def cost(self, work: Workload, cluster: Cluster) -> Cost | None:
        """What a step of ``work`` costs on ``cluster``, for planning; None: it is not known."""
        return None

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most strategies need nothing
        """In the launching process, before each start: put what only members may have into ``Duty.folder``."""

    def serve(self, recipe: Recipe, world: World, duty: Duty) -> Replica | None:
        """Body of a process whose role serves; a replica if from now on it is this process that leads the run."""
        raise ConfigError(f"{type(self).__name__} has no role {world.role!r} that serves.")
