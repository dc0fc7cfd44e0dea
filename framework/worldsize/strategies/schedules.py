"""Learning-rate schedules of recipes, advanced after each update or by an evaluation metric."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from worldsize.core import ConfigError, Recipe, StateDict, Strategy
from worldsize.errors import neighbours

_METRICS = ("metrics", "metric")  # names of the metric argument of a schedule's step()
_EVALUATED = "evaluated_step"


@final
class Schedule:
    """Wrapper of the schedule ``plain`` that a recipe returned.

    Attributes:
        plain: The wrapped schedule.
        needs_metric: Whether it is advanced by the metric of each evaluation instead of after each update.

    Raises:
        ConfigError: its ``step`` requires other arguments than a metric, or it lacks a scheduler's methods.
    """

    def __init__(self, plain: LRScheduler) -> None:
        self.plain, self.needs_metric = plain, _needs_metric(plain)
        self._evaluated = 0  # the step of the last evaluation that advanced it

    @staticmethod
    def create_schedules(recipe: Recipe, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Schedule]:
        """Create the recipe's schedules, keyed by the names of their optimizers.

        Raises:
            ConfigError: a schedule's name does not match any optimizer, or matches the wrong one.
        """
        schedules, kind = recipe.schedules(optimizers), type(recipe).__name__
        for name, schedule in schedules.items() if recipe.has_several_updates else ():
            if name not in optimizers:
                raise ConfigError(f"{kind}.schedules: unknown optimizer {name!r}{neighbours(name, optimizers)}")
            if schedule.optimizer is not optimizers[name]:
                raise ConfigError(
                    f"{kind}.schedules: the schedule {name!r} belongs to a different optimizer. Use the name of its "
                    "optimizer as the key of each schedule."
                )
        return {name: Schedule(plain) for name, plain in schedules.items()}

    def step(self) -> None:
        """Advance the schedule after an update, unless it needs a metric."""
        if not self.needs_metric:
            self.plain.step()

    def advance_by(self, value: float, *, step: int) -> None:
        """Advance the schedule by the metric ``value`` evaluated after ``step``, if it needs one.

        A second call for a step does nothing, since an evaluation is repeated if a process died in it.
        """
        if self.needs_metric and step > self._evaluated:
            advance: Any = self.plain.step
            advance(value)
            self._evaluated = step

    def state_dict(self) -> StateDict:
        """Return the state of the schedule."""
        state = self.plain.state_dict()
        return {**state, _EVALUATED: self._evaluated} if self.needs_metric else state

    def load_state_dict(self, state: StateDict) -> None:
        """Load what :meth:`state_dict` returned."""
        self._evaluated = state.get(_EVALUATED, 0)
        self.plain.load_state_dict({key: value for key, value in state.items() if key != _EVALUATED})

    def set_rates(self) -> None:
        """Set the next step's learning rates from the current schedule, not the saved one."""
        plain = self.plain
        if isinstance(plain, LambdaLR):  # other schedules of torch restore their hyperparameters from their state
            pairs = zip(plain.base_lrs, plain.lr_lambdas, strict=True)
            rates = [base * factor(plain.last_epoch) for base, factor in pairs]
            for group, rate in zip(plain.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def _needs_metric(plain: Any) -> bool:
    """Return whether ``plain.step`` takes a metric; raise ConfigError if it is not a schedule."""
    name = type(plain).__name__
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(plain, method, None)):
            raise ConfigError(
                f"schedule() returned a {name} without a {method}() method. Return a scheduler from "
                "torch.optim.lr_scheduler, such as LambdaLR."
            )
    needed = [
        parameter.name
        for parameter in inspect.signature(plain.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed and (len(needed) > 1 or needed[0] not in _METRICS):
        raise ConfigError(
            f"schedule returned a {name}, but its step() requires {' and '.join(needed)}. Return a schedule with "
            "step(), called after each update, such as LambdaLR, or step(metrics), called after each evaluation, such "
            "as ReduceLROnPlateau."
        )
    return bool(needed)


def check_metric(schedules: Sequence[Schedule], strategy: Strategy | None, metric: str | None) -> None:
    """Raise ConfigError if ``metric`` is missing or unused, or the strategy does not support it.

    ``strategy``: the strategy of the run, or None for a plain loop.
    """
    needing = [type(schedule.plain).__name__ for schedule in schedules if schedule.needs_metric]
    if not needing and metric is not None:
        raise ConfigError(
            f"schedule_metric={metric} requires a schedule that steps on a metric. Set schedule_metric=null, or return "
            "a schedule such as ReduceLROnPlateau from Recipe.schedule."
        )
    if needing and strategy is not None and not strategy.schedules_by_metric:
        raise ConfigError(
            f"{type(strategy).__name__}, as configured, does not support schedules that step on an evaluation metric, "
            f"such as {needing[0]}. Set strategy=ddp, or use a schedule that steps after each update."
        )
    if needing and metric is None:
        raise ConfigError(
            f"{needing[0]} requires an evaluation metric. Set schedule_metric to a metric of the recipe's evaluation, "
            "such as loss, and evaluate_every to the number of steps between evaluations."
        )
