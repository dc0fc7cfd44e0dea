"""Optional protocols of a stream of training samples: sharding among readers, and resuming.

:meth:`Recipe.data` returns a stream if the data cannot be indexed. Without these protocols, every process reads the
whole stream, and resuming reads it again from the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ShardedStream(Protocol):
    """A stream that can be sharded among readers, such as ``datasets.IterableDataset``.

    Each logical rank reads a separate shard, so that no process reads the whole stream. If shards have unequal lengths,
    shorter shards restart before the others end.
    """

    @property
    def num_shards(self) -> int:
        """Return the largest number of readers that can share the stream."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return shard ``index`` of ``num_shards``.

        The argument ``num_shards`` must not exceed the property of that name. Every sample is in exactly one shard.
        Each call returns a new object that iterates from the start of the shard; another call follows whenever the
        shard restarts. Shards may also implement :class:`StatefulStream`.
        """


@runtime_checkable
class StatefulStream(Protocol):
    """A stream, or an iterator of one, that can continue from a saved state.

    torchdata's ``StatefulDataLoader`` and ``datasets.IterableDataset`` are examples. Checkpoints store the state. It
    may contain None, bool, int, float, str, bytes, tensors, NumPy arrays and scalars, and dicts, lists, tuples and sets
    of these.
    """

    def state_dict(self) -> Any:
        """Return the newest iterator's position, after the last sample that it yielded."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue this iterator, or the stream's next one, from the saved position."""
