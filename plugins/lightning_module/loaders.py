"""Get data sets, batch sizes and sample order from the DataLoaders of a Lightning program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, Subset

from plugins.lightning_module.positions import RunValues
from worldsize.core import ConfigError
from worldsize.data.batches import is_iterable


@final
class CollatedSamples(Dataset[Any]):
    """A map-style data set that builds batches with the ``collate_fn`` of its DataLoader."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    @property
    def lengths(self) -> Tensor | None:
        """Sample lengths (samples,) for ``length_balanced``, or None if the dataset lacks them."""
        lengths: Tensor | None = getattr(self._dataset, "lengths", None)
        return lengths

    def load_batch(self, indices: Tensor) -> Any:
        """Load and collate the samples with ``indices`` (batch,), like a DataLoader."""
        places = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(places))
        return self._collate([self._dataset[place] for place in places])


def single_loader(loaders: Any, name: str) -> DataLoader[Any]:
    """Return the only DataLoader returned by the Lightning method ``name``.

    Raises:
        ConfigError: it returned several DataLoaders, or something else.
    """
    if isinstance(loaders, list | tuple) and len(loaders) == 1:
        (loaders,) = loaders
    if isinstance(loaders, DataLoader) and type(loaders).__iter__ is DataLoader.__iter__:
        return loaders
    if isinstance(loaders, list | tuple | dict) or type(loaders).__name__ == "CombinedLoader":
        raise ConfigError(f"{name} returned several DataLoaders; only one is supported. Return a single DataLoader.")
    raise ConfigError(f"{name} returned a {type(loaders).__name__}, expected a torch.utils.data.DataLoader.")


def get_loader_data(loader: DataLoader[Any]) -> Any:
    """Return a DataLoader's data set; a map-style one includes the ``collate_fn``."""
    return loader.dataset if is_iterable(loader.dataset) else CollatedSamples(loader.dataset, loader.collate_fn)


def first_samples(data: Any, count: int) -> Any:
    """Return the first samples of training data returned by :func:`get_loader_data`."""
    if isinstance(data, CollatedSamples):
        return CollatedSamples(Subset(data, range(min(count, len(data)))), data._collate)
    raise ConfigError("streamed training data requires validation_step and val_dataloader. Add both to the module.")


def check_loader(loader: DataLoader[Any], name: str) -> None:
    """Raise ConfigError if the DataLoader has a custom sampler, batch sampler or worker_init_fn."""
    if refused := list(_find_unsupported(loader)):
        raise ConfigError("\n".join(f"{name}: {each}" for each in refused))


def _find_unsupported(loader: DataLoader[Any]) -> Iterator[str]:
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        what = "batch_size=None" if loader.batch_sampler is None else "a batch_sampler"
        yield f"the DataLoader has {what}, but worldsize assigns samples to ranks. Use batch_size instead."
    elif not is_iterable(loader.dataset) and not _is_plain(loader.sampler):
        yield (
            f"the DataLoader's sampler {type(loader.sampler).__name__} is not supported: worldsize shuffles "
            "and shards the samples. Remove the sampler, and set shuffle=True."
        )
    if loader.worker_init_fn is not None:
        yield "the DataLoader's worker_init_fn is not called: worldsize seeds each batch. Remove it."


def _is_plain(sampler: object) -> bool:
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler


def check_values(train: DataLoader[Any], evaluated: DataLoader[Any] | None, run: RunValues) -> None:
    """Raise ConfigError if batch sizes or shuffling differ between the DataLoaders and the run.

    The run's batch size may be a multiple of the DataLoader's, as with several devices.
    """
    words: dict[str, tuple[int, int]] = {}
    if run.batch_size % (train.batch_size or 1):
        words["batch_size"] = (train.batch_size or 1, run.batch_size)
    if evaluated is not None and evaluated.batch_size != run.evaluate_batch_size:
        words["evaluate_batch_size"] = (evaluated.batch_size or 1, run.evaluate_batch_size)
    if words:
        raise ConfigError(
            f"the DataLoaders have {_format_settings({key: value for key, (value, _) in words.items()}, ', ')}; the "
            f"run has {_format_settings({key: value for key, (_, value) in words.items()}, ', ')}. Set "
            f"{_format_settings({key: value for key, (value, _) in words.items()}, ' ')}, or recipe.run_decides=true."
        )
    if not is_iterable(train.dataset) and isinstance(train.sampler, SequentialSampler):
        raise ConfigError(
            "the training DataLoader does not shuffle, but worldsize shuffles every epoch. Set shuffle=True, "
            "or recipe.run_decides=true."
        )


def _format_settings(words: dict[str, int], between: str) -> str:
    return between.join(f"{name}={value}" for name, value in words.items())


def same_collate(train: DataLoader[Any], evaluated: DataLoader[Any] | None) -> Callable[[list[Any]], Any]:
    """Return the collate function for streams.

    Raises:
        ConfigError: training and evaluation have different ones.
    """
    if evaluated is not None and evaluated.collate_fn != train.collate_fn and is_iterable(evaluated.dataset):
        raise ConfigError(
            "the DataLoaders of the two streams have different collate_fn. Use the same collate_fn for both."
        )
    return train.collate_fn


def default_device(batch: Any) -> torch.device:
    """Return the device of the first tensor in a nested batch, or the CPU if it has no tensors."""
    if isinstance(batch, Tensor):
        return batch.device
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((default_device(part) for part in parts), torch.device("cpu"))
