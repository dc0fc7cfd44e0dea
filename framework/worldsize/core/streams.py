"""What a stream of training samples may offer beside iteration: to be divided among readers, and to resume.

A stream is what :meth:`Recipe.data` returns where it has no index. None of this is needed; each saves reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ShardedStream(Protocol):
    """A stream that can be divided among readers, as ``datasets.IterableDataset`` can.

    Each logical rank reads a part of its own, so that no process reads the whole. Where parts are of unequal length,
    a shorter one begins again before the others end.
    """

    @property
    def num_shards(self) -> int:
        """Return the largest number of readers among which the stream can be divided."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return part ``index`` of ``num_shards``, which are at most as many as the property says.

        Every sample is in exactly one of the parts. Each call returns a new object, whose iteration begins at the start
        of the part; it is called again whenever the part begins again. The parts may be :class:`StatefulStream` too.
        """


@runtime_checkable
class StatefulStream(Protocol):
    """A stream, or an iterator of one, that can go on where another one was.

    torchdata's ``StatefulDataLoader`` and ``datasets.IterableDataset`` are such. Checkpoints keep the state, which
    consists of None, bool, int, float, str, bytes, tensors, NumPy arrays and scalars, and of dicts, lists, tuples and
    sets of these.
    """

    def state_dict(self) -> Any:
        """Return where the newest iterator is: after the last sample that it has yielded."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Let the next iterator, or this one, yield what follows where ``state_dict`` was taken."""
