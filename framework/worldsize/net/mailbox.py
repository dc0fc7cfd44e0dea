"""A queue between threads, for which a loop that waits for files can wait, too."""

from __future__ import annotations

from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class Mailbox(Generic[T]):
    """Any thread puts items; one takes them. ``arrival`` is readable while there are some."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self.arrival, self._write = Pipe(duplex=False)

    def put(self, item: T) -> None:
        self._items.put(item)
        self._write.send_bytes(b"!")

    def get(self) -> T:
        """Wait for the next item."""
        self.arrival.recv_bytes()
        return self._items.get()
