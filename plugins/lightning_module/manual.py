"""Optimizers, gradients and schedules for a training step with manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plugins.lightning_module.attributes import StepAttributes
from plugins.lightning_module.gradient_guard import GradientGuard
from plugins.lightning_module.gradients import Gradients
from plugins.lightning_module.optimization import Configured, ManualSchedule
from plugins.lightning_module.step_log import StepLog
from plugins.lightning_module.untouched import Untouched
from worldsize.core import ConfigError, Update

_IN_PROGRESS: ContextVar[ManualStep] = ContextVar("manual step")


@final
@dataclass
class ManualOptimizers:
    """Optimizers and schedules of one model, and gradients left over from its last step."""

    optimizers: Mapping[str, Optimizer]
    """The optimizers to step, in the module's order; strategies may have sharded them."""
    parameters: Mapping[str, frozenset[int]]
    """Ids of each optimizer's parameters, before sharding."""
    known: frozenset[int]
    """Ids of all parameters of the model."""
    configured: Configured
    """The optimizers and schedules returned by ``configure_optimizers``."""
    schedules: Mapping[str, ManualSchedule] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    """Why an optimizer's gradient cannot be accumulated further; see :meth:`Gradients.explain_leftovers`."""
    attributes: StepAttributes = field(default_factory=StepAttributes)
    """The module's attributes for each micro-batch of a step."""
    first_step: int | None = None
    """The first step of this process, which has additional checks."""


@final
class ManualStep:
    """One training step on one micro-batch; the module itself steps the optimizers.

    Args:
        made: The optimizers.
        model: The model; the training step must not change its parameters.
        give: Called with each update; returns once the optimizer has stepped.
        step: Number of the step in the run.
    """

    def __init__(self, made: ManualOptimizers, model: nn.Module, give: Callable[[Update], None], step: int) -> None:
        self._made, self._give, self._step = made, give, step
        self._untouched = Untouched(model, made.optimizers)
        self.log = StepLog()
        self.schedulers = [StepScheduler(each, step, self._untouched) for each in made.schedules.values()]
        self._gradients = Gradients(made.parameters, made.known, made.left)
        self._guard = GradientGuard(made.known) if step == made.first_step else None
        self._toggled: str | None = None
        self._is_toggle_unused = False  # toggled without a backward pass since
        self._updates = 0
        self._is_epoch_end = False

    @property
    def optimizers(self) -> list[StepOptimizer]:
        """The optimizers in the module's order, created on each access to avoid a reference cycle."""
        return [StepOptimizer(self, name, each) for name, each in self._made.optimizers.items()]

    @contextmanager
    def activate_step(self) -> Iterator[None]:
        """Within the context, let the functions of :func:`attach_step` act on this step."""
        token = _IN_PROGRESS.set(self)
        self._untouched.record_state()
        try:
            with self._guard or nullcontext():
                yield
        finally:
            _IN_PROGRESS.reset(token)

    def toggle(self, optimizer: Any) -> None:
        """Accumulate gradients of subsequent losses only for this optimizer."""
        self._toggled, self._is_toggle_unused = self._find_name(optimizer), True

    def untoggle(self, optimizer: Any) -> None:
        """Undo :meth:`toggle`: accumulate gradients for all optimizers again."""
        self._toggled = None

    def backward(self, loss: Any, *args: Any, **options: Any) -> None:
        """Record a loss passed to ``manual_backward``; the gradient is computed at an optimizer step.

        Raises:
            ConfigError: the loss is not a scalar, unsupported arguments are passed, or an optimizer was untoggled
                before its backward pass.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError("self.manual_backward requires a scalar loss, such as loss.mean().")
        options.pop("retain_graph", None)  # not needed: each backward pass is for the parameters of one optimizer
        if args or options:
            raise ConfigError(
                "self.manual_backward supports only the loss argument. Remove the other arguments, or use "
                "torch.autograd.grad for partial gradients."
            )
        if self._toggled is None and self._is_toggle_unused:
            raise ConfigError(
                "self.manual_backward was called after untoggle_optimizer. Call it while the optimizer is "
                "toggled, or remove toggle_optimizer."
            )
        self._is_toggle_unused = False
        names = list(self._made.optimizers) if self._toggled is None else [self._toggled]
        self._gradients.add_loss(loss.sum() if loss.ndim else loss, names)

    def take_step(self, name: str) -> None:
        """Step an optimizer with the losses of backward passes since its last ``zero_grad``.

        Raises:
            ConfigError: the optimizer's gradient has other contributions; it has no loss; the module changed
                parameters, gradients or optimizer settings; or the epoch has ended.
        """
        if self._is_epoch_end:
            raise ConfigError("on_train_epoch_end must not step an optimizer. Step it in training_step.")
        self._updates += 1
        self._check_untouched()
        self._give((name, self._gradients.take_loss(name)))
        self._untouched.record_state()

    def zero_gradient(self, name: str) -> None:
        """Clear the gradient of an optimizer."""
        self._gradients.clear_gradient(name)

    def finish_step(self, end_epoch: Callable[[], Any] | None) -> None:
        """End the step, and the epoch if this is the epoch's last step.

        Raises:
            ConfigError: no optimizer was stepped; the module changed parameters, gradients or optimizer settings; or
                micro-batches advance schedules differently.
        """
        self._check_untouched()
        if not self._updates:
            raise ConfigError(
                f"training_step did not step an optimizer in step {self._step}; gradients are not kept between "
                "steps. Step in every batch. To accumulate N batches, use an N times larger batch_size with "
                "logical_ranks=N."
            )
        self._made.left = self._gradients.explain_leftovers()
        if end_epoch is not None:
            self._is_epoch_end = True
            self.log.close("on_train_epoch_end")
            self._untouched.record_state()
            end_epoch()
            self._check_untouched()
        for schedule in self.schedulers:
            schedule.check_advances()

    def _check_untouched(self) -> None:
        """Raise ConfigError if the module changed parameters, gradients or learning rates."""
        self._untouched.check_state()
        if self._guard is not None:
            self._guard.check_data()

    def _find_name(self, optimizer: Any) -> str:
        wanted = optimizer.optimizer if isinstance(optimizer, StepOptimizer) else optimizer
        for name, each in self._made.optimizers.items():
            if each is wanted:
                return name
        raise ConfigError("toggle_optimizer requires an optimizer returned by self.optimizers().")


@final
class StepOptimizer:
    """An optimizer as returned by ``self.optimizers()`` in a training step.

    Other attributes are forwarded to ``optimizer``.
    """

    def __init__(self, step: ManualStep, name: str, optimizer: Optimizer) -> None:
        self._step, self._name, self.optimizer = step, name, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer, after calling ``closure`` to compute the gradient, if given."""
        if options:
            raise ConfigError(
                f"step({', '.join(options)}=...) is not supported: an optimizer's step() accepts only a closure. "
                "Remove the other arguments."
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._step.take_step(self._name)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the optimizer's gradient."""
        self._step.zero_gradient(self._name)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Accumulate gradients only for this optimizer, within the context."""
        self._step.toggle(self)
        yield
        self._step.untoggle(self)


@final
class StepScheduler:
    """A schedule as returned by ``self.lr_schedulers()``. All micro-batches of a step advance it once."""

    def __init__(self, schedule: ManualSchedule, step: int, untouched: Untouched) -> None:
        self._schedule, self._step, self._untouched = schedule, step, untouched
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule.scheduler, name)

    def step(self, *args: Any, **options: Any) -> None:
        """Advance the schedule by one step."""
        if args or options:
            raise ConfigError(
                "a schedule's step() takes no arguments in worldsize: the learning rate must depend only on the "
                "step. Remove the arguments, and do not use ReduceLROnPlateau."
            )
        self._count += 1
        self._untouched.check_settings()
        self._schedule.advance_to_count(self._step, self._count)
        self._untouched.begin_settings()

    def check_advances(self) -> None:
        """Raise ConfigError if the step's micro-batches advanced the schedule differently."""
        self._schedule.check_count(self._step, self._count)


def attach_step(part: Any, log: StepLog) -> None:
    """Add manual-optimization functions to a module; outside of steps, ``self.log`` writes to ``log``."""
    own = {
        "log": lambda *args, **options: _get_log_function(log)(*args, **options),
        "optimizers": _optimizers,
        "lr_schedulers": _schedulers,
        "manual_backward": lambda *args, **options: _get_current_step("manual_backward").backward(*args, **options),
        "toggle_optimizer": lambda optimizer: _get_current_step("toggle_optimizer").toggle(optimizer),
        "untoggle_optimizer": lambda optimizer: _get_current_step("untoggle_optimizer").untoggle(optimizer),
        "clip_gradients": _refuse_clipping,
    }
    for name, function in own.items():
        object.__setattr__(part, name, function)


def _get_current_step(name: str) -> ManualStep:
    try:
        return _IN_PROGRESS.get()
    except LookupError:
        raise ConfigError(f"self.{name}() was called outside training_step. Call it in training_step.") from None


def _get_log_function(outside: StepLog) -> Callable[..., None]:
    step = _IN_PROGRESS.get(None)
    return outside.log if step is None else step.log.log


def _optimizers(use_pl_optimizer: bool = True) -> StepOptimizer | list[StepOptimizer]:
    own = _get_current_step("optimizers").optimizers
    return own[0] if len(own) == 1 else own


def _schedulers() -> StepScheduler | list[StepScheduler] | None:
    own: Sequence[StepScheduler] = _get_current_step("lr_schedulers").schedulers
    return None if not own else own[0] if len(own) == 1 else list(own)


def _refuse_clipping(*args: Any, **options: Any) -> NoReturn:
    raise ConfigError(
        "self.clip_gradients is not supported: gradients are computed in the optimizer's step(). Remove "
        "it, and set clip_norm."
    )
