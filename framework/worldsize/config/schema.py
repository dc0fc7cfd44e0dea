"""The keys of a run with their types, limits and meanings: one dataclass per configuration section.

OmegaConf's schema is derived from these dataclasses (see :mod:`worldsize.config.section`), which also hold the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from worldsize.config.section import build_section_keys, build_section_schema
from worldsize.core.cluster import Cluster
from worldsize.core.evaluation import is_split, metric_key, parse_metric_key
from worldsize.core.events import Listener
from worldsize.core.launcher import HealthLimits
from worldsize.core.limits import COUNT, LARGEST, NO_KEY, PORT, FilePath, FolderName, Key, OneOf, Range
from worldsize.core.numerics import Numerics
from worldsize.core.sections import IntegrityConfig, ShuffleConfig, WeightAverage
from worldsize.data.skips import SKIP_FORM, SkippedSamples
from worldsize.errors import ConfigError, neighbours
from worldsize.loop.early_stopping import EarlyStopping
from worldsize.loop.spikes import SpikeDetection
from worldsize.world.environments import ENVIRONMENTS
from worldsize.world.processes import SIGNALS
from worldsize.world.topology import Topology

if TYPE_CHECKING:  # imports numpy
    from worldsize.checkpoint.format import Retention

_INTERVAL = Range(least=0, hint="0 means never")
_PROCESSES = Range(least=0, most=256, hint="the limit is per worker")


@dataclass(frozen=True)
class RunConfig:
    """The folder and the purpose of a run.

    Attributes:
        root: Parent folder of run folders.
        name: Name of the run folder; None: date, time and a random id.
        group: Name that groups the runs of an experiment or a sweep in wandb.
        reproduces: Manifest of the run that this run reproduces.
        strict: Whether to refuse to reproduce a run if anything lowers the reproducibility level.
        include: Patterns of untracked files to record even if they look private (``.env``, ``*.pem``).
        private: Whether only the user may read the run folder.
        evaluates: Checkpoint to evaluate instead of training.
        examine: Measure links per tier ("tiers") or between all nodes ("pairs") instead of training.
        stop_after: Last step to train; the run then saves a checkpoint and stops, as on request. `worldsize resume`
            continues it to the end. None: train to the end.
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
    stop_after: Annotated[int | None, COUNT, LARGEST] = None


@dataclass(frozen=True)
class TrainingConfig:
    """Length of training, batches, and intervals of logging and evaluation.

    Attributes:
        steps: Number of steps; null or omitted if ``epochs`` is given.
        batch_size: Samples per step over all logical ranks; null if each sample of the data is already a batch, in
            which case each logical rank uses one per step.
        lr: Learning rate; None if the recipe's optimizer does not need one or sets its own.
        seed: Seed of the weights, the data order and all other random numbers.
        log_every: Steps between two log entries.
        evaluate_every: Steps between two evaluations; 0: only at the end.
        evaluate_batch_size: Samples per evaluation batch.
        schedule_metric: Metric that advances a schedule such as ReduceLROnPlateau after each evaluation.
        data_workers: Data-loading processes per worker; "auto": as many as shorten its steps.
        length_balanced: Whether samples of similar length share a step; the dataset must define ``lengths``.
        shuffle: How samples are shuffled within an epoch.
        skip_samples: Samples that no step uses, as ranges of positions in the endless sequence of samples, e.g.
            ["12000:12064"]: the first position, counted from 0 over all epochs, and the one after the last.
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
        int | Literal["auto"], _PROCESSES, OneOf("auto", hint="A number of processes is also accepted.")
    ] = 0
    length_balanced: bool = False
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    skip_samples: Sequence[Annotated[str, SKIP_FORM]] = ()

    def __post_init__(self) -> None:
        self.check_evaluates("schedule_metric", self.schedule_metric)
        SkippedSamples.from_words(self.skip_samples)  # raises if a range is empty

    def check_evaluates(self, key: str, metric: str | None) -> None:
        """Raise ConfigError if ``key`` is set to a metric, but the run is evaluated only at its end."""
        if metric is not None and not self.evaluate_every:
            raise ConfigError(
                f"{key}={metric} requires evaluations during training. "
                "Set evaluate_every to the number of steps between evaluations."
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """The data to evaluate.

    Attributes:
        splits: Splits of the recipe; metrics of "test" keep their names, those of other splits are ``split/name``.
            Empty: the recipe's ``evaluation_split``.
        batches: Number of batches, sampled anew for each evaluation; None: all data.
    """

    splits: Sequence[str] = ()
    batches: Annotated[int | None, COUNT, LARGEST] = None

    def __post_init__(self) -> None:
        if len({*self.splits}) < len(self.splits):
            raise ConfigError(f"evaluation.splits={list(self.splits)} must not have duplicates.")

    def check_known(self, known: Sequence[str]) -> None:
        """Raise ConfigError unless all splits are among ``known``, the recipe's splits."""
        for split in self.splits:
            if not is_split(split):
                raise ConfigError(f"evaluation.splits: invalid split name {split!r}. Use a name without a slash.")
            if split not in known:
                raise ConfigError(f"evaluation.splits: the recipe has no split {split!r}{neighbours(split, known)}")

    def check_metric(self, metric: str | None, *, key: str) -> None:
        """Raise ConfigError if ``metric``, the value of ``key``, belongs to a split that is not evaluated."""
        split, name = parse_metric_key(metric or "")
        if metric is not None and split not in self.splits:
            raise ConfigError(
                f"{key}={metric} requires the split {split!r}, but evaluation.splits={list(self.splits)}. "
                f"Set {key}={metric_key(self.splits[0], name)}, or add the split."
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, which checkpoints to keep, and which state a resumed run loads.

    Attributes:
        keep: Which older checkpoints to keep.
        every: Steps between saves; 0: none before the end; "auto": minimize the cost of measured saves and expected
            failures, usually with a save at least every ten minutes, and with ``keep.best`` also save at evaluations.
        at_end: Whether to save after the last step.
        signals: Names of the signals that make a run save and exit with code 75.
        ignore: Parts of the state that a resumed run does not load: model, optimizer, schedule, scaler, ema, or
            hyperparameters.
        ignore_until: Last step for whose checkpoint ``ignore`` applies; None: it applies to all checkpoints.
        allow_older: Whether to load an older checkpoint if the newest is damaged.
        on_failure: What to do if a save fails.
        peers: Steps between two copies of each shard to a peer's memory, for healing strategies that shard state
            (``strategy.on_failure=heal``); 0: no copies.
    """

    keep: Retention
    every: Annotated[
        int | Literal["auto"], _INTERVAL, LARGEST, OneOf("auto", hint="A number of steps is also accepted.")
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
                raise ConfigError(f"checkpoint.signals: unknown signal {name!r}{neighbours(name, known)}")

    def check_spikes(self, log_every: int) -> None:
        """Raise ConfigError if all kept checkpoints may be newer than the last logged step before a spike.

        A spike is noticed before the logged step with it is saved, and the spike may have begun right after the
        previous logged step.
        """
        if not isinstance(self.every, int) or not self.every or self.keep.every:
            return
        needed = 1 + -(-(log_every - 1) // self.every)
        if self.keep.last < needed:
            raise ConfigError(
                f"spike.on_spike=rewind requires a checkpoint from before the last {log_every} steps (log_every), but "
                f"only {self.keep.last} checkpoints are kept, one every {self.every} steps. Set "
                f"checkpoint.keep.last={needed}, or a smaller log_every."
            )

    def list_ignored_parts(self, step: int) -> Sequence[str]:
        """Return the parts to ignore in the checkpoint of ``step``; after ``ignore_until``, only hyperparameters."""
        from worldsize.checkpoint.format import HYPERPARAMETERS  # imports torch

        limit = self.ignore_until
        return [part for part in self.ignore if part == HYPERPARAMETERS or limit is None or step <= limit]


@dataclass(frozen=True)
class ProfileConfig:
    """The steps that PyTorch's profiler traces, and the step that ``worldsize compare --operations`` records.

    Attributes:
        steps: The first and the last step, e.g. [10, 12]; None: do not profile.
        operations: Step whose operations are recorded; training stops after it. None: record no operations.
        saved_operation: Operation of this step whose inputs and results are saved, e.g. "rank_00000/17".
    """

    steps: Sequence[Annotated[int, COUNT]] | None = None
    operations: Annotated[int | None, COUNT, LARGEST] = None
    saved_operation: str | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and not (len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]):
            raise ConfigError(
                f"profile.steps={list(self.steps)} must be the first and the last step to trace, e.g. [10,12]."
            )


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """The measurements of a run.

    Attributes:
        step_breakdown: Whether to measure the time breakdown of each step, which also detects stragglers.
        health: Limits of the health monitor on each node.
        profile: The steps to trace.
        listeners: Functions that create the run's listeners, by their names in warnings.
    """

    step_breakdown: bool = True
    health: HealthLimits
    profile: Annotated[ProfileConfig, NO_KEY] = field(default_factory=ProfileConfig)
    listeners: Annotated[Mapping[str, Callable[..., Listener]], NO_KEY] = field(default_factory=dict)

    @property
    def watched(self) -> HealthLimits | None:
        """Limits of the health monitor on each node; None if it is off."""
        return self.health if self.health.every else None


@dataclass(frozen=True)
class SweepConfig:
    """The goal of a search over configurations.

    Attributes:
        metric: The metric to optimize, from each run's last evaluation; None: runs do not report a metric.
        direction: Whether to minimize or maximize the metric; None: the sweeper's default.
    """

    metric: str | None = None
    direction: Literal["minimize", "maximize"] | None = None


@dataclass(frozen=True)
class AgentsConfig:
    """How agents order hosts and connect to each other; keys of the section ``cluster``.

    Attributes:
        port: Port on the first host; None: derived from the run's id.
        on_node_mismatch: What to do if a host's code or packages differ from the first host's.
        topology: File that orders hosts by the switches above them, in YAML or as Slurm's topology.conf. None: keep the
            given order.
        placement: "near": hosts under one switch get consecutive ranks; "spread": hosts are assigned from the switches
            in turn, so that the first ranks, such as parameter servers, are spread over all switches.
    """

    port: Annotated[int | None, PORT] = None
    on_node_mismatch: Literal["refuse", "warn"] = "refuse"
    topology: Annotated[Path | None, FilePath()] = None
    placement: Literal["near", "spread"] = "near"

    def switches(self) -> Topology | None:
        """Read the topology file, if any; raise ConfigError if that fails."""
        return Topology.read(self.topology, is_spread=self.placement == "spread") if self.topology else None


@dataclass(frozen=True)
class RateScaling:
    """How ``lr`` scales with the samples per update; keys of the section ``cluster``.

    Attributes:
        scale_lr: Rule for scaling ``lr`` with the samples per update, if these depend on the number of workers.
        base_batch: Samples per update for which ``lr`` was tuned; None: ``batch_size``.
    """

    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    base_batch: Annotated[int | None, COUNT] = None


@dataclass(frozen=True)
class _ClusterConfig:
    """Keys of the section ``cluster`` from which other values are computed.

    Attributes:
        processes_per_node: Alternative to ``processes``.
        environment: Source of rank variables for manually started workers (torchrun, openmpi, slurm, alone; auto).
        max_memory: Memory of one process, in bytes, above which an alert is raised.
    """

    processes_per_node: Annotated[int | None, Range(least=1, most=4096)] = None
    environment: Annotated[str, OneOf("auto", *ENVIRONMENTS)] = "auto"
    max_memory: Annotated[float | None, Range(above=0, hint="the unit is bytes")] = None


@dataclass(frozen=True, kw_only=True)
class _TopLevel:
    """The sections, and top-level keys from which other values are computed.

    Attributes:
        epochs: Length of the run, as an alternative to ``steps``.
        logical_ranks: Number of micro-batches per step; None: the strategy's default.
        init_from: Initial weights: a run's checkpoint, a folder of safetensors files or a state_dict file.
        init_from_strict: Whether weight names must match the model's exactly; otherwise ignore unmatched weights.
        launch: Train, or only show or write the scheduler's command.
        allow_targets: Additional modules whose functions and classes may be used as ``_target_``.
        faults: Faults to inject; see docs/howto/restarts.md.
        launcher: How processes are started, stopped and restarted; set by the cluster.
        strategy: How replicas share parameters and gradients.
        reproducibility: How exactly the run can be reproduced.
        recipe: The model, the loss and the data of the run.
        optimizer: The optimizer, in recipes that take one.
        schedule: The schedule of the learning rate, in recipes that take one.
        data: The source of the samples, in recipes that take one.
        autoscale: Policy that changes the number of processes of a healing run.
        logger: Where metrics are logged, in addition to metrics.jsonl.
        listeners: Additional loggers, by name.
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
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    early_stopping: EarlyStopping | None = None
    spike: SpikeDetection | None = None
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


ClusterSchema = build_section_schema(Cluster, _ClusterConfig, AgentsConfig, RateScaling)
_NumericsSchema = make_dataclass(
    "NumericsSchema",
    [
        ("_target_", str, field(default="worldsize.core.Numerics")),
        *(
            (name, kind, field(default=f"${{{name}}}"))
            for name, kind, _ in build_section_keys(Numerics, fields(Numerics))
        ),
    ],
    namespace={"__doc__": Numerics.__doc__},
)
Schema = make_dataclass(
    "Schema",
    [
        ("numerics", _NumericsSchema, field(default_factory=_NumericsSchema)),
        ("cluster", ClusterSchema, field(default_factory=ClusterSchema)),
    ],
    bases=(build_section_schema(TrainingConfig, Numerics, _TopLevel),),
)
