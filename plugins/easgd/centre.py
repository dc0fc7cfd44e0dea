"""The centre variable: the process that holds it, and a worker's way to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import final

import torch
from torch import Tensor

from worldsize.errors import WorldsizeError
from worldsize.transport.certificates import Keys
from worldsize.transport.channel import Channel, LostError, accepted
from worldsize.transport.frames import Header, Operation, RefusedError, view


def _send(channel: Channel, operation: Operation, row_n: Tensor) -> None:
    channel.send(Header(operation, dtype=row_n.dtype, shape=tuple(row_n.shape)), [view(row_n)])


@final
class Link:
    """What a worker asks of the centre. A row is all trained parameters, one after the other, float32 on the CPU."""

    def __init__(self, channel: Channel, numel: int) -> None:
        self._channel, self._numel = channel, numel

    def put(self, row_n: Tensor) -> None:
        """The centre is there from now on."""
        _send(self._channel, Operation.APPLY, row_n)
        self._channel.answer(Operation.DONE)

    def meet(self, row_n: Tensor) -> Tensor:
        """Pull the centre towards ``row_n``; where it was."""
        _send(self._channel, Operation.PUSH, row_n)
        return self._received()

    def look(self) -> Tensor:
        """Where the centre is."""
        self._channel.send(Header(Operation.PULL))
        return self._received()

    def _received(self) -> Tensor:
        centre_n = torch.empty(self._numel)
        self._channel.answer(Operation.WEIGHTS).require(torch.float32, (self._numel,))
        self._channel.fill([view(centre_n)])
        return centre_n

    def close(self) -> None:
        self._channel.close()


def joined(listener: socket.socket, keys: Keys | None, workers: int, timeout: float) -> list[Channel]:
    """The channel of every worker, by rank.

    Raises:
        WorldsizeError: one did not come within ``timeout`` seconds.
    """
    listener.settimeout(timeout)
    found: dict[str, Channel] = {}
    names = [f"worker-{rank}" for rank in range(workers)]
    while missing := [name for name in names if name not in found]:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise WorldsizeError(f"{', '.join(missing)} did not come within {timeout:g} s (cluster.timeout).") from None
        try:
            channel = accepted(connection, keys, seconds=timeout)
            channel.wait_at_most(timeout)
            name = str(channel.message(channel.answer(Operation.JOIN))["name"])
            if name not in missing or (keys is not None and channel.identity != name):
                raise RefusedError(f"{channel.identity} says that it is {name}")
        except (LostError, RefusedError) as error:
            print(f"refused a connection: {error}", flush=True)
            connection.close()
            continue
        channel.tell(Operation.WELCOME, {})
        found[name] = channel
    return [found[name] for name in names]


@final
class Centre:
    """Moves by ``elasticity`` × distance towards every row that it meets, until the workers leave."""

    def __init__(self, workers: Sequence[Channel], *, numel: int, elasticity: float) -> None:
        self._workers, self._elasticity = workers, elasticity
        self._row_n = torch.zeros(numel)  # until the first worker puts it somewhere
        self._moving = threading.Lock()

    def serve_synchronously(self) -> None:
        """Rounds in the order of ranks: every worker meets the centre as it was when the round began."""
        with suppress(LostError):
            while True:
                pull_n = torch.zeros_like(self._row_n)
                for worker in self._workers:
                    pull_n += self._next(worker) - self._row_n
                    _send(worker, Operation.WEIGHTS, self._row_n)
                self._row_n += self._elasticity * pull_n

    def serve_asynchronously(self) -> None:
        """Every worker as it comes."""
        threads = [threading.Thread(target=self._attend, args=(worker,), daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _attend(self, worker: Channel) -> None:
        with suppress(LostError):
            while True:
                row_n = self._next(worker)
                with self._moving:
                    before_n = self._row_n.clone()
                    self._row_n += self._elasticity * (row_n - before_n)
                _send(worker, Operation.WEIGHTS, before_n)

    def _next(self, worker: Channel) -> Tensor:
        """The next row that the worker pulls with; what it asks before that is answered. Raises LostError."""
        while (header := worker.header()).operation != Operation.PUSH:
            if header.operation == Operation.PULL:
                _send(worker, Operation.WEIGHTS, self._row_n)
            elif header.operation == Operation.APPLY:
                self._row_n = self._row(worker, header)
                worker.send(Header(Operation.DONE))
            else:
                raise RefusedError(f"{header.operation.name} means nothing to a centre")
        return self._row(worker, header)

    def _row(self, worker: Channel, header: Header) -> Tensor:
        header.require(torch.float32, self._row_n.shape)
        row_n = torch.empty_like(self._row_n)
        worker.fill([view(row_n)])
        return row_n
