"""A recipe's schedule, advanced after each update or, like ReduceLROnPlateau, by the metric of each evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, final

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from worldsize.core import ConfigError, StateDict, Strategy

_METRICS = ("metrics", "metric")  # names by which a schedule's step takes the metric of an evaluation
_EVALUATED = "evaluated_step"


@final
class Schedule:
    """The schedule ``plain`` that a recipe made.

    Attributes:
        plain: The schedule.
        needs_metric: Whether it is advanced by the metric of each evaluation instead of after each update.

    Raises:
        ConfigError: it can neither be advanced after an update nor by a metric, or has no state to save.
    """

    def __init__(self, plain: LRScheduler) -> None:
        self.plain, self.needs_metric = plain, _needs_metric(plain)
        self._evaluated = 0  # the step whose evaluation has advanced it last

    @staticmethod
    def of(plain: LRScheduler | None) -> Schedule | None:
        """Return the schedule; None if the recipe has none."""
        return None if plain is None else Schedule(plain)

    def step(self) -> None:
        """Advance it after an update, unless it waits for a metric."""
        if not self.needs_metric:
            self.plain.step()

    def advance_by(self, value: float, *, step: int) -> None:
        """Advance it by the metric of the evaluation after ``step``, if it needs one; a second time does nothing.

        An evaluation is repeated if a process is lost in it. Some processes may have completed it before.
        """
        if self.needs_metric and step > self._evaluated:
            advance: Any = self.plain.step
            advance(value)
            self._evaluated = step

    def state_dict(self) -> StateDict:
        """Return its state."""
        state = self.plain.state_dict()
        return {**state, _EVALUATED: self._evaluated} if self.needs_metric else state

    def load_state_dict(self, state: StateDict) -> None:
        """Load what :meth:`state_dict` returned."""
        self._evaluated = state.get(_EVALUATED, 0)
        self.plain.load_state_dict({key: value for key, value in state.items() if key != _EVALUATED})

    def set_rates(self) -> None:
        """Set the next step's learning rates from the present schedule, which may be longer than the saved one."""
        plain = self.plain
        if isinstance(plain, LambdaLR):  # torch's other schedules load their hyperparameters with their state
            pairs = zip(plain.base_lrs, plain.lr_lambdas, strict=True)
            rates = [base * factor(plain.last_epoch) for base, factor in pairs]
            for group, rate in zip(plain.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def _needs_metric(plain: Any) -> bool:
    """Return whether the step of ``plain`` takes a metric."""
    name = type(plain).__name__
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(plain, method, None)):
            raise ConfigError(
                f"schedule returned a {name}, which has no method {method}. Return a schedule of "
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
            f"schedule returned a {name}, whose step needs {' and '.join(needed)}. Return a schedule that is advanced "
            "by step() after each update, such as LambdaLR, or by step(metrics) after each evaluation, such as "
            "ReduceLROnPlateau."
        )
    return bool(needed)


def check_metric(schedules: Sequence[Schedule], strategy: Strategy | None, metric: str | None) -> None:
    """Raise ConfigError unless the run names a metric (key ``schedule_metric``) exactly if a schedule needs one.

    ``strategy``: the strategy of the run; None: a plain loop.
    """
    needing = [type(schedule.plain).__name__ for schedule in schedules if schedule.needs_metric]
    if not needing and metric is not None:
        raise ConfigError(
            f"schedule_metric={metric}: the recipe has no schedule that is advanced by a metric. "
            "Set schedule_metric=null, or return one such as ReduceLROnPlateau from schedule."
        )
    if needing and strategy is not None and not strategy.schedules_by_metric:
        raise ConfigError(
            f"{needing[0]} is advanced by the metric of an evaluation between two steps, and steps overlap under this "
            f"{type(strategy).__name__}. Set strategy=ddp, or use a schedule that is advanced after each update."
        )
    if needing and metric is None:
        raise ConfigError(
            f"{needing[0]} is advanced by the metric of an evaluation. Set schedule_metric to a metric that the recipe "
            "evaluates, such as loss, and evaluate_every to the steps between two evaluations."
        )
