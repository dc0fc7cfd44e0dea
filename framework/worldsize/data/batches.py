"""Loads a batch of a data set, and moves it to the device ahead of the step that needs it.

Batches may be of any type: tensors in containers, and objects that have ``to(device)`` themselves.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from types import FrameType
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset, default_collate

from worldsize.core import Batch, ConfigError, MicroBatch, Recipe
from worldsize.devices import on_device

Host = TypeVar("Host")
Copied = TypeVar("Copied")

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


def map_tensors(batch: Batch, function: Callable[[Tensor], Any], own: Callable[[Any], Any]) -> Batch:
    """Return a batch with ``function`` of every tensor in its lists, tuples, mappings and dataclasses.

    Args:
        batch: The batch, which is not changed.
        function: Takes and returns a tensor of any shape.
        own: Takes and returns any other object; those with ``to(device)`` are always passed to it.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return own(batch)

    def mapped(each: Any) -> Any:
        return map_tensors(each, function, own)

    match batch:
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*map(mapped, batch))
        case list() | tuple():
            values = list(map(mapped, batch))
            return values if type(batch) is list else type(batch)(values)
        case defaultdict():
            return defaultdict(batch.default_factory, {key: mapped(value) for key, value in batch.items()})
        case Mapping():
            values_by_key = {key: mapped(value) for key, value in batch.items()}
            return values_by_key if type(batch) is dict else type(batch)(values_by_key)  # type: ignore[call-arg]
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for each in fields(batch):
            if hasattr(batch, each.name):
                object.__setattr__(changed, each.name, mapped(getattr(batch, each.name)))  # it may be frozen
        return changed
    return own(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to ``device``; for the CPU return it as it is.

    Raises:
        ConfigError: the batch has an object with tensors, and no method ``to``.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(batch, lambda tensor: on_device(tensor, device), lambda own: _moved(own, device))


def _moved(own: Any, device: torch.device) -> Any:
    if not callable(getattr(own, "to", None)):
        _check_holds_no_tensor(own)
        return own
    moved = own.to(device, non_blocking=True) if _takes_non_blocking(type(own)) else own.to(device)
    return own if moved is None else moved  # it may have changed itself


def _check_holds_no_tensor(own: Any) -> None:
    held = next((name for name, value in getattr(own, "__dict__", {}).items() if isinstance(value, Tensor)), None)
    if held is not None:
        kind = type(own).__name__
        raise ConfigError(
            f"batches hold a {kind}, whose tensor {held!r} would stay on the CPU: it has no method to. Give {kind} a "
            "method to(device), which returns it on the device, or make it a dataclass, a tuple or a dict of tensors."
        )


def _takes_non_blocking(kind: type) -> bool:
    """Return whether ``to`` of a type takes non_blocking; one of any arguments hands them on to tensors."""
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def pinned(own: Any) -> Any:
    """Return an object of its own type in page-locked memory if it has a method for that, else as it is."""
    return own.pin_memory() if callable(getattr(own, "pin_memory", None)) else own


def copied_ahead(steps: Iterable[Host], begin: Callable[[Host], Callable[[], Copied]]) -> Iterator[Copied]:
    """Yield each step's batches as copies on the device; the copy of the next step's batches has begun by then.

    Args:
        steps: the batches of each step, on the host.
        begin: begins to copy the batches of a step, and returns a function that waits for the copy and returns it.
    """
    finish: Callable[[], Copied] | None = None
    for step in steps:
        ready, finish = finish, begin(step)
        if ready:
            yield ready()
    if finish:
        yield finish()


@final
class SideStream:
    """Copies to a GPU on a stream of its own, while the current stream computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: list[MicroBatch]) -> Callable[[], list[MicroBatch]]:
        """Begin to copy a step, and return a function that makes the current stream wait for the copy."""
        with torch.cuda.stream(self._side):  # what is allocated here belongs to the side stream
            copies = [replace(each, data=_copied(each.data, self._device)) for each in step]
            copied = self._side.record_event()

        def finish() -> list[MicroBatch]:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)  # and not for the side stream, where the next copy may have begun
            for each in copies:
                _use_on(each.data, current)
            return [replace(each, data=to_device(each.data, self._device)) for each in copies]

        return finish


def _copied(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch without waiting for the copy; objects whose tensors cannot be kept for another stream stay.

    Its pinned memory, without which the copy would wait, is kept until the stream has read it.
    """

    return map_tensors(
        batch,
        lambda tensor: on_device(tensor, device),
        lambda own: to_device(pinned(own), device) if _is_recorded(own) else own,
    )


def _is_recorded(own: object) -> bool:
    return callable(getattr(own, "record_stream", None)) or isinstance(own, PackedSequence)


def _use_on(batch: Batch, stream: torch.cuda.Stream) -> None:
    """Keep the side stream from using the memory of a batch again before ``stream`` is done with it."""

    def used(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    def own_used(own: Any) -> Any:
        if isinstance(own, PackedSequence):
            for each in own:
                if each is not None:
                    used(each)
        elif _is_recorded(own):
            own.record_stream(stream)
        return own

    map_tensors(batch, used, own_used)
