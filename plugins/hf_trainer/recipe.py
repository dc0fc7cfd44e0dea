"""Train the model of a transformers.Trainer with its data, loss, optimizer and schedule."""

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
from plugins.hf_trainer.building import build_trainer
from plugins.hf_trainer.losses import TrainerLoss, count_rows, weigh_loss
from plugins.hf_trainer.predictions import NAME, PredictionMetrics, has_metrics
from plugins.hf_trainer.program import check_trainer
from worldsize.core import PRECISIONS, Recipe, StateMetric
from worldsize.errors import require

_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # newer and older transformers


@final
@dataclass(frozen=True)
class HFTrainer(Recipe):
    """Train like a program's ``transformers.Trainer``, using its parts without running the Trainer itself.

    Args:
        trainer: name of the function that creates the Trainer, as in the configuration.
        make_trainer: that function; called once per process, on the CPU, after seeding.
        run: run settings that also exist in TrainingArguments.
        run_decides: whether ``run`` overrides differing TrainingArguments; otherwise they raise an error.

    Raises:
        ConfigError: transformers is not installed, or the Trainer is customized in an unsupported way.
    """

    trainer: str
    make_trainer: Callable[..., Any]
    run: RunValues
    run_decides: bool = False

    evaluation_split = "eval"

    def __post_init__(self) -> None:
        for package in ("transformers", "accelerate"):
            require("recipe=hf_trainer", package, extra="recipes")
        check_trainer(self._built)
        check_arguments(self._built.args, self.run, run_decides=self.run_decides)

    @cached_property
    def _built(self) -> Any:
        return build_trainer(self.make_trainer, name=self.trainer, seed=self.run.seed)

    @cached_property
    def _loss(self) -> TrainerLoss:
        return TrainerLoss(self._built)

    @cached_property
    def _predictions(self) -> PredictionMetrics | None:
        """The metric that calls ``compute_metrics``; None if the Trainer would not call it."""
        if not has_metrics(self._built):
            return None
        return PredictionMetrics(self._built, casts_halves=PRECISIONS[self.run.precision].autocast is not None)

    def model(self) -> nn.Module:
        """Return a copy of the Trainer's model, leaving the original unchanged."""
        model: nn.Module = copy.deepcopy(self._built.model)
        arguments = self._built.args
        if arguments.gradient_checkpointing:  # in newer versions, an alias of activation_checkpointing
            name = next(name for name in _CHECKPOINTING if hasattr(model, name))
            getattr(model, name)(arguments.gradient_checkpointing_kwargs)
        return model.train()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Create the Trainer's optimizer, without weight decay for biases and norm parameters."""
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
        """Create the Trainer's learning-rate schedule, for the length of this run."""
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
        """Return the Trainer's data without the columns unused by its model.

        Without an ``eval_dataset``, the "eval" split is the first batch of the training data.
        """
        trainer = self._built
        chosen = trainer.train_dataset if split == "train" else trainer.eval_dataset
        if chosen is None:
            chosen = _select_first(trainer.train_dataset, self.run.evaluate_batch_size)
        return trainer._remove_unused_columns(chosen) if _is_table(chosen) else chosen

    def collate(self, samples: list[Any]) -> Mapping[str, Any]:
        """Create a batch with the Trainer's collator, without columns unused by the model."""
        trainer = self._built
        return dict(trainer._get_collator_with_removed_columns(trainer.data_collator)(samples))

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the Trainer's mean loss, a scalar, or (sum over labels, count) if it counts labels."""
        mean, count, _ = self._loss.compute_mean_loss(model, batch)
        return weigh_loss(mean, count)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, ...]]:
        """Return ``eval_loss`` as (sum, count), weighted by samples, and the predictions."""
        mean, _, outputs = self._loss.compute_mean_loss(model, batch)
        rows = count_rows(batch)
        name = "loss" if self._built.eval_dataset is not None else "loss_of_first_training_samples"
        metrics: dict[str, tuple[Tensor, ...]] = {name: (mean.double() * rows.to(mean.device), rows)}
        if self._predictions is not None:
            metrics[NAME] = self._predictions.collect_inputs(batch, outputs, mean, rows=int(rows))
        return metrics

    def metrics(self) -> Mapping[str, StateMetric]:
        """Return the metric for ``compute_metrics``, if the Trainer has one and an ``eval_dataset``."""
        return {} if self._predictions is None else {NAME: self._predictions}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers that transformers never splits across devices."""
        names = getattr(model, "_no_split_modules", None) or ()
        return [module for module in model.modules() if type(module).__name__ in names]


def _is_table(dataset: Any) -> bool:
    """Return whether a data set is a ``datasets.Dataset``, without requiring that package."""
    from transformers.utils.import_utils import is_datasets_available

    if not is_datasets_available():
        return False
    from datasets import Dataset

    return isinstance(dataset, Dataset)


def _select_first(dataset: Any, count: int) -> Any:
    """Return the first ``count`` samples of a map-style data set or a stream."""
    if not hasattr(dataset, "__getitem__"):
        return dataset.take(count) if hasattr(dataset, "take") else dataset
    if hasattr(dataset, "select"):
        return dataset.select(range(min(count, len(dataset))))
    return torch.utils.data.Subset(dataset, range(min(count, len(dataset))))
