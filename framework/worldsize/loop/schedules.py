"""Learning-rate schedules that torch lacks as single objects, and chained schedules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from worldsize.core import ConfigError, Range
from worldsize.core.limits import check_limits
from worldsize.errors import neighbours

Steps = Annotated[int, Range(least=1)]
Warmup = Annotated[float, Range(least=0, most=1, hint="the value is a fraction of the steps")]
WarmupSteps = Annotated[int | None, Range(least=0)]
Floor = Annotated[float, Range(least=0, hint="the value is a fraction of the peak")]


def warmup_cosine(
    optimizer: Optimizer,
    *,
    steps: Steps,
    warmup: Warmup = 0.05,
    warmup_steps: WarmupSteps = None,
    floor: Floor = 0.1,
) -> LRScheduler:
    """Return a linear warm-up to the peak, then half a cosine to ``floor`` times the peak.

    Args:
        optimizer: its learning rate is the peak.
        steps: total number of steps in the run.
        warmup: length of the warm-up as a fraction of ``steps``, 0 to 1, if ``warmup_steps`` is None.
        warmup_steps: length of the warm-up in steps.
        floor: final learning rate, as a fraction of the peak.

    Source: SGDR, Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, without restarts.
    """
    rising = _count_warmup_steps(steps, warmup, warmup_steps)

    def compute_cosine_decay(step: int) -> float:
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _compute_progress(step, rising, steps)))

    return _prepend_warmup(optimizer, rising, compute_cosine_decay)


def warmup_linear(
    optimizer: Optimizer,
    *,
    steps: Steps,
    warmup: Warmup = 0.05,
    warmup_steps: WarmupSteps = None,
    floor: Floor = 0.0,
) -> LRScheduler:
    """Return a linear warm-up to the peak, then linear decay to ``floor`` times the peak.

    For the arguments, see :func:`warmup_cosine`. Source: BERT, Devlin et al. 2019, arXiv 1810.04805, appendix A.2.
    """
    rising = _count_warmup_steps(steps, warmup, warmup_steps)

    def compute_linear_decay(step: int) -> float:
        return floor + (1 - floor) * max(0.0, (steps - step) / max(1, steps - rising))

    return _prepend_warmup(optimizer, rising, compute_linear_decay)


def warmup_inverse_sqrt(
    optimizer: Optimizer, *, steps: Steps, warmup: Warmup = 0.05, warmup_steps: WarmupSteps = None
) -> LRScheduler:
    """Return a linear warm-up, then decay with the inverse square root of the step.

    After the warm-up, the rate is the peak times the square root of the warm-up length over the step number. If
    ``warmup_steps`` is given, the schedule does not depend on the length of the run, so that the run can be extended.
    For the arguments, see :func:`warmup_cosine`. Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3, with the
    optimizer's learning rate as its peak.
    """
    rising = _count_warmup_steps(steps, warmup, warmup_steps)
    return _prepend_warmup(optimizer, rising, lambda step: math.sqrt(rising / (step + 1)))


def warmup_stable_decay(
    optimizer: Optimizer,
    *,
    steps: Steps,
    warmup: Warmup = 0.05,
    warmup_steps: WarmupSteps = None,
    decay: Annotated[float, Range(least=0, most=1, hint="the value is a fraction of the steps")] = 0.2,
    shape: Literal["linear", "sqrt"] = "sqrt",
    floor: Floor = 0.0,
) -> LRScheduler:
    """Return a linear warm-up, a constant peak, and a final decay to ``floor`` times the peak.

    A run that is resumed with more steps from a checkpoint before the decay continues at the peak.

    Args:
        optimizer: its learning rate is the peak.
        steps: total number of steps in the run.
        warmup: length of the warm-up as a fraction of ``steps``, 0 to 1, if ``warmup_steps`` is None.
        warmup_steps: length of the warm-up in steps.
        decay: length of the decay as a fraction of ``steps``, 0 to 1.
        shape: "linear", or "sqrt": 1 minus the square root of the completed fraction of the decay.
        floor: final learning rate, as a fraction of the peak.

    Source: MiniCPM, Hu et al. 2024, arXiv 2404.06395, section 4; for the shapes, Hägele et al. 2024, arXiv
    2405.18392, section 3.
    """
    rising = _count_warmup_steps(steps, warmup, warmup_steps)
    last = max(1, round(decay * steps))

    def compute_final_decay(step: int) -> float:
        done = _compute_progress(step, steps - last, steps)
        return floor + (1 - floor) * (1 - (done if shape == "linear" else math.sqrt(done)))

    return _prepend_warmup(optimizer, rising, compute_final_decay)


def _count_warmup_steps(steps: int, warmup: float, warmup_steps: int | None) -> int:
    """Return the number of warm-up steps, at least 1."""
    return max(1, round(warmup * steps) if warmup_steps is None else warmup_steps)


def _compute_progress(step: int, first: int, last: int) -> float:
    """Return the position of ``step`` between ``first`` and ``last``, clamped to 0 to 1."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


def _prepend_warmup(optimizer: Optimizer, rising: int, falling: Callable[[int], float]) -> LRScheduler:
    """Return a schedule that rises linearly for ``rising`` steps and then follows ``falling``."""
    return LambdaLR(optimizer, lambda step: (step + 1) / rising if step < rising else falling(step))


def chained(optimizer: Optimizer, *, steps: Steps, parts: Sequence[Mapping[str, Any]]) -> LRScheduler:
    """Return a sequence of schedules.

    Each schedule starts from its own step 0 where the previous schedule ends. This resembles torch's ``SequentialLR``,
    but the rate of a step depends only on its number. After the last step, the last schedule continues.

    Args:
        optimizer: Its learning rate is the peak of each schedule.
        steps: Total number of steps in the run.
        parts: The schedules, each with a ``name`` (constant, cosine, linear, inverse_sqrt or warmup_stable_decay), a
            length as ``steps`` or as ``share`` of the run, and the options of that schedule. The last part does not
            have a length; it gets the remaining steps.

    Raises:
        ConfigError: A part is malformed, or there are no steps left for the last part.
    """
    if not parts:
        raise ConfigError("schedule.parts is empty. Set schedule.parts=[{name: linear, share: 0.5}, {name: cosine}].")
    lengths = [_parse_length(index, part, steps) for index, part in enumerate(parts[:-1])]
    if steps - sum(lengths) < 1:
        raise ConfigError(
            f"schedule.parts: {sum(lengths)} of {steps} steps are used before the last part. Shorten the other parts."
        )
    if {"steps", "share"} & parts[-1].keys():
        raise ConfigError("schedule.parts: the last part takes the remaining steps. Remove its steps or share.")
    starts = [*accumulate(lengths, initial=0), steps]
    factors = [
        _build_factor(index, part, end - begin)
        for index, (part, (begin, end)) in enumerate(zip(parts, pairwise(starts), strict=True))
    ]

    def compute_factor(step: int) -> float:
        index = max(index for index, begin in enumerate(starts[:-1]) if begin <= step)
        return factors[index](step - starts[index])

    return LambdaLR(optimizer, compute_factor)


def _constant(optimizer: Optimizer, *, steps: Steps, factor: Floor = 1.0) -> LRScheduler:
    return LambdaLR(optimizer, lambda _: factor)


_NAMED: Mapping[str, Callable[..., LRScheduler]] = {
    "constant": _constant,
    "cosine": warmup_cosine,
    "linear": warmup_linear,
    "inverse_sqrt": warmup_inverse_sqrt,
    "warmup_stable_decay": warmup_stable_decay,
}


def _parse_length(index: int, part: Mapping[str, Any], steps: int) -> int:
    """Return the number of steps of a part other than the last."""
    own, share, key = part.get("steps"), part.get("share"), f"schedule.parts[{index}]"
    if (own is None) == (share is None):
        raise ConfigError(f"{key} requires either steps or share (a fraction of the run's steps). Set one of them.")
    length = own if share is None else round(share * steps) if isinstance(share, int | float) else share
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{key} must be at least one step long, got {length!r}.")
    return length


def _build_factor(index: int, part: Mapping[str, Any], length: int) -> Callable[[int], float]:
    """Return a part's learning rate, relative to the peak, as a function of the step."""
    key, name = f"schedule.parts[{index}]", str(part.get("name"))
    if name not in _NAMED:
        raise ConfigError(f"{key}: unknown schedule {name!r}{neighbours(name, _NAMED)}")
    options = {option: value for option, value in part.items() if option not in ("name", "steps", "share")}
    known = inspect.signature(_NAMED[name]).parameters.keys() - {"optimizer", "steps"}
    for option in options:
        if option not in known:
            raise ConfigError(f"unknown key '{key}.{option}'{neighbours(option, known)}")
    check_limits(_NAMED[name], options, key=key)
    single = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = _NAMED[name](single, steps=length, **options)
    assert isinstance(schedule, LambdaLR)
    return schedule.lr_lambdas[0]
