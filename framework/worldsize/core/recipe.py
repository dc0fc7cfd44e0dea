"""The recipe: model, data, loss and evaluation. Nothing here knows about processes, devices or strategies.

A buffer that a step's forward passes change has a rule by which its values are combined over logical ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from worldsize.core.state_metric import StateMetric

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


Batch = Any
Metrics: TypeAlias = "Mapping[str, tuple[Tensor, Tensor]]"  # each as (sum, count), two scalars
StateDict = dict[str, Any]
TensorStyle = Literal["column", "row"]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss together with metrics from the same forward pass, which are logged with it.

    Attributes:
        loss: The mean over the micro-batch, a scalar; or two scalars, the sum over it and its weight.
        metrics: Each metric as (sum, count) over the micro-batch, two scalars; the same names in every step. It is
            logged as ``train/<name>``: the sum over all ranks and all steps since the last logged one, divided by the
            count.
    """

    loss: Tensor | tuple[Tensor, Tensor]
    metrics: Metrics = field(default_factory=dict)

    @staticmethod
    def of(loss: Loss) -> LossOutput:
        """Return ``loss`` as a LossOutput; a plain loss has no metrics."""
        return loss if isinstance(loss, LossOutput) else LossOutput(loss)


Loss: TypeAlias = "Tensor | tuple[Tensor, Tensor] | LossOutput"  # a mean, or a sum and its weight; or with metrics


class Recipe(ABC):
    """The task to learn. It knows nothing about processes, devices or how replicas agree."""

    remembers: ClassVar[bool] = False
    """Whether a step depends on what this object kept in earlier steps, such as environments or running means, or on
    learning rates that it has changed itself. Define :meth:`state` and :meth:`load_state`, too: otherwise a run that is
    restarted or resumed trains other weights, which is refused where the same bits are promised."""

    def state(self, logical_rank: int) -> Any:
        """Return what this object keeps from step to step for a logical rank, counted from 0.

        It is saved with each checkpoint, whichever process computes the logical rank then. It consists of None, bool,
        int, float, str, bytes, tensors, NumPy arrays and scalars, and of dicts, lists, tuples and sets of these. Where
        gangs heal it is called in each step, before the update.
        """
        raise NotImplementedError

    def load_state(self, logical_rank: int, state: Any) -> None:
        """Replace what this object keeps for a logical rank by what :meth:`state` returned, perhaps elsewhere."""
        raise NotImplementedError

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, whatever device trains it, so that its initial weights are the same everywhere.

        Strategies that shard the model may run this with fake tensors, and materialize the weights later, one at a
        time. They may call it more than once. Each call must return the same model, whatever was called before, except
        for the random numbers that it draws from torch, NumPy and ``random``.
        """

    def pretrained_weights(self) -> PretrainedWeights | None:
        """Return the files that hold the weights that :meth:`model` returns; each rank then reads only its parts.

        ``None``: no file has them, or only the model's own library can read it.
        """
        return None

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer of ``model``, whose parameters a strategy may have moved or sharded by then.

        Their values may be NaN as yet, if a checkpoint is about to be loaded.
        """

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the learning-rate schedule, advanced once per optimizer step; ``None`` keeps the rate constant."""
        return None

    @abstractmethod
    def data(self, split: str) -> Any:
        """Return the dataset of ``split``, one of :meth:`splits`: map-style or iterable.

        A map-style dataset with a method ``load_batch(indices)``, given an int64 tensor (batch,), loads a whole batch
        at once; one with ``__getitems__`` a list of samples; any other is read sample by sample. Its attribute
        ``lengths``, a tensor (samples,), holds the length of each sample, for ``length_balanced``.
        """

    def splits(self) -> Sequence[str]:
        """Return the names that :meth:`data` accepts; ``evaluation.splits`` chooses among them."""
        return ("train", "test")

    def tokens_per_sample(self) -> int | None:
        """Return the number of tokens of a sample if all have the same, so that schedules can be given in tokens."""
        return None

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of samples, by default with torch's collate function. Override to pad them to one length."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss, a scalar: the mean over the micro-batch; or two scalars, the sum over it and its weight.

        The gradient of a step is that of the mean over micro-batches. With weights, such as the number of tokens that
        count, it is that of the sum over all micro-batches divided by their total weight, however samples are
        distributed. A :class:`LossOutput` adds metrics to either form.
        """

    def loss_at(self, model: nn.Module, batch: Batch, step: int) -> Loss:
        """Return the loss in step number ``step``, counted from 1. Override it if the loss depends on the step.

        Training calls :meth:`micro_batch_loss`. Unless they are overridden, it calls this method, and this one
        :meth:`loss`.
        """
        return self.loss(model, batch)

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        """Return the loss of one logical rank in one step. Override it if the loss depends on the logical rank.

        Beside its data, ``batch`` has the step, the logical rank, and a seed that follows from both and the run's seed,
        for example for the environment of a rollout. The loss must not depend on anything else of a process.
        """
        return self.loss_at(model, batch.data, batch.step)

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        """Return each metric as (sum, count) over the batch, two scalars.

        Any grouping of batches then adds up exactly. For a metric that :meth:`metrics` names, return instead the
        tensors from which its state is computed, such as predictions (batch, classes) and targets (batch,).
        """

    def metrics(self) -> Mapping[str, StateMetric]:
        """Return the metrics that are not a ratio of sums, by name; ``evaluate`` returns their inputs by that name."""
        return {}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated parts of ``model`` in order of use, such as transformer layers.

        They are units of sharding, of compiling and of activation checkpointing.
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
        """Return how tensor parallelism divides modules, by their names in ``model``.

        A linear layer is divided by its output ("column") or its input features ("row", after "column").
        """
        return {}

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        """Return how buffers that :meth:`loss` changes are combined over logical ranks, by their names in ``model``.

        A name may be a pattern, as of ``fnmatch``, such as "blocks.*.seen". In a step, every logical rank begins with
        the values at the start of the step:

        - "sum": the value at the start plus the changes of all logical ranks, such as a counter of samples.
        - "mean": the value at the start plus the mean of these changes, such as a moving average of means over a batch.
        - "last": the value after the pass of the last logical rank.
        - "equal": all logical ranks must have the same value, such as a counter of steps; else the step is refused.
        - :class:`Concatenated`: a queue into which logical ranks write their rows one after the other.

        The statistics of torch's norm layers need no rule, nor do buffers with ``persistent=False``, which are caches
        of each process. Any other buffer that the loss changes is refused.
        """
        return {}

    def row_values(self, model: nn.Module) -> Mapping[str, RowValues]:
        """Return the initial distribution of embedding rows, by the embedding's name in ``model``.

        Rows of other embeddings are standard normal. It matters only for strategies that create a row when it is first
        used, in embeddings with ``sparse=True``.
        """
        return {}

    def remarks(self, model: Mapping[str, Tensor]) -> list[str]:
        """Return lines to show at the end of a run, given the trained model's state, in full shapes on the CPU."""
        return []

    def save_assets(self, folder: Path) -> None:  # noqa: B027 - most models need nothing beside their weights
        """Write files that accompany exported weights, such as a tokenizer, into ``folder``."""

    def files(self) -> Mapping[str, Path]:
        """Return the data files on which the result depends, by names that do not depend on the machine."""
        return {}

    def fingerprints(self) -> Mapping[str, Mapping[str, Any]]:
        """Identify data that are too large to be read whole before a start, by name.

        Each has at least ``size``, in bytes, and ``sha256``, which changes when the data do, as
        ``worldsize.data.source.Source.fingerprint`` returns them.
        """
        return {}


def saves_state(recipe: Recipe) -> bool:
    """Return whether a recipe defines :meth:`Recipe.state`."""
    return type(recipe).state is not Recipe.state


@dataclass(frozen=True)
class PretrainedWeights:
    """Files with the weights from which a recipe's training begins.

    Attributes:
        path: A path as ``init_from`` takes it, such as a folder with safetensors files. It holds exactly the weights of
            the model, under the model's own names.
        recipe: The same recipe, except that the values of its model's weights are arbitrary.
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
        """Draw the whole table (rows, features) in place from this distribution.

        For tables whose rows are created one by one, return it from :meth:`Recipe.row_values` instead.
        """
        from torch import nn

        if self.kind == "uniform":
            nn.init.uniform_(embedding.weight, -self.scale, self.scale)
        else:
            nn.init.normal_(embedding.weight, std=self.scale)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The data of one logical rank in one step.

    Attributes:
        data: The batch, as the recipe collates it.
        seed: The seed of the logical rank's random stream in this step, set before the loss is computed.
        step: The step, counted from 1.
        logical_rank: The logical rank, counted from 0, whichever process computes it.
    """

    data: Batch
    seed: int
    step: int = 1
    logical_rank: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationBatch:
    """Batch number ``index`` of the evaluation set; ``counted=False`` pads ranks to equal length.

    Strategies whose forward pass communicates must also compute padding batches; others may skip them.
    """

    index: int
    data: Batch
    counted: bool = True
    seed: int = 0  # of the random numbers that the evaluation draws, whichever process evaluates the batch


BufferSum = Literal["mean", "sum", "equal", "last"]
BUFFER_SUMS: tuple[BufferSum, ...] = get_args(BufferSum)


@dataclass(frozen=True)
class Concatenated:
    """A ring of rows into which each logical rank writes its own, one after the other, such as MoCo's queue of keys.

    With K rows, and the pointer at p when a step begins, a logical rank writes its n rows at p, p + 1, ..., p + n - 1
    (modulo K) and moves the pointer to p + n (modulo K). After the step the rows of logical rank 0 are at p, those of
    logical rank 1 behind them, and so on, and the pointer is behind the last: as if one process had written the rows of
    the whole batch at once. If they are more than K, later rows replace earlier ones.

    Attributes:
        pointer: Name of the buffer with the position of the next row, one integer, in the same module as the queue.
        dim: Dimension of the queue along which its rows are.
    """

    pointer: str
    dim: int = 0


BufferRule: TypeAlias = BufferSum | Concatenated
