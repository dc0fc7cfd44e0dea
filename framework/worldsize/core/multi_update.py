"""Recipes whose step has several updates, as needed for GANs, actor-critic methods and manual optimization."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias, final

from worldsize.core.recipe import Batch, Loss, MicroBatch, Recipe
from worldsize.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Update: TypeAlias = "tuple[str | Sequence[str], Loss]"  # the name of an optimizer or of several, and their loss


class MultiUpdateRecipe(Recipe):
    """A task whose step is a sequence of updates by one or several optimizers, such as a GAN's.

        def updates(self, model, batch, step):
            fake = model.generator(noise)
            yield "discriminator", self.tell_apart(model.discriminator, batch, fake.detach())
            yield "generator", self.fool(model.discriminator, fake)

    A :class:`Strategy` declares with ``trains_multi_update`` whether it can train one.
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
