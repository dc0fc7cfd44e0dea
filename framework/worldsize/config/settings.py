"""The resolved configuration as typed values: the last place that sees it as a mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from worldsize.checkpoints.format import HYPERPARAMETERS
from worldsize.checkpoints.retention import Retention
from worldsize.config.instantiate import Allowed, build, check_targets
from worldsize.core import (
    AgentLauncher,
    BatchLauncher,
    Cluster,
    ConfigError,
    Launcher,
    LaunchMethod,
    Link,
    Listener,
    Numerics,
    Recipe,
    Role,
    Strategy,
    World,
)
from worldsize.data.loader import Order, logical_ranks_of
from worldsize.engine.faults import Faults
from worldsize.engine.fit import Intervals
from worldsize.errors import neighbours
from worldsize.reproducibility.determinism import Determinism
from worldsize.world.preemption import SIGNALS

AnyLauncher = Launcher | AgentLauncher | BatchLauncher


@dataclass(frozen=True)
class Settings:
    """One run's values and objects. Touches no device, no process group and no file."""

    config: Mapping[str, Any]
    cluster: Cluster
    numerics: Numerics
    strategy: Strategy
    recipe: Recipe
    determinism: Determinism
    roles: Mapping[str, Role]
    launcher: AnyLauncher
    logger: Callable[..., Listener] | None
    retention: Retention
    faults: Faults
    logical_ranks: int

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def batch_size(self) -> int:
        return int(self.config["batch_size"])

    @property
    def evaluate_batch_size(self) -> int:
        return int(self.config["evaluate_batch_size"])

    @property
    def data_workers(self) -> int:
        return int(self.config["data_workers"])

    @property
    def stops_on_nonfinite(self) -> bool:
        return bool(self.config["nonfinite"] == "stop")

    @property
    def excludes_slow(self) -> bool:
        """Whether the launcher goes on without a host on which a rank is slow."""
        return bool(self.config["launcher"].get("exclude_slow", False))

    @property
    def step_breakdown(self) -> bool:
        """Whether it is measured where the time of steps goes."""
        return bool(self.config["observe"]["step_breakdown"])

    @property
    def profiled(self) -> tuple[int, int] | None:
        """First and last step that are traced."""
        steps = self.config["profile"]["steps"]
        return (steps[0], steps[1]) if steps else None

    @property
    def group(self) -> str | None:
        """Name under which wandb groups the runs of one experiment or sweep."""
        group = self.config["run"]["group"]
        return None if group is None else str(group)

    @property
    def examines(self) -> str | None:
        """What the processes find out about the cluster, instead of training: see ``run.examine``."""
        examine = self.config["run"]["examine"]
        return None if examine is None else str(examine)

    def ignored(self, step: int) -> Sequence[str]:
        """Parts of a checkpoint of this step that are not loaded; those of the run's later ones are."""
        saves = self.config["checkpoint"]
        limit = saves.get("ignore_until")
        return [part for part in saves["ignore"] if part == HYPERPARAMETERS or limit is None or step <= limit]

    @property
    def intervals(self) -> Intervals:
        config, saves = self.config, self.config["checkpoint"]
        return Intervals(
            steps=config["steps"],
            log_every=config["log_every"],
            evaluate_every=config["evaluate_every"],
            save_every=saves["every"],
            save_at_end=saves["at_end"],
            keeps_best=self.retention.best is not None,
        )

    def peers(self) -> list[list[int]]:
        """Workers that have equal work, by rank."""
        groups = self.strategy.groups(self.cluster)["data"]
        first = min(rank for group in groups for rank in group)
        return [[rank - first for rank in group] for group in groups]

    def data_part(self, world: World) -> World:
        """``world`` as the data see it: the part that this process trains, and of how many."""
        return replace(world, rank=self.strategy.data_rank(world), size=self.strategy.data_parallel(self.cluster))

    def order(self, rank: int, size: int) -> Order:
        """The data order as seen by worker ``rank`` of ``size``."""
        mine = logical_ranks_of(rank, size, self.logical_ranks)
        return Order(self.seed, self.batch_size, self.logical_ranks, mine, bool(self.config["length_balanced"]))


def load_settings(config: Mapping[str, Any]) -> Settings:
    """Build and check everything that ``config`` describes.

    Raises:
        ConfigError: a value, a relation between values, or a target that cannot run.
    """
    allowed = _allowed(config)
    check_targets(config, allowed)
    _check_numbers(config)
    determinism = build(config["reproducibility"], Determinism, allowed=allowed, key="reproducibility")
    cluster = _cluster(config["cluster"], determinism.threads)
    strategy = build(config["strategy"], Strategy, allowed=allowed, key="strategy")  # type: ignore[type-abstract]
    _check_reduce(strategy)
    numerics = build(config["numerics"], Numerics, allowed=allowed, key="numerics")
    strategy.check_numerics(numerics)
    roles = strategy.roles(cluster)
    if config["run"]["examine"]:
        roles = {"worker": Role(cluster.processes)}  # all of them meet
    parts = strategy.data_parallel(cluster)
    logical_ranks = _logical_ranks(config, parts, strategy.default_micro_batches)
    strategy.check_micro_batches(logical_ranks // parts)
    return Settings(
        config=config,
        cluster=cluster,
        numerics=numerics,
        strategy=strategy,
        recipe=build(config["recipe"], Recipe, allowed=allowed, key="recipe"),  # type: ignore[type-abstract]
        determinism=determinism,
        roles=roles,
        launcher=_launcher(config["launcher"], allowed),
        logger=build(config["logger"], partial, allowed=allowed, key="logger") if config["logger"] else None,
        retention=build(config["checkpoint"]["keep"], Retention, allowed=allowed, key="checkpoint.keep"),
        faults=Faults.parsed(config["faults"]),
        logical_ranks=logical_ranks,
    )


def _launcher(node: Mapping[str, Any], allowed: Allowed) -> AnyLauncher:
    launcher = build(node, LaunchMethod, allowed=allowed, key="launcher")  # type: ignore[type-abstract]
    if not isinstance(launcher, AnyLauncher):
        raise ConfigError(f"launcher: {type(launcher).__name__} is no Launcher, AgentLauncher or BatchLauncher.")
    return launcher


def _allowed(config: Mapping[str, Any]) -> Allowed:
    return Allowed((*Allowed().prefixes, *config["run"].get("packages", ()), *config.get("allow_targets", ())))


def _cluster(node: Mapping[str, Any], threads: int | None) -> Cluster:
    links = {tier: Link(**link) for tier, link in (node.get("links") or {}).items()}
    return Cluster(
        name=node["name"],
        nodes=node["nodes"],
        processes=node["processes"],
        device=node["device"],
        backend=node.get("backend") or ("nccl" if node["device"] == "cuda" else "gloo"),
        threads=node.get("threads") or threads,
        timeout=node.get("timeout", 600.0),
        interface=node.get("interface"),
        hca=node.get("hca"),
        links=links,
        device_memory=node.get("device_memory"),
        price_per_hour=node.get("price_per_hour"),
    )


_MINIMA = {
    "steps": 1,
    "batch_size": 1,
    "log_every": 1,
    "evaluate_every": 0,
    "evaluate_batch_size": 1,
    "data_workers": 0,
}


def _check_numbers(config: Mapping[str, Any]) -> None:
    for key, least in _MINIMA.items():
        if config[key] < least:
            raise ConfigError(f"{key}={config[key]} must be {least} or more.")
    if (traced := config["profile"]["steps"]) and not (len(traced) == 2 and 1 <= traced[0] <= traced[1]):
        raise ConfigError(f"profile.steps={traced} must be the first and the last step to trace, e.g. [10,12].")
    saves = config["checkpoint"]
    if saves["every"] < 0:
        raise ConfigError(f"checkpoint.every={saves['every']} must be 0 (none in between) or more.")
    known = [number.name for number in SIGNALS]
    for name in saves["signals"]:
        if name not in known:
            raise ConfigError(f"checkpoint.signals: no signal {name!r}{neighbours(name, known)}")
    if config["launch"] not in ("run", "show", "write"):
        raise ConfigError(f"launch={config['launch']!r} is unknown. Known: run, show, write.")


def _check_reduce(strategy: Strategy) -> None:
    wanted, known = strategy.reduce, strategy.reductions
    if wanted not in known:
        raise ConfigError(
            f"strategy.reduce={wanted!r} is no way in which {type(strategy).__name__} sums{neighbours(wanted, known)}"
        )


def _logical_ranks(config: Mapping[str, Any], workers: int, each: int) -> int:
    """Logical ranks of the run: ``each`` a data-parallel worker unless set; workers and batch must divide."""
    total = config.get("logical_ranks") or workers * each
    batch: int = config["batch_size"]
    if total < 1 or total % workers:
        raise ConfigError(
            f"{total} logical ranks do not divide over {workers} data-parallel workers. "
            f"Set logical_ranks to a multiple of {workers}, or cluster.processes to a divisor of {total}."
        )
    if batch % total:
        below, above = batch // total * total, -(-batch // total) * total
        options = (
            f"batch_size={below} or {above}" if below else f"batch_size={above} (at least one sample a logical rank)"
        )
        raise ConfigError(f"batch_size={batch} does not divide over {total} logical ranks. Set {options}.")
    return int(total)
