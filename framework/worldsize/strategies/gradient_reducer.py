"""The interface for reducing a step's micro-batches to one mean gradient, with helpers.

The helpers compute the gradient clipping factor for sharded gradients, and record which parameters have a gradient in
a step, on this rank or on any rank. They also detect parameters without a gradient before the optimizer steps.
DistributedDataParallel reports these only in the next forward pass, after an update with unreduced gradients.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from worldsize.collectives.group import Collective, start_collective
from worldsize.core import ConfigError, Dealing, MicroBatch, Numerics, StateDict
from worldsize.devices import is_accelerator
from worldsize.optimizers.groups import all_parameters
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.loss_scaling import scale_gradients

Backward = Callable[[MicroBatch, float], LossRecord]
Observe = Callable[[str, Tensor], Tensor]
"""Takes the name and the gradient of a tensor, of any shape; returns the gradient to use."""


class GradientReducer(ABC):
    """Abstract base: computes the mean gradient of all logical ranks in a step, in ``.grad``."""

    dealing: Dealing = "cyclic"  # the assignment of logical ranks that :meth:`run` expects
    divides_gradients: bool = False
    """Whether each rank holds only a part of the model's gradients."""

    @property
    def is_ordered(self) -> bool:
        """Whether the gradient has the same bits at every world size."""
        return False

    @abstractmethod
    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        """Compute the step's gradient.

        Args:
            batches: Micro-batches of this process.
            backward: Takes a micro-batch and a factor, adds the gradient times the factor to ``.grad``, and returns
                the record of the loss.

        Returns:
            The results of ``backward``, in the order of ``batches``.
        """

    def begin_updates(self) -> AbstractContextManager[None]:
        """Return the context of a step with several updates, each a call of :meth:`run`."""
        return nullcontext()

    def run_apart(self, batch: MicroBatch, backward: Backward) -> LossRecord:
        """Compute a pass of ``batch`` outside :meth:`run`, and discard its gradients and changes of buffers.

        Only called if the strategy supports "integrity". All ranks must call it.
        """
        raise NotImplementedError

    def observe_gradients(self, observe: Observe) -> AbstractContextManager[None]:
        """Call ``observe`` in this block with each gradient of a pass, before it is added to others.

        Only called if the strategy supports "integrity". The names are those of parameters or of units of them.
        """
        raise NotImplementedError

    def commit(self) -> None:  # noqa: B027 - most change only gradients
        """Accept the changes of the last :meth:`run` to the model, before the update."""

    def undo(self) -> None:  # noqa: B027 - most change only gradients
        """Undo the changes of :meth:`run` since the last :meth:`commit`, after a failed step.

        Needed only if the gang heals. Strategies with ``shards_state`` do not need it, since survivors then restore
        their state from copies.
        """

    def scale(self, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
        """Multiply the gradients computed by :meth:`run` by ``factor``, a scalar tensor."""
        scale_gradients(parameters, factor)

    def compute_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Return the L2 norm of the whole gradient, a scalar.

        The norm is equal on all ranks that share the gradient. None if servers hold part of the gradient: only
        :meth:`clip` can then wait for the norm.
        """
        gradients = [each.grad for each in parameters if each.grad is not None]
        if not (self.is_ordered and any(is_accelerator(gradient.device) for gradient in gradients)):
            return nn.utils.get_total_norm(gradients)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([compute_aligned_norm(gradient) for gradient in gradients]))
        return norm

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clip the gradients to a total norm of at most ``limit``; return the norm before clipping."""
        norm = self.compute_norm(parameters)
        assert norm is not None  # otherwise the subclass overrides this method
        for is_sharded in (True, False):  # torch operations do not mix DTensors and plain tensors
            own = [parameter for parameter in parameters if isinstance(parameter.grad, DTensor) is is_sharded]
            nn.utils.clip_grads_with_norm_(own, limit, norm)
        return norm

    def state(self) -> StateDict:
        """Return the state that persists between steps; it can be loaded only at this world size."""
        return {}

    def load(self, state: StateDict) -> None:  # noqa: B027 - most are stateless
        """Load what :meth:`state` returned, after :meth:`on_resume`."""

    def on_resume(self) -> None:  # noqa: B027 - most sums do not depend on earlier steps
        """Prepare to resume: the next step must sum in the same order as in the saved run."""


class OrderedSums(GradientReducer):
    """Abstract base of reducers whose gradients have the same bits at every world size."""

    @property
    def is_ordered(self) -> bool:
        return True


@contextmanager
def observe_parameters(parameters: Iterable[tuple[str, nn.Parameter]], observe: Observe) -> Iterator[None]:
    """Call ``observe`` in this block with the gradient that each backward pass computes for a named parameter."""
    trained = [(name, each) for name, each in parameters if each.requires_grad]
    hooks = [each.register_hook(partial(observe, name)) for name, each in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def set_gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the gradients of ``parameters`` in this block, and restore them afterwards."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def pop_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Pop the gradients of ``parameters``, in their shapes, with zeros for missing ones."""
    gradients = []
    for parameter in parameters:
        gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return gradients


def disable_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Disable gradient synchronization in the block if ``module`` is DistributedDataParallel."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def finds_unused(module: nn.Module | None) -> bool:
    """Return whether ``module`` is DistributedDataParallel that finds unused parameters."""
    return isinstance(module, DistributedDataParallel) and bool(module.find_unused_parameters)


def refuse_norms_of_others(model: nn.Module, optimizer: Optimizer, numerics: Numerics) -> None:
    """Refuse a gradient norm that would include parameters unknown to ``optimizer``.

    Raises:
        ConfigError: a parameter requires a gradient, but ``zero_grad`` would not reset it.
    """
    own = {id(parameter) for parameter in all_parameters(optimizer)}
    others = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in own]
    if others:
        clips = numerics.clip_norm is not None
        raise ConfigError(
            f"{'clip_norm' if clips else 'nonfinite=skip'} requires all trainable parameters in the optimizer; "
            f"missing: {format_names(others)}. Their gradients are never reset, so the norm would include all "
            "earlier steps. Freeze them with requires_grad_(False), add them to the optimizer, or set "
            f"{'clip_norm=null' if clips else 'nonfinite=stop'}."
        )


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor, a scalar, that clips a gradient of ``norm`` (a scalar) to ``limit``.

    It equals the factor in torch.nn.utils.clip_grads_with_norm_.
    """
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def compute_aligned_norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm of ``gradient``, a scalar, with bits that do not depend on its address.

    A view of a bucket may start at any address. CUDA's kernel reads four elements at once if all tensors of a call are
    aligned, and otherwise sums in a different order.
    """
    is_aligned = gradient.data_ptr() % (4 * gradient.element_size()) == 0
    norm: Tensor = torch._foreach_norm([gradient if is_aligned else gradient.clone()])[0]
    return norm


@final
class Presence:
    """Records which of ``parameters`` had a gradient in a step.

    The others must keep ``grad=None``. Optimizers skip parameters without a gradient, but apply weight decay to
    parameters with a zero gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._absent = set(range(len(parameters)))

    def record_gradients(self) -> None:
        """Record which gradients exist after a backward pass."""
        if self._absent:
            self._absent = {index for index in self._absent if self._parameters[index].grad is None}

    @property
    def absent(self) -> Set[int]:
        """Indices of the parameters without a gradient so far."""
        return self._absent

    def mask_absent(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return ``gradients`` (one per parameter, in their shapes) with None for absent ones."""
        return [None if index in self._absent else each for index, each in enumerate(gradients)]


@final
class PresenceExchange:
    """Determines which gradients exist on any rank of ``group``; only ranks that lack one wait."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: tuple[Collective, Tensor] | None = None  # an exchange that this rank has not waited for

    def present_anywhere(self, present: Sequence[bool]) -> Sequence[bool]:
        """Return whether each gradient is present on any rank; all ranks must call it."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None
        has_all = all(present)
        if has_all:
            any_n = torch.ones(len(present), dtype=torch.uint8, device=self._device)  # a copy would wait for the GPU
        else:
            any_n = torch.tensor(present, dtype=torch.uint8, device=self._device)
        work = start_collective(dist.all_reduce, any_n, op=dist.ReduceOp.MAX, group=self._group)
        if has_all:
            self._sent = work, any_n
            return present
        work.wait()
        return [bool(each) for each in any_n.tolist()]


_SHOWN = 4  # maximum number of names in a message
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def check_reduced(module: nn.Module) -> None:
    """Check that DDP has reduced all gradients, after the last backward pass of a step.

    This does not communicate with other ranks. The private method exists in torch 2.1 to 2.15.

    Raises:
        ConfigError: ``module`` still waits for the gradient of a parameter that the pass did not reach.
    """
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    try:
        module._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _build_unused_error(module, str(error)) from None
    first = next((each for each in module.module.parameters() if each.requires_grad), None)
    if first is not None and first.grad is None:  # the pass did not reach any parameter
        raise _build_unused_error(module, "")


def _build_unused_error(module: DistributedDataParallel, said: str) -> ConfigError:
    own = module.module.named_parameters()
    named = {name.removeprefix("model."): each for name, each in own if each.requires_grad}  # prefix from CallingRoot
    names = [name for name, each in named.items() if each.grad is None]
    if not names and (match := _INDICES.search(said)):  # an earlier micro-batch had a gradient
        names = [list(named)[int(index)] for index in match[1].split() if int(index) < len(named)]
    return ConfigError(
        f"{format_names(names)} received no gradient in the last micro-batch of this process. Set "
        "strategy.find_unused_parameters=true, freeze the parameters with requires_grad_(False), or make the loss "
        "depend on them."
    )


def format_names(names: list[str]) -> str:
    """Return the first of ``names`` as a list for a message."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "") if names else "some parameters"
