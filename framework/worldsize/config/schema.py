"""The structured schema: every key of a run, its type and its meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from worldsize.core.limits import PORT, SECONDS, FilePath, FolderName, OneOf, Range
from worldsize.world.environments import ENVIRONMENTS

_LARGEST = Range(most=2**63 - 1)  # what tensors and other languages take
_COUNT = Range(least=1)
_SHARE = Range(above=0, most=1)
_PROCESSES = Range(least=0, most=256, hint="so many processes for each worker")
_INTERVAL = Range(least=0, hint="0: never")


@dataclass
class LinkSchema:
    """The speed of one kind of link, for planning and for the reductions that choose by it.

    Attributes:
        bandwidth: Bytes a second in each direction.
        latency: Seconds of a message.
        gap: Least seconds of one round of a ring.
        incast: Share of the bandwidth that is left where all ranks send to all at once.
    """

    bandwidth: Annotated[float, Range(above=0, hint="it is in bytes a second")] = MISSING
    latency: Annotated[float, Range(least=0, hint="it is in seconds")] = MISSING
    gap: Annotated[float, Range(least=0, hint="it is in seconds")] = 0.0
    incast: Annotated[float, Range(above=0, most=1)] = 1.0


@dataclass
class SpotSchema:
    """A node that may be reclaimed costs so much an hour, and fails every so many hours, reclaims among them."""

    price_per_hour: Annotated[float | None, Range(least=0)] = None
    mtbf_hours: Annotated[float | None, Range(above=0)] = None


@dataclass
class ClusterSchema:
    """Shape and links. ``processes`` counts all nodes; ``processes_per_node`` may be given instead.

    ``environment``: whose variables place a worker that is started by hand (torchrun, openmpi, slurm, alone; auto).
    ``interface``: network interface of the collectives (default: the one that leads to the first node). ``hca``:
    InfiniBand adapters that NCCL may use (NCCL_IB_HCA). ``port``: at which the hosts find the first (default: one that
    follows from the run's id). ``on_node_mismatch``: what is done when hosts have other code or packages than the
    first: refuse or warn. For planning: ``device_memory`` in bytes that a process may fill (default: what this machine
    has), ``price_per_hour`` of a node. ``mtbf_hours``: mean hours between two failures of a node, for planning and for
    ``checkpoint.every=auto``. ``spot_market``: price and hours between failures, reclaims among them, of a spot node.
    For a strategy that heals (``strategy.on_failure=heal``): ``min_processes``, with which it goes on at least,
    ``spares``: further processes, which wait to take the places of those that die, and ``spare_nodes``: further nodes
    that wait to take those of lost ones; of ``hosts`` they are the last. ``peak_flops``: dense operations a second of
    one process's device, of which the MFU is the share that the model uses (default: that of a known GPU).
    ``max_memory``: bytes of memory that one process may hold before an alert says so. ``debug``: NCCL and torch tell
    what they do, in the logs of the processes. ``pin``: whether each process keeps to the cores and the memory of a
    NUMA node (numa), or to cores that no other has (exclusive); auto: as numa where there are several such nodes.
    ``tiers``: nodes of a rack, of a pod, ..., by the name of the tier, whose link is ``links.NAME``; or a mapping with
    ``nodes`` and the keys of a link. ``topology``: file that says which switches are above each host, a YAML or Slurm's
    topology.conf; it orders the hosts: with ``placement`` near, those below one switch are neighbours; with spread they
    are taken from the switches in turn, so that the first ranks, such as parameter servers, are below all of them.
    ``scale_lr``: rule by which ``lr`` follows the samples of an update where these depend on the number of workers,
    relative to the ``base_batch`` samples for which it was chosen (default: ``batch_size``).
    """

    name: str = MISSING
    nodes: Annotated[int, Range(least=1, most=1_000_000)] = 1
    processes: Annotated[int | None, Range(most=1_000_000)] = None
    processes_per_node: Annotated[int | None, Range(least=1, most=4096)] = None
    device: str | None = "cpu"  # any kind of device that torch knows, see worldsize.devices
    backend: str | None = None
    threads: Annotated[int | None, Range(least=1, most=4096)] = None
    timeout: Annotated[float, SECONDS] = 600.0
    environment: Annotated[str, OneOf("auto", *ENVIRONMENTS)] = "auto"
    interface: str | None = None
    hca: str | None = None
    port: Annotated[int | None, PORT] = None
    on_node_mismatch: Annotated[str, OneOf("refuse", "warn")] = "refuse"
    device_memory: Annotated[float | None, Range(above=0, hint="it is in bytes")] = None
    price_per_hour: Annotated[float | None, Range(least=0)] = None
    mtbf_hours: Annotated[float | None, Range(above=0)] = None
    spot_market: SpotSchema = field(default_factory=SpotSchema)
    min_processes: Annotated[int | None, Range(least=1)] = None
    spares: Annotated[int, Range(least=0, most=256)] = 0
    spare_nodes: Annotated[int, Range(least=0, most=256)] = 0
    peak_flops: Annotated[float | None, Range(above=0, hint="it is in operations a second")] = None
    max_memory: Annotated[float | None, Range(above=0, hint="it is in bytes")] = None
    debug: bool = False
    pin: Annotated[str, OneOf("auto", "none", "numa", "exclusive")] = "auto"
    scale_lr: Annotated[str, OneOf("none", "linear", "sqrt")] = "none"
    base_batch: Annotated[int | None, _COUNT] = None
    links: dict[str, LinkSchema] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)
    topology: Annotated[str | None, FilePath()] = None
    placement: Annotated[str, OneOf("near", "spread")] = "near"


@dataclass
class RunSchema:
    """The folder of a run, and what the run is for.

    Attributes:
        root: Folder that holds the folders of runs.
        name: Name of the run's folder; null: date, time and a random id.
        group: Name under which wandb shows runs together.
        reproduces: Manifest of the run that this one re-creates.
        strict: Whether to refuse to re-create it where something lowers the level of reproducibility.
        include: Patterns of untracked files that are recorded although they seem to be private (``.env``, ``*.pem``).
        private: Whether only its user may read the run's folder.
        evaluates: Folder of the checkpoint that is evaluated instead of training.
        examine: Measure links by tier ("tiers") or between all nodes ("pairs") instead of training.
    """

    root: Annotated[str, FilePath()] = "runs"
    name: Annotated[str | None, FolderName()] = None
    group: str | None = None
    reproduces: Annotated[str | None, FilePath()] = None
    strict: bool = False
    include: list[str] = field(default_factory=list)
    private: bool = True
    evaluates: Annotated[str | None, FilePath()] = None
    examine: Annotated[str | None, OneOf("tiers", "pairs")] = None


@dataclass
class CheckpointSchema:
    """``every``: steps between saves (0: none in between; auto: as measured saves and expected failures cost least,
    and every ten minutes); ``at_end``: one after the last step.

    ``signals`` ask for a save and an end with exit code 75. ``ignore``: parts of the state that a resumed run leaves
    as they are: model, optimizer, schedule, scaler, ema, or hyperparameters; of checkpoints up to step ``ignore_until``
    (null: of all). ``allow_older``: an older checkpoint stands in for a damaged one. ``on_failure``: whether training
    stops or continues when storage refuses a save. ``peers``: with ``strategy.on_failure=heal`` and a strategy that
    shards state, steps from one copy of each shard in the memory of a peer to the next.
    """

    every: Annotated[int | str, _INTERVAL, _LARGEST, OneOf("auto", hint="A number of steps is taken, too.")] = "auto"
    at_end: bool = True
    keep: Any = None
    signals: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    ignore_until: Annotated[int | None, Range(least=0)] = None
    allow_older: bool = False
    on_failure: Annotated[str, OneOf("stop", "continue")] = "continue"
    peers: Annotated[int, Range(least=0, most=1_000_000)] = 1


@dataclass
class EMASchema:
    """An exponential moving average of the weights, which is evaluated and saved beside them.

    Attributes:
        decay: Share of the average that one averaging keeps; null: there is no average.
        every: Updates from one averaging to the next.
        warmup: Whether the decay is lower at first: (1 + n) / (10 + n) at averaging n.
    """

    decay: Annotated[float | None, Range(least=0, most=1, hint="0.999 is usual; null: no average")] = None
    every: Annotated[int, _COUNT, _LARGEST] = 1
    warmup: bool = False


@dataclass
class EarlyStoppingSchema:
    """The rule by which a run ends before its last step.

    Attributes:
        metric: The metric that has to improve; null: the run does not end early.
        direction: Whether a smaller (min) or a larger (max) metric is better.
        patience: Evaluations without an improvement after which the run ends.
        min_delta: Least difference that counts as an improvement.
    """

    metric: str | None = None
    direction: Annotated[str, OneOf("min", "max")] = "min"
    patience: Annotated[int, _COUNT, _LARGEST] = 3
    min_delta: Annotated[float, Range(least=0)] = 0.0


@dataclass
class SweepSchema:
    """The goal of a search over configurations.

    Attributes:
        metric: The metric of each run's last evaluation that the search goes by; null: runs report none.
        direction: Whether the search minimizes or maximizes it; null: as the sweeper does by itself.
    """

    metric: str | None = None
    direction: Annotated[str | None, OneOf("minimize", "maximize")] = None


@dataclass
class EvaluationSchema:
    """The data that are evaluated.

    Attributes:
        splits: Splits as the recipe names them; metrics of "test" have their own names, others are ``split/name``.
        batches: Evaluate so many batches, drawn anew each time; null: all data.
    """

    splits: list[str] = field(default_factory=lambda: ["test"])
    batches: Annotated[int | None, _COUNT, _LARGEST] = None


@dataclass
class ShuffleSchema:
    """The way in which samples are shuffled within an epoch.

    Attributes:
        enabled: Whether they are; otherwise samples keep the order of the data.
        block: Samples that are neighbours in the data and stay close, for slow storage; 1: each goes anywhere.
        window: Blocks whose samples are mixed.
    """

    enabled: bool = True
    block: Annotated[int, _COUNT, _LARGEST] = 1
    window: Annotated[int, _COUNT, _LARGEST] = 64


@dataclass
class HealthSchema:
    """The limits beyond which a figure of a node raises an alert, and how often each node is looked at; null: no limit.

    Attributes:
        every: Seconds between two samples; 0: none.
        memory: Share of the memory of the node or container in use.
        swap: Bytes a second between memory and swap space.
        disk: Share of the run folder's file system in use.
        temperature: Degrees Celsius of a GPU.
        network_errors: Errors of the network interfaces in a minute.
    """

    every: Annotated[float, Range(least=0, most=3600, hint="it is in seconds; 0: none")] = 20.0
    memory: Annotated[float | None, _SHARE] = 0.95
    swap: Annotated[float | None, Range(least=0, hint="it is in bytes a second")] = 10e6
    disk: Annotated[float | None, _SHARE] = 0.95
    temperature: Annotated[float | None, Range(above=0, hint="it is in degrees Celsius")] = 90.0
    network_errors: Annotated[float | None, Range(least=0)] = 60.0


@dataclass
class ObserveSchema:
    """The measurements of a run.

    Attributes:
        step_breakdown: Whether to measure where each step's time goes, which also finds stragglers.
        health: What is watched of each node.
    """

    step_breakdown: bool = True
    health: HealthSchema = field(default_factory=HealthSchema)


@dataclass
class ProfileSchema:
    """The steps that PyTorch's profiler traces.

    Attributes:
        steps: The first and the last one, e.g. [10, 12]; null: none.
    """

    steps: list[Annotated[int, Range(least=1)]] | None = None


@dataclass
class NumericsSchema:
    """The values of the top-level keys of the same names, as the object that a run is trained with."""

    _target_: str = "worldsize.core.Numerics"
    precision: str = "${precision}"
    clip_norm: float | None = "${clip_norm}"  # type: ignore[assignment]  # an interpolation
    nonfinite: str = "${nonfinite}"
    compile: bool = "${compile}"  # type: ignore[assignment]
    compile_mode: str = "${compile_mode}"
    activation_checkpointing: str = "${activation_checkpointing}"
    activation_offload: bool = "${activation_offload}"  # type: ignore[assignment]


@dataclass
class Schema:
    """The top-level keys of a run.

    ``steps``: null or left out where ``epochs`` is given.
    ``batch_size``: samples a step over all logical ranks; null where each sample of the data is a batch already, of
    which each logical rank takes one in a step.
    ``lr``: null where the recipe's optimizer takes none, or sets its own.
    ``data_workers``: processes that load data ahead of each worker; auto: as many as make its steps shorter.
    ``schedule_metric``: the metric by which a schedule such as ReduceLROnPlateau is advanced after each evaluation.
    ``length_balanced``: samples of similar length share a step; the data set says how long each is, by ``lengths``.
    ``init_from``: begin with the weights of a run's checkpoint, a folder of safetensors files or a state_dict file;
    ``init_from_strict=false``: weights that only one side has are left out.
    """

    steps: Annotated[int | None, _COUNT, _LARGEST] = MISSING
    epochs: Annotated[float | None, Range(above=0)] = None
    batch_size: Annotated[int | None, _COUNT, _LARGEST] = MISSING
    lr: Annotated[float | None, Range(least=0)] = MISSING
    seed: int = 0
    logical_ranks: Annotated[int | None, _COUNT, _LARGEST] = None
    precision: str = "fp32"
    clip_norm: Annotated[float | None, Range(above=0, finite=False, hint="null: no clipping")] = None
    nonfinite: str = "stop"
    compile: bool = False
    compile_mode: str = "default"
    activation_checkpointing: str = "none"
    activation_offload: bool = False
    log_every: Annotated[int, _COUNT, _LARGEST] = 10
    evaluate_every: Annotated[int, _INTERVAL, _LARGEST] = 0
    evaluate_batch_size: Annotated[int, _COUNT, _LARGEST] = 256
    schedule_metric: str | None = None
    data_workers: Annotated[int | str, _PROCESSES, OneOf("auto", hint="A number of processes is taken, too.")] = 0
    length_balanced: bool = False
    shuffle: ShuffleSchema = field(default_factory=ShuffleSchema)
    init_from: Annotated[str | None, FilePath()] = None
    init_from_strict: bool = True
    launch: Annotated[str, OneOf("run", "show", "write")] = "run"
    allow_targets: list[str] = field(default_factory=list)
    run: RunSchema = field(default_factory=RunSchema)
    numerics: NumericsSchema = field(default_factory=NumericsSchema)
    cluster: ClusterSchema = field(default_factory=ClusterSchema)
    checkpoint: CheckpointSchema = field(default_factory=CheckpointSchema)
    ema: EMASchema = field(default_factory=EMASchema)
    early_stopping: EarlyStoppingSchema = field(default_factory=EarlyStoppingSchema)
    sweep: SweepSchema = field(default_factory=SweepSchema)
    faults: list[dict[str, Any]] = field(default_factory=list)
    evaluation: EvaluationSchema = field(default_factory=EvaluationSchema)
    observe: ObserveSchema = field(default_factory=ObserveSchema)
    profile: ProfileSchema = field(default_factory=ProfileSchema)
    launcher: Any = MISSING
    strategy: Any = MISSING
    reproducibility: Any = MISSING
    recipe: Any = MISSING
    optimizer: Any = None
    schedule: Any = None
    data: Any = None
    autoscale: Any = None
    logger: Any = None
    listeners: dict[str, Any] = field(default_factory=dict)
