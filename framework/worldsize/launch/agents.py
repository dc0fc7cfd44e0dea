"""One agent a host: the agent of the first leads the run, the others do as it says.

They speak JSON over one TCP connection each, authenticated both ways by a key that the run's members have
(HMAC challenge of multiprocessing.connection; nothing is unpickled). Both sides send signs of life; who has not been
heard of for ``node_timeout`` is lost.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from queue import Queue
from typing import Any, final

from torch._C._distributed_c10d import TCPStore

from worldsize.core import ConfigError, Failure, Job, Outcome, Plan
from worldsize.errors import WorldsizeError
from worldsize.launch.gang import Gang
from worldsize.launch.node import Meeting, NodeLauncher, private_folder
from worldsize.world.environments import Node
from worldsize.world.interfaces import address_towards, interface_of
from worldsize.world.interfaces import variables as network_variables
from worldsize.world.preemption import PREEMPTED

_RETRY = 0.1  # seconds
_LONGEST = 1 << 20  # bytes of a message
Message = Mapping[str, Any]


def write_key(run_dir: Path) -> None:
    """Give the run's members a key, if they have none yet; only their user may read it."""
    path = run_dir / "agents.key"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))


def read_key(run_dir: Path) -> bytes:
    """Raises ConfigError: the run folder has none."""
    try:
        return (run_dir / "agents.key").read_bytes()
    except OSError as error:
        raise ConfigError(f"the run's key cannot be read: {error}. All hosts need the run folder {run_dir}.") from error


@final
class Line:
    """A connection between two agents. Each send and receive fails after ``patience`` seconds of silence."""

    def __init__(self, connection: socket.socket, patience: float) -> None:
        bound = struct.pack("ll", int(patience), int(patience % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, bound)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()

    def challenge(self, key: bytes) -> None:
        """Raises AuthenticationError or OSError."""
        deliver_challenge(self._connection, key)
        answer_challenge(self._connection, key)

    def answer(self, key: bytes) -> None:
        """Raises AuthenticationError or OSError."""
        answer_challenge(self._connection, key)
        deliver_challenge(self._connection, key)

    def send(self, **message: Any) -> None:
        """Raises OSError."""
        with self._sending:
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message:
        """The next message that is no sign of life. Raises OSError or EOFError."""
        while True:
            message: Message = json.loads(self._connection.recv_bytes(_LONGEST))
            if message:
                return message

    def close(self) -> None:
        self._connection.close()


@final
class Pulse:
    """A context: sends signs of life over ``lines`` from a thread of its own."""

    def __init__(self, lines: Sequence[Line], patience: float) -> None:
        self._lines, self._interval = lines, patience / 4
        self._ended = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._beat, daemon=True, name="pulse").start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(self._interval):
            for line in self._lines:
                with suppress(OSError):  # whoever listens on that line notices
                    line.send()


@final
@dataclass
class Other:
    """Another host, as the first one sees it."""

    rank: int
    host: str
    line: Line
    outcome: Outcome | None = None

    def say_over(self, code: int) -> None:
        """The run has ended with this exit code."""
        with suppress(OSError):
            self.line.send(over=code)


@final
@dataclass(frozen=True)
class Lead(NodeLauncher):
    """The agent of the first host: a launcher for whoever runs the attempts, which all hosts take part in."""

    node: Node = field(default_factory=Node)
    others: Sequence[Other] = ()

    @property
    def hosts(self) -> Sequence[str]:
        return [other.host for other in self.others]

    def launch(self, plan: Plan) -> Job:
        if not self.others:
            address = "127.0.0.1"
            return self.start_node(plan, self.node, Meeting.alone(plan, _network(plan, address)))
        address = address_towards(self.node.first or "")
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        for other in self.others:
            other.outcome = None
            with suppress(OSError):  # noticed when it is listened to
                other.line.send(attempt=plan.attempt, port=port)
        gang = self.start_node(plan, self.node, _meeting(plan, address, port, address))
        # after the fork: it has a thread
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return _Joint(plan.attempt, gang, self.others, self.node_timeout, store)

    def describe(self, plan: Plan) -> str:
        return f"{plan.world_size} processes on {self.node.count} hosts"


@final
@dataclass
class _Joint(Job):
    """The processes of all hosts."""

    attempt: int
    gang: Gang
    others: Sequence[Other]
    patience: float
    store: TCPStore  # where the ranks meet, for as long as they live

    def wait(self) -> Outcome:
        threads = [threading.Thread(target=self._listen, args=(other,), daemon=True) for other in self.others]
        with Pulse([other.line for other in self.others], self.patience):
            for thread in threads:
                thread.start()
            own = self.gang.wait()
            if own.exit_code not in (0, PREEMPTED):
                self._abort()
            for thread in threads:
                thread.join()
        return joined([own, *(other.outcome for other in self.others if other.outcome)])

    def cancel(self) -> None:
        self.gang.cancel()

    def _listen(self, other: Other) -> None:
        try:
            message = other.line.receive()
            other.outcome = _outcome(message["ended"])
        except (OSError, EOFError):
            cause = f"the host {other.host} (node {other.rank}) has not answered for {self.patience:g} s, or is gone"
            other.outcome = Outcome("failed", 1, Failure("node", other.rank, cause, 1))
        if other.outcome.exit_code not in (0, PREEMPTED):
            self._abort()
            self.gang.abort()

    def _abort(self) -> None:
        for other in self.others:
            with suppress(OSError):
                other.line.send(abort=self.attempt)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """What a run is whose hosts ended like this; of several failures the first in time is the cause."""
    failed = [outcome for outcome in outcomes if outcome.failure]
    if failed:
        return min(failed, key=lambda outcome: outcome.failure.time_ns if outcome.failure else 0)
    first, reasons = outcomes[0], {outcome.exit_reason for outcome in outcomes}
    for reason in ("interrupted", "preempted"):
        if reason in reasons:
            return next(outcome for outcome in outcomes if outcome.exit_reason == reason)
    return first


def _outcome(facts: dict[str, Any]) -> Outcome:
    failure = Failure(**facts.pop("failure")) if facts["failure"] else facts.pop("failure")
    steps = facts.pop("steps")
    return Outcome(**facts, failure=failure, steps=tuple(steps) if steps else None)


def _network(plan: Plan, address: str) -> dict[str, str]:
    return network_variables(plan.cluster.backend, plan.cluster.interface or interface_of(address), plan.cluster.hca)


def _meeting(plan: Plan, first: str, port: int, address: str) -> Meeting:
    """The ranks of all hosts meet in a store that the first host's agent serves, in torch's own words."""
    store = {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(plan.attempt),
    }
    variables = {**_network(plan, address), **store}
    return Meeting(private_folder(), plan.cluster.processes_per_node, "env://", variables, address)


# ---------------------------------------------------------------- coming together


def gather(node: Node, port: int, key: bytes, *, patience: float, silence: float) -> list[tuple[Other, Message]]:
    """At the first host: the others, in their order, each with what it says of itself.

    ``patience``: seconds that they have to come; ``silence``: after which one is lost.

    Raises:
        WorldsizeError: one did not come in time, or the port is taken.
    """
    found: dict[int, tuple[Other, Message]] = {}
    deadline = time.monotonic() + patience
    with _listening(node, port) as listener:
        while len(found) < node.count - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, address = listener.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, node.count) if rank not in found]
                raise WorldsizeError(
                    f"nodes {missing} of {node.count} did not come within {patience:g} s. Look at their logs, and "
                    f"whether they reach {node.first} at port {port}; cluster.timeout is how long is waited."
                ) from None
            with suppress(OSError, EOFError, ValueError, KeyError):
                line = _authenticated(connection, key, address[0], silence)
                facts = line.receive()
                found[facts["node"]] = Other(facts["node"], facts["host"], line), facts
    return [found[rank] for rank in sorted(found)]


def _authenticated(connection: socket.socket, key: bytes, address: str, silence: float) -> Line:
    connection.settimeout(None)
    line = Line(connection, silence)
    try:
        line.challenge(key)
    except AuthenticationError as error:
        print(f"refused {address}: {error}", flush=True)
        raise OSError("no member of this run") from error
    return line


def _listening(node: Node, port: int) -> socket.socket:
    try:
        return socket.create_server((address_towards(node.first or ""), port), backlog=node.count)
    except OSError as error:
        raise WorldsizeError(
            f"port {port} at {node.first}, where the nodes are to meet, cannot be opened: {error}. "
            "Set cluster.port to one that is free."
        ) from error


def reach(node: Node, port: int, key: bytes, *, patience: float, silence: float, facts: Message) -> Line:
    """From another host: a line to the first. ``patience`` and ``silence`` as in :func:`gather`.

    Raises:
        WorldsizeError: it does not answer, or has another key.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection((node.first, port), timeout=5.0)
            connection.settimeout(None)
            line = Line(connection, silence)
            line.answer(key)
            line.send(**facts)
            return line
        except AuthenticationError as error:
            raise WorldsizeError(f"{node.first}:{port} is not of this run: {error}.") from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise WorldsizeError(
                    f"the first node, {node.first}, does not answer at port {port}: {error}. "
                    "Look at its log, and at what lies between the two."
                ) from error
            time.sleep(_RETRY)


@final
class Follower:
    """The agent of another host than the first."""

    def __init__(self, launcher: NodeLauncher, plan: Plan, node: Node, line: Line) -> None:
        self._launcher, self._plan, self._node, self._line = launcher, plan, node, line
        self._messages: Queue[Message | None] = Queue()
        self._gang: Gang | None = None
        self._attempt = 0
        self._aborted = -1  # the last attempt that was called off, perhaps before it had begun here

    def follow(self) -> int:
        """Take part in every attempt until the first host says how the run ended; the exit code.

        Raises:
            WorldsizeError: the first host is gone.
        """
        threading.Thread(target=self._listen, daemon=True, name="listen").start()
        with Pulse([self._line], self._launcher.node_timeout):
            while (message := self._messages.get()) is not None:
                if "over" in message:
                    return int(message["over"])
                self._take_part(int(message["attempt"]), int(message["port"]))
        raise WorldsizeError(
            f"the first node, {self._node.first}, has not answered for {self._launcher.node_timeout:g} s, or is gone."
        )

    def _listen(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                message = self._line.receive()
                if "abort" not in message:
                    self._messages.put(message)
                else:
                    self._call_off(int(message["abort"]))
        self._messages.put(None)
        self._call_off(self._attempt)

    def _call_off(self, attempt: int) -> None:
        self._aborted = attempt
        if self._gang is not None and self._attempt == attempt:
            self._gang.abort()

    def _take_part(self, attempt: int, port: int) -> None:
        self._attempt = attempt
        plan, first = replace(self._plan, attempt=attempt), self._node.first or ""
        meeting = _meeting(plan, first, port, address_towards(first))
        self._gang = self._launcher.start_node(plan, self._node, meeting)
        if self._aborted == attempt:
            self._gang.abort()
        outcome = self._gang.wait()
        self._gang = None
        with suppress(OSError):  # the listening thread notices, too
            self._line.send(ended=asdict(outcome))
