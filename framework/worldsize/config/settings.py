"""Builds the typed settings of a run, and the objects they contain, from the resolved configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from worldsize.checkpoint.format import Retention
from worldsize.config.cluster import build_cluster, check_topology
from worldsize.config.instantiate import Allowed, build_object, check_node, check_targets
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
from worldsize.config.section import build_dataclass
from worldsize.config.shape import (
    AnyLauncher,
    RunShape,
    check_activations,
    check_autoscale,
    check_backend,
    check_compiles,
    check_copies,
    check_device,
    check_flips,
    check_graphs,
    check_heals,
    check_integrity,
    check_operations,
    check_precision,
    check_reduce,
    check_remembers,
    check_rewinds,
    check_slices,
    check_stop_after,
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
    parse_metric_key,
)
from worldsize.core.sections import IntegrityConfig, WeightAverage
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.data.permutation import Shuffle
from worldsize.data.skips import SkippedSamples
from worldsize.loop.early_stopping import EarlyStopping
from worldsize.loop.faults import Faults
from worldsize.loop.fit import LoopConfig
from worldsize.loop.initial_weights import InitialWeights
from worldsize.loop.spikes import SpikeDetection
from worldsize.record.determinism import Determinism

T = TypeVar("T")


@dataclass(frozen=True)
class Settings(RunShape):
    """One run's values and objects; building them does not use devices, process groups or files."""

    config: Mapping[str, Any]  # the whole resolved configuration, to be recorded
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    average: WeightAverage | None  # moving average of the weights, or None
    integrity: IntegrityConfig
    early_stopping: EarlyStopping | None
    spike: SpikeDetection | None  # None: spikes are not detected
    initial: InitialWeights | None  # initial weights of a new run, or None for random weights
    observe: ObserveConfig
    agents: AgentsConfig
    recipe: Recipe
    faults: Faults
    autoscaler: Autoscaler | None  # changes the number of processes; None: only users change it

    @property
    def loop(self) -> LoopConfig:
        """The length of the run, and the intervals of logging, evaluating and saving.

        With ``checkpoint.keep.best`` and ``checkpoint.every=auto``, every evaluated step is saved as a candidate.
        """
        every, keeps_best = self.checkpoint.every, self.checkpoint.keep.best is not None
        if every == "auto":
            every = self.training.evaluate_every if keeps_best else 0
        return LoopConfig(
            steps=self.training.steps,
            batch_size=self.training.batch_size,
            log_every=self.training.log_every,
            evaluate_every=self.training.evaluate_every,
            save_every=every,
            save_at_end=self.checkpoint.at_end,
            keeps_best=keeps_best,
            logical_ranks=self.logical_ranks if self.heals else None,
            parts=self.list_peer_groups()[0] if self.heals else None,
            logs_first=self.heals,
            stop_on_nonfinite=self.numerics.nonfinite == "stop",
        )

    def create_plan(self, folder: Path) -> Plan:
        """Return the launcher's plan for this run or examination in ``folder``."""
        variables = self.determinism.variables()
        ranks, policy, health = self.logical_ranks, self.autoscaler, self.observe.watched
        return Plan(folder, self.cluster, self.roles, variables, logical_ranks=ranks, autoscaler=policy, health=health)

    @property
    def skips_samples(self) -> bool:
        """Whether samples are skipped, or may be after a spike."""
        return bool(self.training.skip_samples) or (self.spike is not None and self.spike.is_rewinding)

    @property
    def spikes_if_nonfinite(self) -> Sequence[str]:
        """Logged values whose NaN or infinity makes the run go back; float16 gradients may overflow in good steps."""
        if self.spike is None or not self.spike.is_rewinding or self.numerics.nonfinite != "stop":
            return ()
        return ("loss",) if self.numerics.policy.scales_loss else ("loss", "grad_norm")

    def update_text(self) -> str:
        """Describe the samples per update and the learning rate, for display."""
        return update_text(self, self.training.lr, batch_size=self.training.batch_size)

    def resize_gang(self, processes: int) -> Settings:
        """Return the settings for a gang that now has ``processes`` members."""
        cluster = replace(self.cluster, nodes=1, processes=processes)
        return replace(self, cluster=cluster, roles=self.strategy.roles(cluster))

    def list_peer_groups(self) -> list[list[int]]:
        """Return the data-parallel groups of worker ranks, counted from the first worker."""
        groups = self.strategy.groups(self.cluster)["data"]
        first = min(rank for group in groups for rank in group)
        return [[rank - first for rank in group] for group in groups]

    def data_part(self, world: World) -> World:
        """Return ``world`` with this process's data-parallel rank and size."""
        return replace(world, rank=self.strategy.data_rank(world), size=self.strategy.data_parallel(self.cluster))

    def create_order(self, rank: int, size: int, dealing: Dealing = "cyclic") -> Order:
        """Return the order in which worker ``rank`` of ``size`` reads the training samples."""
        own_ranks = assign_logical_ranks(rank, size, self.logical_ranks, dealing)
        training = self.training
        ranks, balanced = self.logical_ranks, training.length_balanced
        shuffle, skipped = Shuffle(**vars(training.shuffle)), SkippedSamples.from_words(training.skip_samples)
        return Order(training.seed, training.batch_size, ranks, own_ranks, balanced, shuffle, skipped)


@dataclass(frozen=True)
class Objects:
    """The objects described by a resolved configuration, subject to its allow-list.

    ``built`` caches objects by key across changes of the configuration; an object is rebuilt if its section changed.
    """

    config: Mapping[str, Any]
    built: dict[str, tuple[object, Any]] = field(default_factory=dict)

    @cached_property
    def allowed(self) -> Allowed:
        own = (*self.config["run"].get("packages", ()), *self.config.get("allow_targets", ()))
        return Allowed((*Allowed().prefixes, *own))

    def build_cached_object(self, key: str, node: Any, kind: type[T]) -> T:
        """Build the object of type ``kind`` described by ``node``, the value of ``key``.

        Raises:
            ConfigError: the object has a different type, cannot be built, or is outside the allow-list.
        """
        if key not in self.built or self.built[key][0] != node:
            self.built[key] = node, build_object(node, kind, allowed=self.allowed, key=key)
        return cast("T", self.built[key][1])


def load_shape(objects: Objects) -> RunShape:
    """Build and check the run's cluster, strategy, numerics and launcher.

    Raises:
        ConfigError: a value, a combination of values, or a target is invalid.
    """
    config = objects.config
    check_targets(config, objects.allowed)
    determinism = objects.build_cached_object("reproducibility", config["reproducibility"], Determinism)
    cluster = build_cluster(config["cluster"], determinism.threads, config["data_workers"])
    strategy = objects.build_cached_object("strategy", config["strategy"], Strategy)  # type: ignore[type-abstract]
    check_reduce(strategy)
    check_backend(cluster.backend)  # the strategy's module may have registered it
    run = build_dataclass(RunConfig, config["run"])
    launcher = load_launcher(objects)
    if run.examine:  # includes spare nodes, so there may be more processes than the strategy supports
        roles: Mapping[str, Role] = {"worker": Role(cluster.processes)}
        logical_ranks = cluster.processes
    else:
        roles = strategy.roles(cluster)
        check_heals(roles, cluster, launcher)
        logical_ranks = config.get("logical_ranks") or strategy.data_parallel(cluster) * strategy.default_micro_batches
    check_topology(config["cluster"].get("topology"), launcher)
    scaling = build_dataclass(RateScaling, config["cluster"])
    check_copies(roles, strategy, config["checkpoint"].get("peers", 1))
    numerics = _numerics(objects, strategy, cluster, exact=determinism.exact_mode)
    return RunShape(run, cluster, strategy, determinism, numerics, launcher, roles, logical_ranks, scaling)


def load_settings(objects: Objects) -> Settings:
    """Build and check the settings of a run.

    Raises:
        ConfigError: a value, a combination of values, or a target is invalid.
    """
    config, shape = objects.config, load_shape(objects)
    cluster, strategy = shape.cluster, shape.strategy
    training = build_dataclass(TrainingConfig, config)
    training = replace(training, schedule_metric=_canonical(training.schedule_metric))
    training.check_evaluates("early_stopping.metric", config["early_stopping"]["metric"])
    metric = _canonical(config["early_stopping"]["metric"])
    keep = objects.build_cached_object("checkpoint.keep", config["checkpoint"]["keep"], Retention)
    checkpoint = build_dataclass(CheckpointConfig, config["checkpoint"], keep=keep)
    observe = _build_observe_config(config, _listeners(objects), cluster)
    for group in ("optimizer", "schedule", "data"):  # errors then mention these keys, which users know
        if (node := config[group]) and any(node == value for value in config["recipe"].values()):
            check_node(node, allowed=objects.allowed, key=group)
    shape.check_batch(training.batch_size)
    recipe, initial = load_recipe(objects)
    faults = Faults.from_rows(config["faults"])
    integrity = build_dataclass(IntegrityConfig, config.get("integrity", {}))
    spike = _build_spike_detection(config.get("spike") or {})  # missing in older runs
    if observe.profile.operations is not None:
        check_operations(shape, integrity, recipe)
    check_stop_after(shape)
    if shape.trains:
        check_integrity(integrity, shape, recipe)
        check_flips(faults, shape.strategy, recipe)
        check_remembers(recipe, shape.roles, shape.launcher, exact=shape.determinism.exact_mode)
        check_graphs(shape.numerics, cluster, shape.micro_batches, recipe)
        if spike and spike.is_rewinding:
            check_rewinds(shape, recipe)
            checkpoint.check_spikes(training.log_every)
    return Settings(
        **vars(shape),
        config=config,
        training=training,
        evaluation=_evaluation(config, recipe, keep),
        checkpoint=checkpoint,
        average=_build_weight_average(config["ema"], strategy),
        integrity=integrity,
        initial=initial,
        early_stopping=None
        if metric is None
        else build_dataclass(EarlyStopping, config["early_stopping"], metric=metric),
        spike=spike,
        observe=observe,
        # hosts listed in the configuration are already in order
        agents=build_dataclass(
            AgentsConfig, config["cluster"], **({"topology": None} if "hosts" in config["cluster"] else {})
        ),
        recipe=recipe,
        faults=faults,
        autoscaler=_autoscaler(objects, shape),
    )


def _numerics(objects: Objects, strategy: Strategy, cluster: Cluster, *, exact: str | None) -> Numerics:
    """Build the numerics, and check that the strategy and the devices support them.

    ``exact``: the reproducibility mode if it guarantees bitwise identical results, otherwise None.
    """
    numerics = objects.build_cached_object("numerics", objects.config["numerics"], Numerics)
    strategy.check_numerics(numerics)
    check_precision(numerics, strategy)
    check_compiles(numerics, strategy, exact=exact)
    check_slices(numerics, strategy)
    check_device(numerics, cluster, exact=exact)
    check_activations(numerics, strategy, cluster)
    return numerics


def _autoscaler(objects: Objects, shape: RunShape) -> Autoscaler | None:
    node = objects.config.get("autoscale")  # missing in older runs
    if not node:
        return None
    autoscaler = objects.build_cached_object("autoscale", node, Autoscaler)  # type: ignore[type-abstract]
    check_autoscale(autoscaler, shape.roles, shape.cluster, shape.logical_ranks)
    return autoscaler


def _evaluation(config: Mapping[str, Any], recipe: Recipe, keep: Retention) -> EvaluationConfig:
    evaluation = build_dataclass(EvaluationConfig, config["evaluation"])
    if not evaluation.splits:
        evaluation = replace(evaluation, splits=(recipe.evaluation_split,))
    evaluation.check_known(recipe.splits())
    evaluation.check_metric(keep.best, key="checkpoint.keep.best")
    evaluation.check_metric(config.get("schedule_metric"), key="schedule_metric")
    for group in ("early_stopping", "sweep"):
        evaluation.check_metric(config[group]["metric"], key=f"{group}.metric")
    return evaluation


def load_recipe(objects: Objects) -> tuple[Recipe, InitialWeights | None]:
    """Build the recipe to train; return it with its initial weights (None: initialized by the recipe).

    Raises:
        ConfigError: the object is not a recipe, cannot be built, or is outside the allow-list.
    """
    config = objects.config
    recipe = objects.build_cached_object("recipe", config["recipe"], Recipe)  # type: ignore[type-abstract]
    if config["init_from"] is not None:
        return recipe, InitialWeights(Path(config["init_from"]), config["init_from_strict"])
    pretrained = recipe.pretrained_weights()
    return (recipe, None) if pretrained is None else (pretrained.recipe, InitialWeights(pretrained.path, strict=True))


def _build_weight_average(node: Mapping[str, Any], strategy: Strategy) -> WeightAverage | None:
    if node["decay"] is None:
        return None
    if "ema" not in strategy.supports:
        raise ConfigError(
            f"ema.decay={node['decay']} is not supported with {type(strategy).__name__}: the weights differ between "
            "ranks or are on servers. Set ema.decay=null, or use a strategy such as ddp or fsdp."
        )
    return build_dataclass(WeightAverage, node)


def _build_spike_detection(node: Mapping[str, Any]) -> SpikeDetection | None:
    return None if node.get("factor") is None else build_dataclass(SpikeDetection, node)


def _canonical(metric: str | None) -> str | None:
    """Return the metric's name in metrics.jsonl, e.g. ``loss`` for "test/loss"."""
    return None if metric is None else metric_key(*parse_metric_key(metric))


def _build_observe_config(
    config: Mapping[str, Any], listeners: Mapping[str, Callable[..., Listener]], cluster: Cluster
) -> ObserveConfig:
    node = config["observe"]
    process_memory, cpus = config["cluster"].get("max_memory"), cluster.cpus_per_node
    health = build_dataclass(HealthLimits, node.get("health") or {"every": 0}, process_memory=process_memory, cpus=cpus)
    return build_dataclass(
        ObserveConfig,
        node,
        health=health,
        profile=build_dataclass(ProfileConfig, config["profile"]),
        listeners=listeners,
    )


def _listeners(objects: Objects) -> Mapping[str, Callable[..., Listener]]:
    """Return functions that create the run's logger and other listeners, skipping null entries."""
    config = objects.config
    named = {"logger": config["logger"], **{f"listeners.{name}": node for name, node in config["listeners"].items()}}
    for key, node in named.items():
        if node and not (isinstance(node, Mapping) and "_target_" in node):
            raise ConfigError(f"{key} is not a listener. Set {key}._target_=your.module.Listener.")
    return {
        key.replace("listeners.", "listener "): objects.build_cached_object(key, {**node, "_partial_": True}, partial)
        for key, node in named.items()
        if node
    }


def load_launcher(objects: Objects) -> AnyLauncher:
    """Build only the launcher.

    Raises:
        ConfigError: the object is not a launcher, or is outside the allow-list.
    """
    launcher = objects.build_cached_object("launcher", objects.config["launcher"], LaunchMethod)  # type: ignore[type-abstract]
    if not isinstance(launcher, AnyLauncher):
        raise ConfigError(f"launcher: {type(launcher).__name__} is not a Launcher, AgentLauncher or BatchLauncher.")
    return launcher
