"""How replicas agree: the value that a configuration describes, and the replica that it makes in a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from worldsize.core.cluster import Cluster, Role, World
from worldsize.core.context import RunContext
from worldsize.core.numerics import Numerics
from worldsize.core.recipe import EvaluationBatch, MicroBatch, Recipe, StateDict
from worldsize.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor

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
    def load(self, state: StateDict) -> None:
        """Take what :meth:`state` gave, under this strategy or another; every rank must call it."""

    def facts(self) -> Mapping[str, Any]:
        """What else there is to log of the steps since the last call; plain values."""
        return {}

    step_reached: int | None = None  # where it stands by itself; None: at 0, or where the loaded checkpoint stood

    def close(self, *, complete: bool) -> None:  # noqa: B027 - most replicas hold nothing to release
        """Release what the replica holds beyond memory: the run ends, or pauses to be resumed."""


@dataclass(frozen=True)
class Strategy(ABC):
    """How replicas agree. An immutable description: touches no device and no process group.

    A subclass is a frozen dataclass too; its fields are the keys below ``strategy`` in its YAML. What belongs to the
    run, such as its numerics, is handed to the replica with the context instead.
    """

    reductions: ClassVar[Sequence[Reduction]] = ("flat", "ordered")
    """What ``reduce`` may be."""
    reduce: Reduction = "flat"
    """How gradients are summed over logical ranks."""

    def check_numerics(self, numerics: Numerics) -> None:  # noqa: B027 - most strategies carry all of them
        """Raise ConfigError for numerics that this strategy cannot carry, before a process starts."""

    @abstractmethod
    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        """Processes by role.

        Raises:
            ConfigError: the cluster's size cannot carry this strategy.
        """

    @abstractmethod
    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        """Make the live replica of the process that ``context.world`` describes."""

    @property
    def default_micro_batches(self) -> int:
        """Logical ranks that each part of the data has, unless the run says how many there are."""
        return 1

    def check_micro_batches(self, count: int) -> None:  # noqa: B027 - most strategies take any number
        """Raise ConfigError if a step of ``count`` logical ranks in each part of the data cannot be computed."""

    def check_recipe(self, recipe: Recipe) -> None:  # noqa: B027 - most strategies take any recipe
        """Raise ConfigError if ``recipe`` does not define what this strategy asks of it."""

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
        """Return which part of the data this process trains, counted from 0."""
        return world.rank

    def cost(self, work: Workload, cluster: Cluster) -> Cost | None:
        """What a step of ``work`` costs on ``cluster``, for planning; None: it is not known."""
        return None

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most strategies need nothing
        """Put what only members may have into ``Rendezvous.folder``, in the launching process, before each start."""

    def serve(self, recipe: Recipe, context: RunContext) -> Replica | None:
        """Body of a process whose role serves; a replica if from now on it is this process that leads the run."""
        raise ConfigError(f"{type(self).__name__} has no role {context.world.role!r} that serves.")
