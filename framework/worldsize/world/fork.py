"""What forked processes inherit, so that none of them has to make it again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ready_to_fork() -> Iterator[None]:
    """A process that is forked within need not look through what was imported before, nor copy its pages."""
    import torch._dynamo  # noqa: F401 - every optimizer imports it before its first step, and that takes a second

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
