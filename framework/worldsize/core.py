"""The nouns of worldsize: contracts only. Imports torch, the standard library and our errors, nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from worldsize.errors import ConfigError, NonfiniteLossError, WorldsizeError

StateDict = dict[str, Any]
Batch = Any
Precision = Literal["fp32", "bf16", "fp16"]
Nonfinite = Literal["stop", "skip", "ignore"]
Reduction = Literal["flat", "ordered", "hierarchical"]  # torch's own sums, the fixed tree of logical ranks, by node
TensorStyle = Literal["column", "row"]
Emit = Callable[["Event"], None]

__all__ = ["ConfigError", "NonfiniteLossError", "WorldsizeError"]  # raised by what these contracts promise


# ---------------------------------------------------------------- shape of a run


@dataclass(frozen=True)
class Link:
    """One tier of the interconnect: bandwidth in bytes a second per direction, latency in seconds. ``gap``: seconds of
    a round in which every rank sends to one and hears from one, at the least, however few the bytes (g of LogP, Culler
    et al. 1993, doi:10.1145/155332.155333): more than the latency where processors are what bounds it. ``incast``:
    share of the bandwidth that is left where all ranks send to all at once (Phanishayee et al., FAST 2008).

    Of tiers "device" and "node" a rank's, of "network" a node's: its ranks share it.
    """

    bandwidth: float
    latency: float
    gap: float = 0.0
    incast: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """What a launcher offers: shape, device and links by tier ("device", "node", "network").

    For planning: ``device_memory`` in bytes that one process may fill, ``price_per_hour`` of a node.
    """

    name: str
    nodes: int
    processes: int
    device: Literal["cpu", "cuda"]
    backend: str
    threads: int | None = None
    timeout: float = 600.0
    interface: str | None = None
    hca: str | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    device_memory: float | None = None
    price_per_hour: float | None = None

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes


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
class Role:
    """How many processes play a role, and whether one that dies restarts alone or with its gang.

    ``serves``: its processes run :meth:`Strategy.serve`, and have no process group; the others train a replica.
    ``least``: how many must live for the run to go on without those that died (None: all).
    """

    processes: int
    restart: Literal["together", "alone"] = "together"
    serves: bool = False
    least: int | None = None


@dataclass(frozen=True)
class Plan:
    """A validated run: everything that a launcher needs to start it.

    ``secrets`` are variables of every process too, but must not be written, shown or put on a command line.
    """

    run_dir: Path
    cluster: Cluster
    roles: Mapping[str, Role]
    environment: Mapping[str, str]
    attempt: int = 1
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def world_size(self) -> int:
        return sum(role.processes for role in self.roles.values())


@dataclass(frozen=True)
class World:
    """Who this process is, and among whom.

    ``rank`` and ``size`` count within the role, and are all that a recipe may look at;
    ``global_rank`` and ``world_size`` count every process of the run.
    """

    role: str
    rank: int
    size: int
    global_rank: int
    world_size: int
    local_rank: int
    node_rank: int
    device: torch.device
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    folder: Path | None = None  # that all processes of this attempt see, and only they; None outside of a run

    @property
    def group(self) -> ProcessGroup | None:
        """The processes of this role; ``None`` where there is no process group at all."""
        return self.groups.get(self.role)


# ---------------------------------------------------------------- what is learned


class Recipe(ABC):
    """What is learned. Knows nothing of processes, devices or how replicas agree."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, whatever trains it, so that its initial weights are the same everywhere."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer: ...

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Learning-rate schedule, advanced once an optimizer step; ``None`` keeps the rate constant."""
        return None

    @abstractmethod
    def data(self, split: str) -> Any:
        """Dataset of ``split`` ("train" or "test"): map-style or iterable.

        A map-style dataset with a method ``batch(indices: Tensor)`` is asked for a whole batch at
        once; one with ``__getitems__`` for a list of samples; any other sample by sample. Its attribute ``lengths``,
        a tensor [samples], says how long each is, for ``length_balanced``.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scalar loss: the mean over the micro-batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Each metric as (sum, count) over the batch, so that any grouping of batches adds up exactly."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated parts of ``model`` in order of use, such as transformer layers: units of sharding and of
        activation checkpointing.
        """
        return ()

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """``model`` as a chain, for pipelines: the first takes what ``loss`` gives to the model, each further one
        what the one before returns (one tensor), the last returns what the model does. Parameters may be shared.
        """
        return ()

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        """How tensor parallelism divides modules, by name: a linear layer by its output ("column") or input features
        ("row", after "column").
        """
        return {}

    def remarks(self, model: Mapping[str, Tensor]) -> list[str]:
        """Lines to show at the end of a run, from the trained model's state."""
        return []

    def files(self) -> Mapping[str, Path]:
        """Data files that decide the result, by a name that does not depend on the machine."""
        return {}


@dataclass(frozen=True)
class RowValues:
    """What the rows of an embedding are before their first update: "normal" with deviation ``scale``, or "uniform"
    in [-scale, scale). It counts where a strategy makes rows as they are touched (``sparse=True``).
    """

    kind: Literal["normal", "uniform"] = "normal"
    scale: float = 1.0

    def fill(self, embedding: nn.Embedding | nn.EmbeddingBag) -> None:
        """Draw the whole table like that, and leave a mark for strategies that make its rows one by one."""
        if self.kind == "uniform":
            nn.init.uniform_(embedding.weight, -self.scale, self.scale)
        else:
            nn.init.normal_(embedding.weight, std=self.scale)
        object.__setattr__(embedding, "row_values", self)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The data of one logical rank in one step, and the seed of its random stream there."""

    data: Batch
    seed: int


@dataclass(frozen=True, slots=True)
class EvaluationBatch:
    """Batch number ``index`` of the evaluation set; ``counted=False`` pads ranks to equal length.

    Strategies whose forward pass communicates must run a padding batch; others may skip it.
    """

    index: int
    data: Batch
    counted: bool = True


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


# ---------------------------------------------------------------- how replicas agree


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


# ---------------------------------------------------------------- how processes start


@dataclass(frozen=True)
class Failure:
    """The first process that failed, and why."""

    role: str
    rank: int
    cause: str
    exit_code: int
    step: int | None = None  # that it was in, if it is known
    time_ns: int = 0  # since 1970, on its host's clock; 0: a signal or a lost host ended it, before its peers noticed


@dataclass(frozen=True)
class Outcome:
    """How a job ended: ``exit_reason`` is "completed", "failed", "interrupted", or "preempted": saved, start it again;
    of jobs of a scheduler "submitted" or "ended".

    ``steps``: the step after which it began, and the last one it completed, where they are known.
    ``first_step_at``: Unix time at which it completed its first step.
    """

    exit_reason: str
    exit_code: int
    failure: Failure | None = None
    steps: tuple[int, int] | None = None
    first_step_at: float | None = None


class Job(ABC):
    """Processes that a launcher has started. ``ids``: of the jobs that it has submitted, one a run."""

    ids: Sequence[str] = ()

    @abstractmethod
    def wait(self) -> Outcome: ...

    @abstractmethod
    def cancel(self) -> None: ...


class Launcher(ABC):
    """How processes start. Every process runs ``python -m worldsize.worker RUN_DIR`` or its equivalent.

    ``max_restarts``: times that a gang that failed is started again from its last checkpoint.
    """

    max_restarts: int = 0
    submits: ClassVar[bool] = False  # hands the run over to others, who record its attempts
    sweeps: ClassVar[bool] = False  # takes the runs of a sweep together, see launch_all
    elsewhere: ClassVar[bool] = False  # the run's folder is where the processes are, out of the launching one's sight

    @property
    def hosts(self) -> Sequence[str]:
        """Names of the hosts that take part beside this one, where they are known."""
        return ()

    @property
    def waits(self) -> bool:
        """Whether the job of ``launch`` can be waited for, until the run has ended."""
        return not self.submits

    def check(self, cluster: Cluster) -> None:  # noqa: B027 - not every launcher has something to check
        """Raise ConfigError for a cluster that this launcher cannot start, before a run folder exists."""

    def write(self, plan: Plan) -> None:  # noqa: B027 - most start processes from the run folder as it is
        """Put what ``launch`` hands over, a script and keys, into the run folder."""

    @abstractmethod
    def launch(self, plan: Plan) -> Job: ...

    def launch_all(self, plans: Sequence[Plan]) -> Job:
        """The runs of a sweep, all of one shape, as one job."""
        raise NotImplementedError

    def state(self, job: str) -> str | None:
        """The scheduler's word for a job that was submitted; None: it is over.

        Raises:
            WorldsizeError: it does not answer.
        """
        return None

    def log_command(self, job: str, *, follow: bool) -> Sequence[str]:
        """What shows the logs of a job whose run folder is elsewhere; nothing: they are in the run folder."""
        return ()

    def cancel(self, job: str) -> None:
        """End a job that was submitted."""
        raise ConfigError(f"{type(self).__name__} submits no jobs.")

    @abstractmethod
    def describe(self, plan: Plan) -> str:
        """What ``launch`` would do, as a text that a person can read or run."""


# ---------------------------------------------------------------- what happened


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
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointSaved:
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
