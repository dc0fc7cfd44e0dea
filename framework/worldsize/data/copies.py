"""Copies batches to the device ahead of the steps that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from worldsize.core import Batch, MicroBatch
from worldsize.data.batches import map_tensors, pinned, to_device
from worldsize.devices import on_device

Host = TypeVar("Host")
Copied = TypeVar("Copied")


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
