"""The structured schema: every key of a run, its type and its meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class LinkSchema:
    """Bandwidth in bytes a second per direction; latency and gap (a round of a ring at the least) in seconds; incast:
    share of the bandwidth that is left where all ranks send to all at once.
    """

    bandwidth: float = MISSING
    latency: float = MISSING
    gap: float = 0.0
    incast: float = 1.0


@dataclass
class ClusterSchema:
    """Shape and links. ``processes`` counts all nodes; ``processes_per_node`` may be given instead.

    ``environment``: whose variables place a worker that is started by hand (torchrun, openmpi, slurm, alone; auto).
    ``interface``: network interface of the collectives (default: the one that leads to the first node). ``hca``:
    InfiniBand adapters that NCCL may use (NCCL_IB_HCA). ``port``: at which the hosts find the first (default: one that
    follows from the run's id). ``on_node_mismatch``: what is done when hosts have other code or packages than the
    first: refuse or warn. For planning: ``device_memory`` in bytes that a process may fill (default: what this machine
    has), ``price_per_hour`` of a node.
    """

    name: str = MISSING
    nodes: int = 1
    processes: int | None = None
    processes_per_node: int | None = None
    device: str | None = "cpu"
    backend: str | None = None
    threads: int | None = None
    timeout: float = 600.0
    environment: str = "auto"
    interface: str | None = None
    hca: str | None = None
    port: int | None = None
    on_node_mismatch: str = "refuse"
    device_memory: float | None = None
    price_per_hour: float | None = None
    links: dict[str, LinkSchema] = field(default_factory=dict)


@dataclass
class RunSchema:
    """A run's folder and purpose; ``name`` defaults to date, time and a random id; ``group`` groups runs in wandb.

    ``reproduces``: manifest of the run that this one re-creates; ``strict``: only if nothing downgrades its level.
    ``examine``: the cluster is examined instead: its links by tier ("tiers") or between all nodes ("pairs").
    """

    root: str = "runs"
    name: str | None = None
    group: str | None = None
    reproduces: str | None = None
    strict: bool = False
    examine: str | None = None


@dataclass
class CheckpointSchema:
    """``every``: steps between saves (0: none in between); ``at_end``: one after the last step.

    ``signals`` ask for a save and an end with exit code 75. ``ignore``: parts of the state that a resumed run leaves
    as they are: model, optimizer, schedule, scaler, or hyperparameters; of checkpoints up to step ``ignore_until``
    (null: of all). ``allow_older``: an older checkpoint stands in for a damaged one.
    """

    every: int = 0
    at_end: bool = True
    keep: Any = None
    signals: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    ignore_until: int | None = None
    allow_older: bool = False


@dataclass
class ObserveSchema:
    """``step_breakdown``: measure where each step's time goes, which finds stragglers too."""

    step_breakdown: bool = True


@dataclass
class ProfileSchema:
    """``steps``: first and last of those that PyTorch's profiler traces, e.g. [10, 12]."""

    steps: list[int] | None = None


@dataclass
class NumericsSchema:
    _target_: str = "worldsize.core.Numerics"
    precision: str = "${precision}"
    clip_norm: float | None = "${clip_norm}"  # type: ignore[assignment]  # an interpolation
    nonfinite: str = "${nonfinite}"


@dataclass
class Schema:
    """Top-level keys. ``batch_size`` is global: samples a step over all logical ranks.

    ``length_balanced``: samples of similar length share a step; the data set says how long each is, by ``lengths``.
    """

    steps: int = MISSING
    epochs: float | None = None
    batch_size: int = MISSING
    lr: float = MISSING
    seed: int = 0
    logical_ranks: int | None = None
    precision: str = "fp32"
    clip_norm: float | None = None
    nonfinite: str = "stop"
    log_every: int = 10
    evaluate_every: int = 0
    evaluate_batch_size: int = 256
    data_workers: int = 0
    length_balanced: bool = False
    launch: str = "run"
    allow_targets: list[str] = field(default_factory=list)
    run: RunSchema = field(default_factory=RunSchema)
    numerics: NumericsSchema = field(default_factory=NumericsSchema)
    cluster: ClusterSchema = field(default_factory=ClusterSchema)
    checkpoint: CheckpointSchema = field(default_factory=CheckpointSchema)
    faults: list[dict[str, Any]] = field(default_factory=list)
    observe: ObserveSchema = field(default_factory=ObserveSchema)
    profile: ProfileSchema = field(default_factory=ProfileSchema)
    launcher: Any = MISSING
    strategy: Any = MISSING
    reproducibility: Any = MISSING
    recipe: Any = MISSING
    optimizer: Any = None
    schedule: Any = None
    data: Any = None
    logger: Any = None


def register() -> None:
    """Make the schema known to Hydra."""
    ConfigStore.instance().store("schema", node=Schema)
