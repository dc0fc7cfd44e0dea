"""The contract that turns the micro-batches of a step into one mean gradient, and the parts that implementations share.

These are the factor of gradient clipping, for gradients that torch sees only in part; the record of the parameters
that have a gradient in a step, on a rank and on any rank; and the detection of parameters without one before
DistributedDataParallel would train on sums that lack it. Torch notices those only when the next forward pass begins:
the update of the step has then been taken with gradients that no rank has sent.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from worldsize.collectives.step_timer import started, wait
from worldsize.core import ConfigError, Dealing, MicroBatch, Numerics, StateDict
from worldsize.devices import is_accelerator
from worldsize.optimizers.groups import all_parameters
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.loss_scaling import scale_gradients

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


def refuse_norms_of_others(model: nn.Module, optimizer: Optimizer, numerics: Numerics) -> None:
    """Refuse a norm over parameters that nothing updates: ``zero_grad`` leaves their gradients to the next steps.

    Raises:
        ConfigError: a parameter requires a gradient, and ``optimizer`` does not have it.
    """
    own = {id(parameter) for parameter in all_parameters(optimizer)}
    others = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in own]
    if others:
        clips = numerics.clip_norm is not None
        raise ConfigError(
            f"{'clip_norm' if clips else 'nonfinite=skip'}: the norm would count gradients of {listed(others)}, in no "
            "parameter group of the optimizer, whose zero_grad() does not reset them: it would grow with those of all "
            "earlier steps. Freeze them with requires_grad_(False), give them to the optimizer, or set "
            f"{'clip_norm=null' if clips else 'nonfinite=stop'}."
        )


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the scalar factor that reduces a gradient of ``norm`` (a scalar) to at most ``limit``.

    It is that of torch.nn.utils.clip_grads_with_norm_.
    """
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def aligned_norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm of ``gradient``, a scalar, with bits that do not depend on its address.

    A view of a bucket may begin anywhere. CUDA's kernel reads four numbers at once where they are aligned, and adds
    them in another order where they are not; it chooses for all tensors of a call.
    """
    is_aligned = gradient.data_ptr() % (4 * gradient.element_size()) == 0
    norm: Tensor = torch._foreach_norm([gradient if is_aligned else gradient.clone()])[0]
    return norm


@final
class Presence:
    """Records which of ``parameters`` had a gradient in a step; the others must end without one.

    An optimizer leaves a parameter without a gradient alone, and decays the weights of one whose gradient is zero.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._absent = set(range(len(parameters)))

    def note(self) -> None:
        """Record the gradients that a backward pass has left."""
        if self._absent:
            self._absent = {index for index in self._absent if self._parameters[index].grad is None}

    @property
    def absent(self) -> Set[int]:
        """Indices of the parameters that had no gradient so far."""
        return self._absent

    def without_absent(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return ``gradients``, one for each parameter, in their shapes, with None for the absent ones."""
        return [None if index in self._absent else each for index, each in enumerate(gradients)]


@final
class PresenceExchange:
    """Tells the ranks of ``group`` which gradients any of them has; only a rank that lacks one waits for the answer."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: tuple[Work, Tensor] | None = None  # an exchange that this rank has not waited for

    def present_anywhere(self, present: Sequence[bool]) -> Sequence[bool]:
        """Return whether any rank has each gradient, given whether this one has; all ranks must call it."""
        if self._sent is not None:
            wait(self._sent[0])
            self._sent = None
        has_all = all(present)
        if has_all:
            any_n = torch.ones(len(present), dtype=torch.uint8, device=self._device)  # a copy waits for the GPU
        else:
            any_n = torch.tensor(present, dtype=torch.uint8, device=self._device)
        work = started(dist.all_reduce(any_n, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        if has_all:
            self._sent = work, any_n
            return present
        wait(work)
        return [bool(each) for each in any_n.tolist()]


_SHOWN = 4  # names in a message
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def check_reduced(module: nn.Module) -> None:
    """Check that all gradients have been summed, after the last backward pass of a step; others are not wrapped.

    It asks for nothing from other ranks. The private method is that of torch 2.1 to 2.15.

    Raises:
        ConfigError: ``module`` waits for the gradient of a parameter that the pass has not reached.
    """
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    try:
        module._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _unused(module, str(error)) from None
    first = next((each for each in module.module.parameters() if each.requires_grad), None)
    if first is not None and first.grad is None:  # the pass has reached none of them
        raise _unused(module, "")


def _unused(module: DistributedDataParallel, said: str) -> ConfigError:
    own = module.module.named_parameters()
    named = {name.removeprefix("model."): each for name, each in own if each.requires_grad}  # in a CallingRoot
    names = [name for name, each in named.items() if each.grad is None]
    if not names and (match := _INDICES.search(said)):  # it had one in an earlier micro-batch
        names = [list(named)[int(index)] for index in match[1].split() if int(index) < len(named)]
    return ConfigError(
        f"{listed(names)} got no gradient in the last micro-batch of this process, and every process must have a "
        "gradient of every parameter. Set strategy.find_unused_parameters=true, freeze them with "
        "requires_grad_(False), or let the loss depend on them."
    )


def listed(names: list[str]) -> str:
    """Return some of ``names`` for a message."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "") if names else "some parameters"
