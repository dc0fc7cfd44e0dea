"""Completes the settings of a composed configuration, and refuses overrides without effect.

It fills in the plugin folders, the processes on this machine, the group of a sweep, and the number of steps for lengths
in epochs, samples or tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from worldsize.config.cluster import apply_topology, normalize_tiers
from worldsize.config.compose import is_sweep, read_group_choices, resolve_config, sweep_folder, typed_overrides
from worldsize.config.learning_rate import apply_lr_scaling
from worldsize.config.purpose import TRAIN, Purpose
from worldsize.config.search_path import find_installed_plugins, list_search_roots, make_importable
from worldsize.config.settings import Objects, Settings, load_recipe, load_settings, load_shape
from worldsize.config.shape import RunShape, count_training_nodes, resolve_processes
from worldsize.core import Numerics, Recipe
from worldsize.data.batches import is_iterable
from worldsize.data.order import count_epoch_steps, epoch_length
from worldsize.devices import device_count
from worldsize.errors import ConfigError

_LENGTH = re.compile(r"(\d+(?:\.\d+)?) ?([kMG]?) ?(step|epoch|sample|token)s?")
_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Length:
    """A length in steps, epochs, samples or tokens; ``text`` is the value of ``key``, such as "10M tokens"."""

    key: str
    text: str
    count: float
    unit: str

    def count_steps(self, recipe: Recipe, batch_size: int) -> int:
        """Return the length in steps, rounded up.

        Raises:
            ConfigError: the data are a stream without a length, or the recipe does not define tokens per sample.
        """
        match self.unit:
            case "step":
                return math.ceil(self.count)
            case "sample":
                return math.ceil(self.count / batch_size)
            case "epoch":
                dataset = recipe.data("train")
                if is_iterable(dataset):
                    raise ConfigError(
                        f"{self.key}={self.text} requires data of known length, but the dataset is a stream. Use steps."
                    )
                return count_epoch_steps(self.count, epoch_length(dataset), batch_size)
        if (tokens := recipe.tokens_per_sample()) is None:
            raise ConfigError(
                f"{self.key}={self.text} requires the number of tokens per sample, which {type(recipe).__name__} does "
                "not define. Implement Recipe.tokens_per_sample, or use steps, samples or epochs."
            )
        return math.ceil(self.count / (batch_size * tokens))


def build_settings(
    cfg: DictConfig, purpose: Purpose = TRAIN, *, samples_per_logical_rank: int | None = None
) -> Settings:
    """Build typed settings, including values that only the launching process can determine.

    Args:
        cfg: The composed configuration.
        purpose: The purpose of the run; it implies some values.
        samples_per_logical_rank: If given, replaces ``batch_size``, to divide evenly under every strategy.

    Raises:
        ConfigError: a value is missing or invalid, or the length of the run is given twice.
    """
    make_importable(list_search_roots())
    cfg = _select_length(cfg)
    cfg = override_values(cfg, purpose.values())
    if "hosts" in cfg.cluster:
        cfg = override_values(
            cfg, {"cluster.nodes": count_training_nodes(cfg.cluster.hosts, spare=cfg.cluster.spare_nodes)}
        )
    cfg = override_values(cfg, _reconcile_values(cfg))
    lengths = collect_lengths(cfg)
    cfg = override_values(cfg, dict.fromkeys(lengths, 1))  # placeholder; the data do not depend on the number of steps
    if has_own_batches(cfg):
        samples_per_logical_rank, cfg = 1, override_values(cfg, {"evaluate_batch_size": 1})
    objects = Objects(_complete_config(cfg))
    shape = load_shape(objects)
    if samples_per_logical_rank is not None:
        cfg = override_values(cfg, {"batch_size": samples_per_logical_rank * shape.logical_ranks})
        objects = Objects(_complete_config(cfg), objects.built)
    computed = _scale_learning_rate(cfg, shape)
    if lengths:
        shape.check_batch(cfg.batch_size)  # before the data are read
        recipe, _ = load_recipe(objects)
        computed |= {key: length.count_steps(recipe, cfg.batch_size) for key, length in lengths.items()}
    if computed:
        objects = Objects(_complete_config(override_values(cfg, computed)), objects.built)
    settings = load_settings(objects)
    profiled, steps = settings.observe.profile.steps, settings.training.steps
    if profiled is not None and profiled[1] > steps:
        raise ConfigError(
            f"profile.steps={list(profiled)} exceeds the length of the run. Set steps of at most {steps}."
        )
    return settings


def override_values(cfg: DictConfig, values: Mapping[str, object]) -> DictConfig:
    """Return a copy of the configuration with these values, ignoring keys unknown to its launcher or strategy."""
    copy = deepcopy(cfg) if values else cfg
    for key, value in values.items():
        section, _, name = key.partition(".")
        if section not in ("launcher", "strategy") or name in copy[section]:
            OmegaConf.update(copy, key, value, merge=False)
    return copy


def has_own_batches(cfg: DictConfig) -> bool:
    """Return whether each sample of the recipe's data is already a batch (``batch_size=null``).

    Raises:
        ConfigError: ``batch_size`` is missing.
    """
    if OmegaConf.is_missing(cfg, "batch_size"):
        raise ConfigError(
            "batch_size is missing. Set e.g. batch_size=64, or batch_size=null if the dataset yields batches."
        )
    return cfg.batch_size is None


def _select_length(cfg: DictConfig) -> DictConfig:
    """Return the configuration with ``epochs=null`` if ``steps`` on the command line replaces a file's ``epochs``.

    Otherwise ``epochs`` takes precedence over ``steps``.

    Raises:
        ConfigError: both are on the command line, or neither is set.
    """
    has_steps = not OmegaConf.is_missing(cfg, "steps") and cfg.steps is not None
    if not has_steps and cfg.epochs is None:
        raise ConfigError("the length of the run is missing. Set e.g. steps=100 or epochs=1.")
    typed = typed_overrides()
    if not has_steps or cfg.epochs is None or "steps" not in typed:
        return cfg
    if "epochs" in typed:
        raise ConfigError(
            f"steps={cfg.steps} and epochs={cfg.epochs} are mutually exclusive. "
            f"Set epochs=null steps={cfg.steps}, or remove steps={cfg.steps}."
        )
    return override_values(cfg, {"epochs": None})


def collect_lengths(cfg: DictConfig) -> dict[str, Length]:
    """Return the lengths to convert to steps, by the configuration key to set to the number of steps."""
    lengths = dict(find_lengths(OmegaConf.to_container(cfg.schedule))) if cfg.schedule else {}
    run = {} if cfg.epochs is None else {"steps": Length("epochs", f"{cfg.epochs:g}", float(cfg.epochs), "epoch")}
    return {**run, **lengths}


def _scale_learning_rate(cfg: DictConfig, shape: RunShape) -> dict[str, object]:
    """Return ``{"lr": scaled}`` if ``cluster.scale_lr`` changes the learning rate, otherwise ``{}``.

    Raises:
        ConfigError: the scaling rule does not apply to this run.
    """
    typed = None if OmegaConf.is_missing(cfg, "lr") else cfg.lr
    if shape.run.evaluates is not None or (lr := apply_lr_scaling(shape, typed, batch_size=cfg.batch_size)) == typed:
        return {}
    return {"lr": lr}


def _complete_config(cfg: DictConfig) -> dict[str, Any]:
    config = resolve_config(cfg)
    kind = config["cluster"]["device"] or "cpu"  # null: resolved from the GPUs of other machines
    gpus = device_count(kind) if kind != "cpu" else 0
    group = config["run"]["group"] or (sweep_folder() if is_sweep() else read_group_choices().get("experiment"))
    places = {
        "import_path": [str(root) for root in list_search_roots()],
        "packages": [each.module for each in find_installed_plugins()],
    }
    run = {**config["run"], "group": group, **places}
    cluster = apply_topology(normalize_tiers(resolve_processes(config["cluster"], gpus)))
    # the launcher's options were resolved before hosts were ordered
    hosts = {"hosts": cluster["hosts"]} if "hosts" in config["launcher"] and "hosts" in cluster else {}
    return {**config, "cluster": cluster, "launcher": {**config["launcher"], **hosts}, "run": run}


def find_lengths(node: Any, key: str = "schedule") -> Iterator[tuple[str, Length]]:
    """Yield each length in ``node``, such as "2 epochs" or "10M tokens", with its key."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from find_lengths(child, f"{key}.{name}")
    if isinstance(node, str) and (match := _LENGTH.fullmatch(node.strip())):
        number, scale, unit = match.groups()
        yield key, Length(key, match[0], float(number) * _SCALES[scale], unit)


_Switch = tuple[tuple[str, ...], Callable[[DictConfig], bool], str]  # keys; whether they take effect; remedy if not
_SWITCHES: tuple[_Switch, ...] = (
    (("ema.every", "ema.warmup"), lambda cfg: cfg.ema.decay is not None, "ema.decay=0.999"),
    (
        ("early_stopping.direction", "early_stopping.patience", "early_stopping.min_delta"),
        lambda cfg: cfg.early_stopping.metric is not None,
        "early_stopping.metric=loss",
    ),
    (("sweep.direction",), lambda cfg: cfg.sweep.metric is not None, "sweep.metric=loss"),
    (("shuffle.block", "shuffle.window"), lambda cfg: bool(cfg.shuffle.enabled), "shuffle.enabled=true"),
    (
        ("spike.window", "spike.on_spike", "spike.rewinds"),
        lambda cfg: cfg.spike.factor is not None,
        "spike.factor=3",
    ),
    (("compile_mode",), lambda cfg: bool(cfg.compile), "compile=true"),
    (("init_from_strict",), lambda cfg: cfg.init_from is not None, "init_from=PATH"),
)
_PURPOSES = {"run.evaluates": "evaluate", "run.examine": "doctor"}  # keys set by other commands
_GROUPS = ("optimizer", "schedule", "data")  # groups that only take effect if the recipe's YAML refers to them


def check_effects(cfg: DictConfig) -> None:
    """Raise ConfigError if an override has no effect on this run, or sets a key reserved for a different command."""
    typed = typed_overrides()
    cfg = override_values(cfg, _reconcile_values(cfg))
    for key in typed.keys() & _PURPOSES.keys():
        if OmegaConf.select(cfg, key) is not None:
            raise ConfigError(f"{typed[key]} is reserved for `worldsize {_PURPOSES[key]}`. Run that command instead.")
    for keys, counts, remedy in _SWITCHES:
        for key in keys:
            if key in typed and not counts(cfg):
                missing = remedy.partition("=")[0]
                raise ConfigError(f"{typed[key]} has no effect without {missing}. Also set {remedy}, or remove {key}.")
    for group in (*_GROUPS, "lr"):
        words = [word for key, word in typed.items() if key == group or key.startswith(f"{group}.")]
        if words and not is_taken(cfg, group):
            raise ConfigError(
                f"{words[0]} has no effect: this run does not use {group}. Refer to ${{{group}}} in the recipe's YAML, "
                "or remove the override."
            )


def _reconcile_values(cfg: DictConfig) -> dict[str, object]:
    """Return the values, by key, that reconcile settings which exist in two sections.

    A learning rate in the optimizer section becomes the run's ``lr``, and the optimizer then refers to it. Therefore
    ``optimizer.lr=0.1`` and ``lr=0.1`` give the same run, including its record and ``cluster.scale_lr``. An override
    ``clip_norm=0.5`` replaces the ``numerics.clip_norm`` from a file.

    Raises:
        ConfigError: both settings are overridden.
    """
    typed = typed_overrides()
    values: dict[str, object] = {}
    for key in typed.keys() & {each.name for each in fields(Numerics)}:
        if not OmegaConf.is_interpolation(cfg.numerics, key):
            if (other := typed.get(f"numerics.{key}")) is not None:
                raise ConfigError(f"{typed[key]} and {other} are mutually exclusive; pass one of them.")
            values[f"numerics.{key}"] = f"${{{key}}}"
    if not OmegaConf.is_dict(cfg.optimizer) or "lr" not in cfg.optimizer or not is_taken(cfg, "optimizer"):
        return values
    if OmegaConf.is_interpolation(cfg.optimizer, "lr") or OmegaConf.is_missing(cfg.optimizer, "lr"):
        return values
    rate = cfg.optimizer.lr
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return values
    if "lr" in typed and cfg.lr != rate:
        raise ConfigError(f"{typed['lr']} conflicts with optimizer.lr={rate}. Set only one of them.")
    return {**values, "lr": float(rate), "optimizer.lr": "${lr}"}


def is_taken(cfg: DictConfig, key: str) -> bool:
    """Return whether another section refers to ``key``, directly or through a group such as ``optimizer``.

    A reference in such a group counts only if another section in turn refers to the group.
    """
    return _is_taken(cast("dict[str, Any]", OmegaConf.to_container(cfg)), key)


def _is_taken(sections: Mapping[str, Any], key: str) -> bool:
    reference = re.compile(rf"\$\{{\.*{key}\b")
    referring = [name for name, section in sections.items() if name != key and reference.search(str(section))]
    return any(name not in _GROUPS or _is_taken(sections, name) for name in referring)
