"""Completes the settings of a composed configuration, and refuses typed values that can have no effect.

It fills in the folders of plugins, the processes of this machine, the group of a sweep, and the number of steps for
lengths in epochs, samples or tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from worldsize.config.arguments import key_of
from worldsize.config.cluster import with_tiers, with_topology
from worldsize.config.compose import choices, is_sweep, resolved, sweep_folder, task_overrides
from worldsize.config.learning_rate import scaled_lr
from worldsize.config.search_path import installed, make_importable, roots
from worldsize.config.settings import Settings, load_settings, load_shape, recipe_of, with_initial
from worldsize.config.shape import RunShape, nodes_of, with_processes
from worldsize.core import Numerics, Recipe
from worldsize.data.batches import is_iterable
from worldsize.data.order import epoch_length, steps_of
from worldsize.devices import device_count
from worldsize.errors import ConfigError

_LENGTH = re.compile(r"(\d+(?:\.\d+)?) ?([kMG]?) ?(step|epoch|sample|token)s?")
_OF_SHAPE = (  # keys that decide about processes
    *("run", "cluster", "strategy", "reproducibility", "numerics", "launcher", "logical_ranks", "checkpoint"),
    "data_workers",
)
_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def settings_of(cfg: DictConfig, *, samples_per_logical_rank: int | None = None) -> Settings:
    """Build typed settings, completed with values that only the launching process knows.

    Args:
        cfg: The composed configuration; the values that it lacks are set in it.
        samples_per_logical_rank: It replaces the batch size, so that this divides under every strategy.

    Raises:
        ConfigError: a value is missing or wrong, or the length of the run is given twice.
    """
    make_importable(roots())
    if "hosts" in cfg.cluster:
        cfg.cluster.nodes = nodes_of(cfg.cluster.hosts, spare=cfg.cluster.spare_nodes)
    _check_length(cfg)
    _unite_values(cfg)
    if has_own_batches(cfg):
        samples_per_logical_rank = cfg.evaluate_batch_size = 1
    lengths = lengths_of(cfg)
    for key in ("steps", *lengths) if cfg.epochs is not None else lengths:
        OmegaConf.update(cfg, key, 1)  # until the length of the data is known
    config = _completed(resolved(cfg))
    shape, shaped = load_shape(config), config
    if samples_per_logical_rank is not None:
        cfg.batch_size = samples_per_logical_rank * shape.logical_ranks
        config = _completed(resolved(cfg))
    if cfg.epochs is not None or lengths:
        shape.check_batch(cfg.batch_size)  # before the data are read
        _set_lengths(cfg, with_initial(recipe_of(config), config)[0], lengths)
    scaled = _with_scaled_lr(cfg, shape)
    if scaled is not cfg or cfg.epochs is not None or lengths:
        config = _completed(resolved(scaled))  # again, since schedules interpolate these values
    if any(config.get(key) != shaped.get(key) for key in _OF_SHAPE):  # and so do these, now and then
        shape = load_shape(config)
    return _with_profile_in_run(load_settings(config, shape))


def has_own_batches(cfg: DictConfig) -> bool:
    """Return whether each sample of the recipe's data is a batch already, which ``batch_size=null`` says.

    Raises:
        ConfigError: ``batch_size`` is missing.
    """
    if OmegaConf.is_missing(cfg, "batch_size"):
        raise ConfigError(
            "batch_size is missing: how many samples has a step? Set batch_size=64 or another number, or "
            "batch_size=null if the recipe's data are batches already."
        )
    return cfg.batch_size is None


def _check_length(cfg: DictConfig) -> None:
    """Raise ConfigError unless one of ``steps`` and ``epochs`` says how long the run is.

    A recipe's own ``steps`` give way to ``epochs``; typed ones do not.
    """
    has_steps = not OmegaConf.is_missing(cfg, "steps") and cfg.steps is not None
    if not has_steps and cfg.epochs is None:
        raise ConfigError("steps is missing, and so is epochs: how long is the run? Set steps=100 or epochs=1.")
    is_typed = any(word.lstrip("+").startswith("steps=") for word in task_overrides())
    if has_steps and cfg.epochs is not None and is_typed:
        raise ConfigError(
            f"steps={cfg.steps} is given, and so is epochs={cfg.epochs}, which would decide how long the run is. "
            f"Set epochs=null steps={cfg.steps}, or leave steps out."
        )


def lengths_of(cfg: DictConfig) -> dict[str, str]:
    """Return the lengths of the schedule that are written as text, such as "2 epochs", by key."""
    return dict(written_lengths(OmegaConf.to_container(cfg.schedule))) if cfg.schedule else {}


def _with_profile_in_run(settings: Settings) -> Settings:
    """Return the settings; raise ConfigError if the profile names steps that the run does not reach."""
    profiled, steps = settings.observe.profile.steps, settings.training.steps
    if profiled is not None and profiled[1] > steps:
        raise ConfigError(f"profile.steps={list(profiled)} goes beyond the run. Its last step is {steps}.")
    return settings


def _with_scaled_lr(cfg: DictConfig, shape: RunShape) -> DictConfig:
    """Return the configuration with the learning rate that ``cluster.scale_lr`` makes of the typed one.

    Raises:
        ConfigError: the rule has no meaning for this run.
    """
    typed = None if OmegaConf.is_missing(cfg, "lr") else cfg.lr
    if shape.run.evaluates is not None or (lr := scaled_lr(shape, typed, batch_size=cfg.batch_size)) == typed:
        return cfg
    scaled = deepcopy(cfg)
    scaled.lr = lr
    return scaled


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    kind = config["cluster"]["device"] or "cpu"  # null: decided by the number of GPUs, which are other machines'
    gpus = device_count(kind) if kind != "cpu" else 0
    group = config["run"]["group"] or (sweep_folder() if is_sweep() else choices().get("experiment"))
    places = {"import_path": [str(root) for root in roots()], "packages": [each.module for each in installed()]}
    run = {**config["run"], "group": group, **places}
    cluster = with_topology(with_tiers(with_processes(config["cluster"], gpus)))
    # the launcher's options were resolved before the hosts were ordered
    hosts = {"hosts": cluster["hosts"]} if "hosts" in config["launcher"] and "hosts" in cluster else {}
    return {**config, "cluster": cluster, "launcher": {**config["launcher"], **hosts}, "run": run}


def _set_lengths(cfg: DictConfig, recipe: Recipe, lengths: Mapping[str, str]) -> None:
    """Set the steps of ``epochs``, and of the schedule's ``lengths`` by key, that follow from the recipe's data."""
    if cfg.epochs is not None:
        length = _epoch(recipe, "epochs needs a data set with a length; this one is a stream. Set steps instead.")
        cfg.steps = steps_of(float(cfg.epochs), length, cfg.batch_size)
    for key, text in lengths.items():
        OmegaConf.update(cfg, key, _length_in_steps(text, recipe, cfg.batch_size, key=key))


def _epoch(recipe: Recipe, refusal: str) -> int:
    """Return the samples of an epoch; raise ConfigError with this text if the data are a stream."""
    dataset = recipe.data("train")
    if is_iterable(dataset):
        raise ConfigError(refusal)
    return epoch_length(dataset)


def written_lengths(node: Any, key: str = "schedule") -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each length below ``node``, such as "2 epochs" or "10M tokens"."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from written_lengths(child, f"{key}.{name}")
    if isinstance(node, str) and _LENGTH.fullmatch(node.strip()):
        yield key, node.strip()


def _length_in_steps(text: str, recipe: Recipe, batch_size: int, *, key: str) -> int:
    """Convert a length, the value of ``key``, to steps, rounded up.

    Raises:
        ConfigError: the data are a stream without a length, or the recipe does not say how many tokens a sample has.
    """
    match = _LENGTH.fullmatch(text)
    assert match is not None, text
    number, scale, unit = match.groups()
    count = float(number) * _SCALES[scale]
    if unit == "epoch":
        refusal = f"{key}={text}: the data are a stream, of which no length is known. Give steps instead."
        return steps_of(count, _epoch(recipe, refusal), batch_size)
    if unit == "token":
        tokens = recipe.tokens_per_sample()
        if tokens is None:
            raise ConfigError(
                f"{key}={text}: {type(recipe).__name__} does not say how many tokens a sample has. "
                "Define Recipe.tokens_per_sample, or give steps, samples or epochs."
            )
        return math.ceil(count / (batch_size * tokens))
    return math.ceil(count / batch_size) if unit == "sample" else math.ceil(count)


_Switch = tuple[tuple[str, ...], Callable[[DictConfig], bool], str]  # keys; whether they count; what makes them count
_SWITCHES: tuple[_Switch, ...] = (
    (("ema.every", "ema.warmup"), lambda cfg: cfg.ema.decay is not None, "ema.decay=0.999"),
    (
        ("early_stopping.direction", "early_stopping.patience", "early_stopping.min_delta"),
        lambda cfg: cfg.early_stopping.metric is not None,
        "early_stopping.metric=loss",
    ),
    (("sweep.direction",), lambda cfg: cfg.sweep.metric is not None, "sweep.metric=loss"),
    (("shuffle.block", "shuffle.window"), lambda cfg: bool(cfg.shuffle.enabled), "shuffle.enabled=true"),
    (("compile_mode",), lambda cfg: bool(cfg.compile), "compile=true"),
    (("init_from_strict",), lambda cfg: cfg.init_from is not None, "init_from=PATH"),
)
_PURPOSES = {"run.evaluates": "evaluate", "run.examine": "doctor"}  # keys that other commands set
_GROUPS = ("optimizer", "schedule", "data")  # a recipe's YAML refers to those that it takes


def check_effects(cfg: DictConfig) -> None:
    """Raise ConfigError if a typed word sets a value that this run does not read, or that a different command sets."""
    typed = {key_of(word): word for word in task_overrides() if not word.startswith("~")}
    for key in typed.keys() & _PURPOSES.keys():
        if OmegaConf.select(cfg, key) is not None:
            raise ConfigError(f"{typed[key]} is set by `worldsize {_PURPOSES[key]}`. Call that instead.")
    for keys, counts, remedy in _SWITCHES:
        for key in keys:
            if key in typed and not counts(cfg):
                missing = remedy.partition("=")[0]
                raise ConfigError(f"{typed[key]} has no effect without {missing}. Set {remedy}, too, or leave it out.")
    for group in (*_GROUPS, "lr"):
        words = [word for key, word in typed.items() if key == group or key.startswith(f"{group}.")]
        if words and not is_taken(cfg, group):
            raise ConfigError(
                f"{words[0]} has no effect: nothing in this run takes {group}. Let the recipe's YAML refer to "
                f"${{{group}}}, or leave it out."
            )


def _unite_values(cfg: DictConfig) -> None:
    """Unite values that two sections have.

    The optimizer's own learning rate becomes the run's ``lr``, and a reference to it. So ``optimizer.lr=0.1`` and
    ``lr=0.1`` are the same run, in its record and under ``cluster.scale_lr``, too. A typed ``clip_norm=0.5`` replaces
    the ``numerics.clip_norm`` of a file.

    Raises:
        ConfigError: both are typed.
    """
    typed = {key_of(word): word for word in task_overrides() if not word.startswith("~")}
    for key in typed.keys() & {each.name for each in fields(Numerics)}:
        if not OmegaConf.is_interpolation(cfg.numerics, key):
            if (other := typed.get(f"numerics.{key}")) is not None:
                raise ConfigError(f"{typed[key]} is given, and so is {other}. Leave one of them out.")
            cfg.numerics[key] = f"${{{key}}}"
    if not OmegaConf.is_dict(cfg.optimizer) or "lr" not in cfg.optimizer or not is_taken(cfg, "optimizer"):
        return
    if OmegaConf.is_interpolation(cfg.optimizer, "lr") or OmegaConf.is_missing(cfg.optimizer, "lr"):
        return
    rate = cfg.optimizer.lr
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return
    if "lr" in typed and cfg.lr != rate:
        raise ConfigError(f"{typed['lr']} is given, and so is optimizer.lr={rate}. Leave one of them out.")
    cfg.lr, cfg.optimizer.lr = float(rate), "${lr}"


def is_taken(cfg: DictConfig, key: str) -> bool:
    """Return whether a section other than ``key`` itself refers to it, perhaps by sections that it refers to.

    A group such as ``optimizer`` counts only where it is taken itself.
    """
    return _is_taken(cast("dict[str, Any]", OmegaConf.to_container(cfg)), key)


def _is_taken(sections: Mapping[str, Any], key: str) -> bool:
    reference = re.compile(rf"\$\{{\.*{key}\b")
    referring = [name for name, section in sections.items() if name != key and reference.search(str(section))]
    return any(name not in _GROUPS or _is_taken(sections, name) for name in referring)
