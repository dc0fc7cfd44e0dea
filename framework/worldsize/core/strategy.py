"""Strategies (immutable values that describe how replicas agree) and the replicas that they make in a process."""

from __future__ import annotations

import warnings
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

# Which of L logical ranks process p of P computes: p, p + P, p + 2P, ... ("cyclic"), or L / P neighbours ("block").
Dealing = Literal["cyclic", "block"]
# Torch's own sums ("flat"), sums in the fixed tree of logical ranks ("ordered"), or first inside each node.
Reduction = Literal["flat", "ordered", "hierarchical"]

Capability = Literal[
    "state_metrics",  # metrics that Recipe.metrics names, which are merged from states
    "loss_scale",  # precisions that need one, such as fp16
    "ema",  # the section ``ema``: its replicas have ``trained_weights``
    "multi_update",  # a MultiUpdateRecipe
    "features",  # a FeatureRecipe
    "compile",  # Numerics.compile
    "activation_checkpointing",  # Numerics.activation_checkpointing and activation_offload
    "sparse_gradients",  # sums of gradients of embeddings with sparse=True, which NCCL cannot do
    "adamw_8bit",  # this optimizer, whose state is in blocks of whole parameters
    "schedule_free",  # optimizers that are evaluated with other weights than they train
]
_EARLIER: Mapping[str, Capability | None] = {  # None: the variable itself names capabilities
    "merges_states": "state_metrics",
    "averages_weights": "ema",
    "trains_multi_update": "multi_update",
    "gathers_features": "features",
    "compiles": "compile",
    "recomputes": "activation_checkpointing",
    "sums_sparse_gradients": "sparse_gradients",
    "special_optimizers": None,
}


@dataclass(frozen=True)
class Workload:
    """A step of training, independent of how it is distributed. Bytes are those of the whole model.

    Attributes:
        parameter_bytes: All parameters.
        optimizer_bytes: State of the optimizer.
        unit_bytes: The largest unit that a sharded model gathers at once.
        activation_bytes: Activations of one micro-batch, with the activation checkpointing of the run.
        boundary_bytes: Activations that one block passes to the next, for one micro-batch.
        blocks: Number of repeated parts of the model.
        compute_seconds: Forward, backward and update of one rank in a step, without communication.
        update_seconds: The update, a part of ``compute_seconds``.
        overlap: Fraction of ``compute_seconds`` behind which communication hides, 0 to 1.
        sum_seconds: Time to add two vectors with one number per parameter.
        micro_batches: Micro-batches of each data-parallel part in a step; 0: the strategy's default.
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
    """The cost of a step under a strategy, per rank.

    Attributes:
        memory_bytes: Largest memory of a rank.
        sent_bytes: Bytes that a rank sends in a step.
        across_bytes: Bytes that a node sends to other nodes in a step.
        communication_seconds: Communication of a step, hidden or not.
        idle: Fraction of a step in which a rank waits for its turn, as in a pipeline bubble; 0 to 1.
        exposed_seconds: Communication that cannot hide behind compute; None: derive it from ``Workload.overlap``.
        added_seconds: Extra compute of a rank, on top of the workload; negative if ranks share the update.
        same: Whether the result of a step equals that of one process, up to rounding.
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
        skipped: Whether the update (of several updates, at least one) was skipped because the gradient was not finite.
        partly: Whether only some of several updates were skipped.
        overflowed: Whether an update was skipped because its gradient left the range of float16 under the loss scale;
            like a plain loop, averages count such a step.
        metrics: Training metrics by name: float64 (local micro-batches, 2), each row a sum and its count.
    """

    losses: Sequence[Tensor]
    lr: float | None
    grad_norm: Tensor | None = None
    skipped: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    partly: bool = False
    occasional: bool = False
    overflowed: bool = False


class Replica(ABC):
    """A live model on one worker, made by a :class:`Strategy`."""

    @abstractmethod
    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Compute forward and backward, combine gradients with the other replicas, and update.

        Args:
            micro_batches: This process's data in the step, one for each of its logical ranks, in ascending order.
        """

    @abstractmethod
    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        """Return the metrics over the batches of all ranks: sums and counts, reduced in batch order, then divided."""

    def advance_schedules(self, value: float, *, step: int) -> None:
        """Advance schedules that need a metric by its ``value`` in the evaluation after ``step``, alike on all ranks.

        It may be repeated for a step. Only called for a strategy that ``schedules_by_metric``.
        """
        raise NotImplementedError

    @abstractmethod
    def state(self) -> StateDict:
        """Return the state to save: ``model``, ``optimizer`` and so on.

        The keys of ``model`` are those of ``recipe.model()``, however it is wrapped. Names, shapes and plain values are
        the same on every rank. A tensor may be a DTensor; a tensor on the meta device is held by other ranks. The
        optional part ``strategy`` fits only this strategy at this world size: other replicas ignore it.
        """

    @abstractmethod
    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned, under this strategy or another. Every rank must call it."""

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return this rank's live part of each trained parameter, by its name in the model's state.

        A part has the shape of the parameter, or of its local shard. Writing into it in place changes the weights that
        the replica computes with. A parameter that other ranks hold is on the meta device. Only called for a strategy
        that supports "ema".
        """
        raise NotImplementedError

    def facts(self) -> Mapping[str, Any]:
        """Return further plain values to log, about the steps since the last call."""
        return {}

    dealing: Dealing = "cyclic"  # which logical ranks this process computes in a step
    step_reached: int | None = None  # steps that it has done itself; None: 0, or those of the loaded checkpoint

    def close(self, *, complete: bool) -> None:  # noqa: B027 - most replicas hold nothing to release
        """Release resources other than memory. ``complete``: the run is over; otherwise it may be resumed."""


@dataclass(frozen=True)
class Strategy(ABC):
    """Describes how replicas agree. It is immutable and uses no device and no process group.

    A subclass is a frozen dataclass, too; its fields are the keys below ``strategy`` in its YAML. Settings of the run,
    such as its numerics, reach the replica with the context instead.
    """

    reductions: ClassVar[Sequence[Reduction]] = ("flat", "ordered")
    """Allowed values of ``reduce``."""
    supports: ClassVar[frozenset[Capability]] = frozenset({"state_metrics", "loss_scale"})
    """What a run may ask of it; the rest is refused before a process starts."""
    serves_rows: ClassVar[bool] = False
    """Whether the rows of embeddings with ``sparse=True`` are on servers, which update them in ways of their own."""
    divides_lr: ClassVar[bool] = False
    """Whether the updates of a step share one learning rate, where ``update_parts`` are several."""
    shards_state: ClassVar[bool] = False
    """Whether a process holds state that no other has, of which a gang that heals needs copies."""
    reduce: Reduction = "flat"
    """How gradients are summed over logical ranks."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Warn of the class variables that ``supports`` has replaced."""
        super().__init_subclass__(**keywords)
        for name, capability in _EARLIER.items():
            if name not in vars(cls):
                continue
            value = vars(cls)[name]
            named = frozenset(value) if capability is None else frozenset({capability})
            others = cls.supports - ({"adamw_8bit", "schedule_free"} if capability is None else named)
            cls.supports = others | named if value else others
            warnings.warn(
                f"{cls.__name__}.{name} is supports = frozenset({{{', '.join(map(repr, sorted(named)))}, ...}}) now",
                FutureWarning,
                stacklevel=2,
            )

    def __post_init__(self) -> None:
        check_limits(type(self), vars(self), key="strategy")

    def check_numerics(self, numerics: Numerics) -> None:  # noqa: B027 - most strategies carry all of them
        """Raise ConfigError for numerics that this strategy does not support, before a process starts."""

    @abstractmethod
    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        """Return the processes of each role, by its name; those that train have the role "worker".

        Raises:
            ConfigError: the strategy cannot run with this number of processes.
        """

    @abstractmethod
    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        """Make the live replica of the process that ``context.world`` describes."""

    @property
    def schedules_by_metric(self) -> bool:
        """Whether its replicas ``advance_schedules`` that need the metric of an evaluation."""
        return False

    @property
    def default_micro_batches(self) -> int:
        """Number of logical ranks of each data-parallel part, unless the run sets ``logical_ranks``."""
        return 1

    def check_micro_batches(self, count: int) -> None:  # noqa: B027 - most strategies take any number
        """Raise ConfigError if a step of ``count`` logical ranks in each part of the data cannot be computed."""

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise ConfigError if ``recipe`` does not define what this strategy needs."""
        if "state_metrics" not in self.supports and (names := sorted(recipe.metrics())):
            raise ConfigError(
                f"{type(self).__name__} evaluates metrics that are sums and counts, and {names[0]!r} is not. "
                "Use a strategy such as ddp, or leave it out of Recipe.metrics."
            )

    def check_built(  # noqa: B027 - most strategies take any
        self, recipe: Recipe, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Raise ConfigError if this strategy cannot train the ``model`` or ``optimizer`` that ``recipe`` made.

        It is called before a process starts, with both on the meta device.
        """

    def healing(self) -> Strategy:
        """Return the strategy of a gang that goes on without its dead: one for any number of processes that live."""
        return self

    def groups(self, cluster: Cluster) -> Mapping[str, list[list[int]]]:
        """Return the axes of the device mesh by name: for each, disjoint groups of global ranks that communicate.

        A rank's coordinate on an axis is its index in its group.
        """
        start = 0
        for name, role in self.roles(cluster).items():
            if name == "worker":
                break
            start += role.processes
        return {"data": [list(range(start, start + self.roles(cluster)["worker"].processes))]}

    def data_parallel(self, cluster: Cluster) -> int:
        """Return the number of data-parallel parts of a step: one per worker, unless several share a model."""
        return self.roles(cluster)["worker"].processes

    def data_rank(self, world: World) -> int:
        """Return which part of the data this process trains, counted from 0."""
        return world.rank

    def update_parts(self, cluster: Cluster, logical_ranks: int) -> int | None:
        """Return into how many updates the samples of a step are divided evenly.

        None: all samples of a step are one update, however many processes there are.
        """
        return None

    def cost(self, work: Workload, cluster: Cluster) -> Cost | None:
        """Predict the cost of a step of ``work`` on ``cluster``; None: unknown."""
        return None

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most strategies need nothing
        """Write secrets of the members, such as keys, into ``folder`` (later ``Rendezvous.folder``).

        Called in the launching process before each attempt.
        """

    def serve(self, recipe: Recipe, context: RunContext) -> Replica | None:
        """Serve in a process whose role serves, until the run ends; return a replica if this process is to lead it."""
        raise ConfigError(f"{type(self).__name__} has no role {context.world.role!r} that serves.")
