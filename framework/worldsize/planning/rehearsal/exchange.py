"""What ranks say to each other in small tensors: sizes, counts and wishes, by which they decide what to call next.

A rank is rehearsed without its peers, as if they had the same numbers. Where they have not, it is rehearsed again with
what they have said before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from worldsize.planning.rehearsal.groups import Group

_LARGEST = 4096  # bytes: what is larger decides nothing
_PAIRS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Place(NamedTuple):
    """The place of a call among those of its group, from 0."""

    group: Group
    number: int


class Words(NamedTuple):
    """The tensors of one rank in one call, which has its own words."""

    call: str
    tensors: tuple[bytes, ...]


def words_of(call: str, tensors: Sequence[Tensor]) -> Words | None:
    """Return what small tensors hold; None: they are large, or hold nothing."""
    if any(isinstance(each, FakeTensor) or each.is_meta or each.device.type != "cpu" for each in tensors):
        return None
    if sum(each.numel() * each.element_size() for each in tensors) > _LARGEST:
        return None
    return Words(
        call, tuple(bytes(each.detach().contiguous().flatten().view(torch.uint8).numpy().data) for each in tensors)
    )


@final
@dataclass(frozen=True)
class Said:
    """The small tensors of all ranks in one rehearsal, by place and rank."""

    words: Mapping[Place, Mapping[int, Words]] = field(default_factory=dict)

    def heard(self, place: Place, call: str, mine: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """Return the tensors of every member in ``call``, in the order of the group; None: nothing is known of them.

        A member of which nothing is known, or that called something else there, is taken to have ``mine``.
        """
        known = self.words.get(place)
        if known is None:
            return None
        return [_tensors(known.get(rank), call, mine) for rank in place.group.ranks]


def _tensors(words: Words | None, call: str, mine: Sequence[Tensor]) -> list[Tensor]:
    sizes = [each.numel() * each.element_size() for each in mine]
    if words is None or words.call != call or [len(each) for each in words.tensors] != sizes:
        return [each.clone() for each in mine]
    pairs = zip(words.tensors, mine, strict=True)
    return [
        torch.frombuffer(bytearray(word), dtype=each.dtype).view(each.shape) if word else each for word, each in pairs
    ]


def combined(operation: str, reduction: str, root: int, heard: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return what a call gives each member, for each of its tensors: the sum, the root's, or all after each other."""
    columns = list(zip(*heard, strict=True))
    if operation == "broadcast":
        return list(heard[root])
    if operation == "all_gather":
        return [torch.cat([each.flatten() for each in column]) for column in columns]
    sums = [reduce(_PAIRS[reduction], column) for column in columns]
    return [_divided(each, len(heard)) for each in sums] if reduction == "avg" else sums


def _divided(total: Tensor, count: int) -> Tensor:
    return total / count if total.is_floating_point() else total // math.ceil(count)
