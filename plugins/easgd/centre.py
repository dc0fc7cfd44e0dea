"""The process that holds the center variable, and the workers' connections to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from queue import Empty, Queue
from typing import final

import torch
from torch import Tensor

from worldsize.errors import WorldsizeError
from worldsize.net.agent_connection import RefusalLog
from worldsize.net.channel import Channel, LostError
from worldsize.net.credentials import Credentials
from worldsize.net.endpoints import accept_channel, accept_join
from worldsize.net.frames import CommonOperation, Header, RefusedError, tensor_frame, view_bytes

_HANDSHAKE = 10.0  # seconds for the handshake of a new connection


class Operation(IntEnum):
    """Operations between a worker and the center, in addition to the common ones."""

    PUT = 32  # payload: the new center; answered by DONE
    MEET = 33  # payload: a worker's row, toward which the center moves; answered by CENTRE
    LOOK = 34  # answered by CENTRE
    CENTRE = 35  # payload: the center


def _send_row(channel: Channel, operation: Operation, row_n: Tensor) -> None:
    channel.send(*tensor_frame(operation, row_n))


@final
class Link:
    """A worker's connection to the center. A row has all trained parameters: float32 (n,), CPU."""

    def __init__(self, channel: Channel, numel: int) -> None:
        self._channel, self._numel = channel, numel

    def set_centre(self, row_n: Tensor) -> None:
        """Set the center to ``row_n``, shape (n,)."""
        _send_row(self._channel, Operation.PUT, row_n)
        self._channel.receive_answer(CommonOperation.DONE)

    def pull_centre(self, row_n: Tensor) -> Tensor:
        """Pull the center toward ``row_n`` (n,) and return its previous value (n,)."""
        _send_row(self._channel, Operation.MEET, row_n)
        return self._receive_centre()

    def read_centre(self) -> Tensor:
        """Return the center, a tensor (n,), without moving it."""
        self._channel.send(Header(Operation.LOOK))
        return self._receive_centre()

    def _receive_centre(self) -> Tensor:
        centre_n = torch.empty(self._numel)
        self._channel.receive_answer(Operation.CENTRE).require_payload(torch.float32, (self._numel,))
        self._channel.receive_into([view_bytes(centre_n)])
        return centre_n

    def close(self) -> None:
        self._channel.close()


def accept_workers(
    listener: socket.socket, credentials: Credentials | None, workers: int, timeout: float
) -> list[Channel]:
    """Wait for all workers to connect; return channels by rank. Handshakes are concurrent.

    Raises:
        WorldsizeError: a worker is missing and none has connected for ``timeout`` seconds.
    """
    arrivals: Queue[tuple[str, Channel]] = Queue()
    refusals = RefusalLog()
    threading.Thread(
        target=_accept_connections, args=(listener, credentials, arrivals, refusals), daemon=True, name="accept"
    ).start()
    try:
        return _welcome_workers(arrivals, [f"worker-{rank}" for rank in range(workers)], timeout, refusals)
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the accept thread


def _welcome_workers(
    arrivals: Queue[tuple[str, Channel]], names: Sequence[str], timeout: float, refusals: RefusalLog
) -> list[Channel]:
    channels: dict[str, Channel] = {}
    while missing := [name for name in names if name not in channels]:
        try:
            name, channel = arrivals.get(timeout=timeout)
        except Empty:
            raise WorldsizeError(
                f"timed out after {timeout:g} s waiting for {', '.join(missing)} to join (cluster.timeout)."
            ) from None
        if name not in missing:
            refusals.record_refusal("a connection", f"unexpected peer {name}")
            channel.close()
            continue
        channel.wait_at_most(timeout)
        channel.send_message(CommonOperation.WELCOME, {})
        channels[name] = channel
    return [channels[name] for name in names]


def _accept_connections(
    listener: socket.socket,
    credentials: Credentials | None,
    arrivals: Queue[tuple[str, Channel]],
    refusals: RefusalLog,
) -> None:
    with suppress(OSError):  # the socket is shut down once all workers have connected
        while True:
            connection, _ = listener.accept()
            threading.Thread(
                target=_admit_worker, args=(connection, credentials, arrivals, refusals), daemon=True
            ).start()


def _admit_worker(
    connection: socket.socket,
    credentials: Credentials | None,
    arrivals: Queue[tuple[str, Channel]],
    refusals: RefusalLog,
) -> None:
    channel = None
    try:
        channel = accept_channel(connection, credentials, seconds=_HANDSHAKE, operations=Operation)
        channel.wait_at_most(_HANDSHAKE)
        arrivals.put((accept_join(channel)["name"], channel))
    except (LostError, RefusedError) as error:
        refusals.record_refusal("a connection", error)
        (channel or connection).close()


@final
class Centre:
    """The center variable, moved by ``elasticity`` × (row − center) for each row from a worker."""

    def __init__(self, workers: Sequence[Channel], *, numel: int, elasticity: float) -> None:
        self._workers, self._elasticity = workers, elasticity
        self._row_n = torch.zeros(numel)  # until the first worker sets it
        self._moving = threading.Lock()

    def serve_synchronously(self) -> None:
        """Serve rounds: each worker, in rank order, receives the center from the round's start."""
        with suppress(LostError):
            while True:
                pull_n = torch.zeros_like(self._row_n)
                for worker in self._workers:
                    pull_n += self._receive_next_row(worker) - self._row_n
                    _send_row(worker, Operation.CENTRE, self._row_n)
                self._row_n += self._elasticity * pull_n

    def serve_asynchronously(self) -> None:
        """Serve each worker's requests as they arrive."""
        threads = [threading.Thread(target=self._serve_worker, args=(worker,), daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve_worker(self, worker: Channel) -> None:
        with suppress(LostError):
            while True:
                row_n = self._receive_next_row(worker)
                with self._moving:
                    before_n = self._row_n.clone()
                    self._row_n += self._elasticity * (row_n - before_n)
                _send_row(worker, Operation.CENTRE, before_n)

    def _receive_next_row(self, worker: Channel) -> Tensor:
        """Answer the worker's requests until its next MEET, and return the received row.

        Raises:
            LostError: the worker has disconnected.
        """
        while (header := worker.receive_header()).operation != Operation.MEET:
            if header.operation == Operation.LOOK:
                _send_row(worker, Operation.CENTRE, self._row_n)
            elif header.operation == Operation.PUT:
                self._row_n = self._receive_row(worker, header)
                worker.send(Header(CommonOperation.DONE))
            else:
                raise RefusedError(f"unexpected {header.operation.name}")
        return self._receive_row(worker, header)

    def _receive_row(self, worker: Channel, header: Header) -> Tensor:
        header.require_payload(torch.float32, self._row_n.shape)
        row_n = torch.empty_like(self._row_n)
        worker.receive_into([view_bytes(row_n)])
        return row_n
