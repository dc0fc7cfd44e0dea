"""Traces some steps with PyTorch's profiler, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")
_MOST_ALLOCATIONS = 100_000  # the latest ones, in a snapshot of some tens of MB


def traced(
    batches: Iterable[T], path: Path, *, first: int, span: tuple[int, int], device: torch.device
) -> Generator[T]:
    """Yield ``batches`` of the steps after ``first`` unchanged; trace steps ``span[0]`` to ``span[1]`` into ``path``.

    On a GPU, its allocations in these steps are written beside it, with the suffix ``.memory.pickle``; on a CPU, the
    trace itself has each allocation, as events "[memory]" with the bytes and the total after it.

    A step's trace begins when its data are requested, and ends when those of the next step are. Close the iterator to
    write a trace that the end of the run cuts short.
    """
    source = iter(batches)
    with ExitStack() as stack:
        for step in count(first + 1):
            if step == max(span[0], first + 1) <= span[1]:
                stack.enter_context(_trace(path, device))
            if step == span[1] + 1:
                stack.close()
            with record_function(f"step {step}"):
                try:
                    batch = next(source)
                except StopIteration:
                    return
                yield batch


def peak_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the most bytes that torch's allocator has held for tensors on a GPU; nothing for a CPU."""
    return {"peak_device_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


@contextmanager
def _trace(path: Path, device: torch.device) -> Iterator[None]:
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    profiler = profile(activities=[ProfilerActivity.CPU, *cuda], profile_memory=not cuda)
    try:
        with profiler, _allocations(path.with_suffix(".memory.pickle")) if cuda else nullcontext():
            yield
    finally:
        profiler.export_chrome_trace(str(path))


@contextmanager
def _allocations(path: Path) -> Iterator[None]:
    """Write what torch's CUDA allocator does within the block into ``path``, for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
