"""Base classes of strategies, and of the replicas that strategies create.

A strategy describes how replicas synchronize.
"""

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

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor, nn
    from torch.optim import Optimizer

# Logical ranks (L in total) of process p of P: p, p + P, p + 2P, ... ("cyclic"), or L / P consecutive ones ("block").
Dealing = Literal["cyclic", "block"]
# torch's all-reduce ("flat"), a fixed tree over logical ranks ("ordered"), or intra-node first ("hierarchical").
Reduction = Literal["flat", "ordered", "hierarchical"]

Capability = Literal[
    "state_metrics",  # metrics in Recipe.metrics, merged from their states
    "loss_scale",  # precisions that need loss scaling, such as fp16
    "ema",  # the section ``ema``; replicas implement ``trained_weights``
    "multi_update",  # a MultiUpdateRecipe
    "features",  # a FeatureRecipe
    "integrity",  # the section ``integrity``
    "compile",  # Numerics.compile
    "activation_checkpointing",  # Numerics.activation_checkpointing and activation_offload
    "sparse_gradients",  # all-reduce of gradients of embeddings with sparse=True; NCCL does not support it
    "adamw_8bit",  # an optimizer whose quantized state needs whole parameters
    "schedule_free",  # optimizers that evaluate with different weights than they train
    "operations",  # recording of the operations of each logical rank (``worldsize compare --operations``)
]
_EARLIER: Mapping[str, Capability | None] = {  # deprecated class variables; None: the variable lists capabilities
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
    """Size of a training step, independent of how it is distributed.

    Bytes refer to the whole model.

    Attributes:
        parameter_bytes: All parameters.
        optimizer_bytes: Optimizer state.
        unit_bytes: Largest unit that a sharded model gathers at once.
        activation_bytes: Activations of one micro-batch, given the run's activation checkpointing.
        boundary_bytes: Activations that one block passes to the next, per micro-batch.
        blocks: Number of repeated blocks in the model.
        compute_seconds: Forward, backward and update of one rank per step, without communication.
        update_seconds: The update's share of ``compute_seconds``.
        overlap: Fraction of ``compute_seconds`` that can hide communication, 0 to 1.
        sum_seconds: Time to add two vectors with one element per parameter.
        micro_batches: Micro-batches per data-parallel replica and step; 0: the strategy's default.
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
    """Predicted cost of a step under a strategy, per rank.

    Attributes:
        memory_bytes: Peak memory of a rank.
        sent_bytes: Bytes that a rank sends per step.
        across_bytes: Bytes that a node sends to other nodes per step.
        communication_seconds: Communication time per step, hidden or not.
        idle: Fraction of a step that a rank is idle, as in a pipeline bubble; 0 to 1.
        exposed_seconds: Communication that cannot overlap compute; None: derive it from ``Workload.overlap``.
        added_seconds: Compute seconds per rank beyond ``Workload.compute_seconds``; negative if ranks share the update.
        same: Whether a step has the same result as on a single process, up to rounding.
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
        lr: Learning rate of the update; None if the optimizer has none.
        grad_norm: Norm of the whole gradient before clipping, a scalar; None if not computed, see
            ``RunContext.logs_norm``.
        skipped: Whether the update, or at least one of several, was skipped because the gradient was not finite.
        partly: Whether only some of several updates were skipped.
        overflowed: Whether an update was skipped because its scaled gradient overflowed float16. Weight averaging still
            counts such a step, as in a plain training loop.
        metrics: Training metrics by name: float64 (local micro-batches, 2), each row a sum and its count.
        occasional: Whether the names of ``metrics`` may differ from step to step, in the same way on all ranks.
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
    """A live model on one worker, created by a :class:`Strategy`."""

    @abstractmethod
    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Run forward and backward, combine gradients with the other replicas, and update.

        Args:
            micro_batches: This process's data for the step, one per local logical rank, in ascending order.
        """

    @abstractmethod
    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        """Return the metrics over the batches of all ranks.

        Metrics are sums divided by counts, both reduced in batch order.
        """

    def advance_schedules(self, value: float, *, step: int) -> None:
        """Advance schedules that depend on a metric by its ``value`` after ``step``.

        The value is the same on all ranks. May be called more than once for the same step. Only called if the strategy
        has ``schedules_by_metric``.
        """
        raise NotImplementedError

    @abstractmethod
    def state(self) -> StateDict:
        """Return the state to save: ``model``, ``optimizer`` and so on.

        The keys of ``model`` are those of ``recipe.model()``, however it is wrapped. Names, shapes and plain values are
        the same on every rank. A tensor may be a DTensor; a tensor on the meta device is stored on other ranks. The
        optional key ``strategy`` holds state for this strategy at this world size; other replicas ignore it.
        """

    @abstractmethod
    def load(self, state: StateDict) -> None:
        """Load a state that :meth:`state` returned, from this or another strategy.

        Every rank must call this.
        """

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return this rank's live tensor of each trained parameter, by name in the model's state.

        A tensor has the shape of the parameter, or of its local shard. Modifying it in place changes the weights that
        the replica trains. A parameter that is stored on other ranks is a tensor on the meta device. Only called if the
        strategy supports "ema".
        """
        raise NotImplementedError

    def facts(self) -> Mapping[str, Any]:
        """Return further plain values to log, covering the steps since the last call."""
        return {}

    dealing: Dealing = "cyclic"  # how logical ranks are assigned to processes
    step_reached: int | None = None  # last step computed by this object; None: 0, or the loaded checkpoint's step

    def close(self, *, complete: bool) -> None:  # noqa: B027 - most replicas hold nothing to release
        """Release resources other than memory. If not ``complete``, the run may be resumed."""


class ReplicaWrapper(Replica):
    """Abstract base: forwards everything but the step to the replica ``inner``."""

    def __init__(self, inner: Replica) -> None:
        self._inner = inner
        self.step_reached, self.dealing = inner.step_reached, inner.dealing

    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        return self._inner.evaluate(batches)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._inner.advance_schedules(value, step=step)

    def state(self) -> StateDict:
        return self._inner.state()

    def load(self, state: StateDict) -> None:
        self._inner.load(state)

    def trained_weights(self) -> Mapping[str, Tensor]:
        return self._inner.trained_weights()

    def facts(self) -> Mapping[str, Any]:
        return self._inner.facts()

    def close(self, *, complete: bool) -> None:
        self._inner.close(complete=complete)


@dataclass(frozen=True)
class Strategy(ABC):
    """Describes how replicas synchronize.

    Strategies are immutable and do not use a device or process group. Subclasses are frozen dataclasses too; their
    fields are the keys under ``strategy`` in their YAML. Settings of the run, such as its numerics, reach the replica
    through the context instead.
    """

    reductions: ClassVar[Sequence[Reduction]] = ("flat", "ordered")
    """Allowed values of ``reduce``."""
    supports: ClassVar[frozenset[Capability]] = frozenset({"state_metrics", "loss_scale"})
    """Optional features that runs may use; others are refused before a process starts."""
    serves_rows: ClassVar[bool] = False
    """Whether servers store the rows of embeddings with ``sparse=True`` and update them with their own optimizers."""
    divides_lr: ClassVar[bool] = False
    """Whether each update uses only its part of the learning rate if ``update_parts`` returns more than one."""
    shards_state: ClassVar[bool] = False
    """Whether each process holds unique state, so that a healing gang needs copies of it."""
    reduce: Reduction = "flat"
    """How gradients are reduced over logical ranks."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Convert deprecated class variables to ``supports``, with a warning."""
        super().__init_subclass__(**keywords)
        for name, capability in _EARLIER.items():
            if name not in vars(cls):
                continue
            value = vars(cls)[name]
            named = frozenset(value) if capability is None else frozenset({capability})
            others = cls.supports - ({"adamw_8bit", "schedule_free"} if capability is None else named)
            cls.supports = others | named if value else others
            warnings.warn(
                f"{cls.__name__}.{name} is deprecated. Use supports = "
                f"frozenset({{{', '.join(map(repr, sorted(named)))}, ...}}).",
                FutureWarning,
                stacklevel=2,
            )

    def __post_init__(self) -> None:
        check_limits(type(self), vars(self), key="strategy")

    def check_numerics(self, numerics: Numerics) -> None:  # noqa: B027 - most strategies support all of them
        """Raise ConfigError if this strategy does not support ``numerics``.

        Called before a process starts.
        """

    def check_audit(self, cluster: Cluster) -> None:
        """Raise ConfigError unless replicas on ``cluster`` can audit each other's gradients (``integrity.audit``)."""
        if self.data_parallel(cluster) < 2:
            raise ConfigError(
                "integrity.audit requires at least two data-parallel replicas, which compute the same logical ranks. "
                "Use more processes, or set integrity.audit=0."
            )

    @abstractmethod
    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        """Return the roles by name; training processes have the role "worker".

        Raises:
            ConfigError: the strategy cannot run with this number of processes.
        """

    @abstractmethod
    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        """Create the live replica in the process described by ``context.world``."""

    @property
    def schedules_by_metric(self) -> bool:
        """Whether replicas implement ``advance_schedules``, for schedules on an evaluation metric."""
        return False

    @property
    def default_micro_batches(self) -> int:
        """Default number of logical ranks per replica, unless ``logical_ranks`` is set."""
        return 1

    def check_micro_batches(self, count: int) -> None:  # noqa: B027 - most strategies take any number
        """Raise ConfigError if a replica cannot compute ``count`` logical ranks per step."""

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise ConfigError if ``recipe`` does not meet this strategy's requirements."""
        if "state_metrics" not in self.supports and (names := sorted(recipe.metrics())):
            raise ConfigError(
                f"{type(self).__name__} requires metrics as (sum, count), but {names[0]!r} is in Recipe.metrics. "
                "Use a strategy such as ddp, or remove the metric from Recipe.metrics."
            )

    def check_built(  # noqa: B027 - most strategies take any
        self, recipe: Recipe, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Raise ConfigError if this strategy cannot train ``model`` with ``optimizer``.

        Both were created by ``recipe``. Called before a process starts, with both on the meta device.
        """

    def healing(self) -> Strategy:
        """Return the variant of this strategy for healing gangs, with any number of processes."""
        return self

    def axis_sizes(self, processes: int) -> Mapping[str, int]:
        """Return mesh axis sizes by name for ``processes`` workers; empty if only data-parallel."""
        return {}

    def groups(self, cluster: Cluster) -> Mapping[str, list[list[int]]]:
        """Return the axes of the device mesh by name, as disjoint groups of global ranks.

        The ranks of a group communicate. A rank's coordinate on an axis is its index in its group.
        """
        start = 0
        for name, role in self.roles(cluster).items():
            if name == "worker":
                break
            start += role.processes
        return {"data": [list(range(start, start + self.roles(cluster)["worker"].processes))]}

    def data_parallel(self, cluster: Cluster) -> int:
        """Return the data-parallel size: one per worker, unless several workers share a model."""
        return self.roles(cluster)["worker"].processes

    def data_rank(self, world: World) -> int:
        """Return this process's data-parallel rank."""
        return world.rank

    def update_parts(self, cluster: Cluster, logical_ranks: int) -> int | None:
        """Return the number of equal updates into which the samples of a step are split.

        None: all samples of a step form one update, independent of the number of processes.
        """
        return None

    def cost(self, work: Workload, cluster: Cluster) -> Cost | None:
        """Predict the cost of a step of ``work`` on ``cluster``; None if unknown."""
        return None

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most strategies need nothing
        """Write secrets for the processes, such as keys, into ``folder``.

        The folder becomes ``Rendezvous.folder``. Called in the launching process before each attempt.
        """

    def serve(self, recipe: Recipe, context: RunContext) -> Replica | None:
        """Run a serving process until the run ends.

        Returns a replica only if the process also runs the training loop.
        """
        raise ConfigError(f"{type(self).__name__} has no serving role {context.world.role!r}.")
