"""Loads one batch of a data set."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from worldsize.core import Batch, ConfigError, Recipe

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
    return collate(_samples(dataset, indices.tolist()))


def _samples(dataset: Any, indices: list[int]) -> list[Any]:
    samples = []
    for index in indices:
        samples.append(dataset[index])
    return samples


def sample_of(frame: FrameType | None) -> int | None:
    """Return the sample that is loaded in a stack whose innermost frame is ``frame``; None: not known."""
    while frame is not None:
        if frame.f_code is _samples.__code__:
            index: int | None = frame.f_locals.get("index")
            return index
        frame = frame.f_back
    return None


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set is a stream, which has no length and no index.

    Raises:
        ConfigError: it is a DataLoader that makes batches, whose batches would be taken for samples.
    """
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        raise ConfigError(
            f"the recipe's data are a {type(dataset).__name__}, which makes batches itself, in an order and of a size "
            "that no other world size would have. Return its data set (loader.dataset), set batch_size to the samples "
            "of a step over all processes, and define Recipe.collate if it has a collate_fn; data_workers stands for "
            "num_workers. As a stream of single samples, give it batch_size=None."
        )
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
