"""A shard on the network: one thread a connection, one lock a shard."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from worldsize.strategies.parameter_server.codec import Codec
from worldsize.strategies.parameter_server.rows import RowGradients, Rows
from worldsize.strategies.parameter_server.shard import Gradient, Shard
from worldsize.strategies.parameter_server.tree import send_tree
from worldsize.transport.certificates import Keys
from worldsize.transport.channel import Channel, LostError, accepted
from worldsize.transport.frames import Header, Operation, RefusedError, message, view

_HANDSHAKE = 10.0  # seconds
_LOGGED = 100
_HOTTEST = 5  # rows of a table that are told
_FENCED = 70  # exit code
Service = Callable[[Channel, Mapping[str, Any]], None]


def _nothing(step: int) -> None: ...


def _alone() -> bool:
    return True


@dataclass
class _Session:
    """One worker: pushes of an epoch are numbered, and each is taken once."""

    epoch: int
    sequence: int = 0


@dataclass
class _Follower:
    """The standby that has a copy of the shard: operations that were sent to it, and that it has made too."""

    channel: Channel
    sent: int = 0
    made: int = 0


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
    lease: float = 5.0
    replicated: bool = False
    fence: Callable[[], bool] = _alone  # become master anew, once the standby does not answer; False: another is
    is_master: Callable[[], bool] = _alone
    services: dict[str, Service] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)  # guards the shard
    codec: Codec | None = None
    led_by: str = "server-"  # how the name of who leads the run begins
    ended: threading.Event = field(default_factory=threading.Event)
    followed: threading.Event = field(default_factory=threading.Event)
    lost: int = 0  # updates that workers had seen and this server has not
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _adopted: dict[int, int] = field(default_factory=dict)  # sequence by epoch, of a master that died
    _follower: _Follower | None = None
    _load: _Load = field(default_factory=lambda: _Load())
    refused: int = 0

    def start(self) -> None:
        self.services = {"data": self._data, "peer": self._peer, "standby": self._lead, **self.services}
        if not self.replicated:
            self.followed.set()
        threading.Thread(target=self._accept, daemon=True, name="accept").start()
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

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
        self.followed.wait(self.lease)
        session = self._session(str(facts["name"]), int(facts["epoch"]))
        self._note_loss(str(facts["name"]), int(facts.get("seen", 0)))
        channel.tell(Operation.WELCOME, {"sequence": session.sequence, "step": self.shard.step})
        while True:
            header = channel.header()
            match header.operation:
                case Operation.PUSH | Operation.PUSH_ROWS:
                    self._push(channel, header, session)
                case Operation.PULL:
                    self._pull(channel, header)
                case Operation.PULL_ROWS:
                    self._pull_rows(channel, header)
                case Operation.SHARE:
                    channel.accept_share(self.timeout)
                case _:
                    raise RefusedError(f"{header.operation.name} from a worker")

    def _session(self, name: str, epoch: int) -> _Session:
        """A later epoch begins anew; the same one goes on where its connection broke."""
        with self.changed:
            session = self._sessions.get(name)
            if session is None or epoch > session.epoch:
                session = self._sessions[name] = _Session(epoch, self._adopted.get(epoch, 0))
            if epoch < session.epoch:
                raise RefusedError(f"{name} has come back since as epoch {session.epoch}; this is {epoch}")
            return session

    def _push(self, channel: Channel, header: Header, session: _Session) -> None:
        if header.epoch != session.epoch or header.sequence != session.sequence + 1:
            raise RefusedError(
                f"PUSH {header.sequence} of epoch {header.epoch} came; {session.sequence + 1} of "
                f"{session.epoch} was next"
            )
        payload, gradient = self.receive(channel, header)
        self._load.queue(+1)
        with self.changed:
            self._load.queue(-1)
            if header.sequence != session.sequence + 1:
                raise RefusedError(f"PUSH {header.sequence} came twice at once")
            self.begins(self.shard.step + 1)
            ticket = self._forward(header, payload)
            self._take(header, gradient)
            session.sequence += 1
            self._load.taken(header)
            self.changed.notify_all()
        self._settle(ticket)
        channel.send_later(Header(Operation.DONE, table=header.table, sequence=header.sequence))

    def receive(self, channel: Channel, header: Header) -> tuple[list[memoryview], Gradient]:
        """The payload of a push: its bytes, and the gradient that they are. Raises LostError or RefusedError."""
        if header.operation == Operation.PUSH_ROWS:
            return self._receive_rows(channel, header)
        if header.table >= len(self.shard.buckets):
            raise RefusedError(f"PUSH of table {header.table}; there are {len(self.shard.buckets)}")
        bucket, codec = self.shard.buckets[header.table], self.codec
        dtype, length = (codec.dtype, codec.length(bucket.numel)) if codec else (bucket.dtype, bucket.numel)
        header.require(dtype, (length,))
        received = torch.empty(length, dtype=dtype)
        channel.fill(payload := [view(received)])
        return payload, codec.decode(received, bucket.numel) if codec else received

    def _receive_rows(self, channel: Channel, header: Header) -> tuple[list[memoryview], RowGradients]:
        rows = self._rows(header)
        count, rest = divmod(header.length, 8 + 4 * rows.table.dim)
        if rest or header.dtype != torch.uint8 or count > rows.table.rows:
            raise RefusedError(f"PUSH_ROWS of {rows.table.name} carries {header.length} bytes")
        ids_n, gradients_nd = torch.empty(count, dtype=torch.int64), torch.empty(count, rows.table.dim)
        channel.fill(payload := [view(ids_n), view(gradients_nd)])
        _check_rows(rows, ids_n)
        return payload, (ids_n, gradients_nd)

    def _rows(self, header: Header) -> Rows:
        if header.table >= len(self.shard.tables):
            raise RefusedError(f"rows of table {header.table}; there are {len(self.shard.tables)}")
        return self.shard.tables[header.table]

    def _take(self, header: Header, gradient: Gradient) -> None:
        """A push that is the next one of its session."""
        part = {"step": header.step, "width": header.width, "node": header.node, "seen": header.seen}
        first = len(self.shard.buckets) if header.operation == Operation.PUSH_ROWS else 0
        self.shard.push(first + header.table, gradient, **part)

    def follow(self, channel: Channel, header: Header) -> None:
        """A push that the master has taken."""
        _, gradient = self.receive(channel, header)
        self._adopted[header.epoch] = header.sequence
        self._take(header, gradient)

    def adopt(self, image: Mapping[str, Any]) -> None:
        """Become what the master is; :meth:`follow` and others make its steps from there."""
        with self.changed:
            self.shard.restore(image["shard"])
            self._adopted = dict(image["sessions"])

    def _note_loss(self, name: str, seen: int) -> None:
        """A worker has seen more than this server remembers, which has come back from a checkpoint."""
        with self.changed:
            missing = seen - self.shard.updates - self.lost
            if missing > 0:
                self.lost += missing
                print(
                    f"{self.lost} updates are lost, which {name} has seen; going on at step {self.shard.step}",
                    flush=True,
                )

    def _pull(self, channel: Channel, header: Header) -> None:
        """All buckets, once the updates of steps up to ``header.step`` have been made."""
        with self.changed:
            self._wait_for(header.step)
            seen = self.shard.updates % 2**32
        for index, (bucket, values_n) in enumerate(zip(self.shard.buckets, self.shard.values, strict=True)):
            head = Header(Operation.WEIGHTS, index, bucket.dtype, (bucket.numel,), seen=seen, step=self.shard.step)
            channel.send(head, [view(values_n)])
        self._load.given(sum(values_n.nbytes for values_n in self.shard.values))

    def _wait_for(self, step: int) -> None:
        if not self.changed.wait_for(lambda: self.shard.step >= step, self.timeout):
            raise RefusedError(f"step {step} did not end; the shard is at step {self.shard.step}")

    def _pull_rows(self, channel: Channel, header: Header) -> None:
        """Rows by their ids, once the updates of steps up to ``header.step`` have been made."""
        rows = self._rows(header)
        if header.dtype != torch.int64 or len(header.shape) != 1 or header.shape[0] > rows.table.rows:
            raise RefusedError(f"PULL_ROWS of {rows.table.name} carries {header.dtype} {list(header.shape)}")
        ids_n = torch.empty(header.shape, dtype=torch.int64)
        channel.fill([view(ids_n)])
        _check_rows(rows, ids_n)
        with self.changed:
            self._wait_for(header.step)
            values_nd = rows.pull(ids_n)
            seen, step = self.shard.updates % 2**32, self.shard.closed
        shape = (len(ids_n), rows.table.dim)
        head = Header(Operation.WEIGHTS, header.table, torch.float32, shape, seen=seen, step=step)
        channel.send(head, [view(values_nd)])
        self._load.given(values_nd.nbytes)

    def _peer(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Who leads the run."""
        if not facts["name"].startswith(self.led_by):
            raise RefusedError(f"{facts['name']} does not lead this run")
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
                    self.apply(**channel.message(header))
                    channel.send(Header(Operation.DONE))
                case Operation.RESET:
                    self.reset(**channel.message(header))
                    channel.send(Header(Operation.DONE))
                case Operation.FACTS:
                    channel.tell(Operation.MESSAGE, self.facts())
                case Operation.STATE:
                    state = self.state()
                    channel.send(Header(Operation.DONE))  # from here on the shard may change again
                    send_tree(channel, state)
                case Operation.STOP:
                    channel.message(header)
                    channel.send(Header(Operation.DONE))
                    self.ended.set()
                case _:
                    raise RefusedError(f"{header.operation.name} from {facts['name']}")

    # ------------------------------------------------------------ what the server that leads decides

    def apply(self, step: int, factor: float | None) -> None:
        """Make the update of ``step`` that waits for approval; once, however often it is asked for."""
        with self.changed:
            ticket = self._forward(*message(Operation.APPLY, {"step": step, "factor": factor}))
            self.shard.apply(step, factor)
            self.changed.notify_all()
        self._settle(ticket)

    def reset(self, step: int, factor: float | None) -> None:
        """Another server leads now: end ``step``, if it was approved, and forget what has come of a later one."""
        with self.changed:
            ticket = self._forward(*message(Operation.RESET, {"step": step, "factor": factor}))
            self.shard.apply(step, factor)
            if self.shard.rule.gathers:
                self.shard.begin_step()
            self.changed.notify_all()
        self._settle(ticket)

    def state(self) -> dict[str, Any]:
        """A copy of the shard's."""
        with self.changed:
            return self.shard.state()

    def facts(self) -> dict[str, Any]:
        """Load since the last call, and updates lost since the start."""
        with self.changed:
            load, self._load = self._load, _Load(waiting=self._load.waiting)
            tables = {
                rows.table.name: {
                    "rows": rows.count,
                    "evicted": rows.evicted,
                    "missed": rows.missed,
                    "hottest": rows.hottest(_HOTTEST),
                }
                for rows in self.shard.tables
            }
        state = {"step": self.shard.step, "lost_updates": self.lost, "refused": self.refused}
        return {**state, **load.described(), **({"tables": tables} if tables else {})}

    # ------------------------------------------------------------ a standby

    def _lead(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Give a standby a copy of everything, and from then on every operation before it is acknowledged."""
        if not facts["name"].startswith("server-"):
            raise RefusedError(f"{facts['name']} is no server")
        channel.wait_at_most(self.lease)
        follower = _Follower(channel)
        with self.changed:
            if self._follower is not None:
                raise RefusedError("there is a standby already")
            channel.tell(Operation.WELCOME, {})
            sessions = {session.epoch: session.sequence for session in self._sessions.values()}
            send_tree(channel, {"shard": self.shard.image(), "sessions": {**self._adopted, **sessions}})
            self._follower = follower
        self.followed.set()
        print(f"{facts['name']} stands by", flush=True)
        with suppress(LostError, RefusedError):
            while True:
                channel.answer(Operation.DONE)
                with self.changed:
                    follower.made += 1
                    self.changed.notify_all()
        self._abandon(follower)

    def _watch(self) -> None:
        """Signs of life for the standby; and one of two masters, should there ever be two, ends."""
        while not self.ended.wait(self.lease / 4):
            if not self.is_master():
                self._yield()
            with self.changed:
                self._forward(Header(Operation.HEARTBEAT), [])

    def _yield(self) -> NoReturn:
        print("another server is master of this shard now", flush=True)
        os._exit(_FENCED)

    def _forward(self, header: Header, payload: Sequence[memoryview]) -> tuple[_Follower, int] | None:
        """The caller holds the lock, so that the standby does everything in the same order."""
        follower = self._follower
        if follower is None:
            return None
        try:
            follower.channel.send(header, payload)
        except LostError:
            self._abandon(follower)
            return None
        follower.sent += 1
        return follower, follower.sent

    def _settle(self, ticket: tuple[_Follower, int] | None) -> None:
        """Wait until the standby has made the operation too, or is given up."""
        if ticket is not None:
            follower, number = ticket
            with self.changed:
                self.changed.wait_for(lambda: follower.made >= number or self._follower is not follower)

    def _abandon(self, follower: _Follower) -> None:
        """Go on without a standby, unless it has taken this server for dead and is master now."""
        with self.changed:
            if self._follower is not follower or self.ended.is_set():
                return
            if not self.fence():
                self._yield()
            self._follower = None
            self.changed.notify_all()
        print("there is no standby any more", flush=True)


def _check_rows(rows: Rows, ids_n: Tensor) -> None:
    """Raise RefusedError unless these are rows of this server, sorted and each there once."""
    ids = ids_n.numpy()  # whose calls cost a quarter of torch's, where there are few rows
    if not len(ids):
        return
    if not (ids[1:] > ids[:-1]).all():
        raise RefusedError(f"rows of {rows.table.name} come sorted and each once; these do not")
    if ids[0] < 0 or ids[-1] >= rows.table.rows:
        raise RefusedError(f"{rows.table.name} has rows 0 to {rows.table.rows - 1}; another one was named")
    if rows.rule.shards > 1 and not bool((rows.rule.shard_of(ids_n, rows.table) == rows.shard).all()):
        raise RefusedError(f"rows of {rows.table.name} were named that belong to another server")


@dataclass
class _Load:
    """What a server did since it was last asked."""

    pushes: int = 0
    pulls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waiting: int = 0
    longest_queue: int = 0  # pushes that waited for the shard at once
    since: float = field(default_factory=time.perf_counter)

    def queue(self, change: int) -> None:
        self.waiting += change
        self.longest_queue = max(self.longest_queue, self.waiting)

    def taken(self, header: Header) -> None:
        self.pushes += 1
        self.bytes_in += header.length

    def given(self, nbytes: int) -> None:
        self.pulls += 1
        self.bytes_out += nbytes

    def described(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("pushes", "pulls", "bytes_in", "bytes_out", "longest_queue")}
        return {**figures, "seconds": round(time.perf_counter() - self.since, 3)}
