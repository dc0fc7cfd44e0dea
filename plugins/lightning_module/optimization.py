"""Parse the optimizers and schedules returned by ``configure_optimizers``."""

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
    """A schedule from ``configure_optimizers``.

    Args:
        interval: unit of the schedule, "step" or "epoch".
        frequency: units between advances.
    """

    scheduler: LRScheduler
    interval: str = "epoch"
    frequency: int = 1


@final
@dataclass(frozen=True)
class Configured:
    """The optimizers of a module, in its order, and their schedules."""

    optimizers: Sequence[Optimizer]
    schedules: Sequence[Scheduled]

    def find_schedule(self, optimizer: Optimizer) -> Scheduled | None:
        """Return the schedule of an optimizer, or None if it has none.

        Raises:
            ConfigError: the optimizer has several schedules.
        """
        own = [each for each in self.schedules if each.scheduler.optimizer is optimizer]
        if len(own) > 1:
            raise ConfigError(
                "configure_optimizers returned several schedules for one optimizer; only one is supported. Chain "
                "them with torch.optim.lr_scheduler.ChainedScheduler."
            )
        return own[0] if own else None


def call_configure_optimizers(module: Any) -> Configured:
    """Call ``configure_optimizers``.

    Raises:
        ConfigError: it returns a form unknown to Lightning, or a schedule that depends on more than the step number.
    """
    returned = module.configure_optimizers()
    optimizers, schedules = _split_returned(returned)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        what = "None" if returned is None else f"an object of type {type(returned).__name__}"
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returned {what}. Return an optimizer, a list of "
            "optimizers, lists of optimizers and schedules, or dicts with 'optimizer' and 'lr_scheduler'."
        )
    scheduled = [_parse_schedule(each) for each in schedules]
    for each in scheduled:
        if not any(each.scheduler.optimizer is optimizer for optimizer in optimizers):
            raise ConfigError(
                "configure_optimizers returned a schedule for an optimizer that it did not return. Return that "
                "optimizer too, or use a returned optimizer for the schedule."
            )
    return Configured(optimizers, scheduled)


def _split_returned(returned: Any) -> tuple[list[Any], list[Any]]:
    """Split Lightning's return formats into optimizers and schedules."""
    match returned:
        case Mapping() if "frequency" in returned:
            raise ConfigError(
                "configure_optimizers returned an optimizer with a frequency, which Lightning 2 ignores. Remove "
                "the frequency, and step the optimizer in training_step with self.automatic_optimization = False."
            )
        case Mapping():
            return [returned.get("optimizer")], [returned["lr_scheduler"]] if "lr_scheduler" in returned else []
        case [list() | tuple() as optimizers, schedules]:
            return list(optimizers), list(schedules) if isinstance(schedules, list | tuple) else [schedules]
        case list() | tuple():
            pairs = [_split_returned(each) for each in returned]
            return [each for own, _ in pairs for each in own], [each for _, own in pairs for each in own]
    return [returned], []


def _parse_schedule(given: Any) -> Scheduled:
    words = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = words.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau) or words.get("reduce_on_plateau"):
        raise ConfigError(
            "ReduceLROnPlateau is not supported in configure_optimizers: the learning rate must depend only "
            "on the step, not on metrics. Use a different schedule of torch.optim.lr_scheduler."
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"configure_optimizers returned a {type(scheduler).__name__} as the learning-rate scheduler. "
            "Return a scheduler "
            "from torch.optim.lr_scheduler."
        )
    interval, frequency = words.get("interval", "epoch"), words.get("frequency", 1)
    if interval not in ("step", "epoch") or not isinstance(frequency, int) or frequency < 1:
        raise ConfigError(
            f"configure_optimizers returned a schedule with interval={interval!r}, frequency={frequency!r}. "
            "interval must be 'step' or 'epoch', frequency at least 1."
        )
    return Scheduled(scheduler, interval, frequency)


class ModuleSchedule(LRScheduler):
    """Base class for a module's schedules; copies their optimizer's hyperparameters to the optimizer in use."""

    def __init__(self, scheduled: Scheduled, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduled.scheduler
        self._steps = 0
        # otherwise the scheduler would warn that its optimizer does not step; a different optimizer steps instead
        self.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _step_scheduler(self) -> None:
        self.scheduler.step()
        self._hand_over()

    def _hand_over(self) -> None:
        source = self.scheduler.optimizer
        if source is not self.optimizer:
            for group, values in zip(self.optimizer.param_groups, source.param_groups, strict=True):
                group.update({name: value for name, value in values.items() if name != "params"})

    def get_last_lr(self) -> list[float | Tensor]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]
        self.scheduler.load_state_dict(state_dict["scheduler"])
        source = self.scheduler.optimizer
        for group, rate in zip(source.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        self._hand_over()


@final
class PositionSchedule(ModuleSchedule):
    """Advances a module's schedule by steps or epochs, as configured by ``configure_optimizers``."""

    def __init__(self, scheduled: Scheduled, optimizer: Optimizer, positions: Positions) -> None:
        super().__init__(scheduled, optimizer)
        self._scheduled, self._positions = scheduled, positions

    def step(self, epoch: int | None = None) -> None:
        """Count a step, and advance the schedule when due."""
        self._steps += 1
        if self._is_due():
            self._step_scheduler()

    def _is_due(self) -> bool:
        every = self._scheduled.frequency
        if self._scheduled.interval == "step":
            return (self._positions.batch_index(self._steps) + 1) % every == 0
        return self._positions.ends_epoch(self._steps) and (self._positions.find_epoch(self._steps) + 1) % every == 0


@final
class ManualSchedule(ModuleSchedule):
    """A schedule that the module advances itself, once per step for all micro-batches."""

    def __init__(self, scheduled: Scheduled, optimizer: Optimizer) -> None:
        super().__init__(scheduled, optimizer)
        self._current = self._before = 0  # last step in which the schedule advanced, and its count before that step
        self._ended: int | None = None  # step that at least one micro-batch has finished

    def step(self, epoch: int | None = None) -> None:
        """Do nothing after an update: the module advances its schedule itself."""

    def advance_to_count(self, step: int, count: int) -> None:
        """Advance the schedule for the ``count``-th time in ``step``, unless a different micro-batch already has."""
        self._start_step(step)
        if self._before + count > self._steps and self._ended != step:
            self._steps += 1
            self._step_scheduler()

    def check_count(self, step: int, count: int) -> None:
        """Finish ``step`` for a micro-batch that advanced the schedule ``count`` times.

        Raises:
            ConfigError: another micro-batch advanced it a different number of times.
        """
        self._start_step(step)
        self._ended = step
        if self._before + count != self._steps:
            raise ConfigError(
                f"training_step advances a schedule {count} times for one micro-batch of step {step} and "
                f"{self._steps - self._before} times for another. Make the number of advances depend only on "
                "batch_idx and the epoch."
            )

    def _start_step(self, step: int) -> None:
        if step != self._current:
            self._current, self._before, self._ended = step, self._steps, None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._current, self._before, self._ended = 0, self._steps, None
