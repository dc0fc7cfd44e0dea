"""Prepares a process for forking: imports and memory that its children share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ready_to_fork() -> Iterator[None]:
    """Freeze the garbage collector, so that processes forked inside neither scan nor copy imported objects."""
    import torch._dynamo  # every optimizer imports it before its first step, and that takes a second
    import torch.distributed.checkpoint.state_dict  # noqa: F401 - whoever loads or hands over a state needs it

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
