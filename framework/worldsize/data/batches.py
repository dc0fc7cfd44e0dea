"""Load batches from a data set, and copy them to the device ahead of their step.

Batches may be tensors, nested containers of tensors, and objects with a method ``to(device)``.
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
from worldsize.devices import move_to_device

Host = TypeVar("Host")
Copied = TypeVar("Copied")

Collate = Callable[[list[Any]], Batch]


def get_collate_fn(recipe: Recipe) -> Collate:
    """Return ``recipe.collate`` if overridden, else ``default_collate`` for the fast path."""
    return default_collate if type(recipe).collate is Recipe.collate else recipe.collate


def fetch_batch(dataset: Any, indices: Tensor, collate: Collate = default_collate) -> Batch:
    """Load one batch by the fastest method that the data set provides.

    A data set can load full batches (``load_batch``), lists of samples (``__getitems__``) or single samples
    (``__getitem__``).

    Args:
        dataset: a map-style data set.
        indices: int64 [batch], indices of the samples in the batch.
        collate: combines a list of samples into a batch.
    """
    if hasattr(dataset, "load_batch"):
        return dataset.load_batch(indices)
    if isinstance(dataset, torch.utils.data.TensorDataset) and collate is default_collate:
        return tuple(tensor[indices] for tensor in dataset.tensors)
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(indices.tolist()))
    return collate(_load_samples(dataset, indices.tolist()))


def _load_samples(dataset: Any, indices: list[int]) -> list[Any]:
    samples = []
    for index in indices:
        samples.append(dataset[index])
    return samples


def find_current_sample(frame: FrameType | None) -> int | None:
    """Find the index of the sample being loaded in a stack; None if batches are loaded."""
    while frame is not None:
        if frame.f_code is _load_samples.__code__:
            index: int | None = frame.f_locals.get("index")
            return index
        frame = frame.f_back
    return None


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set is a stream, i.e. not indexable.

    Raises:
        ConfigError: it is a batched DataLoader, whose batches would be mistaken for samples.
    """
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        raise ConfigError(
            f"Recipe.data returned a batched {type(dataset).__name__}, whose batches would change with the world size. "
            "Return loader.dataset, and set batch_size (the global batch size), data_workers (for num_workers) and "
            "Recipe.collate (for collate_fn). To use the loader as a stream of samples, pass batch_size=None to it."
        )
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def map_tensors(batch: Batch, function: Callable[[Tensor], Any], own: Callable[[Any], Any]) -> Batch:
    """Apply ``function`` to each tensor in a batch's lists, tuples, mappings and dataclasses.

    Args:
        batch: The batch; it is not modified.
        function: Maps a tensor of any shape to its replacement.
        own: Maps any other leaf to its replacement. An object with ``to(device)`` is a leaf, even if it is a container.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return own(batch)

    def map_child(each: Any) -> Any:
        return map_tensors(each, function, own)

    match batch:
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*map(map_child, batch))
        case list() | tuple():
            values = list(map(map_child, batch))
            return values if type(batch) is list else type(batch)(values)
        case defaultdict():
            return defaultdict(batch.default_factory, {key: map_child(value) for key, value in batch.items()})
        case Mapping():
            values_by_key = {key: map_child(value) for key, value in batch.items()}
            return values_by_key if type(batch) is dict else type(batch)(values_by_key)  # type: ignore[call-arg]
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for each in fields(batch):
            if hasattr(batch, each.name):
                object.__setattr__(changed, each.name, map_child(getattr(batch, each.name)))  # also works if frozen
        return changed
    return own(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to ``device``; for the CPU, return it unchanged.

    Raises:
        ConfigError: the batch contains an object that has tensors but lacks a method ``to``.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(batch, lambda tensor: move_to_device(tensor, device), lambda own: _move_object(own, device))


def _move_object(own: Any, device: torch.device) -> Any:
    if not callable(getattr(own, "to", None)):
        _check_holds_no_tensor(own)
        return own
    moved = own.to(device, non_blocking=True) if _takes_non_blocking(type(own)) else own.to(device)
    return own if moved is None else moved  # an in-place to() may return None


def _check_holds_no_tensor(own: Any) -> None:
    held = next((name for name, value in getattr(own, "__dict__", {}).items() if isinstance(value, Tensor)), None)
    if held is not None:
        kind = type(own).__name__
        raise ConfigError(
            f"cannot move a batch to the device: {kind} contains a tensor, {held!r}, but does not define to(). "
            f"Define {kind}.to(device), or convert {kind} to a dataclass, tuple or dict."
        )


def _takes_non_blocking(kind: type) -> bool:
    """Return whether ``kind.to`` accepts ``non_blocking``, explicitly or through ``**kwargs``."""
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def pin_object(own: Any) -> Any:
    """Pin an object if it has a method ``pin_memory``, otherwise return it unchanged."""
    return own.pin_memory() if callable(getattr(own, "pin_memory", None)) else own


def prefetch_copies(steps: Iterable[Host], begin: Callable[[Host], Callable[[], Copied]]) -> Iterator[Copied]:
    """Yield each step's batches on the device, while the next step's are being copied.

    Args:
        steps: the batches of each step, on the host.
        begin: starts to copy the batches of a step; returns a function that waits for the copies and returns them.
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
    """Copies micro-batches to a GPU on a side stream, in parallel with the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: list[MicroBatch]) -> Callable[[], list[MicroBatch]]:
        """Start copying a step's micro-batches from the host.

        The returned function makes the current stream wait for the copies, without blocking the CPU, and returns them.
        """
        with torch.cuda.stream(self._side):  # allocations here belong to the side stream
            copies = [replace(each, data=_copy_batch(each.data, self._device)) for each in step]
            copied = self._side.record_event()

        def wait_for_copies() -> list[MicroBatch]:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)  # wait_stream would also wait for the next copy
            for each in copies:
                _use_on(each.data, current)
            return [replace(each, data=to_device(each.data, self._device)) for each in copies]

        return wait_for_copies


def _copy_batch(batch: Batch, device: torch.device) -> Batch:
    """Start copying a batch to ``device``; objects without ``record_stream`` stay on the host.

    torch does not reuse the pinned memory until the copy has completed.
    """
    return map_tensors(
        batch,
        lambda tensor: move_to_device(tensor, device),
        lambda own: to_device(pin_object(own), device) if _is_recorded(own) else own,
    )


def _is_recorded(own: object) -> bool:
    return callable(getattr(own, "record_stream", None)) or isinstance(own, PackedSequence)


def _use_on(batch: Batch, stream: torch.cuda.Stream) -> None:
    """Prevent the side stream from reusing a batch's memory before ``stream`` has used it."""

    def record_tensor_use(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    def own_used(own: Any) -> Any:
        if isinstance(own, PackedSequence):
            for each in own:
                if each is not None:
                    record_tensor_use(each)
        elif _is_recorded(own):
            own.record_stream(stream)
        return own

    map_tensors(batch, record_tensor_use, own_used)
