"""Loads one batch of a data set, and brings it to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from worldsize.core import Batch, Recipe

Collate = Callable[[list[Any]], Batch]


def collate_of(recipe: Recipe) -> Collate:
    """Return the function that makes batches of the samples of ``recipe``.

    It is torch's ``default_collate`` itself unless the recipe overrides ``collate``, so that :func:`fetch` can take a
    faster way to the same batch.
    """
    return default_collate if type(recipe).collate is Recipe.collate else recipe.collate


def fetch(dataset: Any, indices: Tensor, collate: Collate = default_collate) -> Batch:
    """Load one batch in the largest units that the data set offers.

    A data set may load whole batches (``load_batch``), lists of samples (``__getitems__``) or single ones
    (``__getitem__``).

    Args:
        dataset: the data set, which has an index.
        indices: int64 [batch], the samples of the batch.
        collate: makes a batch of a list of samples.
    """
    if hasattr(dataset, "load_batch"):
        return dataset.load_batch(indices)
    if isinstance(dataset, torch.utils.data.TensorDataset) and collate is default_collate:
        return tuple(tensor[indices] for tensor in dataset.tensors)
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(indices.tolist()))
    return collate([dataset[index] for index in indices.tolist()])


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set is a stream, which has no length and no index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a nested batch to ``device``; for the CPU return the batch as it is."""
    if device.type == "cpu":
        return batch
    return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(device, non_blocking=True))
