"""ZeRO stage 1 with any optimizer: each rank updates its own parameters, and receives the others."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from worldsize.core import World
from worldsize.dist.step_timer import phase, started, wait
from worldsize.optimizers.names import all_parameters
from worldsize.strategies.step_hooks import enclose_steps

_SMALL = 1 << 20  # bytes; up to here parameters are sent together, from a copy


@final
class OwnedSteps:
    """Lets ``optimizer`` update the parameters that this rank owns, and sends these to the other ranks.

    It stays the recipe's own object. While it steps, its groups have only this rank's parameters, and no other has a
    gradient, so that it keeps no state of others. Before and after a step, its groups are complete: schedules and the
    recipe's hooks see all parameters, equal on all ranks.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._owners = owners([group["params"] for group in optimizer.param_groups], world.size)
        self._whole: list[list[Tensor]] | None = None  # the complete groups, while they are restricted
        self._gradients: list[tuple[Tensor, Tensor]] = []  # of other ranks' parameters, during a step
        self._alone = False  # whether a step sends nothing

    def begin(self) -> None:
        """Restrict every step from now on."""
        enclose_steps(self._optimizer, self._enter, self._leave)

    @contextmanager
    def restricted(self) -> Iterator[None]:
        """Let the groups have only this rank's parameters; steps within the context send nothing."""
        self._restrict()
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self._complete()

    def _enter(self) -> None:
        if self._alone:
            return
        others = [each for each in all_parameters(self._optimizer) if not self._owns(each)]
        self._gradients = [(each, each.grad) for each in others if each.grad is not None]
        for each, _ in self._gradients:
            each.grad = None
        self._restrict()

    def _leave(self) -> None:
        if self._alone:
            return
        self._complete()
        for each, gradient in self._gradients:
            each.grad = gradient
        self._gradients = []
        with phase("communication"):
            self._exchange()

    def _exchange(self) -> None:
        """Send this rank's parameters to the others, and receive theirs; small ones of one owner in one message."""
        messages: dict[tuple[int, object], list[Tensor]] = {}
        for place, each in enumerate(all_parameters(self._optimizer)):
            owner = self._owners.get(id(each))
            if each.requires_grad and owner is not None:
                kind = (each.dtype, each.device) if each.nbytes <= _SMALL else place
                messages.setdefault((owner, kind), []).append(each.detach())
        flights = []
        for (owner, _), parts in messages.items():
            sent = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
            work = started(dist.broadcast(sent, group=self._world.group, group_src=owner, async_op=True))
            flights.append((work, sent, parts))
        for work, sent, parts in flights:
            wait(work)
            if len(parts) > 1:
                received = torch.split(sent, [part.numel() for part in parts])
                torch._foreach_copy_(parts, [own.view(part.shape) for own, part in zip(received, parts, strict=True)])

    def _owns(self, parameter: Tensor) -> bool:
        """Return whether this rank updates ``parameter``; all do if it came to the optimizer later."""
        return self._owners.get(id(parameter), self._world.rank) == self._world.rank

    def _restrict(self) -> None:
        groups = self._optimizer.param_groups
        self._whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [each for each in group["params"] if self._owns(each)]

    def _complete(self) -> None:
        assert self._whole is not None
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        self._whole = None


def owners(groups: Iterable[Iterable[Tensor]], ranks: int) -> dict[int, int]:
    """Return the rank that owns each parameter, of any shape, by its id: the largest ones first, to the emptiest."""
    loads, owned = [(0, rank) for rank in range(ranks)], dict[int, int]()
    for group in groups:
        for parameter in sorted(group, key=Tensor.numel, reverse=True):
            load, rank = heapq.heappop(loads)
            owned[id(parameter)] = rank
            heapq.heappush(loads, (load + parameter.numel(), rank))
    return owned
