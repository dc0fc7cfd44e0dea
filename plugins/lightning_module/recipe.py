"""Train a LightningModule: its model, loss, optimizer, schedule and data, without a change."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plugins.lightning_module.manual_recipe import ManualLightningRecipe
from plugins.lightning_module.optimization import PositionSchedule, Scheduled, configured
from plugins.lightning_module.program import LightningProgram
from plugins.lightning_module.step_log import mean_over, training_metrics
from plugins.lightning_module.step_module import StepModule, evaluation_metrics, loss_of
from worldsize.core import Batch, ConfigError, LossOutput, Recipe, StateMetric

if find_spec("lightning") is None:
    raise ConfigError(
        "recipe=lightning_module needs lightning, which is not installed. Install it: uv add lightning, or "
        "pip install lightning."
    )


def lightning_recipe(program: LightningProgram, *, run_decides: bool = False, **keys: Any) -> Recipe:
    """Make the recipe that trains what ``program`` would hand to ``lightning.Trainer.fit``.

    Args:
        run_decides: where DataLoaders differ from the run, its values hold; otherwise the run is refused.
        keys: keys of the configuration that ``program`` was made of.

    Raises:
        ConfigError: it has something that does not come along.
    """
    program.check(run_decides=run_decides)
    return ManualLightningRecipe(program) if program.is_manual else LightningRecipe(program)


@final
class LightningRecipe(Recipe):
    """Trains a module whose ``training_step`` returns the loss that one optimizer lowers."""

    def __init__(self, program: LightningProgram) -> None:
        self._program = program
        self._scheduled: Scheduled | None = None  # as the last call of configure_optimizers returned it

    def model(self) -> nn.Module:
        """Return the module as strategies see it: its forward pass is a step."""
        return self._program.new_module()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the one optimizer that ``configure_optimizers`` makes."""
        assert isinstance(model, StepModule)
        model.attach()
        made = configured(model.lightning)
        if len(made.optimizers) > 1:
            raise ConfigError(
                f"{type(model.lightning).__name__}.configure_optimizers returns {len(made.optimizers)} optimizers; "
                "training_step returns the loss of one. Step them in it: self.automatic_optimization = False."
            )
        (optimizer,) = made.optimizers
        self._scheduled = made.of(optimizer)
        return optimizer

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the module's schedule, advanced after the steps or epochs that it asks for."""
        own = self._scheduled
        return None if own is None else PositionSchedule(own, optimizer, self._program.positions)

    def data(self, split: str) -> Any:
        """Return the data sets of the DataLoaders; "test" are those of validation, unless they are to be tested."""
        return self._program.data(split)

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of samples of a stream; other data sets have the way of their DataLoader."""
        return self._program.collate(samples)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Return the loss of the first step."""
        return self.loss_at(model, batch, 1)

    def loss_at(self, model: nn.Module, batch: Batch, step: int) -> LossOutput:
        """Return what ``training_step`` returns, with what it logs."""
        index = self._program.positions.batch_index(step)
        output, logged = model("training_step", batch, index=index, step=step)
        return LossOutput(loss_of(output, "training_step"), training_metrics(logged))

    def metrics(self) -> Mapping[str, StateMetric]:
        """Return the metrics of torchmetrics that are parts of the module, by their paths."""
        return self._program.metrics

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        """Return the values logged by ``validation_step`` or ``test_step``, or else its loss, as (sum, count)."""
        assert isinstance(model, StepModule)
        run, name = self._program.run, self._program.evaluation_step
        if name is not None:
            return evaluation_metrics(model, name, batch, metrics=self._program.metrics, step=run.steps)
        output, _ = model("training_step", batch, index=0, step=run.steps)
        return {"loss_of_first_training_samples": mean_over(batch, loss_of(output, "training_step"))}
