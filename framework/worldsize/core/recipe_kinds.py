"""Recipes with several updates in a step, and recipes with a loss over all samples of a step.

GANs, actor-critic methods and manual optimization need several updates; contrastive losses compare the features of all
samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias, final

from worldsize.core.recipe import Batch, Loss, LossOutput, MicroBatch, Recipe
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


Update: TypeAlias = "tuple[str | Sequence[str], Loss]"  # the name of an optimizer or of several, and their loss


class MultiUpdateRecipe(Recipe):
    """A task whose step is a sequence of updates by one or several optimizers, such as a GAN's.

        def updates(self, model, batch, step):
            fake = model.generator(noise)
            yield "discriminator", self.tell_apart(model.discriminator, batch, fake.detach())
            yield "generator", self.fool(model.discriminator, fake)

    A :class:`Strategy` that can train one has "multi_update" among its ``supports``.
    """

    @abstractmethod
    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        """Make the optimizers of ``model`` by name; no parameter belongs to two of them.

        A strategy may have moved or sharded the parameters by then. Register a hook of an optimizer
        (``register_step_post_hook``) for work after each of its steps, such as clipping or averaging weights.
        """

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        """Make learning-rate schedules by the names of their optimizers.

        Each is advanced once per update of its optimizer. The rate of an optimizer without a schedule is constant.
        """
        return {}

    @abstractmethod
    def updates(self, model: nn.Module, batch: Batch, step: int) -> Iterable[Update]:
        """Yield each update of step number ``step``, counted from 1: an optimizer's name, and a scalar loss.

        It is a generator. At each ``yield`` the gradient of the loss with respect to the parameters of that optimizer
        alone is averaged over all logical ranks and clipped, and the optimizer takes its step; then the generator goes
        on with the new weights. Tensors made before a ``yield``, such as generated images, may be used after it. A loss
        is a mean, or a sum and its weight, as in :meth:`Recipe.loss`.

        Several optimizers that minimize one loss share a backward pass: ``yield ("muon", "adamw"), loss``. Their
        gradients are clipped together, by one norm, and then each of them takes its step.

        The sequence of names may depend on ``step``, but not on data or random numbers: it must be the same for all
        logical ranks. The generator runs once for each logical rank, so it must not change parameters itself.

        The generator may return metrics of the step, in the form of :attr:`LossOutput.metrics`.
        """

    def micro_batch_updates(self, model: nn.Module, batch: MicroBatch) -> Iterable[Update]:
        """Return the generator of :meth:`updates` for one logical rank in one step, as training calls it.

        Override it if losses depend on the logical rank, as :meth:`Recipe.micro_batch_loss`.
        """
        return self.updates(model, batch.data, batch.step)

    @final
    def optimizer(self, model: nn.Module) -> NoReturn:
        """Refuse: a recipe with several updates has no single optimizer.

        Raises:
            ConfigError: always.
        """
        raise self._refusal()

    @final
    def schedule(self, optimizer: Optimizer) -> NoReturn:
        """Refuse, as :meth:`optimizer` does."""
        raise self._refusal()

    @final
    def loss(self, model: nn.Module, batch: Batch) -> NoReturn:
        """Refuse, as :meth:`optimizer` does."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} takes several updates a step, and whatever trains it must call its method updates. "
            "Choose a strategy that does, such as ddp."
        )


@final
@dataclass(frozen=True, slots=True)
class Features:
    """The features of all samples of a step, in the order of logical ranks.

    Attributes:
        everyone: One tensor (samples of the step, ...) for each that :meth:`FeatureRecipe.features` returns.
        own: For each of these, the rows of the logical rank whose loss is computed.
    """

    everyone: Sequence[Tensor]
    own: Sequence[slice]


class FeatureRecipe(Recipe):
    """A task whose loss compares the samples of a whole step, whichever processes compute their features.

        def features(self, model, batch):
            images, texts = batch
            return model.image(images), model.text(texts)

        def feature_loss(self, model, features, batch):
            images, texts = features.everyone
            own, _ = features.own
            logits = model.scale.exp() * images[own] @ texts.T
            return nn.functional.cross_entropy(logits, torch.arange(len(texts))[own])

    A step computes the features of all logical ranks without gradients and gathers them, then the derivative of all
    losses by the features, then the features of each logical rank again, with their gradients (Gao et al. 2021,
    "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"). So its result does not depend on the
    number of processes, and a process keeps activations of one logical rank at a time. It holds the features of all.

    A :class:`Strategy` that can train one has "features" among its ``supports``.
    """

    @abstractmethod
    def features(self, model: nn.Module, batch: Batch) -> Sequence[Tensor]:
        """Return tensors (samples, ...) of a micro-batch, such as embeddings of images and of texts.

        Those of all logical ranks have equally many dimensions and sizes but for the first. Integers, such as labels,
        are gathered, too. It runs twice in a step, with the same random numbers.
        """

    @abstractmethod
    def feature_loss(self, model: nn.Module, features: Features, batch: Batch) -> Loss:
        """Return the loss of one logical rank, as :meth:`Recipe.loss` does, given the features of all.

        The gradient of a step is that of the mean over logical ranks. ``batch`` is the logical rank's micro-batch. It
        may use parameters of ``model``, such as a temperature, and runs twice, with the same random numbers.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss of a batch among its own samples only, as if the step had one logical rank."""
        own = self.features(model, batch)
        return self.feature_loss(model, Features(own, [slice(len(each)) for each in own]), batch)


def with_gradients(loss: Loss, features: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> LossOutput:
    """Return ``loss`` with the same value, whose backward pass gives ``gradients`` to ``features``, too.

    Args:
        loss: The loss, which does not depend on ``features``.
        features: Tensors of any shapes, with a graph.
        gradients: For each of them, a tensor of its shape, or None: it has no gradient.
    """
    output = LossOutput.of(loss)
    value, weight = (output.loss, None) if not isinstance(output.loss, tuple) else output.loss
    for feature, gradient in zip(features, gradients, strict=True):
        if gradient is not None:
            product = (feature.to(gradient.dtype) * gradient).sum()
            value = value + (product - product.detach()).to(value.dtype)
    return LossOutput(value if weight is None else (value, weight), output.metrics)
