"""Pushes buckets while the backward pass computes others (Zhang et al. 2017, Poseidon, arXiv 1706.03292)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import final

from torch import Tensor, nn

from worldsize.dist.step_timer import phase
from worldsize.strategies.parameter_server.sharding import BucketKey, ShardLayout

Push = Callable[[BucketKey, Mapping[str, Tensor | None]], None]  # a bucket, and the gradients in it by name


@final
class OverlappedPush:
    """Pushes a bucket as soon as all its gradients are ready, from a separate thread."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: Sequence[ShardLayout]) -> None:
        self._parameters = parameters
        self._names: dict[BucketKey, set[str]] = {
            (server, table): {piece.name for piece in bucket.pieces}
            for server, shard in enumerate(shards)
            for table, bucket in enumerate(shard)
        }
        self._buckets = {name: [key for key, names in self._names.items() if name in names] for name in parameters}
        self._missing: dict[BucketKey, set[str]] = {}
        self._queue: SimpleQueue[BucketKey | None] = SimpleQueue()  # of the backward pass in progress
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]

    @contextmanager
    def during_backward(self, push: Push) -> Iterator[None]:
        """Push the gradients of the backward pass inside the block; those with missing ones are pushed at its end.

        Nothing else may use the connections of ``push`` inside the block. An exception of ``push`` is raised at its
        end; nothing is pushed after the block, even if it fails.
        """
        self._missing = {key: set(names) for key, names in self._names.items()}
        queue = self._queue = SimpleQueue()  # a new queue, since that of a failed pass may hold buckets
        errors: list[Exception] = []
        thread = threading.Thread(target=self._work, args=(push, queue, errors), daemon=True, name="push")
        thread.start()
        try:
            yield
            for key in list(self._missing):
                queue.put(key)
        finally:
            self._missing = {}
            queue.put(None)
            with phase("communication"):
                thread.join()
        if errors:
            raise errors[0]

    def _arrived(self, name: str, _: Tensor) -> None:
        for key in self._buckets[name]:
            names = self._missing.get(key, set())
            if name in names:
                names.remove(name)
                if not names:
                    del self._missing[key]
                    self._queue.put(key)

    def _work(self, push: Push, queue: SimpleQueue[BucketKey | None], errors: list[Exception]) -> None:
        try:
            while (key := queue.get()) is not None:
                push(key, {name: self._parameters[name].grad for name in self._names[key]})
        except Exception as error:  # raised again at the end of the block
            errors.append(error)
