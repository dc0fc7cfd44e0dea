"""Traces some steps with PyTorch's profiler, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")


def traced(
    batches: Iterable[T], path: Path, *, first: int, span: tuple[int, int], device: torch.device
) -> Generator[T]:
    """Yield ``batches`` of the steps after ``first`` unchanged; trace steps ``span[0]`` to ``span[1]`` into ``path``.

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


@contextmanager
def _trace(path: Path, device: torch.device) -> Iterator[None]:
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
    try:
        with profiler:
            yield
    finally:
        profiler.export_chrome_trace(str(path))
