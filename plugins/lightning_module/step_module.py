"""Wrapper of a LightningModule for strategies; its forward pass is a step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from plugins.lightning_module.loaders import default_device
from plugins.lightning_module.manual import attach_step
from plugins.lightning_module.module_metrics import ModuleMetric, metrics_in, reset_metrics
from plugins.lightning_module.stand_in import RunFacts
from plugins.lightning_module.step_log import StepLog, mean_over
from worldsize.core import ConfigError, Metrics


@final
class StepModule(nn.Module):
    """Exposes the submodules of a LightningModule under the same names, and calls its steps.

    Strategies hook into the wrapper's forward pass. Inside a step, ``self(x)`` and submodules are thus called as usual.

    Args:
        lightning: the module.
        facts: the object that the module gets as ``self.trainer``.
        transfers: owner of each batch-transfer hook: the module or the data module.
    """

    def __init__(self, lightning: Any, facts: RunFacts, transfers: Mapping[str, Any]) -> None:
        super().__init__()
        self._held = (lightning,)  # a tuple, so that it is not registered as a submodule
        self._parameters, self._buffers, self._modules = lightning._parameters, lightning._buffers, lightning._modules
        self._non_persistent_buffers_set = lightning._non_persistent_buffers_set
        self._facts, self._log, self._transfers = facts, StepLog(), transfers
        self.training = lightning.training
        self.connect_modules()

    @property
    def lightning(self) -> Any:
        """The wrapped LightningModule."""
        return self._held[0]

    @property
    def step_log(self) -> StepLog:
        """The log of the step in progress."""
        return self._log

    def connect_modules(self, *, is_manual: bool = False) -> None:
        """Connect the LightningModules to the run's facts and log, which copies lose.

        ``is_manual``: whether the module steps its optimizers itself.
        """
        self.lightning.trainer = self._facts
        for part in self.lightning.modules():
            if hasattr(part, "log_dict") and hasattr(part, "save_hyperparameters"):
                object.__setattr__(part, "log", self._log.log)
                if is_manual:
                    attach_step(part, self._log)

    def train(self, mode: bool = True) -> StepModule:
        """Set training mode through the LightningModule's own method."""
        self.training = mode
        self.lightning.train(mode)
        return self

    def to(self, *args: Any, **options: Any) -> Any:
        """Move the LightningModule itself, so that it tracks its device."""
        self.lightning.to(*args, **options)
        return self

    def forward(self, name: str, batch: Any, *, index: int, step: int) -> tuple[Any, Metrics]:
        """Run step ``name`` on batch ``index``; return its output and logged values."""
        method = self.prepare_step(name, batch, step=step)
        moved = self.apply_transfer_hooks(batch)
        output = method(moved, index) if takes_index(method) else method(moved)
        if name == "training_step":
            self._log.check_numbers()
        return output, self._log.take_values()

    def prepare_step(self, name: str, batch: Any, *, step: int) -> Any:
        """Prepare step number ``step`` of the run, and return the module's method for it."""
        self._facts.set_step(step, name)
        self._log.start_step(batch)
        reset_metrics(self.lightning)
        device = default_device(batch)
        if self.lightning.device != device and device.type != "cpu":
            self.lightning.to(device)
        return getattr(self.lightning, name)

    def apply_transfer_hooks(self, batch: Any) -> Any:
        """Call the program's overridden batch-transfer hooks on ``batch``, and return the result."""
        for name, owner in self._transfers.items():
            batch = getattr(owner, name)(batch, 0)
        return batch


def takes_index(method: Any) -> bool:
    """Return whether a step method accepts a batch index."""
    parameters = inspect.signature(method).parameters.values()
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)


def evaluation_metrics(
    model: StepModule, name: str, batch: Any, *, step: int, metrics: Mapping[str, ModuleMetric]
) -> Mapping[str, tuple[Tensor, ...]]:
    """Evaluate a batch with step ``name``; return its logged values or loss as (sum, count).

    Raises:
        ConfigError: the step neither logs nor returns a value.
    """
    logged: Metrics
    output, logged = model(name, batch, index=0, step=step)
    objects = {id(metric): name for name, metric in model.step_log.objects.items()}
    states = {
        path: metrics[path].extract_inputs(metric, objects.get(id(metric), ""))
        for path, metric in metrics_in(model.lightning)
    }
    if logged or objects:
        return {**logged, **states}
    if output is None:
        raise ConfigError(f"{name} did not log a metric. Call self.log(name, value) in it.")
    return {"loss": mean_over(batch, extract_loss(output, name)), **states}


def extract_loss(output: Any, name: str) -> Tensor:
    """Return the loss, a scalar, from a step's output: the output itself, or its "loss" entry.

    Raises:
        ConfigError: there is no scalar loss.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = "None" if loss is None else f"an object of type {type(loss).__name__}"
        raise ConfigError(f"{name} returned {what}. Return the loss, a scalar tensor, or a dict with it as 'loss'.")
    return loss.reshape(()) if loss.ndim else loss
