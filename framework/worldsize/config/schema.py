"""Every key of a run with its type, limits and meaning: a dataclass for each section, also of its value.

OmegaConf's schema is derived from these dataclasses (see :mod:`worldsize.config.section`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from worldsize.config.section import keys_of, schema_of
from worldsize.core.cluster import Cluster
from worldsize.core.evaluation import is_split, metric_key, split_of
from worldsize.core.events import Listener
from worldsize.core.launcher import HealthLimits
from worldsize.core.limits import COUNT, LARGEST, NO_KEY, PORT, FilePath, FolderName, Key, OneOf, Range
from worldsize.core.numerics import Numerics
from worldsize.core.sections import ShuffleConfig, WeightAverage
from worldsize.errors import ConfigError, neighbours
from worldsize.train.early_stopping import EarlyStopping
from worldsize.world.environments import ENVIRONMENTS
from worldsize.world.processes import SIGNALS
from worldsize.world.topology import Topology

if TYPE_CHECKING:  # it imports numpy
    from worldsize.checkpoint.format import Retention

_INTERVAL = Range(least=0, hint="0: never")
_PROCESSES = Range(least=0, most=256, hint="so many processes for each worker")


@dataclass(frozen=True)
class RunConfig:
    """The folder of a run, and what the run is for.

    Attributes:
        root: Folder that holds the folders of runs.
        name: Name of the run's folder; None: date, time and a random id.
        group: Name under which wandb shows the runs of an experiment or a sweep together.
        reproduces: Manifest of the run that this one re-creates.
        strict: Whether to refuse to re-create it where something lowers the level of reproducibility.
        include: Patterns of untracked files that are recorded although they seem to be private (``.env``, ``*.pem``).
        private: Whether only its user may read the run's folder.
        evaluates: Checkpoint that is evaluated instead of training.
        examine: Measure links by tier ("tiers") or between all nodes ("pairs") instead of training.
    """

    root: Annotated[Path, FilePath()] = Path("runs")
    name: Annotated[str | None, FolderName()] = None
    group: str | None = None
    reproduces: Annotated[Path | None, FilePath()] = None
    strict: bool = False
    include: Sequence[str] = ()
    private: bool = True
    evaluates: Annotated[Path | None, FilePath()] = None
    examine: Literal["tiers", "pairs"] | None = None


@dataclass(frozen=True)
class TrainingConfig:
    """Length of training, batches, and intervals of logging and evaluation.

    Attributes:
        steps: Number of steps; null or left out where ``epochs`` is given.
        batch_size: Samples of a step over all logical ranks; null where each sample of the data is a batch already, of
            which each logical rank takes one in a step.
        lr: Learning rate; None: the recipe's optimizer takes none, or sets its own.
        seed: Seed of weights, order of data and all other random numbers.
        log_every: Steps between two logged ones.
        evaluate_every: Steps between two evaluations; 0: only at the end.
        evaluate_batch_size: Samples of a batch of an evaluation.
        schedule_metric: Metric that advances a schedule such as ReduceLROnPlateau after each evaluation.
        data_workers: Processes that load data ahead of each worker; "auto": as many as make its steps shorter.
        length_balanced: Whether samples of similar length share a step; the data set says how long each is, by
            ``lengths``.
        shuffle: The way in which samples are shuffled within an epoch.
    """

    steps: Annotated[int, Key(int | None), COUNT, LARGEST]
    batch_size: Annotated[int, Key(int | None), COUNT, LARGEST]
    lr: Annotated[float | None, Range(least=0)]
    seed: int = 0
    log_every: Annotated[int, COUNT, LARGEST] = 10
    evaluate_every: Annotated[int, _INTERVAL, LARGEST] = 0
    evaluate_batch_size: Annotated[int, COUNT, LARGEST] = 256
    schedule_metric: str | None = None
    data_workers: Annotated[
        int | Literal["auto"], _PROCESSES, OneOf("auto", hint="A number of processes is taken, too.")
    ] = 0
    length_balanced: bool = False
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)

    def __post_init__(self) -> None:
        self.check_evaluates("schedule_metric", self.schedule_metric)

    def check_evaluates(self, key: str, metric: str | None) -> None:
        """Raise ConfigError if ``key`` names a metric, and the run is evaluated at its end only."""
        if metric is not None and not self.evaluate_every:
            raise ConfigError(
                f"{key}={metric}: the run is evaluated at its end only. "
                "Set evaluate_every to the steps between two evaluations."
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """The data that are evaluated.

    Attributes:
        splits: Splits as the recipe names them; metrics of "test" have their own names, others are ``split/name``.
        batches: Number of batches, drawn anew at each evaluation; None: all data.
    """

    splits: Sequence[str] = ("test",)
    batches: Annotated[int | None, COUNT, LARGEST] = None

    def __post_init__(self) -> None:
        if not self.splits or len({*self.splits}) < len(self.splits):
            raise ConfigError(f"evaluation.splits={list(self.splits)} must name at least one split, and each once.")

    def check_known(self, known: Sequence[str]) -> None:
        """Raise ConfigError unless the recipe, whose splits are ``known``, has these splits."""
        for split in self.splits:
            if not is_split(split):
                raise ConfigError(
                    f"evaluation.splits: {split!r} is no name of a split. Call it by a word, without a slash."
                )
            if split not in known:
                raise ConfigError(f"evaluation.splits: the recipe has no split {split!r}{neighbours(split, known)}")

    def check_metric(self, metric: str | None, *, key: str) -> None:
        """Raise ConfigError if ``key`` of the configuration names a metric of a split that is not evaluated."""
        split, name = split_of(metric or "")
        if metric is not None and split not in self.splits:
            raise ConfigError(
                f"{key}={metric} is a metric of {split!r}, and evaluation.splits={list(self.splits)} does "
                f"not evaluate that. Set {key}={metric_key(self.splits[0], name)}, or add the split."
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, what to keep, and what a resumed run loads.

    Attributes:
        keep: Which older checkpoints are kept.
        every: Steps between saves; 0: none in between; "auto": as measured saves and expected failures cost least, and
            every ten minutes.
        at_end: Whether there is a save after the last step.
        signals: Names of the signals that ask for a save and an end with exit code 75.
        ignore: Parts of the state that a resumed run leaves as they are: model, optimizer, schedule, scaler, ema, or
            hyperparameters.
        ignore_until: Last step whose checkpoint is loaded without them; None: they are left out of all.
        allow_older: Whether an older checkpoint stands in for a damaged one.
        on_failure: What training does when storage refuses a save.
        peers: Steps from one copy of each shard in the memory of a peer to the next, where a strategy that shards state
            heals (``strategy.on_failure=heal``); 0: no copies.
    """

    keep: Retention
    every: Annotated[
        int | Literal["auto"], _INTERVAL, LARGEST, OneOf("auto", hint="A number of steps is taken, too.")
    ] = "auto"
    at_end: bool = True
    signals: Sequence[str] = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
    ignore: Sequence[str] = ()
    ignore_until: Annotated[int | None, Range(least=0)] = None
    allow_older: bool = False
    on_failure: Literal["stop", "continue"] = "continue"
    peers: Annotated[int, Range(least=0, most=1_000_000)] = 1

    def __post_init__(self) -> None:
        known = [number.name for number in SIGNALS]
        for name in self.signals:
            if name not in known:
                raise ConfigError(f"checkpoint.signals: no signal {name!r}{neighbours(name, known)}")

    def ignored(self, step: int) -> Sequence[str]:
        """Return the parts not to load of a checkpoint of this step; later checkpoints are loaded fully."""
        from worldsize.checkpoint.format import HYPERPARAMETERS  # it imports torch

        limit = self.ignore_until
        return [part for part in self.ignore if part == HYPERPARAMETERS or limit is None or step <= limit]


@dataclass(frozen=True)
class ProfileConfig:
    """The steps that PyTorch's profiler traces.

    Attributes:
        steps: The first and the last one, e.g. [10, 12]; None: none.
    """

    steps: Sequence[Annotated[int, COUNT]] | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and not (len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]):
            raise ConfigError(
                f"profile.steps={list(self.steps)} must be the first and the last step to trace, e.g. [10,12]."
            )


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """The measurements of a run.

    Attributes:
        step_breakdown: Whether to measure where each step's time goes, which also finds stragglers.
        health: What is watched of each node.
        profile: The steps that are traced.
        listeners: Functions that create the listeners of the run, by the names used in warnings.
    """

    step_breakdown: bool = True
    health: HealthLimits
    profile: Annotated[ProfileConfig, NO_KEY] = field(default_factory=ProfileConfig)
    listeners: Annotated[Mapping[str, Callable[..., Listener]], NO_KEY] = field(default_factory=dict)

    @property
    def watched(self) -> HealthLimits | None:
        """What is watched of each node; None: nothing."""
        return self.health if self.health.every else None


@dataclass(frozen=True)
class SweepConfig:
    """The goal of a search over configurations.

    Attributes:
        metric: The metric of each run's last evaluation that the search goes by; None: runs report none.
        direction: Whether the search minimizes or maximizes it; None: as the sweeper does by itself.
    """

    metric: str | None = None
    direction: Literal["minimize", "maximize"] | None = None


@dataclass(frozen=True)
class AgentsConfig:
    """How hosts are ordered and meet, as keys of the section ``cluster``.

    Attributes:
        port: Port at which the hosts find the first; None: one that follows from the run's id.
        on_node_mismatch: What is done when hosts have other code or packages than the first.
        topology: File that says which switches are above each host, a YAML or Slurm's topology.conf; it orders the
            hosts. None: they stay in their own order.
        placement: "near": hosts below one switch are neighbours; "spread": they are taken from the switches in turn, so
            that the first ranks, such as parameter servers, are below all of them.
    """

    port: Annotated[int | None, PORT] = None
    on_node_mismatch: Literal["refuse", "warn"] = "refuse"
    topology: Annotated[Path | None, FilePath()] = None
    placement: Literal["near", "spread"] = "near"

    def switches(self) -> Topology | None:
        """Read the file that orders the hosts; raise ConfigError if that fails."""
        return Topology.read(self.topology, is_spread=self.placement == "spread") if self.topology else None


@dataclass(frozen=True)
class RateScaling:
    """How ``lr`` follows the samples of an update, as keys of the section ``cluster``.

    Attributes:
        scale_lr: How ``lr`` scales with the samples of an update, where these depend on the number of workers.
        base_batch: Samples of an update for which ``lr`` was chosen; None: ``batch_size``.
    """

    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    base_batch: Annotated[int | None, COUNT] = None


@dataclass(frozen=True)
class _ClusterConfig:
    """The keys of the section ``cluster`` from which others are computed.

    Attributes:
        processes_per_node: It may be given instead of ``processes``.
        environment: Whose variables place a worker that is started by hand (torchrun, openmpi, slurm, alone; auto).
        max_memory: Bytes of memory that one process may hold before an alert says so.
    """

    processes_per_node: Annotated[int | None, Range(least=1, most=4096)] = None
    environment: Annotated[str, OneOf("auto", *ENVIRONMENTS)] = "auto"
    max_memory: Annotated[float | None, Range(above=0, hint="it is in bytes")] = None


@dataclass(frozen=True, kw_only=True)
class _TopLevel:
    """The sections, and the top-level keys from which others are computed.

    Attributes:
        epochs: Length of the run in place of ``steps``.
        logical_ranks: Number of parts of a step's samples; None: as many as the strategy has micro-batches in a step.
        init_from: Initial weights: a run's checkpoint, a folder of safetensors files or a state_dict file.
        init_from_strict: Whether both must have the same weights; otherwise those that only one has are left out.
        launch: Train, or only show or write the command of the scheduler.
        allow_targets: Modules whose functions and classes a ``_target_`` may name, too.
        faults: Planted faults, see docs/howto/restarts.md.
    """

    epochs: Annotated[float | None, Range(above=0)] = None
    logical_ranks: Annotated[int | None, COUNT, LARGEST] = None
    init_from: Annotated[str | None, FilePath()] = None
    init_from_strict: bool = True
    launch: Literal["run", "show", "write"] = "run"
    allow_targets: Sequence[str] = ()
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig
    ema: WeightAverage | None = None
    early_stopping: EarlyStopping | None = None
    sweep: SweepConfig = field(default_factory=SweepConfig)
    faults: Sequence[Mapping[str, Any]] = ()
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    observe: ObserveConfig
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launcher: Any
    strategy: Any
    reproducibility: Any
    recipe: Any
    optimizer: Any = None
    schedule: Any = None
    data: Any = None
    autoscale: Any = None
    logger: Any = None
    listeners: Mapping[str, Any] = field(default_factory=dict)


ClusterSchema = schema_of(Cluster, _ClusterConfig, AgentsConfig, RateScaling)
_NumericsSchema = make_dataclass(
    "NumericsSchema",
    [
        ("_target_", str, field(default="worldsize.core.Numerics")),
        *((name, kind, field(default=f"${{{name}}}")) for name, kind, _ in keys_of(Numerics, fields(Numerics))),
    ],
)
Schema = make_dataclass(
    "Schema",
    [
        ("numerics", _NumericsSchema, field(default_factory=_NumericsSchema)),
        ("cluster", ClusterSchema, field(default_factory=ClusterSchema)),
    ],
    bases=(schema_of(TrainingConfig, Numerics, _TopLevel),),
)
