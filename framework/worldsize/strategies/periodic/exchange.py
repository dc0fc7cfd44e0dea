"""Averages flat tensors over workers, and counts the bytes sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from worldsize.core import World
from worldsize.devices import on_device
from worldsize.dist.step_timer import started, wait

Begun = Callable[[], Callable[[], Tensor]]


class Exchange(ABC):
    """Averages in at least float32, with the same bits on every worker; a single worker sends nothing."""

    def __init__(self, world: World) -> None:
        self.group, self.size, self.device = world.group, world.size, world.device

    def begin(self, row_n: Tensor) -> Begun:
        """Start to average ``row_n``, of shape (n,), which may be overwritten.

        The first call of the result sends the second half of the exchange; its result waits for the mean (n,). Every
        worker must make these calls in the same order.
        """
        return (lambda: lambda: row_n) if self.group is None else self._begin(row_n)

    @abstractmethod
    def _begin(self, row_n: Tensor) -> Begun: ...

    @abstractmethod
    def sent(self, numel: int) -> int:
        """Return the bytes that each worker sends to average ``numel`` float32 numbers."""


@final
class Exact(Exchange):
    """An all-reduce in float32, which has no second half."""

    def _begin(self, row_n: Tensor) -> Begun:
        work = started(dist.all_reduce(row_n, group=self.group, async_op=True))

        def mean() -> Tensor:
            wait(work)
            return row_n.div_(self.size)

        return lambda: mean

    def sent(self, numel: int) -> int:
        return 2 * (self.size - 1) * -(-numel // self.size) * 4


def wide(tensor: Tensor) -> Tensor:
    """Convert ``tensor`` to the dtype of sums, at least float32, in the same shape."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def flat(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate ``tensors`` of any shapes to one (n,) on ``device``, at least float32."""
    return torch.cat([on_device(wide(tensor.detach()).flatten(), device) for tensor in tensors])


def split_like(row_n: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split ``row_n``, of shape (n,), into views with the shapes of ``like``."""
    parts = torch.split(row_n, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def beside(means: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Bring those of ``means`` to the host whose tensors of ``like`` are there, with one wait for the device."""
    places = [place for place, each in enumerate(like) if each.device.type == "cpu" != means[place].device.type]
    if not places:
        return means
    host_n = torch.cat([means[place].flatten() for place in places]).cpu()
    moved = dict(zip(places, split_like(host_n, [like[place] for place in places]), strict=True))
    return [moved.get(place, mean) for place, mean in enumerate(means)]


def mean_of(tree: Any, exchange: Exchange) -> Any:
    """Return ``tree`` with every floating-point tensor replaced by its mean over workers."""
    leaves, spec = tree_flatten(tree)  # in the order of keys, since the position of a number affects its rounding
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    tensors = [leaves[place] for place in places]
    if tensors:
        row_n = exchange.begin(flat(tensors, exchange.device))()()
        for place, mean in zip(places, beside(split_like(row_n, tensors), tensors), strict=True):
            leaves[place] = mean.to(leaves[place])
    return tree_unflatten(leaves, spec)
