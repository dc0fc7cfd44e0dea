"""How processes that load data for a training process begin."""

from __future__ import annotations

import signal

from torch.utils.data import _utils

from worldsize.data.storage.read_counts import COUNTS
from worldsize.world.parent import die_with_parent
from worldsize.world.preemption import SIGNALS


def begin_worker(parent: int, _: int) -> None:
    """Die with the process ``parent``, leave signals to it, and count what is read here alone."""
    COUNTS.reset()
    die_with_parent(parent)
    for number in SIGNALS:  # they may reach every process; this one is needed until the training process ends
        signal.signal(number, signal.SIG_IGN)


def begin_reader(parent: int, worker: int) -> None:
    """Begin the one process that reads a stream: to the stream it is no worker of a DataLoader.

    ``datasets`` shuffles in another order in such a worker, also in the only one.
    """
    begin_worker(parent, worker)
    _utils.worker._worker_info = None
