"""A learning-rate schedule that consists of others, one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from worldsize.core import ConfigError
from worldsize.core.limits import check_limits
from worldsize.errors import neighbours
from worldsize.train.schedules import (
    Floor,
    Steps,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_stable_decay,
)


def chained(optimizer: Optimizer, *, steps: Steps, parts: Sequence[Mapping[str, Any]]) -> LRScheduler:
    """Return schedules one after the other, each as if its run began where the one before ends.

    As torch's ``SequentialLR`` with milestones, but the rate of a step is a function of its number alone. After the
    last step the last schedule goes on.

    Args:
        optimizer: Its learning rate is the peak of each schedule.
        steps: Steps of the whole run.
        parts: Each with ``name`` (constant, cosine, linear, inverse_sqrt or warmup_stable_decay), its length as
            ``steps`` or as ``share`` of the run, and options of that schedule. The last one has the steps that are
            left, and no length.

    Raises:
        ConfigError: A part is malformed, or nothing is left for the last one.
    """
    if not parts:
        raise ConfigError("schedule.parts is empty. Set schedule.parts=[{name: linear, share: 0.5}, {name: cosine}].")
    lengths = [_length(index, part, steps) for index, part in enumerate(parts[:-1])]
    if steps - sum(lengths) < 1:
        raise ConfigError(
            f"schedule.parts: {sum(lengths)} of {steps} steps are taken before the last part. Give the others less."
        )
    if {"steps", "share"} & parts[-1].keys():
        raise ConfigError("schedule.parts: the last part has the steps that are left. Leave out its length.")
    starts = [*accumulate(lengths, initial=0), steps]
    factors = [
        _factor(index, part, end - begin)
        for index, (part, (begin, end)) in enumerate(zip(parts, pairwise(starts), strict=True))
    ]

    def factor(step: int) -> float:
        index = max(index for index, begin in enumerate(starts[:-1]) if begin <= step)
        return factors[index](step - starts[index])

    return LambdaLR(optimizer, factor)


def _constant(optimizer: Optimizer, *, steps: Steps, factor: Floor = 1.0) -> LRScheduler:
    return LambdaLR(optimizer, lambda _: factor)


_NAMED: Mapping[str, Callable[..., LRScheduler]] = {
    "constant": _constant,
    "cosine": warmup_cosine,
    "linear": warmup_linear,
    "inverse_sqrt": warmup_inverse_sqrt,
    "warmup_stable_decay": warmup_stable_decay,
}


def _length(index: int, part: Mapping[str, Any], steps: int) -> int:
    """Return the steps of a part that is not the last."""
    own, share, key = part.get("steps"), part.get("share"), f"schedule.parts[{index}]"
    if (own is None) == (share is None):
        raise ConfigError(f"{key} needs a length: either its steps, or its share of the run's steps.")
    length = own if share is None else round(share * steps) if isinstance(share, int | float) else share
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{key} is {length!r} steps long. Give it at least one.")
    return length


def _factor(index: int, part: Mapping[str, Any], length: int) -> Callable[[int], float]:
    """Return what multiplies the peak in each step of a part of ``length`` steps."""
    key, name = f"schedule.parts[{index}]", str(part.get("name"))
    if name not in _NAMED:
        raise ConfigError(f"{key}: no schedule {name!r}{neighbours(name, _NAMED)}")
    options = {option: value for option, value in part.items() if option not in ("name", "steps", "share")}
    known = inspect.signature(_NAMED[name]).parameters.keys() - {"optimizer", "steps"}
    for option in options:
        if option not in known:
            raise ConfigError(f"no key '{key}.{option}'{neighbours(option, known)}")
    check_limits(_NAMED[name], options, key=key)
    single = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = _NAMED[name](single, steps=length, **options)
    assert isinstance(schedule, LambdaLR)
    return schedule.lr_lambdas[0]
