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
    """Return how ``recipe`` makes batches of samples: torch's own way, which data sets may shorten, unless it says."""
    return default_collate if type(recipe).collate is Recipe.collate else recipe.collate


def fetch(dataset: Any, indices: Tensor, collate: Collate = default_collate) -> Batch:
    """Load one batch by the widest access that the data set offers.

    It may load whole batches (``load_batch``), lists of samples (``__getitems__``) or single ones (``__getitem__``);
    ``collate`` makes a batch of samples.
    """
    if hasattr(dataset, "load_batch"):
        return dataset.load_batch(indices)
    if isinstance(dataset, torch.utils.data.TensorDataset) and collate is default_collate:
        return tuple(tensor[indices] for tensor in dataset.tensors)
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(indices.tolist()))
    return collate([dataset[index] for index in indices.tolist()])


def is_iterable(dataset: Any) -> bool:
    """Tell whether a data set is a stream: it has no length and no index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a nested batch to ``device``; for the CPU return the batch as it is."""
    if device.type == "cpu":
        return batch
    return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(device, non_blocking=True))
