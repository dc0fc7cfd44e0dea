"""Reads weights from files into the tensors of a rank, with torch.distributed.checkpoint's planners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from worldsize.checkpoint.safetensors import Entry
from worldsize.checkpoint.storage import PlannedReader, part_of
from worldsize.checkpoint.weights import Weights


def read_into(held: Mapping[str, Tensor], weights: Weights, names: Mapping[str, str]) -> None:
    """Fill the tensors that this rank holds, full or sharded, with values from ``weights``, in place.

    Args:
        held: The tensors, by name, with the shapes of those in the source; of a DTensor only the local shard is read.
        weights: The source.
        names: The name of each tensor in the source, by its name in ``held``.
    """
    state_dict_loader.load(dict(held), storage_reader=_WeightsReader(weights, names), no_dist=True)


@final
class _WeightsReader(PlannedReader):
    """Reads the parts that torch's planners request for this rank."""

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        self._weights, self._names = weights, names

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries = {name: self._weights.entries[source] for name, source in self._names.items()}
        return Metadata({name: _whole(entry) for name, entry in entries.items()})

    def values(self, item: ReadItem) -> Tensor:
        return self._weights.part(self._names[item.storage_index.fqn], part_of(item))


def _whole(entry: Entry) -> TensorStorageMetadata:
    shape = torch.Size(entry.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(entry.dtype), shape, [chunk])
