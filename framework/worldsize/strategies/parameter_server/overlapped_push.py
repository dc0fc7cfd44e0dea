"""Pushes of buckets while the backward pass still computes others (Zhang et al. 2017, Poseidon, arXiv 1706.03292)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import final

import torch
from torch import Tensor, nn

from worldsize.collectives.step_timer import phase
from worldsize.strategies.parameter_server.sharding import ShardLayout

Place = tuple[int, int]  # server, and bucket there
Send = Callable[[Place, Mapping[str, Tensor]], None]


@final
class Overlap:
    """Sends a bucket as soon as all gradients in it are there, from a thread of its own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: Sequence[ShardLayout]) -> None:
        self._parameters = parameters
        self._names: dict[Place, set[str]] = {
            (server, table): {piece.name for piece in bucket.pieces}
            for server, shard in enumerate(shards)
            for table, bucket in enumerate(shard)
        }
        self._places = {name: [place for place, names in self._names.items() if name in names] for name in parameters}
        self._missing: dict[Place, set[str]] = {}
        self._queue: SimpleQueue[Place | None] = SimpleQueue()
        self._error: Exception | None = None
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]

    def begin(self, send: Send) -> None:
        """Send the gradients of the next backward pass by ``send(place, gradients by name)``.

        Until :meth:`finish` nobody else may use what ``send`` uses.
        """
        self._send = send
        self._missing = {place: set(names) for place, names in self._names.items()}
        self._thread = threading.Thread(target=self._work, daemon=True, name="push")
        self._thread.start()

    def finish(self) -> None:
        """Send what is left, with zeros where no gradient came. Raises what a send has raised."""
        for place in list(self._missing):
            self._queue.put(place)
        self._missing = {}
        self._queue.put(None)
        with phase("communication"):
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _arrived(self, name: str, _: Tensor) -> None:
        for place in self._places[name]:
            names = self._missing.get(place, set())
            if name in names:
                names.remove(name)
                if not names:
                    del self._missing[place]
                    self._queue.put(place)

    def _work(self) -> None:
        try:
            while (place := self._queue.get()) is not None:
                self._send(place, {name: self._gradient(name) for name in self._names[place]})
        except Exception as error:  # raised again where the step waits for it
            self._error = error

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
