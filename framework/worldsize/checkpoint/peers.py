"""Sends the whole state of one process to others of its group, from memory to memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.checkpoint.tree import join, ordered_like, split
from worldsize.core import StateDict
from worldsize.dist.interruption import INTERRUPTION
from worldsize.dist.step_timer import receive, send

Facts = Mapping[str, Any]
_Form = tuple[str, torch.dtype, Sequence[int]]  # name, type and shape of a tensor

_MESSAGE = 16 << 20  # bytes of small tensors that are sent together


def send_state(
    state: StateDict, facts: Facts, receivers: Sequence[int], group: ProcessGroup, device: torch.device
) -> None:
    """Send ``state``, whose tensors this process holds whole, and plain ``facts`` to ranks of ``group``, one by one.

    Tensors go by way of ``device``, which the group can reach: those of a model on a GPU are not all there.
    """
    tensors, values = split(state)
    forms = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    for receiver in receivers:
        head = [values, forms, dict(facts)]
        INTERRUPTION.call(partial(dist.send_object_list, head, group=group, group_dst=receiver))
        for names in _messages(forms):
            parts = [tensors[name].detach().to(device).flatten() for name in names]
            send(parts[0] if len(parts) == 1 else torch.cat(parts), group, to=receiver)


def receive_state(
    template: StateDict, sender: int, group: ProcessGroup, device: torch.device
) -> tuple[StateDict, Facts]:
    """Receive what rank ``sender`` of ``group`` sends with :func:`send_state`; keys are in the order of ``template``.

    Returns:
        The state, with each tensor where that of ``template`` is, and the facts.
    """
    places = {name: tensor.device for name, tensor in split(template)[0].items()}
    received: list[Any] = [None, None, None]
    INTERRUPTION.call(partial(dist.recv_object_list, received, group=group, group_src=sender))
    values, forms, facts = received
    tensors: dict[str, Tensor] = {}
    kinds = {name: (dtype, shape) for name, dtype, shape in forms}
    for names in _messages(forms):
        sizes = [math.prod(kinds[name][1]) for name in names]
        flat = torch.empty(sum(sizes), dtype=kinds[names[0]][0], device=device)
        receive(flat, group, source=sender)
        for name, part in zip(names, flat.split_with_sizes(sizes), strict=True):
            own = part if len(names) == 1 else part.clone()  # else each would keep the whole message in memory
            tensors[name] = own.view(kinds[name][1]).to(places.get(name, device))
    return ordered_like(join(values, tensors), template), facts


def _messages(forms: Sequence[_Form]) -> Iterator[list[str]]:
    """Yield the names of tensors of one type that are sent together, since each message costs some time."""
    for dtype, same in groupby(sorted(forms, key=lambda form: str(form[1])), key=lambda form: form[1]):
        names, size = list[str](), 0
        for name, _, shape in same:
            if names and size + math.prod(shape) * dtype.itemsize > _MESSAGE:
                yield names
                names, size = [], 0
            names.append(name)
            size += math.prod(shape) * dtype.itemsize
        yield names
