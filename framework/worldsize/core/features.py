"""Recipes with a loss over the features of all samples of a step, such as contrastive ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from worldsize.core.recipe import Batch, Loss, LossOutput, Recipe

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor, nn


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

    A :class:`Strategy` declares with ``gathers_features`` whether it can train one.
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
