"""What is learned: model, data, loss, evaluation. Nothing here knows of processes, devices or strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from worldsize.core.state_metric import StateMetric

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Batch = Any
Metrics: TypeAlias = "Mapping[str, tuple[Tensor, Tensor]]"  # each as (sum, count), two scalars
StateDict = dict[str, Any]
TensorStyle = Literal["column", "row"]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss with what else the same forward pass tells, to be logged beside it.

    Attributes:
        loss: The mean over the micro-batch, a scalar; or two scalars, the sum over it and its weight.
        metrics: Each metric as (sum, count) over the micro-batch, two scalars; the same names in every step. A logged
            step shows it as ``train/<name>``: the sum over all ranks and all steps since the last logged one, divided.
    """

    loss: Tensor | tuple[Tensor, Tensor]
    metrics: Metrics = field(default_factory=dict)

    @staticmethod
    def of(loss: Loss) -> LossOutput:
        """Return ``loss`` in this form; one that has none has no metrics."""
        return loss if isinstance(loss, LossOutput) else LossOutput(loss)


Loss: TypeAlias = "Tensor | tuple[Tensor, Tensor] | LossOutput"  # a mean, or a sum and its weight; or with metrics


class Recipe(ABC):
    """The task to learn. It knows nothing of processes, devices or how replicas agree."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, whatever trains it, so that its initial weights are the same everywhere.

        Strategies that shard the model may run this with fakes of tensors, and make the weights later, one at a time.
        They may call it more than once; each call must return the same model, whatever was called before, but for the
        random numbers of torch, NumPy and ``random`` that it draws.
        """

    def pretrained_weights(self) -> PretrainedWeights | None:
        """Say in which files the weights are that :meth:`model` returns; each rank then reads the parts that it holds.

        ``None``: no file has them, or only the model's library can read it.
        """
        return None

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer of ``model``, whose parameters a strategy may have moved or divided by then."""

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the learning-rate schedule, advanced once an optimizer step; ``None`` keeps the rate constant."""
        return None

    @abstractmethod
    def data(self, split: str) -> Any:
        """Return the dataset of ``split``, one of :meth:`splits`: map-style or iterable.

        A map-style dataset with a method ``load_batch(indices: Tensor)`` is asked for a whole batch at
        once; one with ``__getitems__`` for a list of samples; any other sample by sample. Its attribute ``lengths``,
        a tensor [samples], says how long each is, for ``length_balanced``.
        """

    def splits(self) -> Sequence[str]:
        """Name the data that :meth:`data` knows; ``evaluation.splits`` chooses among them."""
        return ("train", "test")

    def tokens_per_sample(self) -> int | None:
        """Return the tokens of a sample, where all have as many; lengths of a schedule may be given in tokens then."""
        return None

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of samples; torch's way unless overridden, for example to pad them to one length."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss, a scalar: the mean over the micro-batch; or two scalars, the sum over it and its weight.

        A step's gradient is that of the mean of means; with weights, such as the number of tokens that count, it is
        that of the sum over all micro-batches over the weight of all, however samples are dealt. A
        :class:`LossOutput` carries metrics of training along with either.
        """

    def loss_at(self, model: nn.Module, batch: Batch, step: int) -> Loss:
        """Return the loss in step number ``step``, counted from 1: :meth:`loss`, unless it depends on the step.

        Whoever trains calls this one.
        """
        return self.loss(model, batch)

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        """Return each metric as (sum, count) over the batch, two scalars.

        Any grouping of batches then adds up exactly. A metric that :meth:`metrics` names is given what its state is
        computed from, such as predictions and targets.
        """

    def metrics(self) -> Mapping[str, StateMetric]:
        """Name the metrics that are no quotient of sums; ``evaluate`` returns under their names what they take."""
        return {}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated parts of ``model`` in order of use, such as transformer layers.

        They are units of sharding and of activation checkpointing.
        """
        return ()

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return ``model`` as a chain of modules, for pipelines.

        The first takes :meth:`model_inputs`, each further one what the one before returns (one tensor), and the last
        returns what the model does. They may share parameters.
        """
        return ()

    def model_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments that ``loss`` and ``evaluate`` call the model with, once for each batch.

        Only a pipeline asks: its first rank computes with them, and its last one has the output.
        """
        raise NotImplementedError

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        """Say how tensor parallelism divides modules, by name.

        A linear layer is divided by its output ("column") or its input features ("row", after "column").
        """
        return {}

    def row_values(self, model: nn.Module) -> Mapping[str, RowValues]:
        """Say what untouched rows of embeddings are, by the embedding's name in ``model``; others are standard normal.

        It counts where a strategy makes rows as they are touched, in embeddings with ``sparse=True``.
        """
        return {}

    def remarks(self, model: Mapping[str, Tensor]) -> list[str]:
        """Return lines to show at the end of a run, from the trained model's state."""
        return []

    def save_assets(self, folder: Path) -> None:  # noqa: B027 - most models need nothing beside their weights
        """Write into ``folder`` what belongs beside exported weights, such as a tokenizer."""

    def files(self) -> Mapping[str, Path]:
        """Return the data files that decide the result, by names that do not depend on the machine."""
        return {}


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights from which a recipe's training begins, apart from the recipe.

    Attributes:
        path: What ``init_from`` takes, such as a folder with safetensors files. It has every weight of the model, under
            the model's own name, and no other.
        recipe: The same recipe but for the values of its model's weights, which count for nothing.
    """

    path: Path
    recipe: Recipe


@dataclass(frozen=True)
class RowValues:
    """The distribution of an embedding's rows before their first update.

    Args:
        kind: "normal" with deviation ``scale``, or "uniform" in [-scale, scale).
    """

    kind: Literal["normal", "uniform"] = "normal"
    scale: float = 1.0

    def fill(self, embedding: nn.Embedding | nn.EmbeddingBag) -> None:
        """Draw the whole table like that; :meth:`Recipe.row_values` names it where its rows are made one by one."""
        from torch import nn

        if self.kind == "uniform":
            nn.init.uniform_(embedding.weight, -self.scale, self.scale)
        else:
            nn.init.normal_(embedding.weight, std=self.scale)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The data of one logical rank in one step, counted from 1, and the seed of its random stream there."""

    data: Batch
    seed: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class EvaluationBatch:
    """Batch number ``index`` of the evaluation set; ``counted=False`` pads ranks to equal length.

    Strategies whose forward pass communicates must run a padding batch; others may skip it.
    """

    index: int
    data: Batch
    counted: bool = True
    seed: int = 0  # of the random numbers that its evaluation draws, whichever process evaluates it
