"""Gradients of parameters shared by stages of a pipeline, such as embedding and head.

Without a pipeline, autograd adds the gradients of both uses in each micro-batch, and then the sums of micro-batches are
added in the tree of logical ranks. For the same bits, the first stage that holds such a parameter gets the gradient of
each micro-batch from the others, which have already computed theirs; the sums of the others stay zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from worldsize.collectives.group import Collective, start_collective


@dataclass(frozen=True)
class Tied:
    """Parameters shared by several stages.

    Attributes:
        parameters: This rank's parameters, or its shards of them.
        group: The ranks that hold the same parameters or shards.
        owners: Ranks in ``group``, in the order of their stages.
    """

    parameters: Sequence[nn.Parameter]
    group: ProcessGroup
    owners: Sequence[int]


@final
class TiedGradients:
    """Moves gradients of ``tied`` parameters to the first stage after each backward pass."""

    def __init__(self, stage: nn.Module, tied: Sequence[Tied]) -> None:
        own = {id(each) for each in stage.parameters()}
        self._shared = [
            (each, [_find_full_parameter(stage, parameter) for parameter in each.parameters])
            for each in tied
            if all(id(parameter) in own for parameter in each.parameters)
        ]
        self._held: list[tuple[Tensor, ProcessGroup, int]] = []  # to be sent after the messages of the schedule
        self._sent: list[tuple[Collective, Tensor]] = []  # with the tensors that must stay in memory

    def exchange(self) -> None:
        """Receive one micro-batch's gradients on the first stage; hold them on the others."""
        self.send_held()
        for tied, getters in self._shared:
            parameters, group, first = [get() for get in getters], tied.group, tied.owners[0]
            flat = torch.cat(
                [(torch.zeros_like(own) if own.grad is None else own.grad).flatten() for own in parameters]
            )
            if group.rank() != first:
                self._held.append((flat, group, first))
                for own in parameters:
                    own.grad = torch.zeros_like(own)
                continue
            rows = [torch.empty_like(flat) for _ in range(group.size())]
            start_collective(dist.gather, flat, rows, group=group, group_dst=first).wait()
            total, *others = (rows[owner] for owner in reversed(tied.owners))  # autograd adds the last use first
            for row in others:
                total = total + row
            parts = torch.split(total, [own.numel() for own in parameters])
            for own, part in zip(parameters, parts, strict=True):
                own.grad = part.view_as(own)

    def send_held(self) -> None:
        """Start sending the gradients of the last pass.

        The schedule must have sent the pass's input gradient: without it, the first stage would never receive ours.
        """
        while self._sent and self._sent[0][0].is_completed():
            self._sent.pop(0)[0].wait()
        for flat, group, first in self._held:
            self._sent.append((start_collective(dist.gather, flat, group=group, group_dst=first), flat))
        self._held.clear()

    def finish(self) -> None:
        """Wait until all gradients of a step have been sent."""
        self.send_held()
        while self._sent:
            self._sent.pop(0)[0].wait()


def _find_full_parameter(stage: nn.Module, parameter: nn.Parameter) -> Callable[[], nn.Parameter]:
    """Return a getter of ``parameter``, or in an FSDP unit, of its unsharded parameter."""
    units = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    groups: list[Any] = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    for each in (each for group in groups for each in group.fsdp_params):
        if each.sharded_param is parameter:
            return partial(getattr, each, "unsharded_param")
    return lambda: parameter
