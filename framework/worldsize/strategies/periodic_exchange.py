"""Averaging of flat tensors over independent workers, and a count of the bytes sent.

A ``Fragment`` is a group of parameters that workers synchronize together, with an outer optimizer step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_flatten, tree_unflatten

from worldsize.collectives.group import start_collective
from worldsize.core import StateDict, World
from worldsize.devices import move_to_device

Begun = Callable[[], Callable[[], Tensor]]


class Exchange(ABC):
    """Abstract base: averages in at least float32, with the same bits on every worker."""

    def __init__(self, world: World) -> None:
        self.group, self.size, self.device = world.group, world.size, world.device

    def start_average(self, row_n: Tensor) -> Begun:
        """Start averaging ``row_n`` (n,), which may be overwritten; a single worker sends nothing.

        Call the returned function to start the second half of the exchange. It returns a function that waits for the
        mean (n,). All workers must make these calls in the same order.
        """
        return (lambda: lambda: row_n) if self.group is None else self._start_average(row_n)

    @abstractmethod
    def _start_average(self, row_n: Tensor) -> Begun: ...

    @abstractmethod
    def count_sent_bytes(self, numel: int) -> int:
        """Return the bytes that each worker sends to average ``numel`` float32 elements."""


@final
class Exact(Exchange):
    """Exact averaging by an all-reduce in float32, without a second half."""

    def _start_average(self, row_n: Tensor) -> Begun:
        work = start_collective(dist.all_reduce, row_n, group=self.group)

        def wait_for_mean() -> Tensor:
            work.wait()
            return row_n.div_(self.size)

        return lambda: wait_for_mean

    def count_sent_bytes(self, numel: int) -> int:
        return 2 * (self.size - 1) * -(-numel // self.size) * 4


def widen_tensor(tensor: Tensor) -> Tensor:
    """Convert ``tensor`` to the dtype for sums, at least float32, keeping its shape."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def flatten_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate ``tensors`` of any shapes into one (n,) on ``device``, in at least float32."""
    return torch.cat([move_to_device(widen_tensor(tensor.detach()).flatten(), device) for tensor in tensors])


def split_like(row_n: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split ``row_n``, of shape (n,), into views with the shapes of ``like``."""
    parts = torch.split(row_n, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def move_means_to_host(means: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Move means to the CPU if their counterparts in ``like`` are there, with one device sync."""
    places = [place for place, each in enumerate(like) if each.device.type == "cpu" != means[place].device.type]
    if not places:
        return means
    host_n = torch.cat([means[place].flatten() for place in places]).cpu()
    moved = dict(zip(places, split_like(host_n, [like[place] for place in places]), strict=True))
    return [moved.get(place, mean) for place, mean in enumerate(means)]


def average_tree(tree: Any, exchange: Exchange) -> Any:
    """Return ``tree`` with every floating-point tensor replaced by its mean over workers."""
    leaves, spec = tree_flatten(tree)  # in key order, since the position of an element affects its rounding
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    tensors = [leaves[place] for place in places]
    if tensors:
        row_n = exchange.start_average(flatten_tensors(tensors, exchange.device))()()
        for place, mean in zip(places, move_means_to_host(split_like(row_n, tensors), tensors), strict=True):
            leaves[place] = mean.to(leaves[place])
    return tree_unflatten(leaves, spec)


@final
class Fragment:
    """Parameters that workers exchange together, and their last synchronized values.

    ``own``: this worker's parameters, changed in place. SGD with Nesterov momentum updates the synchronized values
    with the outer gradient: their difference from each worker's parameters, averaged over workers (DiLoCo, Douillard
    et al. 2023, arXiv 2311.08105).
    """

    def __init__(self, own: Sequence[Tensor], exchange: Exchange, *, lr: float, momentum: float) -> None:
        self._own, self._exchange = list(own), exchange
        self._agreed = [nn.Parameter(widen_tensor(tensor.detach()).clone()) for tensor in own]
        self._optimizer = SGD(self._agreed, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self._numel = sum(tensor.numel() for tensor in own)
        self._momentum = momentum > 0
        self._begun: Begun | None = None  # the first half of an exchange in flight
        self._arriving: Callable[[], Tensor] | None = None  # the second half: waits for the mean
        self.restart()

    def restart(self) -> None:
        """Reset the synchronized values to this worker's parameters, which are equal on all workers."""
        for agreed, tensor in zip(self._agreed, self._own, strict=True):
            agreed.data.copy_(tensor)
            if self._momentum:  # state() and load() need the buffer before SGD creates it in its first step
                self._optimizer.state[agreed] = {"momentum_buffer": widen_tensor(tensor.detach()).mul(0)}
        self._begun, self._arriving = None, None

    def send(self) -> int:
        """Start exchanging outer gradients; return the bytes that this worker sends."""
        device = self._exchange.device
        self._begun = self._exchange.start_average(
            flatten_tensors(self._agreed, device).sub_(flatten_tensors(self._own, device))
        )
        return self._exchange.count_sent_bytes(self._numel)

    def relay_exchange(self) -> None:
        """Start the second half of the exchange, if one is in flight."""
        if self._begun is not None:
            self._arriving, self._begun = self._begun(), None

    def _wait_for_mean(self) -> Tensor | None:
        """Wait for the outer gradient and return it, (n,), or None if no exchange is in flight."""
        self.relay_exchange()
        if self._arriving is None:
            return None
        mean_n = self._arriving()
        self._arriving = lambda: mean_n
        return mean_n

    def apply_mean(self, mix: float = 0.0) -> None:
        """Take the outer step; set parameters to ``mix`` × own + (1 − mix) × synchronized values."""
        if (mean_n := self._wait_for_mean()) is None:
            return
        self._arriving = None
        for agreed, gradient in zip(self._agreed, split_like(mean_n, self._agreed), strict=True):
            agreed.grad = gradient.to(agreed)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for tensor, agreed in zip(self._own, self._agreed, strict=True):
            tensor.detach().copy_(
                agreed.detach() if mix == 0 else widen_tensor(tensor.detach()).lerp(agreed.detach(), 1 - mix)
            )

    def state(self, *, in_flight: bool) -> StateDict:
        """Return the state, equal on all workers; if ``in_flight``, with the mean of a pending send."""
        momentum = [self._optimizer.state[agreed]["momentum_buffer"] for agreed in self._agreed if self._momentum]
        state: StateDict = {"agreed": [agreed.detach() for agreed in self._agreed], "momentum": momentum}
        if not in_flight:
            return state
        mean_n = self._wait_for_mean()
        incoming = flatten_tensors(self._agreed, self._exchange.device).zero_() if mean_n is None else mean_n
        return {**state, "is_coming": mean_n is not None, "incoming": incoming}

    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned, including a mean that was in flight."""
        for agreed, value in zip(self._agreed, state["agreed"], strict=True):
            agreed.data.copy_(value)
        for agreed, value in zip(self._agreed, state["momentum"], strict=False):
            self._optimizer.state[agreed]["momentum_buffer"].copy_(value)
        self._begun, self._arriving = None, None
        if state.get("is_coming"):
            incoming_n = state["incoming"].clone()
            self._arriving = lambda: incoming_n
