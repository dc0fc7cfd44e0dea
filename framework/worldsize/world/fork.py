"""Prepares a process for forking: imports and memory that its children share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ready_to_fork() -> Iterator[None]:
    """Freeze the garbage collector, so that processes forked inside neither scan nor copy imported objects."""
    import torch._dynamo  # noqa: F401 - every optimizer imports it before its first step, and that takes a second

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
