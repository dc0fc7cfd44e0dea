"""Records which parameters have a gradient in a step, on a rank and on any rank."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from worldsize.dist.step_timer import started, wait


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

    def any(self, present: Sequence[bool]) -> Sequence[bool]:
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
