"""Builds typed settings from the resolved configuration, which is not used as a mapping beyond this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from worldsize.checkpoint.format import Retention
from worldsize.config.cluster import check_topology, cluster_of
from worldsize.config.instantiate import Allowed, build, check_node, check_targets
from worldsize.config.learning_rate import update_text
from worldsize.config.schema import (
    AgentsConfig,
    CheckpointConfig,
    EvaluationConfig,
    ObserveConfig,
    ProfileConfig,
    RateScaling,
    RunConfig,
    TrainingConfig,
)
from worldsize.config.section import typed
from worldsize.config.shape import (
    AnyLauncher,
    RunShape,
    check_activations,
    check_autoscale,
    check_backend,
    check_compiles,
    check_copies,
    check_device,
    check_graphs,
    check_heals,
    check_precision,
    check_reduce,
    check_remembers,
)
from worldsize.core import (
    Autoscaler,
    Cluster,
    ConfigError,
    Dealing,
    HealthLimits,
    LaunchMethod,
    Listener,
    Numerics,
    Plan,
    Recipe,
    Role,
    Strategy,
    World,
    metric_key,
    split_of,
)
from worldsize.core.sections import WeightAverage
from worldsize.data.order import Order, logical_ranks_of
from worldsize.data.permutation import Shuffle
from worldsize.record.determinism import Determinism
from worldsize.train.early_stopping import EarlyStopping
from worldsize.train.faults import Faults
from worldsize.train.fit import LoopConfig
from worldsize.train.initial_weights import InitialWeights


@dataclass(frozen=True)
class Settings(RunShape):
    """One run's values and objects; building them touches no device, process group or file."""

    config: Mapping[str, Any]  # the whole resolved mapping, to be recorded
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    average: WeightAverage | None  # moving average of the weights, or None
    early_stopping: EarlyStopping | None
    initial: InitialWeights | None  # initial weights of a new run; None: random
    observe: ObserveConfig
    agents: AgentsConfig
    recipe: Recipe
    faults: Faults
    autoscaler: Autoscaler | None  # changes the number of processes; None: only people do

    @property
    def loop(self) -> LoopConfig:
        """Return the length of the run, and the intervals of logging, evaluating and saving."""
        return LoopConfig(
            steps=self.training.steps,
            batch_size=self.training.batch_size,
            log_every=self.training.log_every,
            evaluate_every=self.training.evaluate_every,
            save_every=0 if self.checkpoint.every == "auto" else self.checkpoint.every,
            save_at_end=self.checkpoint.at_end,
            keeps_best=self.checkpoint.keep.best is not None,
            logical_ranks=self.logical_ranks if self.heals else None,
            parts=self.peers()[0] if self.heals else None,
            logs_first=self.heals,
            stop_on_nonfinite=self.numerics.nonfinite == "stop",
        )

    def plan(self, folder: Path) -> Plan:
        """Return what a launcher needs to start this run, or this examination, in ``folder``."""
        variables = self.determinism.variables()
        ranks, policy = self.logical_ranks, self.autoscaler
        health = self.observe.watched if self.trains else None
        return Plan(folder, self.cluster, self.roles, variables, logical_ranks=ranks, autoscaler=policy, health=health)

    def update_text(self) -> str:
        """Say how many samples an update has, and which learning rate."""
        return update_text(self, self.training.lr, batch_size=self.training.batch_size)

    def among(self, processes: int) -> Settings:
        """Return the settings of a gang that has ``processes`` members from now on."""
        cluster = replace(self.cluster, nodes=1, processes=processes)
        return replace(self, cluster=cluster, roles=self.strategy.roles(cluster))

    def peers(self) -> list[list[int]]:
        """Return the groups of workers with equal work, by rank."""
        groups = self.strategy.groups(self.cluster)["data"]
        first = min(rank for group in groups for rank in group)
        return [[rank - first for rank in group] for group in groups]

    def data_part(self, world: World) -> World:
        """Return ``world`` with this process's rank and size among the data-parallel parts."""
        return replace(world, rank=self.strategy.data_rank(world), size=self.strategy.data_parallel(self.cluster))

    def order(self, rank: int, size: int, dealing: Dealing = "cyclic") -> Order:
        """Return the data order for worker ``rank`` of ``size``."""
        own_ranks = logical_ranks_of(rank, size, self.logical_ranks, dealing)
        training = self.training
        ranks, balanced = self.logical_ranks, training.length_balanced
        shuffle = Shuffle(**vars(training.shuffle))
        return Order(training.seed, training.batch_size, ranks, own_ranks, balanced, shuffle)


def load_shape(config: Mapping[str, Any]) -> RunShape:
    """Build and check the processes of the run, and how they agree.

    Raises:
        ConfigError: a value, a relation between values, or a target that cannot run.
    """
    allowed = _allowed(config)
    check_targets(config, allowed)
    determinism = build(config["reproducibility"], Determinism, allowed=allowed, key="reproducibility")
    cluster = cluster_of(config["cluster"], determinism.threads, config["data_workers"])
    strategy = build(config["strategy"], Strategy, allowed=allowed, key="strategy")  # type: ignore[type-abstract]
    check_reduce(strategy)
    check_backend(cluster.backend)  # the strategy's module may have registered it
    run = typed(RunConfig, config["run"])
    launcher = launcher_of(config["launcher"], config)
    if run.examine:  # all processes take part in it, more than the strategy may take if there are spare nodes
        roles: Mapping[str, Role] = {"worker": Role(cluster.processes)}
        logical_ranks = cluster.processes
    else:
        roles = strategy.roles(cluster)
        check_heals(roles, cluster, launcher)
        logical_ranks = config.get("logical_ranks") or strategy.data_parallel(cluster) * strategy.default_micro_batches
    check_topology(config["cluster"].get("topology"), launcher)
    scaling = typed(RateScaling, config["cluster"])
    check_copies(roles, strategy, config["checkpoint"].get("peers", 1))
    numerics = _numerics(config, strategy, cluster, exact=determinism.exact_mode)
    return RunShape(run, cluster, strategy, determinism, numerics, launcher, roles, logical_ranks, scaling)


def load_settings(config: Mapping[str, Any], shape: RunShape | None = None) -> Settings:
    """Build and check the settings of ``config``; ``shape``: its processes, if they are loaded already.

    Raises:
        ConfigError: a value, a relation between values, or a target that cannot run.
    """
    shape = shape or load_shape(config)
    cluster, strategy, logical_ranks = shape.cluster, shape.strategy, shape.logical_ranks
    allowed = _allowed(config)
    training = typed(TrainingConfig, config)
    training = replace(training, schedule_metric=_canonical(training.schedule_metric))
    training.check_evaluates("early_stopping.metric", config["early_stopping"]["metric"])
    metric = _canonical(config["early_stopping"]["metric"])
    keep = build(config["checkpoint"]["keep"], Retention, allowed=allowed, key="checkpoint.keep")
    checkpoint = typed(CheckpointConfig, config["checkpoint"], keep=keep)
    observe = _observe(config, _listeners(config, allowed), cluster)
    for group in ("optimizer", "schedule", "data"):  # under the names that a user types
        if (node := config[group]) and any(node == value for value in config["recipe"].values()):
            check_node(node, allowed=allowed, key=group)
    shape.check_batch(training.batch_size)
    autoscaler = None if shape.run.examine else _autoscaler(config, shape.roles, cluster, logical_ranks)
    recipe, initial = with_initial(recipe_of(config), config)
    if shape.trains:
        check_remembers(recipe, shape.roles, shape.launcher, exact=shape.determinism.exact_mode)
        check_graphs(shape.numerics, cluster, logical_ranks // strategy.data_parallel(cluster), recipe)
    return Settings(
        **vars(shape),
        config=config,
        training=training,
        evaluation=_evaluation(config, recipe, keep),
        checkpoint=checkpoint,
        average=_average(config["ema"], strategy),
        initial=initial,
        early_stopping=None if metric is None else typed(EarlyStopping, config["early_stopping"], metric=metric),
        observe=observe,
        # hosts that the configuration names are in order already
        agents=typed(AgentsConfig, config["cluster"], **({"topology": None} if "hosts" in config["cluster"] else {})),
        recipe=recipe,
        faults=Faults.parsed(config["faults"]),
        autoscaler=autoscaler,
    )


def _numerics(config: Mapping[str, Any], strategy: Strategy, cluster: Cluster, *, exact: str | None) -> Numerics:
    """Build the numerics, and check that the strategy and the devices support them.

    ``exact``: the mode in which results must have the same bits each time, if they must.
    """
    numerics = build(config["numerics"], Numerics, allowed=_allowed(config), key="numerics")
    strategy.check_numerics(numerics)
    check_precision(numerics, strategy)
    check_compiles(numerics, strategy, exact=exact)
    check_device(numerics, cluster, exact=exact)
    check_activations(numerics, strategy, cluster)
    return numerics


def _autoscaler(
    config: Mapping[str, Any], roles: Mapping[str, Role], cluster: Cluster, logical_ranks: int
) -> Autoscaler | None:
    node = config.get("autoscale")  # older runs have no such key
    if not node:
        return None
    autoscaler = build(node, Autoscaler, allowed=_allowed(config), key="autoscale")  # type: ignore[type-abstract]
    check_autoscale(autoscaler, roles, cluster, logical_ranks)
    return autoscaler


def _evaluation(config: Mapping[str, Any], recipe: Recipe, keep: Retention) -> EvaluationConfig:
    evaluation = typed(EvaluationConfig, config["evaluation"])
    evaluation.check_known(recipe.splits())
    evaluation.check_metric(keep.best, key="checkpoint.keep.best")
    evaluation.check_metric(config.get("schedule_metric"), key="schedule_metric")
    for group in ("early_stopping", "sweep"):
        evaluation.check_metric(config[group]["metric"], key=f"{group}.metric")
    return evaluation


def with_initial(recipe: Recipe, config: Mapping[str, Any]) -> tuple[Recipe, InitialWeights | None]:
    """Return the recipe to train, and the path of its initial weights if they are in files."""
    if config["init_from"] is not None:
        return recipe, InitialWeights(Path(config["init_from"]), config["init_from_strict"])
    pretrained = recipe.pretrained_weights()
    return (recipe, None) if pretrained is None else (pretrained.recipe, InitialWeights(pretrained.path, strict=True))


def _average(node: Mapping[str, Any], strategy: Strategy) -> WeightAverage | None:
    if node["decay"] is None:
        return None
    if "ema" not in strategy.supports:
        raise ConfigError(
            f"ema.decay={node['decay']}: {type(strategy).__name__} has no weights that all ranks agree on after each "
            "update, or servers have them. Set ema.decay=null, or a strategy such as ddp or fsdp."
        )
    return typed(WeightAverage, node)


def _canonical(metric: str | None) -> str | None:
    """Return the metric's name as metrics.jsonl has it: ``loss`` for "test/loss"."""
    return None if metric is None else metric_key(*split_of(metric))


def _observe(
    config: Mapping[str, Any], listeners: Mapping[str, Callable[..., Listener]], cluster: Cluster
) -> ObserveConfig:
    node = config["observe"]
    process_memory, cpus = config["cluster"].get("max_memory"), cluster.cpus_per_node
    health = typed(HealthLimits, node.get("health") or {"every": 0}, process_memory=process_memory, cpus=cpus)
    return typed(
        ObserveConfig, node, health=health, profile=typed(ProfileConfig, config["profile"]), listeners=listeners
    )


def _listeners(config: Mapping[str, Any], allowed: Allowed) -> Mapping[str, Callable[..., Listener]]:
    """Return functions that create the logger and the other listeners of the run, without null ones."""
    named = {"logger": config["logger"], **{f"listeners.{name}": node for name, node in config["listeners"].items()}}
    for key, node in named.items():
        if node and not (isinstance(node, Mapping) and "_target_" in node):
            raise ConfigError(f"{key} names no listener. Set {key}._target_=your.module.Listener.")
    return {
        key.replace("listeners.", "listener "): build({**node, "_partial_": True}, partial, allowed=allowed, key=key)
        for key, node in named.items()
        if node
    }


def launcher_of(node: Mapping[str, Any], config: Mapping[str, Any]) -> AnyLauncher:
    """Build the launcher that ``node`` describes, inside the allow-list of the whole ``config``.

    Raises:
        ConfigError: it is not a launcher, or outside the allow-list.
    """
    launcher = build(node, LaunchMethod, allowed=_allowed(config), key="launcher")  # type: ignore[type-abstract]
    if not isinstance(launcher, AnyLauncher):
        raise ConfigError(f"launcher: {type(launcher).__name__} is no Launcher, AgentLauncher or BatchLauncher.")
    return launcher


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    """Build only the recipe of ``config``.

    Raises:
        ConfigError: it is not a recipe, cannot be built, or is outside the allow-list.
    """
    return build(config["recipe"], Recipe, allowed=_allowed(config), key="recipe")  # type: ignore[type-abstract]


def _allowed(config: Mapping[str, Any]) -> Allowed:
    return Allowed((*Allowed().prefixes, *config["run"].get("packages", ()), *config.get("allow_targets", ())))
