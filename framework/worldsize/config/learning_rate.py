"""The number of samples per update, and learning-rate scaling based on it.

A step has ``batch_size`` samples at any number of processes. Under most strategies they form one update. If workers
train independently, each computes updates from its own share of the samples, so that the update size depends on the
number of workers.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from worldsize.config.shape import RunShape


def rate_factor(rule: str, *, samples: float, base: float) -> float:
    """Return the scaling factor for a learning rate tuned for updates of ``base`` samples.

    Args:
        rule: "linear": proportional (Goyal et al. 2017, arXiv 1706.02677, section 2.1), for SGD; "sqrt": square root
            (Krizhevsky 2014, arXiv 1404.5997, section 5; Hoffer et al. 2017, arXiv 1705.08741, section 4); "none".
        samples: Samples per update.
        base: Samples per update when the rate was tuned.
    """
    return {"none": 1.0, "linear": samples / base, "sqrt": math.sqrt(samples / base)}[rule]


def update_samples(shape: RunShape, batch_size: int) -> float:
    """Return the number of samples per update, given ``batch_size`` samples per step."""
    return batch_size / (_count_update_parts(shape) or 1)


def apply_lr_scaling(shape: RunShape, lr: float | None, *, batch_size: int) -> float | None:
    """Return ``lr`` scaled by the rule ``cluster.scale_lr``.

    Raises:
        ConfigError: the rule would have no effect at any number of processes, or the rate or the rule is missing.
    """
    rule, base = shape.rate_scaling.scale_lr, shape.rate_scaling.base_batch
    if rule == "none":
        if base is not None:
            raise ConfigError(
                f"cluster.base_batch={base} has no effect with cluster.scale_lr=none. Set cluster.scale_lr=linear or "
                "sqrt, or remove cluster.base_batch."
            )
        return lr
    if lr is None:
        raise ConfigError(f"cluster.scale_lr={rule} requires lr, got lr=null. Set lr, or cluster.scale_lr=none.")
    if base is None and not _is_worker_dependent(shape):
        name = type(shape.strategy).__name__
        what = "an update" if _count_update_parts(shape) is None else "a step (each update with a part of lr)"
        raise ConfigError(
            f"cluster.scale_lr={rule} has no effect with {name}: {what} has batch_size={batch_size} samples with any "
            "number of processes. Set cluster.scale_lr=none, or set cluster.base_batch to the batch size for which "
            f"lr={lr:g} was tuned."
        )
    return lr * rate_factor(rule, samples=_count_rate_samples(shape, batch_size), base=base or batch_size)


def update_text(shape: RunShape, lr: float | None, *, batch_size: int) -> str:
    """Describe the samples per update and the learning rate, for display; ``lr`` must already be scaled."""
    parts = _count_update_parts(shape)
    batch = f"global batch {update_samples(shape, batch_size):g}"
    workers = shape.strategy.data_parallel(shape.cluster)
    if parts is None and workers > 1 and workers == shape.cluster.processes:
        batch += f" = {workers} processes × {batch_size // workers}"
    if parts is not None:
        batch += f" (batch_size={batch_size} / {parts} {'workers' if _is_worker_dependent(shape) else 'logical ranks'})"
    if lr is None:
        return f"{batch} · lr set by the recipe"
    return f"{batch} · lr {lr:g}{_origin(shape, lr, batch_size)}"


def _origin(shape: RunShape, lr: float, batch_size: int) -> str:
    rule, base = shape.rate_scaling.scale_lr, shape.rate_scaling.base_batch or batch_size
    if rule != "none":
        samples = _count_rate_samples(shape, batch_size)
        ratio = f"{samples:g}/{base:g}"
        before = lr / rate_factor(rule, samples=samples, base=base)
        return f" = {before:g} × {f'√({ratio})' if rule == 'sqrt' else ratio} (cluster.scale_lr={rule})"
    if _is_worker_dependent(shape):
        return " with any number of workers (cluster.scale_lr=none)"
    return "" if _count_update_parts(shape) is None else ", divided among the updates"


def _count_update_parts(shape: RunShape) -> int | None:
    return shape.strategy.update_parts(shape.cluster, shape.logical_ranks)


def _is_worker_dependent(shape: RunShape) -> bool:
    """Return whether the number of samples to which the full ``lr`` applies depends on the number of workers."""
    return _count_update_parts(shape) is not None and not shape.strategy.divides_lr


def _count_rate_samples(shape: RunShape, batch_size: int) -> float:
    """Return the number of samples to which the full ``lr`` applies."""
    return update_samples(shape, batch_size) if _is_worker_dependent(shape) else batch_size


def fill_missing_lr(cfg: DictConfig) -> DictConfig:
    """Return the configuration with ``lr: null`` if a learning rate is neither given nor needed.

    The optimizer and the schedule need one only if another section, usually the recipe, refers to them.

    Raises:
        ConfigError: a learning rate is needed but not given.
    """
    if not OmegaConf.is_missing(cfg, "lr") and cfg.lr is not None:
        return cfg
    copy = deepcopy(cfg)
    copy.lr = "???"
    for section in map(str, copy):
        if section not in ("lr", "optimizer", "schedule") and (taker := _taker_of_rate(copy, section)):
            raise ConfigError(
                f"lr is missing, but {taker} requires it. Set e.g. lr=0.001 on the command line or in the recipe's "
                f"YAML, or set {taker}."
            )
    copy.lr = None
    return copy


def _taker_of_rate(cfg: DictConfig, section: str) -> str | None:
    """Return a key that uses ``${lr}``, in ``section`` or a section that it refers to; None if there is none."""
    if OmegaConf.is_missing(cfg, section):
        return None
    try:
        value = cfg[section]
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except InterpolationToMissingValueError as error:
        return str(error.full_key or section) if str(error).splitlines()[0].endswith(": lr") else None
    except OmegaConfBaseException:
        return None  # reported when all sections are resolved
    return None
