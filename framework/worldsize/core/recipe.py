"""The recipe: model, data, loss and evaluation of a task.

A recipe is independent of processes, devices and strategies. Buffers that the forward pass modifies need a rule for
combining their values over logical ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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
TensorStyle = Literal["column", "row", "gathered"]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss together with metrics from the same forward pass; both are logged.

    Attributes:
        loss: The mean over the micro-batch, a scalar; or two scalars, the sum over the micro-batch and its weight.
        metrics: Each metric as (sum, count) over the micro-batch, two scalars, with the same names in every step.
            ``train/<name>`` is logged as sum divided by count, over all ranks and all steps since the previous logged
            step.
    """

    loss: Tensor | tuple[Tensor, Tensor]
    metrics: Metrics = field(default_factory=dict)

    @staticmethod
    def from_loss(loss: Loss) -> LossOutput:
        """Return ``loss`` as a LossOutput, without metrics if it is a plain loss."""
        return loss if isinstance(loss, LossOutput) else LossOutput(loss)


Loss: TypeAlias = "Tensor | tuple[Tensor, Tensor] | LossOutput"  # a mean; a sum and its weight; or either with metrics
Update: TypeAlias = "tuple[str | Sequence[str], Loss]"  # one or several optimizer names, and their loss
ONE_UPDATE = ""  # optimizer name in recipes with one update per step


class Recipe(ABC):
    """The task to learn, independent of processes, devices and the strategy."""

    remembers: ClassVar[bool] = False
    """Whether a step depends on state that this object carries over from earlier steps, such as environments, running
    means or learning rates that it changed itself. If so, also define :meth:`state` and :meth:`load_state`. Without
    them, restarting or resuming changes the result; reproducibility modes that promise identical bits refuse this."""

    has_several_updates: ClassVar[bool] = False
    """Whether a step is a sequence of updates, as in a :class:`~worldsize.core.MultiUpdateRecipe`."""

    evaluation_split: str = "test"
    """The split to evaluate unless ``evaluation.splits`` selects others; it names the metrics, as in ``val/loss``.
    Metrics of "test" have no prefix."""

    def state(self, logical_rank: int) -> Any:
        """Return the state that this object keeps between steps for a logical rank, counted from 0.

        Each checkpoint includes it, whichever process computes the logical rank at that time. The state may contain
        None, bool, int, float, str, bytes, tensors, NumPy arrays and scalars, and dicts, lists, tuples and sets of
        these. Healing gangs call this method in each step, before the update.
        """
        raise NotImplementedError

    def load_state(self, logical_rank: int, state: Any) -> None:
        """Load a logical rank's state, as returned by :meth:`state` in this or another process."""
        raise NotImplementedError

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, so that its weights do not depend on the training device.

        Strategies that shard the model may run this with fake tensors and materialize the weights later, one at a
        time. They may call it more than once. Each call must return the same model, apart from random numbers drawn
        from torch, NumPy and ``random``, independently of earlier calls.
        """

    def pretrained_weights(self) -> PretrainedWeights | None:
        """Return the files with the model's initial weights, so that ranks read only their shards.

        Return None if there are no such files, or only the model's own library can read them.
        """
        return None

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """Create the optimizer of ``model``.

        The strategy may already have moved or sharded the parameters. Parameter values may still be NaN if a checkpoint
        is about to be loaded.
        """

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Create the learning-rate schedule, advanced per optimizer step; None: constant rate."""
        return None

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        """Create the optimizers of ``model`` by name; by default, only :meth:`optimizer`."""
        return {ONE_UPDATE: self.optimizer(model)}

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        """Create the learning-rate schedules by optimizer name; by default, :meth:`schedule`."""
        schedule = self.schedule(optimizers[ONE_UPDATE])
        return {} if schedule is None else {ONE_UPDATE: schedule}

    @abstractmethod
    def data(self, split: str) -> Any:
        """Return the dataset of ``split``, one of :meth:`splits`: map-style or iterable.

        A map-style dataset may define ``load_batch(indices)``, which loads a whole batch given an int64 tensor
        (batch,), or ``__getitems__``, which returns a list of samples. Otherwise it is read sample by sample. For
        ``length_balanced`` it needs an attribute ``lengths``, a tensor (samples,) with the length of each sample.
        """

    def splits(self) -> Sequence[str]:
        """Return the split names that :meth:`data` accepts, for ``evaluation.splits``."""
        return ("train", self.evaluation_split)

    def tokens_per_sample(self) -> int | None:
        """Return the number of tokens per sample, for schedules in tokens; None if it varies."""
        return None

    def collate(self, samples: list[Any]) -> Batch:
        """Collate samples into a batch; override this method to pad samples.

        By default, uses torch's ``default_collate``.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the micro-batch's mean loss (a scalar), or its summed loss and weight (scalars).

        A step uses the gradient of the mean over micro-batches. With weights, such as the number of unmasked tokens, it
        uses the gradient of the sum over all micro-batches divided by their total weight, however samples are
        distributed. A :class:`LossOutput` adds metrics to either form.
        """

    def loss_at(self, model: nn.Module, batch: Batch, step: int) -> Loss:
        """Return the loss in step ``step``, counted from 1.

        Override this method if the loss depends on the step. Training calls :meth:`micro_batch_loss`, which by default
        calls this method, which by default calls :meth:`loss`.
        """
        return self.loss(model, batch)

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        """Return the loss of one logical rank in one step.

        Override this method if the loss depends on the logical rank. Besides its data, ``batch`` has the step, the
        logical rank, and a seed derived from both and the run's seed, for example to seed a rollout environment. The
        loss must not depend on any other property of the process.
        """
        return self.loss_at(model, batch.data, batch.step)

    def micro_batch_updates(self, model: nn.Module, batch: MicroBatch) -> Iterable[Update]:
        """Yield the updates of one logical rank in one step; by default, a single one."""
        yield ONE_UPDATE, self.micro_batch_loss(model, batch)

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor | float, ...]]:
        """Return each metric as (sum, count) over the batch, each a scalar tensor or a number.

        Sums and counts add up to the same metric however samples are batched. For a metric listed in :meth:`metrics`,
        return the inputs of its state instead, such as predictions (batch, classes) and targets (batch,).
        """

    def metrics(self) -> Mapping[str, StateMetric]:
        """Return the metrics that are not ratios of sums, by name.

        ``evaluate`` returns each metric's inputs under the same name.
        """
        return {}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated submodules of ``model`` in order of use, such as transformer layers.

        They are the units of sharding, compilation and activation checkpointing.
        """
        return ()

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return ``model`` as a chain of modules, for pipelines.

        The first module receives :meth:`model_inputs`, each further module the output of its predecessor (one tensor),
        and the last module returns the model's output. Modules may share parameters. A layer that requires further
        arguments can be wrapped in an :class:`~worldsize.strategies.layer_streams.AdaptedLayer`.

        Raises:
            ConfigError: the model cannot be divided into stages; it can still be trained without a pipeline.
        """
        return ()

    def model_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the positional arguments that ``loss`` and ``evaluate`` pass to the model.

        Only pipelines call this method. In a pipeline, ``loss`` and ``evaluate`` must call the model exactly once per
        batch: the first rank computes with these inputs, and the last rank has the output.
        """
        raise NotImplementedError

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        """Return how tensor parallelism shards modules, by their names in ``model``.

        A linear layer is sharded along its output features ("column") or input features ("row", after "column"). With
        "gathered", it is sharded like "column", and each rank gets the outputs of all, for example in a head. In an
        embedding, "row" shards the vocabulary. With ``logical_tensor``, layers are computed in slices along the same
        features.
        """
        return {}

    def tensor_units(self, model: nn.Module) -> Mapping[str, int]:
        """Return counts of units that tensor parallelism must not split, by name.

        For example, ``{"recipe.heads": 12}``.
        """
        return {}

    def cut_sequences(self, batch: Batch, cut: Callable[[Tensor, int], Tensor]) -> Batch:
        """Return ``batch`` with ``cut`` applied to each tensor that contains sequences.

        ``cut``: takes a tensor and the dimension that contains sequences.

        Context parallelism calls this method before :meth:`loss`, :meth:`evaluate` and :meth:`model_inputs`. They then
        see a chunk of each sequence, and return the sum over its tokens and the token count; a mean weights chunks
        equally. Shift targets before cutting. In the model, only ``scaled_dot_product_attention`` may combine tokens,
        and positions must come from :func:`~worldsize.strategies.sequence_chunks.sequence_positions`. For a batch of
        inputs and targets, both (batch, time)::

            return cut(batch[0], 1), cut(batch[1], 1)
        """
        raise NotImplementedError

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        """Return how to combine buffers modified by :meth:`loss`, by their names in ``model``.

        Buffers are combined over logical ranks. A name may be an ``fnmatch`` pattern, such as "blocks.*.seen". Every
        logical rank starts a step with the same buffer values, and the rule determines the values after the step:

        - "sum": the initial value plus the changes of all logical ranks, such as for a sample counter.
        - "mean": the initial value plus the mean of these changes, such as for a moving average of batch means.
        - "last": the value of the last logical rank.
        - "equal": all logical ranks must end with the same value, such as a step counter; otherwise the step fails.
        - :class:`Concatenated`: a queue to which logical ranks append their rows in order.

        Statistics of torch's norm layers do not need a rule, nor do buffers with ``persistent=False``, which are
        treated as per-process caches. A loss that modifies any other buffer is refused.
        """
        return {}

    def row_values(self, model: nn.Module) -> Mapping[str, RowValues]:
        """Return the initial distribution of embedding rows, by the embedding's name in ``model``.

        Embeddings without an entry have standard-normal rows. Only strategies that create rows on first use call this
        method, and only for embeddings with ``sparse=True``.
        """
        return {}

    def remarks(self, model: Mapping[str, Tensor]) -> list[str]:
        """Return lines to show at the end of a run.

        ``model``: full, unsharded state of the trained model on the CPU.
        """
        return []

    def save_assets(self, folder: Path) -> None:  # noqa: B027 - most models need nothing beside their weights
        """Write files that accompany exported weights, such as a tokenizer, into ``folder``."""

    def files(self) -> Mapping[str, Path]:
        """Return the data files that affect the result, by names that do not depend on the machine."""
        return {}

    def fingerprints(self) -> Mapping[str, Mapping[str, Any]]:
        """Return identifiers, by name, of data that are too large to hash before the run starts.

        Each has at least ``size``, in bytes, and ``sha256``, which must change whenever the data change; see
        ``worldsize.data.source.Source.fingerprint``.
        """
        return {}


def saves_state(recipe: Recipe) -> bool:
    """Return whether a recipe defines :meth:`Recipe.state`."""
    return type(recipe).state is not Recipe.state


@dataclass(frozen=True)
class PretrainedWeights:
    """Files with the initial weights of a recipe's model.

    Attributes:
        path: A path accepted by ``init_from``, such as a folder of safetensors files. It contains exactly the weights
            of the model, under the model's own names.
        recipe: The same recipe without the pretrained weights: its model's initial weights may have any values.
    """

    path: Path
    recipe: Recipe


@dataclass(frozen=True)
class RowValues:
    """The distribution of an embedding's rows before their first update.

    Args:
        kind: "normal" with standard deviation ``scale``, or "uniform" in [-scale, scale).
    """

    kind: Literal["normal", "uniform"] = "normal"
    scale: float = 1.0

    def fill_embedding(self, embedding: nn.Embedding | nn.EmbeddingBag) -> None:
        """Fill the whole table (rows, features) in place with samples from this distribution.

        For tables whose rows are created one by one, return the distribution from :meth:`Recipe.row_values` instead.
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
        data: The batch, as collated by the recipe.
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
    """One batch of the evaluation set.

    Attributes:
        index: Index of the batch in the evaluation set, from 0.
        data: The batch, as collated by the recipe.
        counted: Whether the batch counts in the metrics; False for padding, which gives all ranks equally many batches.
            Strategies whose forward pass communicates must also compute padding batches; others may skip them.
        seed: Seed of the batch's random numbers, the same on every process that may evaluate the batch.
    """

    index: int
    data: Batch
    counted: bool = True
    seed: int = 0


BufferSum = Literal["mean", "sum", "equal", "last"]
BUFFER_SUMS: tuple[BufferSum, ...] = get_args(BufferSum)


@dataclass(frozen=True)
class Concatenated:
    """Rule for a ring buffer to which logical ranks append rows, such as MoCo's key queue.

    With K rows, and the pointer at p at the start of a step, a logical rank writes its n rows to p, p + 1, ...,
    p + n - 1 (modulo K) and moves the pointer to p + n (modulo K). After the step, the rows of logical rank 0 start at
    p, followed by those of logical rank 1 and so on, and the pointer is after the last row. The result is the same as
    if one process had written the rows of the whole batch. If there are more than K, later rows replace earlier ones.

    Attributes:
        pointer: Name of the buffer with the index of the next row, one integer, in the same module as the queue.
        dim: Dimension of the queue that indexes rows.
    """

    pointer: str
    dim: int = 0


BufferRule: TypeAlias = BufferSum | Concatenated
