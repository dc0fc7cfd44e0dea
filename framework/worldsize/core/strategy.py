"""How replicas agree: the value that a configuration describes, and the replica that it makes in a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from worldsize.core.cluster import Cluster, Role, World
from worldsize.core.context import RunContext
from worldsize.core.evaluation import EvaluationBatches
from worldsize.core.limits import check_limits
from worldsize.core.numerics import Numerics
from worldsize.core.recipe import MicroBatch, Recipe, StateDict
from worldsize.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor, nn
    from torch.optim import Optimizer

Dealing = Literal["cyclic", "block"]  # of L logical ranks to P processes: p, p + P, ...; or L / P neighbours each
Reduction = Literal["flat", "ordered", "hierarchical"]  # torch's own sums, the fixed tree of logical ranks, by node


@dataclass(frozen=True)
class Workload:
    """A step of training, before it is known how it will be divided. Bytes are of the whole model.

    Attributes:
        parameter_bytes: All parameters.
        optimizer_bytes: State of the optimizer.
        unit_bytes: The largest part that a sharded model gathers at once.
        activation_bytes: Activations of one micro-batch.
        boundary_bytes: What one block hands to the next, for one micro-batch.
        blocks: Number of repeated parts of the model.
        compute_seconds: Forward, backward and update of what one rank does in a step, by itself.
        update_seconds: The update, a part of ``compute_seconds``.
        overlap: Share of ``compute_seconds`` behind which communication hides, 0 to 1.
        sum_seconds: Time to add up as many numbers as there are parameters.
        micro_batches: Micro-batches of each data-parallel part in a step; 0: as many as the strategy takes by default.
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
    """The cost of a step under a strategy, for each rank.

    Attributes:
        memory_bytes: Largest memory of a rank.
        sent_bytes: Bytes that a rank sends in a step.
        across_bytes: Bytes that a node sends to other nodes in a step.
        communication_seconds: Communication of a step, hidden or not.
        idle: Share of a step in which a rank waits its turn, 0 to 1.
        exposed_seconds: Communication that cannot hide behind compute; None: all but the share that overlaps.
        added_seconds: Compute of a rank beside the workload; negative where others share an update.
        same: Whether a step's result is that of one process, up to rounding.
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
    """The result of one step in this process.

    Attributes:
        losses: Loss of each local micro-batch: scalars, detached.
        lr: Learning rate of the update; None: the optimizer has none.
        grad_norm: Norm of the whole gradient before clipping, a scalar; None: not computed.
        skipped: Whether the update was left out, since the gradient was not finite; of several updates, at least one.
        partly: Whether ``skipped`` holds of some of several updates alone: the others were made.
        metrics: What else is logged of the step, by name: float64 [local micro-batches, 2], a sum and its count each.
    """

    losses: Sequence[Tensor]
    lr: float | None
    grad_norm: Tensor | None = None
    skipped: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    partly: bool = False


class Replica(ABC):
    """A live model on one worker, made by a :class:`Strategy`."""

    @abstractmethod
    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Compute forward and backward, agree with the other replicas, and update.

        Args:
            micro_batches: Data of this process in the step, one for each of its logical ranks, in their order.
        """

    @abstractmethod
    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        """Return the metrics over all ranks' batches: sums and counts reduced in batch order, then divided."""

    @abstractmethod
    def state(self) -> StateDict:
        """Return ``model``, ``optimizer`` ...; the model's keys are those of ``recipe.model()``, whatever wraps it.

        The same names, shapes and plain values on every rank. A tensor may be a DTensor; one on the meta device is
        held by other ranks. Part ``strategy``, if there is one, is what only this strategy at this world size can
        use: a replica that it does not fit keeps its own.
        """

    @abstractmethod
    def load(self, state: StateDict) -> None:
        """Take what :meth:`state` gave, under this strategy or another; every rank must call it."""

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return this rank's live part of each parameter that is trained, by its names in the model's state.

        What is written into them in place is what the replica computes with from then on. One that other ranks hold is
        on the meta device. Only asked of a strategy that ``averages_weights``.
        """
        raise NotImplementedError

    def facts(self) -> Mapping[str, Any]:
        """Return what else there is to log of the steps since the last call; plain values."""
        return {}

    dealing: Dealing = "cyclic"  # of logical ranks: which of them this process is given in a step
    step_reached: int | None = None  # where it stands by itself; None: at 0, or where the loaded checkpoint stood

    def close(self, *, complete: bool) -> None:  # noqa: B027 - most replicas hold nothing to release
        """Release what the replica holds beyond memory: the run ends, or pauses to be resumed."""


@dataclass(frozen=True)
class Strategy(ABC):
    """Describes how replicas agree. It is immutable and touches no device and no process group.

    A subclass is a frozen dataclass too; its fields are the keys below ``strategy`` in its YAML. What belongs to the
    run, such as its numerics, is handed to the replica with the context instead.
    """

    reductions: ClassVar[Sequence[Reduction]] = ("flat", "ordered")
    """Values that ``reduce`` may have."""
    averages_weights: ClassVar[bool] = False
    """Whether its replicas give their ``trained_weights``, so that section ``ema`` can average them."""
    trains_multi_update: ClassVar[bool] = False
    """Whether it trains a :class:`~worldsize.core.MultiUpdateRecipe`; if not, such a recipe is refused."""
    merges_states: ClassVar[bool] = True
    """Whether replicas evaluate the metrics that :meth:`Recipe.metrics` names."""
    reduce: Reduction = "flat"
    """Way in which gradients are summed over logical ranks."""

    def __post_init__(self) -> None:
        check_limits(type(self), vars(self), key="strategy")

    def check_numerics(self, numerics: Numerics) -> None:  # noqa: B027 - most strategies carry all of them
        """Raise ConfigError for numerics that this strategy cannot carry, before a process starts."""

    @abstractmethod
    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        """Return the processes of each role, by its name; those that train have the role "worker".

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

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise ConfigError if ``recipe`` does not define what this strategy asks of it."""
        if not self.merges_states and (names := sorted(recipe.metrics())):
            raise ConfigError(
                f"{type(self).__name__} evaluates metrics that are sums and counts, and {names[0]!r} is none. "
                "Use a strategy such as ddp, or leave it out of Recipe.metrics."
            )

    def check_built(  # noqa: B027 - most strategies take any
        self, recipe: Recipe, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Raise ConfigError if this strategy cannot carry what ``recipe`` has built.

        It is asked before a process starts, with ``model`` and ``optimizer`` on the meta device.
        """

    def groups(self, cluster: Cluster) -> Mapping[str, list[list[int]]]:
        """Return the axes along which processes that train work together: for each, disjoint groups of global ranks.

        A rank's coordinate on an axis is its place in its group.
        """
        start = 0
        for name, role in self.roles(cluster).items():
            if name == "worker":
                break
            start += role.processes
        return {"data": [list(range(start, start + self.roles(cluster)["worker"].processes))]}

    def data_parallel(self, cluster: Cluster) -> int:
        """Number of parts that the data of a step are divided into: one a worker, unless several share a model."""
        return self.roles(cluster)["worker"].processes

    def data_rank(self, world: World) -> int:
        """Return which part of the data this process trains, counted from 0."""
        return world.rank

    def cost(self, work: Workload, cluster: Cluster) -> Cost | None:
        """Predict what a step of ``work`` costs on ``cluster``; None: it is not known."""
        return None

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most strategies need nothing
        """Put what only members may have into ``Rendezvous.folder``, in the launching process, before each start."""

    def serve(self, recipe: Recipe, context: RunContext) -> Replica | None:
        """Serve in a process whose role serves; return a replica if from now on this process leads the run."""
        raise ConfigError(f"{type(self).__name__} has no role {context.world.role!r} that serves.")
