"""What ranks say to each other in small tensors: sizes, counts and wishes, by which they decide what to call next.

A rank is rehearsed without its peers, as if they had the same numbers. Where they have not, it is rehearsed again with
what they have said before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from worldsize.planning.rehearsal.groups import Group

_LARGEST = 4096  # bytes of fractions: what is larger decides nothing
_LARGEST_INTEGERS = 1 << 20  # bytes of whole numbers, such as places in a tensor
_REPORTS = "worldsize/collectives/exact.py"  # sums that the loop logs, by which nobody decides anything
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
    """The place of a call among those of its group, from 0; a message's is among those of its sender to its receiver.

    Attributes:
        group: The group.
        number: The place.
        route: The sender of a message, its receiver and its tag; empty: all members take part.
    """

    group: Group
    number: int
    route: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that take part."""
        return self.route[:2] or self.group.ranks


class Words(NamedTuple):
    """The tensors of one rank in one call, which has its own words.

    Attributes:
        call: The call.
        tensors: Their bytes.
        is_news: Whether others may call something else for them.
        is_integral: Whether all are whole numbers or objects, and so become the same each time if others say the same.
    """

    call: str
    tensors: tuple[bytes, ...]
    is_news: bool = True
    is_integral: bool = False


def readable(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors, of any shapes, hold values rather than being fakes."""
    return not any(isinstance(each, FakeTensor) or each.is_meta or each.device.type != "cpu" for each in tensors)


def words_of(call: str, site: str, tensors: Sequence[Tensor], *, is_object: bool) -> Words | None:
    """Return the values of small tensors, of any shapes, or of objects; None: they are large, or fakes."""
    if not readable(tensors):
        return None
    is_integral = not any(each.is_floating_point() or each.is_complex() for each in tensors)
    largest = _LARGEST_INTEGERS if is_integral else _LARGEST
    if not is_object and sum(each.numel() * each.element_size() for each in tensors) > largest:
        return None
    said = tuple(bytes(each.detach().contiguous().flatten().view(torch.uint8).numpy().data) for each in tensors)
    return Words(call, said, not site.startswith(_REPORTS), is_integral)


@final
@dataclass(frozen=True)
class Said:
    """The small tensors of all ranks in one rehearsal, by place and rank."""

    words: Mapping[Place, Mapping[int, Words]] = field(default_factory=dict)

    def by_all(self, place: Place, call: str, mine: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """Return the tensors of every member in ``call``, in group order and in the shapes of ``mine``; None: unknown.

        A member that is unknown, or that called something else there, is assumed to have ``mine``.
        """
        known = self.words.get(place)
        if known is None:
            return None
        said = (_read(known.get(rank), call, mine) for rank in place.group.ranks)
        return [[each.clone() for each in mine] if tensors is None else tensors for tensors in said]

    def by_one(
        self, place: Place, rank: int, call: str, like: Sequence[Tensor], part: int | None = None
    ) -> list[Tensor] | None:
        """Return ``rank``'s tensors in ``call``, or a ``part`` of them, in the shapes of ``like``; None: unknown."""
        words = self.words.get(place, {}).get(rank)
        if words is not None and part is not None:
            words = words._replace(tensors=words.tensors[part : part + 1])
        return _read(words, call, like)

    def has_news(self, ranks: Collection[int]) -> bool:
        """Return whether any of ``ranks`` would hear something else than what it says itself."""
        return any(
            len({known.get(rank) for rank in place.ranks if rank in ranks}) > 1
            for place, known in self.words.items()
            if any(words.is_news for words in known.values())
        )

    @property
    def integers(self) -> Mapping[tuple[Place, int], Words]:
        """The words of whole numbers, which stay as they are once all ranks have heard what others decide."""
        return {
            (place, rank): words
            for place, known in self.words.items()
            for rank, words in known.items()
            if words.is_news and words.is_integral
        }


def _read(words: Words | None, call: str, like: Sequence[Tensor]) -> list[Tensor] | None:
    """Return tensors of words; objects, whose size others may not know yet, are cut or filled up."""
    if words is None or words.call != call or len(words.tensors) != len(like):
        return None
    read = []
    for word, each in zip(words.tensors, like, strict=True):
        size = each.numel() * each.element_size()
        if len(word) != size and "(objects" not in call:
            return None
        own = bytearray(word[:size].ljust(size, b"\0"))
        read.append(torch.frombuffer(own, dtype=each.dtype).view(each.shape) if own else each.detach().clone())
    return read


def combined(operation: str, reduction: str, heard: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
    """Return each member's result of a call: for every tensor the sum, of the same shape, or the concatenation.

    None: the reduction is unknown.
    """
    columns = list(zip(*heard, strict=True))
    if operation in ("all_gather", "gather"):
        return [torch.cat([each.flatten() for each in column]) for column in columns]
    if reduction not in _PAIRS:
        return None
    sums = [reduce(_PAIRS[reduction], column) for column in columns]
    return [_divided(each, len(heard)) for each in sums] if reduction == "avg" else sums


def _divided(total: Tensor, count: int) -> Tensor:
    return total / count if total.is_floating_point() else total // count
