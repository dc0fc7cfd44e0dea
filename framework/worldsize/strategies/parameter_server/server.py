"""A shard on the network: one thread a connection, one lock a shard."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

import torch

from worldsize.strategies.parameter_server.channel import Channel, LostError, accepted
from worldsize.strategies.parameter_server.frames import Header, Operation, RefusedError, view
from worldsize.strategies.parameter_server.keys import Keys
from worldsize.strategies.parameter_server.shard import Shard
from worldsize.strategies.parameter_server.tree import send_tree

_HANDSHAKE = 10.0  # seconds
_LOGGED = 100
Service = Callable[[Channel, Mapping[str, Any]], None]


def _nothing(step: int) -> None: ...


@dataclass
class _Session:
    """One worker: pushes of an epoch are numbered, and each is taken once. ``seen``: updates in what it last pulled."""

    epoch: int
    sequence: int = 0
    seen: int = 0


@final
@dataclass
class Server:
    """Serves ``shard`` to the members of the run. ``services``: what else a connection may be for, by its kind.

    A connection begins with JOIN, {"kind", "name", ...}. What is refused changes nothing, is told to the peer and
    logged, and ends the connection; the server goes on.
    """

    shard: Shard
    listener: socket.socket
    keys: Keys | None
    timeout: float
    begins: Callable[[int], None] = _nothing  # told each step of the shard
    services: dict[str, Service] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)  # guards the shard
    ended: threading.Event = field(default_factory=threading.Event)
    _sessions: dict[str, _Session] = field(default_factory=dict)
    refused: int = 0

    def start(self) -> None:
        self.services = {"data": self._data, "peer": self._peer, **self.services}
        threading.Thread(target=self._accept, daemon=True, name="accept").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # closed: the run is over
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        """One connection that was accepted, from its handshake to its end."""
        channel, peer = None, "a peer"
        try:
            channel = accepted(connection, self.keys, seconds=_HANDSHAKE)
            channel.wait_at_most(_HANDSHAKE)
            header = channel.header()
            if header.operation != Operation.JOIN:
                raise RefusedError(f"{header.operation.name} came before JOIN")
            facts = channel.message(header)
            peer = self._known(channel, facts)
            channel.wait_at_most(self.timeout)
            self.services[facts["kind"]](channel, facts)
        except LostError:
            pass
        except RefusedError as error:
            self._refuse(channel, peer, error)
        finally:
            (channel or connection).close()

    def _known(self, channel: Channel, facts: Any) -> str:
        if not isinstance(facts, dict) or facts.get("kind") not in self.services or not isinstance(facts["name"], str):
            raise RefusedError(f"JOIN says {str(facts)[:200]}")
        if channel.identity is not None and channel.identity != facts["name"]:
            raise RefusedError(f"the certificate of {channel.identity} joins as {facts['name']}")
        return facts["name"]

    def _refuse(self, channel: Channel | None, peer: str, error: RefusedError) -> None:
        self.refused += 1
        if self.refused <= _LOGGED or self.refused % _LOGGED == 0:  # a flood of them must not fill the disk
            print(f"refused {peer}: {error} ({self.refused} so far)", flush=True)
        if channel is not None:
            with suppress(LostError):
                channel.tell(Operation.REFUSED, str(error))

    def _data(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Pushes and pulls of one worker."""
        session = self._session(str(facts["name"]), int(facts["epoch"]))
        channel.tell(Operation.WELCOME, {"sequence": session.sequence, "step": self.shard.step})
        while True:
            header = channel.header()
            if header.operation == Operation.PUSH:
                self._push(channel, header, session)
            elif header.operation == Operation.PULL:
                self._pull(channel, header, session)
            else:
                raise RefusedError(f"{header.operation.name} from a worker")

    def _session(self, name: str, epoch: int) -> _Session:
        """A later epoch begins anew; the same one goes on where its connection broke."""
        with self.changed:
            session = self._sessions.get(name)
            if session is None or epoch > session.epoch:
                session = self._sessions[name] = _Session(epoch)
            if epoch < session.epoch:
                raise RefusedError(f"{name} has come back since as epoch {session.epoch}; this is {epoch}")
            return session

    def _push(self, channel: Channel, header: Header, session: _Session) -> None:
        if header.table >= len(self.shard.buckets):
            raise RefusedError(f"PUSH of table {header.table}; there are {len(self.shard.buckets)}")
        if header.epoch != session.epoch or header.sequence != session.sequence + 1:
            raise RefusedError(
                f"PUSH {header.sequence} of epoch {header.epoch} came; {session.sequence + 1} of "
                f"{session.epoch} was next"
            )
        bucket = self.shard.buckets[header.table]
        header.require(bucket.dtype, (bucket.numel,))
        gradient_n = torch.empty(bucket.numel, dtype=bucket.dtype)
        channel.fill([view(gradient_n)])
        with self.changed:
            if header.epoch != session.epoch or header.sequence != session.sequence + 1:
                raise RefusedError(f"PUSH {header.sequence} came twice at once")
            part = {"step": header.step, "width": header.width, "node": header.node, "seen": session.seen}
            self.begins(self.shard.step + 1)
            self.shard.push(header.table, gradient_n, **part)
            session.sequence += 1
            self.changed.notify_all()
        channel.send(Header(Operation.DONE, table=header.table, sequence=header.sequence))

    def _pull(self, channel: Channel, header: Header, session: _Session) -> None:
        """All buckets, once the updates of steps up to ``header.step`` have been made."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.shard.step >= header.step, self.timeout):
                raise RefusedError(f"step {header.step} did not end; the shard is at step {self.shard.step}")
            session.seen = self.shard.updates
        for index, (bucket, values_n) in enumerate(zip(self.shard.buckets, self.shard.values, strict=True)):
            head = Header(Operation.WEIGHTS, index, bucket.dtype, (bucket.numel,), step=self.shard.step)
            channel.send(head, [view(values_n)])

    def _peer(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Another server, which leads the run."""
        if not facts["name"].startswith("server-"):
            raise RefusedError(f"{facts['name']} is no server")
        channel.tell(Operation.WELCOME, {"step": self.shard.step})
        while True:
            header = channel.header()
            match header.operation:
                case Operation.NORMS:
                    with self.changed:
                        self.changed.wait_for(lambda: self.shard.waits_for_approval, self.timeout)
                        norms = self.shard.norms()
                    channel.tell(Operation.MESSAGE, norms)
                case Operation.APPLY:
                    facts = channel.message(header)
                    with self.changed:
                        self.shard.apply(facts["step"], facts["factor"])
                        self.changed.notify_all()
                    channel.send(Header(Operation.DONE))
                case Operation.STATE:
                    with self.changed:
                        state = self.shard.state()
                    channel.send(Header(Operation.DONE))  # from here on the shard may change again
                    send_tree(channel, state)
                case Operation.STOP:
                    channel.send(Header(Operation.DONE))
                    self.ended.set()
                case _:
                    raise RefusedError(f"{header.operation.name} from a server")
