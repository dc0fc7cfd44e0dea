"""Prepares the processes that load data for a training process."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from pickle import PicklingError
from typing import TypeVar

from torch.utils.data import DataLoader, _utils

from worldsize.core import ConfigError
from worldsize.data.storage.read_counts import COUNTS
from worldsize.world.parent import die_with_parent
from worldsize.world.preemption import SIGNALS

T = TypeVar("T")


def worker_context() -> str:
    """Return how data workers are started: forked, or as ``multiprocessing.set_start_method`` was told.

    Raises:
        ConfigError: by a server, whose children do not end with the process that they load for.
    """
    method = multiprocessing.get_start_method(allow_none=True) or "fork"
    if method == "forkserver":
        raise ConfigError(
            "data workers of multiprocessing's forkserver would outlive the process that they load for. Call "
            "multiprocessing.set_start_method('fork') or 'spawn', or set data_workers=0."
        )
    return method


def started(loader: DataLoader[T]) -> Iterator[T]:
    """Start the workers of a loader.

    Raises:
        ConfigError: they are spawned, and what they load from cannot be sent to them.
    """
    try:
        return iter(loader)
    except (PicklingError, AttributeError, TypeError) as error:
        if worker_context() == "fork":
            raise
        raise ConfigError(
            f"data workers are spawned, and the data cannot be sent to them: {error}. Define the functions that the "
            "data use at the top of a module, call multiprocessing.set_start_method('fork'), or set data_workers=0."
        ) from error


def begin_worker(parent: int, _: int) -> None:
    """Let this process die with the process ``parent``, leave signals to it, and count only what is read here."""
    COUNTS.reset()
    die_with_parent(parent)
    for number in SIGNALS:  # they may reach every process; this one is needed until the training process ends
        signal.signal(number, signal.SIG_IGN)


def begin_reader(parent: int, worker: int) -> None:
    """Prepare the one process that reads a stream, and hide from the stream that it is a worker of a DataLoader.

    In such a worker ``datasets`` shuffles in another order, even if there is only one.
    """
    begin_worker(parent, worker)
    _utils.worker._worker_info = None
