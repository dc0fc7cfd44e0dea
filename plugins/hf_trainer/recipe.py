"""Train what a transformers.Trainer would train: its model, data, loss, optimizer and schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plugins.hf_trainer.arguments import RunValues, check_arguments
from plugins.hf_trainer.building import built_trainer
from plugins.hf_trainer.losses import TrainerLoss, rows_of, weighed
from plugins.hf_trainer.predictions import NAME, PredictionMetrics, has_metrics
from plugins.hf_trainer.program import check_trainer
from worldsize.core import PRECISIONS, Recipe, StateMetric
from worldsize.errors import missing_extra

_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # newer and older transformers


@final
@dataclass(frozen=True)
class HFTrainer(Recipe):
    """Train what a program hands to its ``transformers.Trainer``, which is built and never trained.

    Args:
        trainer: name of the function, as the configuration gives it.
        make_trainer: the function. It is called once in each process, on the CPU, after everything is seeded.
        run: the values of the run that TrainingArguments have too.
        run_decides: where TrainingArguments differ from the run, its values hold; otherwise the run is refused.

    Raises:
        ConfigError: transformers is not installed, or the Trainer has something that does not come along.
    """

    trainer: str
    make_trainer: Callable[..., Any]
    run: RunValues
    run_decides: bool = False

    def __post_init__(self) -> None:
        try:
            import accelerate
            import transformers
        except ImportError:
            raise missing_extra("recipe=hf_trainer", package="transformers[torch]", extra="recipes") from None
        del accelerate, transformers
        check_trainer(self._built)
        check_arguments(self._built.args, self.run, run_decides=self.run_decides)

    @cached_property
    def _built(self) -> Any:
        return built_trainer(self.make_trainer, name=self.trainer, seed=self.run.seed)

    @cached_property
    def _loss(self) -> TrainerLoss:
        return TrainerLoss(self._built)

    @cached_property
    def _predictions(self) -> PredictionMetrics | None:
        """Make the metric that calls ``compute_metrics``; return None if the Trainer would not call it."""
        if not has_metrics(self._built):
            return None
        return PredictionMetrics(self._built, casts_halves=PRECISIONS[self.run.precision].autocast is not None)

    def model(self) -> nn.Module:
        """Return a copy of the Trainer's model, which stays as it was built."""
        model: nn.Module = copy.deepcopy(self._built.model)
        arguments = self._built.args
        if arguments.gradient_checkpointing:  # an alias in newer versions of transformers
            name = next(name for name in _CHECKPOINTING if hasattr(model, name))
            getattr(model, name)(arguments.gradient_checkpointing_kwargs)
        return model.train()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the Trainer's optimizer: weights decay, biases and parameters of norms do not."""
        trainer = self._built
        decaying = set(trainer.get_decay_parameter_names(model))
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [each for name, each in named if name in decaying], "weight_decay": trainer.args.weight_decay},
            {"params": [each for name, each in named if name not in decaying], "weight_decay": 0.0},
        ]
        given = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        kind, options = given
        optimizer: Optimizer = kind([group for group in groups if group["params"]], **{**options, "lr": self.run.lr})
        return optimizer

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Make the Trainer's schedule, over the steps of the run."""
        from transformers import get_scheduler

        arguments, steps = self._built.args, self.run.steps
        schedule: LRScheduler = get_scheduler(
            arguments.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=arguments.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )
        return schedule

    def data(self, split: str) -> Any:
        """Return the Trainer's data without the columns that its model does not take.

        Without an ``eval_dataset``, the split "test" is the first batch of the training data.
        """
        trainer = self._built
        chosen = trainer.train_dataset if split == "train" else trainer.eval_dataset
        if chosen is None:
            chosen = _first(trainer.train_dataset, self.run.evaluate_batch_size)
        return trainer._remove_unused_columns(chosen) if _is_table(chosen) else chosen

    def collate(self, samples: list[Any]) -> Mapping[str, Any]:
        """Make a batch by the Trainer's collator, without columns that the model does not take."""
        trainer = self._built
        return dict(trainer._get_collator_with_removed_columns(trainer.data_collator)(samples))

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the Trainer's mean loss, a scalar; if it counts labels, the sum over labels and their number."""
        mean, count, _ = self._loss.mean(model, batch)
        return weighed(mean, count)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, ...]]:
        """Return the Trainer's ``eval_loss`` as (sum, count), batch means weighted by samples, and the predictions."""
        mean, _, outputs = self._loss.mean(model, batch)
        rows = rows_of(batch)
        name = "loss" if self._built.eval_dataset is not None else "loss_of_first_training_samples"
        metrics: dict[str, tuple[Tensor, ...]] = {name: (mean.double() * rows.to(mean.device), rows)}
        if self._predictions is not None:
            metrics[NAME] = self._predictions.inputs(batch, outputs, mean, rows=int(rows))
        return metrics

    def metrics(self) -> Mapping[str, StateMetric]:
        """Return what ``compute_metrics`` computes, if the Trainer has it and an ``eval_dataset``."""
        return {} if self._predictions is None else {NAME: self._predictions}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers that transformers itself keeps on one device."""
        names = getattr(model, "_no_split_modules", None) or ()
        return [module for module in model.modules() if type(module).__name__ in names]


def _is_table(dataset: Any) -> bool:
    """Return whether a data set is a ``datasets.Dataset``; that package need not be installed."""
    from transformers.utils.import_utils import is_datasets_available

    if not is_datasets_available():
        return False
    from datasets import Dataset

    return isinstance(dataset, Dataset)


def _first(dataset: Any, count: int) -> Any:
    """Return the first samples of a data set or of a stream."""
    if not hasattr(dataset, "__getitem__"):
        return dataset.take(count) if hasattr(dataset, "take") else dataset
    if hasattr(dataset, "select"):
        return dataset.select(range(min(count, len(dataset))))
    return torch.utils.data.Subset(dataset, range(min(count, len(dataset))))
