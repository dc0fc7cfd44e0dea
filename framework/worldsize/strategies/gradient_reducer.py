"""The contract that turns the micro-batches of a step into one mean gradient, and what implementations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import Dealing, MicroBatch, StateDict
from worldsize.devices import is_accelerator
from worldsize.strategies.clipping import aligned_norm
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.loss_weights import scale_gradients

Backward = Callable[[MicroBatch, float], LossRecord]


class GradientReducer(ABC):
    """Runs the backward passes of a step and leaves the mean gradient of all logical ranks in ``.grad``."""

    dealing: Dealing = "cyclic"  # the assignment of logical ranks that :meth:`run` expects
    divides_gradients: bool = False
    """Whether a rank has only a part of the model's gradients."""

    @property
    def is_ordered(self) -> bool:
        """Whether the gradient has the same bits at every world size."""
        return False

    @abstractmethod
    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        """Compute the step's gradient.

        Args:
            batches: Micro-batches of this process.
            backward: Called with a micro-batch and a factor; adds the gradient times the factor to ``.grad``, and
                returns the record of the loss.

        Returns:
            The results of ``backward``, in the order of ``batches``.
        """

    def updates(self) -> AbstractContextManager[None]:
        """Enter a step of several updates, each of which calls :meth:`run`."""
        return nullcontext()

    def commit(self) -> None:  # noqa: B027 - most change nothing but gradients
        """Keep the changes of the last :meth:`run` in the model: the update follows."""

    def undo(self) -> None:  # noqa: B027 - most change nothing but gradients
        """Undo the changes of a :meth:`run` since the last :meth:`commit`: the step has ended before its update.

        Only called where a gang heals, and only needed where survivors keep their own state: not by a strategy that
        ``shards_state``, whose state comes from copies.
        """

    def scale(self, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
        """Multiply the gradients that :meth:`run` has left by ``factor``, a scalar tensor."""
        scale_gradients(parameters, factor)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients so that their total norm is at most ``limit``; return the norm before, a scalar."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        if not (self.is_ordered and any(is_accelerator(gradient.device) for gradient in gradients)):
            return nn.utils.clip_grad_norm_(parameters, limit)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([aligned_norm(gradient) for gradient in gradients]))
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def state(self) -> StateDict:
        """Return the state kept between steps. It differs between ranks, so only the same world size can load it."""
        return {}

    def load(self, state: StateDict) -> None:  # noqa: B027 - most remember nothing
        """Load what :meth:`state` returned, after :meth:`resumed`."""

    def resumed(self) -> None:  # noqa: B027 - most sums do not depend on what came before
        """Prepare to resume where another process stopped: the next step must sum in the order that it would have."""


class OrderedSums(GradientReducer):
    """Abstract: a reducer with the same bits at every world size."""

    @property
    def is_ordered(self) -> bool:
        return True


def taken(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of ``parameters``, in their shapes, with zeros for missing ones, and reset them to None."""
    gradients = []
    for parameter in parameters:
        gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return gradients


def without_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Disable gradient synchronization within the block if ``module`` is a DistributedDataParallel."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()
