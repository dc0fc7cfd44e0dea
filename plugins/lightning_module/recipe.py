"""Train an unmodified LightningModule: its model, loss, optimizer, schedule and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plugins.lightning_module.manual_recipe import ManualLightningRecipe
from plugins.lightning_module.optimization import PositionSchedule, Scheduled, call_configure_optimizers
from plugins.lightning_module.program import LightningProgram
from plugins.lightning_module.step_log import mean_over, training_metrics
from plugins.lightning_module.step_module import StepModule, evaluation_metrics, extract_loss
from worldsize.core import Batch, ConfigError, LossOutput, Recipe, StateMetric
from worldsize.errors import require

require("recipe=lightning_module", "lightning>=2.6,!=2.6.2,!=2.6.3")  # two releases contain malware


def lightning_recipe(program: LightningProgram, *, run_decides: bool = False, **keys: Any) -> Recipe:
    """Create the recipe that trains what ``program`` would pass to ``lightning.Trainer.fit``.

    Args:
        run_decides: whether the run's batch sizes and shuffling override the DataLoaders'; otherwise a mismatch raises.
        keys: configuration keys that ``program`` was built from; ignored.

    Raises:
        ConfigError: ``program`` has unsupported features, or differs from the run.
    """
    program.check_support(run_decides=run_decides)
    return ManualLightningRecipe(program) if program.is_manual else LightningRecipe(program)


@final
class LightningRecipe(Recipe):
    """Trains a module with one optimizer and a ``training_step`` that returns the loss."""

    def __init__(self, program: LightningProgram) -> None:
        self._program = program
        self.evaluation_split = program.evaluation_split
        self._scheduled: Scheduled | None = None  # from the latest call of configure_optimizers

    def model(self) -> nn.Module:
        """Return the module, wrapped for use by strategies; the wrapper's forward pass is a step."""
        return self._program.new_module()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer from ``configure_optimizers``, which must be the only one."""
        assert isinstance(model, StepModule)
        model.connect_modules()
        made = call_configure_optimizers(model.lightning)
        if len(made.optimizers) > 1:
            raise ConfigError(
                f"{type(model.lightning).__name__}.configure_optimizers returned {len(made.optimizers)} "
                "optimizers, but automatic optimization supports one. Use manual optimization: "
                "self.automatic_optimization = False."
            )
        (optimizer,) = made.optimizers
        self._scheduled = made.find_schedule(optimizer)
        return optimizer

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the module's schedule, advanced every step or epoch as configured."""
        own = self._scheduled
        return None if own is None else PositionSchedule(own, optimizer, self._program.positions)

    def data(self, split: str) -> Any:
        """Return the training or evaluation data of the program's DataLoaders."""
        return self._program.get_split(split)

    def collate(self, samples: list[Any]) -> Batch:
        """Collate samples of a stream; map-style data sets have their DataLoader's collate_fn."""
        return self._program.collate(samples)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Return the loss as if at step 1; :meth:`loss_at` takes the actual step."""
        return self.loss_at(model, batch, 1)

    def loss_at(self, model: nn.Module, batch: Batch, step: int) -> LossOutput:
        """Return the output of ``training_step`` with its logged values."""
        index = self._program.positions.batch_index(step)
        output, logged = model("training_step", batch, index=index, step=step)
        return LossOutput(extract_loss(output, "training_step"), training_metrics(logged))

    def metrics(self) -> Mapping[str, StateMetric]:
        """Return the torchmetrics metrics among the module's submodules, by path."""
        return self._program.metrics

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        """Return values logged by the evaluation step, or else its loss, as (sum, count)."""
        assert isinstance(model, StepModule)
        run, name = self._program.run, self._program.evaluation_step
        if name is not None:
            return evaluation_metrics(model, name, batch, metrics=self._program.metrics, step=run.steps)
        output, _ = model("training_step", batch, index=0, step=run.steps)
        return {"loss_of_first_training_samples": mean_over(batch, extract_loss(output, "training_step"))}
