"""Recipes with several updates per step, or whose loss compares all samples of a step.

GANs, actor-critic methods and manual optimization need several updates; contrastive losses compare the features of all
samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, final

from worldsize.core.recipe import Batch, Loss, LossOutput, MicroBatch, Recipe, Update
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class MultiUpdateRecipe(Recipe):
    """A task with several updates per step, by one or several optimizers, such as a GAN.

        def updates(self, model, batch, step):
            fake = model.generator(noise)
            yield "discriminator", self.tell_apart(model.discriminator, batch, fake.detach())
            yield "generator", self.fool(model.discriminator, fake)

    A :class:`Strategy` that can train such a recipe includes "multi_update" in ``supports``.
    """

    has_several_updates = True

    @abstractmethod
    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        """Create the optimizers of ``model`` by name; each parameter belongs to at most one of them.

        The strategy may already have moved or sharded the parameters. To run code after each step of an optimizer, such
        as clipping or averaging weights, register a hook with ``register_step_post_hook``.
        """

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        """Create the learning-rate schedules by optimizer name.

        Each schedule advances once per update of its optimizer. Optimizers without a schedule keep a constant rate.
        """
        return {}

    @abstractmethod
    def updates(self, model: nn.Module, batch: Batch, step: int) -> Iterable[Update]:
        """Yield the optimizer name and the loss of each update in step ``step``, counted from 1.

        At each ``yield``, the gradient of the loss with respect to the optimizer's parameters is averaged over all
        logical ranks and clipped, and the optimizer takes a step. The generator then resumes with the new weights.
        Tensors created before a ``yield``, such as generated images, may be used after it. A loss is a mean, or a sum
        and its weight, as in :meth:`Recipe.loss`.

        Several optimizers that minimize one loss share a backward pass: ``yield ("muon", "adamw"), loss``. Their
        gradients are clipped by their joint norm, and then each optimizer takes a step.

        The sequence of names may depend on ``step``, but not on data or random numbers: it must be the same for all
        logical ranks. The generator runs once for each logical rank, so it must not change parameters itself.

        The generator may return metrics of the step, in the format of :attr:`LossOutput.metrics`.
        """

    def micro_batch_updates(self, model: nn.Module, batch: MicroBatch) -> Iterable[Update]:
        """Return the generator of :meth:`updates` for one logical rank in one step.

        Training calls this method. Override it if losses depend on the logical rank, as with
        :meth:`Recipe.micro_batch_loss`.
        """
        return self.updates(model, batch.data, batch.step)

    @final
    def optimizer(self, model: nn.Module) -> NoReturn:
        """Raise an error, since a recipe with several updates does not have a single optimizer.

        Raises:
            ConfigError: always.
        """
        raise self._create_refusal()

    @final
    def schedule(self, optimizer: Optimizer) -> NoReturn:
        """Raise the same error as :meth:`optimizer`."""
        raise self._create_refusal()

    @final
    def loss(self, model: nn.Module, batch: Batch) -> NoReturn:
        """Raise the same error as :meth:`optimizer`."""
        raise self._create_refusal()

    def _create_refusal(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} has several updates per step and must be trained with its updates method. "
            "Use a strategy with support for several updates, such as ddp."
        )


@final
@dataclass(frozen=True, slots=True)
class Features:
    """The features of all samples of a step, in the order of logical ranks.

    Attributes:
        everyone: One tensor (samples of the step, ...) for each tensor that :meth:`FeatureRecipe.features` returns.
        own: For each tensor in ``everyone``, the rows of the logical rank whose loss is computed.
    """

    everyone: Sequence[Tensor]
    own: Sequence[slice]


class FeatureRecipe(Recipe):
    """A task whose loss compares all samples of a step.

        def features(self, model, batch):
            images, texts = batch
            return model.image(images), model.text(texts)

        def feature_loss(self, model, features, batch):
            images, texts = features.everyone
            own, _ = features.own
            logits = model.scale.exp() * images[own] @ texts.T
            return nn.functional.cross_entropy(logits, torch.arange(len(texts))[own])

    A step first computes and gathers the features of all logical ranks without gradients, then the derivatives of all
    losses with respect to the features, and then recomputes each logical rank's features with gradients (Gao et al.
    2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"). The result does not depend on the
    number of processes. A process stores the features of all logical ranks, but activations of only one at a time.

    A :class:`Strategy` that can train such a recipe includes "features" in ``supports``.
    """

    @abstractmethod
    def features(self, model: nn.Module, batch: Batch) -> Sequence[Tensor]:
        """Return the feature tensors (samples, ...) of a micro-batch.

        For example, embeddings of images and of texts. Shapes must agree across logical ranks except in the first
        dimension. Integer tensors, such as labels, are gathered too. This method runs twice per step, with the same
        random numbers.
        """

    @abstractmethod
    def feature_loss(self, model: nn.Module, features: Features, batch: Batch) -> Loss:
        """Return the loss of one logical rank, given all ranks' features.

        The result has the form of :meth:`Recipe.loss`. ``batch`` is this logical rank's micro-batch. The step uses the
        gradient of the mean over logical ranks. This method may use parameters of ``model``, such as a temperature. It
        runs twice, with the same random numbers.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss over only the samples of ``batch``, as with a single logical rank."""
        own = self.features(model, batch)
        return self.feature_loss(model, Features(own, [slice(len(each)) for each in own]), batch)


def attach_gradients(loss: Loss, features: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> LossOutput:
    """Extend ``loss`` so that its backward pass also passes ``gradients`` to ``features``.

    The value of the loss does not change.

    Args:
        loss: The loss; it does not depend on ``features``.
        features: Tensors of any shape, attached to a graph.
        gradients: The gradient of each feature, with the feature's shape; None if it has none.
    """
    output = LossOutput.from_loss(loss)
    value, weight = (output.loss, None) if not isinstance(output.loss, tuple) else output.loss
    for feature, gradient in zip(features, gradients, strict=True):
        if gradient is not None:
            product = (feature.to(gradient.dtype) * gradient).sum()
            value = value + (product - product.detach()).to(value.dtype)
    return LossOutput(value if weight is None else (value, weight), output.metrics)
