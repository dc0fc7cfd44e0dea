"""The memory that a process needs for a model until it has its own part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from worldsize.strategies.deferred.fakes import bytes_of
from worldsize.strategies.deferred.tape import Deferred, Tape

_SMALL = 16 * 2**20  # bytes that are not worth a warning
_PART = 1 / 4  # of the model
_TEMPORARY = 4  # temporary memory of an initialisation, in multiples of the largest tensor


@final
@dataclass(frozen=True)
class Footprint:
    """The bytes of a model, and those that each process needs of it at once.

    Attributes:
        model: Bytes of the model's tensors.
        made: Bytes of tensors that exist from the start: the model's, and those from which weights are made.
        largest: Bytes of the largest tensor that is still to be made.
        at_once: Most bytes that making one tensor takes, including the tensor itself.
    """

    model: int
    made: int
    largest: int
    at_once: int

    @staticmethod
    def of(there: Iterable[Tensor], borrowed: Iterable[Tensor], waiting: Collection[Deferred], tape: Tape) -> Footprint:
        """Measure a model.

        Args:
            there: The model's tensors that have memory, of any shapes.
            borrowed: Other tensors, of any shapes, from which the model's are made.
            waiting: The model's tensors that are still to be made.
            tape: How they are made.
        """
        own = _storages(there)
        sizes = {each.storage: tape.nbytes[each.storage] for each in waiting}
        return Footprint(
            model=sum(own.values()) + sum(sizes.values()),
            made=sum((own | _storages(borrowed)).values()),
            largest=max(sizes.values(), default=0),
            at_once=max((tape.needs(each) for each in waiting), default=0),
        )

    @property
    def peak(self) -> int:
        """Peak bytes of a process, in addition to its part of the model."""
        return self.made + self.at_once

    def complaint(self) -> str | None:
        """Return why a process holds much of the model at once, and the remedy; None: it does not."""
        together = max(0, self.at_once - _TEMPORARY * self.largest)
        if self.made + together <= max(_SMALL, _PART * self.model):
            return None
        if together > self.made:
            return "its constructor computes weights from each other. Let it initialise one at a time."
        return (
            "its constructor makes them by itself, for example from files. Let modules make their weights on the CPU "
            "by torch.nn.init, and name files that have weights in init_from."
        )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each piece of memory that ``tensors`` are in."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = 0 if storage.device.type == "meta" else storage.nbytes()
        else:
            sizes[id(tensor)] = bytes_of(tensor)
    return sizes
