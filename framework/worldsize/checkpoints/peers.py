"""Sends the whole state of one process to others of its group, from memory to memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.checkpoints.tree import join, ordered_like, split
from worldsize.core import StateDict

Facts = Mapping[str, Any]


def send_state(
    state: StateDict, facts: Facts, receivers: Sequence[int], group: ProcessGroup, device: torch.device
) -> None:
    """Send ``state``, whose tensors this process holds whole, and plain ``facts`` to ranks of ``group``, one by one.

    Tensors go by way of ``device``, which the group can reach: those of a model on a GPU are not all there.
    """
    tensors, values = split(state)
    forms = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    for receiver in receivers:
        dist.send_object_list([values, forms, dict(facts)], group=group, group_dst=receiver)
        for tensor in tensors.values():
            dist.send(tensor.detach().to(device).contiguous(), group=group, group_dst=receiver)


def receive_state(
    template: StateDict, sender: int, group: ProcessGroup, device: torch.device
) -> tuple[StateDict, Facts]:
    """Receive what rank ``sender`` of ``group`` sends with :func:`send_state`; keys are in the order of ``template``.

    Returns:
        The state, with each tensor where that of ``template`` is, and the facts.
    """
    places = {name: tensor.device for name, tensor in split(template)[0].items()}
    received: list[Any] = [None, None, None]
    dist.recv_object_list(received, group=group, group_src=sender)
    values, forms, facts = received
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in forms:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, group=group, group_src=sender)
        tensors[name] = tensor.to(places.get(name, device))
    return ordered_like(join(values, tensors), template), facts
