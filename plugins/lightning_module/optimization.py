"""Reads optimizers and schedules off what ``configure_optimizers`` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from plugins.lightning_module.positions import Positions
from worldsize.core import ConfigError


@final
@dataclass(frozen=True)
class Scheduled:
    """A schedule of ``configure_optimizers``.

    Args:
        interval: "step" or "epoch": what it is counted by.
        frequency: it advances once in so many of them.
    """

    scheduler: LRScheduler
    interval: str = "epoch"
    frequency: int = 1


@final
@dataclass(frozen=True)
class Configured:
    """The optimizers of a module in its order, and their schedules."""

    optimizers: Sequence[Optimizer]
    schedules: Sequence[Scheduled]

    def of(self, optimizer: Optimizer) -> Scheduled | None:
        """Return the schedule of an optimizer, if it has one.

        Raises:
            ConfigError: it has several.
        """
        own = [each for each in self.schedules if each.scheduler.optimizer is optimizer]
        if len(own) > 1:
            raise ConfigError(
                "configure_optimizers returns several schedules of one optimizer, and worldsize advances one. Chain "
                "them: torch.optim.lr_scheduler.ChainedScheduler."
            )
        return own[0] if own else None


def configured(module: Any) -> Configured:
    """Call ``configure_optimizers``.

    Raises:
        ConfigError: it returns none of the forms that Lightning knows, or a schedule that does not follow from the
            number of the step.
    """
    returned = module.configure_optimizers()
    optimizers, schedules = _parts(returned)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        what = "None" if returned is None else f"a {type(returned).__name__}"
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returned {what}. Return an optimizer, a list of them, a "
            "pair of lists with their schedules, or dicts with 'optimizer' and 'lr_scheduler'."
        )
    return Configured(optimizers, [_scheduled(each) for each in schedules])


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedules, in the forms that Lightning knows."""
    match returned:
        case Mapping():
            return [returned.get("optimizer")], [returned["lr_scheduler"]] if "lr_scheduler" in returned else []
        case [list() | tuple() as optimizers, schedules]:
            return list(optimizers), list(schedules) if isinstance(schedules, list | tuple) else [schedules]
        case list() | tuple():
            pairs = [_parts(each) for each in returned]
            return [each for own, _ in pairs for each in own], [each for _, own in pairs for each in own]
    return [returned], []


def _scheduled(given: Any) -> Scheduled:
    words = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = words.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau) or words.get("reduce_on_plateau"):
        raise ConfigError(
            "configure_optimizers returns a ReduceLROnPlateau, whose rate follows from metrics: in worldsize it "
            "follows from the step alone. Choose another schedule of torch.optim.lr_scheduler."
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"configure_optimizers returns a schedule that is a {type(scheduler).__name__}. Return one of "
            "torch.optim.lr_scheduler."
        )
    interval, frequency = words.get("interval", "epoch"), words.get("frequency", 1)
    if interval not in ("step", "epoch") or not isinstance(frequency, int) or frequency < 1:
        raise ConfigError(
            f"configure_optimizers returns a schedule with interval={interval!r}, frequency={frequency!r}. The "
            "interval is 'step' or 'epoch', the frequency a number from 1 on."
        )
    return Scheduled(scheduler, interval, frequency)


@final
class PositionSchedule(LRScheduler):
    """Advances a module's schedule by steps or epochs, and hands its rates to the optimizer that is in fact used."""

    def __init__(self, scheduled: Scheduled, optimizer: Optimizer, positions: Positions) -> None:
        self.optimizer = optimizer
        self._scheduled, self._positions = scheduled, positions
        self._steps = 0
        # it warns if its optimizer takes no step, which another one may do instead
        scheduled.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self, epoch: int | None = None) -> None:
        """Count a step, and advance the schedule if that is due."""
        self._steps += 1
        if self._is_due():
            self._scheduled.scheduler.step()
            self._hand_over()

    def _is_due(self) -> bool:
        every = self._scheduled.frequency
        if self._scheduled.interval == "step":
            return (self._positions.batch_index(self._steps) + 1) % every == 0
        return self._positions.ends_epoch(self._steps) and (self._positions.epoch(self._steps) + 1) % every == 0

    def _hand_over(self) -> None:
        source = self._scheduled.scheduler.optimizer
        if source is not self.optimizer:
            for group, values in zip(self.optimizer.param_groups, source.param_groups, strict=True):
                group.update({name: value for name, value in values.items() if name != "params"})

    def get_last_lr(self) -> list[float | Tensor]:
        return self._scheduled.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "scheduler": self._scheduled.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]
        self._scheduled.scheduler.load_state_dict(state_dict["scheduler"])
        source = self._scheduled.scheduler.optimizer
        for group, rate in zip(source.param_groups, self._scheduled.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        self._hand_over()
