"""The sections of a resolved configuration as typed values; the schema has checked their numbers by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from worldsize.checkpoint.format import HYPERPARAMETERS, Retention
from worldsize.core import HealthLimits, Listener, is_split, metric_key, split_of
from worldsize.data.permutation import Shuffle
from worldsize.errors import ConfigError, neighbours
from worldsize.world.processes import SIGNALS
from worldsize.world.topology import Topology


@dataclass(frozen=True)
class RunConfig:
    """The folder of a run, and what the run is for."""

    root: Path
    group: str | None  # group name in wandb for the runs of one experiment or sweep
    reproduces: Path | None  # manifest of the run that this one re-creates
    strict: bool  # fail unless it is re-created exactly
    include: Sequence[str]  # patterns of untracked files that are recorded although they seem to be private
    private: bool  # only its user may read the folder
    evaluates: Path | None  # evaluate this checkpoint instead of training
    examine: Literal["tiers", "pairs"] | None  # measure the cluster's links instead of training

    @staticmethod
    def of(node: Mapping[str, Any]) -> RunConfig:
        reproduces, evaluates = node["reproduces"], node["evaluates"]
        return RunConfig(
            root=Path(node["root"]),
            group=node["group"],
            reproduces=None if reproduces is None else Path(reproduces),
            strict=node["strict"],
            include=tuple(node["include"]),
            private=node["private"],
            evaluates=None if evaluates is None else Path(evaluates),
            examine=node["examine"],
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Length of training, batches, and intervals of logging and evaluation."""

    steps: int
    batch_size: int  # samples a step over all logical ranks
    lr: float | None  # None: the recipe's optimizer takes none, or sets its own
    seed: int
    log_every: int
    evaluate_every: int
    schedule_metric: str | None  # by which a schedule that needs one is advanced
    evaluate_batch_size: int
    data_workers: int | Literal["auto"]  # processes that load data, of each process that trains; auto: as many as help
    length_balanced: bool
    shuffle: Shuffle

    @staticmethod
    def of(config: Mapping[str, Any]) -> TrainingConfig:
        return TrainingConfig(
            steps=config["steps"],
            batch_size=config["batch_size"],
            lr=config["lr"],
            seed=config["seed"],
            log_every=config["log_every"],
            evaluate_every=config["evaluate_every"],
            schedule_metric=_schedule_metric(config),
            evaluate_batch_size=config["evaluate_batch_size"],
            data_workers=config["data_workers"],
            length_balanced=config["length_balanced"],
            shuffle=Shuffle(**config["shuffle"]),
        )


def _schedule_metric(config: Mapping[str, Any]) -> str | None:
    name = config.get("schedule_metric")  # older runs have no such key
    if name is not None and not config["evaluate_every"]:
        raise ConfigError(
            f"schedule_metric={name}: the run is evaluated at its end only. "
            "Set evaluate_every to the steps between two evaluations."
        )
    return None if name is None else metric_key(*split_of(name))


@dataclass(frozen=True)
class EvaluationConfig:
    """The data that are evaluated."""

    splits: Sequence[str]
    batches: int | None  # number of batches, drawn anew at each evaluation; None: all of the data

    @staticmethod
    def of(node: Mapping[str, Any], known: Sequence[str]) -> EvaluationConfig:
        """Read a section; ``known`` are the splits that the recipe has.

        Raises:
            ConfigError: the section names no split, one twice, or one that the recipe lacks.
        """
        splits = tuple(node["splits"])
        if not splits or len({*splits}) < len(splits):
            raise ConfigError(f"evaluation.splits={list(splits)} must name at least one split, and each once.")
        for split in splits:
            check_split(split, known, key="evaluation.splits")
        return EvaluationConfig(splits, node["batches"])

    def check_metric(self, metric: str | None, *, key: str) -> None:
        """Raise ConfigError if ``key`` of the configuration names a metric of a split that is not evaluated."""
        split, name = split_of(metric or "")
        if metric is not None and split not in self.splits:
            raise ConfigError(
                f"{key}={metric} is a metric of {split!r}, and evaluation.splits={list(self.splits)} does "
                f"not evaluate that. Set {key}={metric_key(self.splits[0], name)}, or add the split."
            )


def check_split(split: str, known: Sequence[str], *, key: str) -> None:
    """Raise ConfigError unless ``split``, which ``key`` names, is one of the recipe's."""
    if not is_split(split):
        raise ConfigError(f"{key}: {split!r} is no name of a split. Call it by a word, without a slash.")
    if split not in known:
        raise ConfigError(f"{key}: the recipe has no split {split!r}{neighbours(split, known)}")


@dataclass(frozen=True)
class CheckpointConfig:
    """Policy for checkpoints: when to save, what to keep, and what a resumed run loads."""

    every: int | Literal["auto"]  # steps between saves; 0: none in between; auto: as saves and failures cost
    at_end: bool
    keep: Retention
    signals: Sequence[str]  # they request a save and an end
    ignore: Sequence[str]  # parts of the state that are not loaded
    ignore_until: int | None  # from checkpoints up to this step; None: from none
    allow_older: bool  # an older checkpoint stands in for a damaged one
    on_failure: Literal["stop", "continue"]  # what training does when storage refuses a save
    peers: int  # steps between two copies of shards in the memory of peers, in a gang that heals; 0: none

    def __post_init__(self) -> None:
        known = [number.name for number in SIGNALS]
        for name in self.signals:
            if name not in known:
                raise ConfigError(f"checkpoint.signals: no signal {name!r}{neighbours(name, known)}")

    @staticmethod
    def of(node: Mapping[str, Any], keep: Retention) -> CheckpointConfig:
        return CheckpointConfig(
            every=node["every"],
            at_end=node["at_end"],
            keep=keep,
            signals=node["signals"],
            ignore=node["ignore"],
            ignore_until=node["ignore_until"],
            allow_older=node["allow_older"],
            on_failure=node["on_failure"],
            peers=node.get("peers", 1),  # older runs have none
        )

    def ignored(self, step: int) -> Sequence[str]:
        """Return the parts not to load of a checkpoint of this step; later checkpoints are loaded fully."""
        limit = self.ignore_until
        return [part for part in self.ignore if part == HYPERPARAMETERS or limit is None or step <= limit]


@dataclass(frozen=True)
class ObserveConfig:
    """Measurements of a run, and its listeners."""

    step_breakdown: bool  # measure where the time of each step goes
    health: HealthLimits | None  # what is watched of the nodes; None: nothing
    profiled: tuple[int, int] | None  # first and last step that are traced
    listeners: Mapping[str, Callable[..., Listener]]  # by the name used in warnings

    @staticmethod
    def of(config: Mapping[str, Any], listeners: Mapping[str, Callable[..., Listener]], *, cpus: int) -> ObserveConfig:
        """Read the sections about observing; ``cpus``: CPUs that the processes of a node need."""
        steps = config["profile"]["steps"]
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ConfigError(f"profile.steps={steps} must be the first and the last step to trace, e.g. [10,12].")
        profiled = cast("tuple[int, int]", tuple(steps)) if steps else None
        observe = config["observe"]
        health = dict(observe.get("health") or {"every": 0})  # older runs have none
        limits = HealthLimits(**health, process_memory=config["cluster"].get("max_memory"), cpus=cpus)
        return ObserveConfig(observe["step_breakdown"], limits if limits.every else None, profiled, listeners)


@dataclass(frozen=True)
class AgentsConfig:
    """Settings for connecting the agents of several hosts, and for hosts that differ."""

    port: int | None  # of the first host; None: one that follows from the run's id
    on_node_mismatch: Literal["refuse", "warn"]
    topology: Path | None  # file that orders the hosts that a scheduler chooses; None: they are in its own order
    is_spread: bool  # whether they are taken from the racks in turn

    @staticmethod
    def of(cluster: Mapping[str, Any]) -> AgentsConfig:
        path = None if "hosts" in cluster else cluster.get("topology")  # older runs have none
        return AgentsConfig(
            port=cluster["port"],
            on_node_mismatch=cluster["on_node_mismatch"],
            topology=Path(path) if path else None,
            is_spread=cluster.get("placement") == "spread",
        )

    def switches(self) -> Topology | None:
        """Read the file that orders the hosts; raise ConfigError if that fails."""
        return Topology.read(self.topology, is_spread=self.is_spread) if self.topology else None
