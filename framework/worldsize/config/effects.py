"""Refuses typed values that can have no effect, and gives the optimizer's own learning rate its one place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from worldsize.config.compose import task_overrides
from worldsize.errors import ConfigError

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
    typed = {word.lstrip("+").partition("=")[0]: word for word in task_overrides() if not word.startswith("~")}
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


def share_rate(cfg: DictConfig) -> None:
    """Make a learning rate that the section ``optimizer`` has of its own the run's ``lr``, to which it then refers.

    So ``optimizer.lr=0.1`` and ``lr=0.1`` are the same run, in its record and under ``cluster.scale_lr``, too.

    Raises:
        ConfigError: both are typed.
    """
    if not OmegaConf.is_dict(cfg.optimizer) or "lr" not in cfg.optimizer or not is_taken(cfg, "optimizer"):
        return
    if OmegaConf.is_interpolation(cfg.optimizer, "lr") or OmegaConf.is_missing(cfg.optimizer, "lr"):
        return
    rate = cfg.optimizer.lr
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return
    typed = [word for word in task_overrides() if re.match(r"\+*lr=", word)]
    if typed and cfg.lr != rate:
        raise ConfigError(f"{typed[0]} is given, and so is optimizer.lr={rate}. Leave one of them out.")
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
