"""Completes the settings of a composed configuration in the launching process.

It fills in the folders of plugins, the processes of this machine, the group of a sweep, and the number of steps for
lengths in epochs, samples or tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from worldsize.config.compose import choices, is_sweep, resolved, sweep_folder, task_overrides
from worldsize.config.effects import share_rate
from worldsize.config.installed import installed
from worldsize.config.learning_rate import scaled_lr
from worldsize.config.search_path import make_importable, roots
from worldsize.config.settings import Settings, load_settings, logical_ranks_wanted
from worldsize.config.shape import nodes_of, with_processes
from worldsize.config.tiers import with_tiers, with_topology
from worldsize.data.fetch import is_iterable
from worldsize.data.order import epoch_length, steps_of
from worldsize.devices import device_count
from worldsize.errors import ConfigError

_LENGTH = re.compile(r"(\d+(?:\.\d+)?) ?([kMG]?) ?(step|epoch|sample|token)s?")
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
    share_rate(cfg)
    if OmegaConf.is_missing(cfg, "steps") or cfg.steps is None:
        cfg.steps = 1  # until the length of the data is known
    if has_own_batches(cfg):
        samples_per_logical_rank = cfg.evaluate_batch_size = 1
    lengths = lengths_of(cfg)
    for key in lengths:
        OmegaConf.update(cfg, key, 1)
    if samples_per_logical_rank is not None:
        cfg.batch_size = samples_per_logical_rank * logical_ranks_wanted(_completed(resolved(cfg)))
    config = _completed(resolved(cfg))
    settings = load_settings(config)
    if cfg.epochs is None and not lengths:
        return _with_profile_in_run(_with_scaled_lr(cfg, settings))
    if cfg.epochs is not None:
        cfg.steps = _steps(settings, epochs=float(cfg.epochs))
    for key, text in lengths.items():
        OmegaConf.update(cfg, key, _length_in_steps(text, settings, key=key))
    # resolved again, since schedules interpolate the number of steps
    return _with_profile_in_run(_with_scaled_lr(cfg, load_settings(_completed(resolved(cfg)))))


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
    profiled, steps = settings.observe.profiled, settings.training.steps
    if profiled is not None and profiled[1] > steps:
        raise ConfigError(f"profile.steps={list(profiled)} goes beyond the run. Its last step is {steps}.")
    return settings


def _with_scaled_lr(cfg: DictConfig, settings: Settings) -> Settings:
    """Return the settings with the learning rate that ``cluster.scale_lr`` makes of the typed one.

    Raises:
        ConfigError: the rule has no meaning for this run.
    """
    if settings.run.evaluates is not None or (lr := scaled_lr(settings)) == settings.training.lr:
        return settings
    scaled = deepcopy(cfg)
    scaled.lr = lr
    return load_settings(_completed(resolved(scaled)))


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


def _steps(settings: Settings, *, epochs: float) -> int:
    dataset = settings.recipe.data("train")
    if is_iterable(dataset):
        raise ConfigError("epochs needs a data set with a length; this one is a stream. Set steps instead.")
    return steps_of(epochs, epoch_length(dataset), settings.training.batch_size)


def written_lengths(node: Any, key: str = "schedule") -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each length below ``node``, such as "2 epochs" or "10M tokens"."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from written_lengths(child, f"{key}.{name}")
    if isinstance(node, str) and _LENGTH.fullmatch(node.strip()):
        yield key, node.strip()


def _length_in_steps(text: str, settings: Settings, *, key: str) -> int:
    """Convert a length, the value of ``key``, to steps, rounded up.

    Raises:
        ConfigError: the data are a stream without a length, or the recipe does not say how many tokens a sample has.
    """
    match = _LENGTH.fullmatch(text)
    assert match is not None, text
    number, scale, unit = match.groups()
    count, batch_size = float(number) * _SCALES[scale], settings.training.batch_size
    if unit == "epoch":
        dataset = settings.recipe.data("train")
        if is_iterable(dataset):
            raise ConfigError(f"{key}={text}: the data are a stream, of which no length is known. Give steps instead.")
        return steps_of(count, epoch_length(dataset), batch_size)
    if unit == "token":
        tokens = settings.recipe.tokens_per_sample()
        if tokens is None:
            raise ConfigError(
                f"{key}={text}: {type(settings.recipe).__name__} does not say how many tokens a sample has. "
                "Define Recipe.tokens_per_sample, or give steps, samples or epochs."
            )
        return math.ceil(count / (batch_size * tokens))
    return math.ceil(count / batch_size) if unit == "sample" else math.ceil(count)
