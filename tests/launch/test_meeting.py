"""Agents meet at a port that anybody can reach, and admit only the hosts of their run."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.meeting import arrivals, gather_agents, reach_first_host
from worldsize.net import agent_connection
from worldsize.net.agent_connection import AgentConnection, HeartbeatSender, RemoteAgent
from worldsize.net.credentials import RunKey, read_key, write_key
from worldsize.net.handshake import MessageSeal, NotOfThisRunError
from worldsize.world.environments import Node

HERE = "127.0.0.1"
HELLO, ANSWER, PROOF = 44, 64, 32  # bytes of a handshake, see worldsize.net.handshake


@pytest.fixture
def key(tmp_path: Path) -> RunKey:
    write_key(tmp_path)
    return read_key(tmp_path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def port() -> int:
    with socket.create_server((HERE, 0)) as listener:
        number: int = listener.getsockname()[1]
        return number


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Sockets and connections to close when the test ends."""
    sockets: list[Any] = []
    yield sockets
    for each in sockets:
        each.close()


@pytest.fixture
def give_up(port: int, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the leader run out of patience."""
    is_late = threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * is_late.is_set(), sleep=time.sleep)
    monkeypatch.setattr(agent_connection, "time", clock)

    def pass_time() -> None:
        is_late.set()
        dialed(port, opened)  # this wakes the leader, and it checks the clock

    return pass_time


def leads(key: RunKey, port: int, *, count: int = 2) -> list[tuple[RemoteAgent, Any]]:
    return gather_agents(Node(0, count, HERE), port, key, patience=60.0, silence=60.0)


def test_hosts_that_are_known_to_be_absent_are_not_waited_for(key: RunKey, port: int, pool: ThreadPoolExecutor) -> None:
    assert gather_agents(Node(0, 2, HERE, ("gone",)), port, key, patience=60, silence=60.0) == []
    came = pool.submit(follows, key, port, rank=1)
    others = gather_agents(Node(0, 4, HERE, ("gone", "lost")), port, key, patience=60, silence=60.0)
    assert [agent.rank for agent, _ in others] == [1]
    came.result().close()
    others[0][0].connection.close()


def follows(key: RunKey, port: int, *, rank: int = 1, patience: float = 60.0) -> AgentConnection:
    facts = {"node": rank, "host": f"host-{rank}"}
    return reach_first_host(Node(rank, 9, HERE), port, key, patience=patience, silence=60.0, facts=facts)


def dialed(port: int, opened: list[Any]) -> socket.socket:
    """Connect as soon as the port listens."""
    connection: socket.socket = eventually(lambda: connected(port))
    opened.append(connection)
    return connection


def connected(port: int) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_connection((HERE, port), timeout=120.0)
    return None


def eventually(happens: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (value := happens()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return value


def received(connection: socket.socket, count: int) -> bytes:
    return connection.recv(count, socket.MSG_WAITALL)


def hello(rank: int, nonce: bytes) -> bytes:
    return struct.pack(">8sI32s", b"wsAgent3", rank, nonce)


def is_closed(connection: socket.socket) -> bool:
    """Read to the end."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def test_hosts_of_a_run_meet_and_exchange_messages(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any]
) -> None:
    leader = pool.submit(leads, key, port, count=3)
    followers = [pool.submit(follows, key, port, rank=rank) for rank in (2, 1)]
    agents = [agent for agent, _ in leader.result()]
    ends = [follower.result() for follower in reversed(followers)]
    opened += [*ends, *(agent.connection for agent in agents)]
    assert [(agent.rank, agent.host) for agent in agents] == [(1, "host-1"), (2, "host-2")]
    for agent, end in zip(agents, ends, strict=True):
        with HeartbeatSender([agent.connection], 0.02):
            agent.connection.send(attempt=agent.rank, text="x" * 500_000)
            assert end.receive() == {"attempt": agent.rank, "text": "x" * 500_000}
            end.send(ended={"steps": [1, 2]}, value=float("inf"))
            assert agent.connection.receive() == {"ended": {"steps": [1, 2]}, "value": "inf"}


# ---------------------------------------------------------------- without the key


def test_a_challenge_of_one_follower_that_is_passed_to_another_lets_nobody_in(
    key: RunKey, pool: ThreadPoolExecutor, opened: list[Any]
) -> None:
    """A symmetric challenge (multiprocessing.connection) fell for this: one follower answered the other's challenge."""
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        attempts = [pool.submit(follows, key, port, rank=rank, patience=0.0) for rank in (1, 2)]
        first, second = (Connection(listener.accept()[0].detach()) for _ in range(2))
        opened += [first, second]
        with suppress(OSError, EOFError):
            first.send_bytes(b"#CHALLENGE#{sha256}" + b"0" * 40)
            first.recv_bytes(4096)  # its answer, ignored
            first.send_bytes(b"#WELCOME#")
            second.send_bytes(first.recv_bytes(4096))  # its challenge
            first.send_bytes(second.recv_bytes(4096))
        for each in (first, second):
            each.close()
        for attempt in attempts:
            with pytest.raises(WorldsizeError):
                attempt.result()


def test_what_one_follower_says_is_no_answer_to_another(
    key: RunKey, pool: ThreadPoolExecutor, opened: list[Any]
) -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        attempts = [pool.submit(follows, key, port, rank=rank) for rank in (1, 2)]
        ends = [listener.accept()[0] for _ in range(2)]
        opened += ends
        greetings = [received(end, HELLO) for end in ends]
        for end, other in zip(ends, reversed(greetings), strict=True):
            end.sendall((other[-32:] + other).ljust(ANSWER, b"\0")[:ANSWER])
        for attempt, end in zip(attempts, ends, strict=True):
            with pytest.raises(WorldsizeError, match="does not belong to this run: authentication as the leader"):
                attempt.result()
            assert end.recv(4096) == b"", "a follower says nothing to whoever is not the leader"


def test_a_proof_of_the_leader_is_not_one_of_a_follower(
    key: RunKey,
    port: int,
    pool: ThreadPoolExecutor,
    opened: list[Any],
    give_up: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="worldsize")
    leader = pool.submit(leads, key, port)
    first, second = dialed(port, opened), dialed(port, opened)
    first.sendall(hello(1, bytes(32)))
    nonce = received(first, ANSWER)[:32]
    second.sendall(hello(1, nonce))  # the leader's own challenge, back to the leader
    answer = received(second, ANSWER)
    first.sendall(answer[32:])
    assert is_closed(first)
    second.sendall(answer[32:])  # and its proof on the original connection
    assert is_closed(second)
    assert caplog.text.count("authentication as the follower of this run failed") == 2
    give_up()
    with pytest.raises(WorldsizeError, match=r"nodes \[1\] of 2 did not connect"):
        leader.result()


class Relay:
    """Forwards bytes between a follower that connected to it and the leader, and records them."""

    def __init__(self, listener: socket.socket, leader_port: int, opened: list[Any]) -> None:
        self.follower, _ = listener.accept()
        self.leader = dialed(leader_port, opened)
        opened += [self.follower]
        self.heard: list[bytes] = []  # of both
        self._pass(self.follower, self.leader, HELLO)
        self._pass(self.leader, self.follower, ANSWER)
        self._pass(self.follower, self.leader, PROOF)

    def _pass(self, source: socket.socket, target: socket.socket, count: int) -> None:
        data = received(source, count)
        target.sendall(data)
        self.heard.append(data)

    def facts(self) -> bytes:
        """Return the follower's first message."""
        return self._message(self.follower)

    def admit(self, facts: bytes) -> None:
        """Forward the follower's facts, and the answer that it is admitted."""
        self.leader.sendall(facts)
        self.follower.sendall(self._message(self.leader))

    def _message(self, source: socket.socket) -> bytes:
        head = received(source, 4)
        return head + received(source, struct.unpack(">I", head)[0] + 32)


def test_a_proof_that_is_sent_again_is_refused(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any], give_up: Callable[[], None]
) -> None:
    with socket.create_server((HERE, 0)) as listener:
        leader = pool.submit(leads, key, port, count=3)
        follower = pool.submit(follows, key, listener.getsockname()[1])
        relay = Relay(listener, port, opened)
        facts = relay.facts()
        relay.admit(facts)
        opened.append(follower.result())
        again = dialed(port, opened)
        again.sendall(relay.heard[0])
        received(again, ANSWER)
        again.sendall(relay.heard[2] + facts)
        assert is_closed(again)
        give_up()
        with pytest.raises(WorldsizeError, match=r"nodes \[2\] of 3 did not connect"):
            leader.result()


def test_what_the_leader_has_said_to_a_follower_is_nothing_to_it_later(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any]
) -> None:
    with socket.create_server((HERE, 0)) as listener:
        leader = pool.submit(arrivals, Node(0, 2, HERE), port, key, patience=60.0, silence=60.0)
        follower = pool.submit(follows, key, listener.getsockname()[1])
        relay = Relay(listener, port, opened)
        relay.admit(relay.facts())
        opened += [follower.result(), *(agent.connection for agent, _ in leader.result())]
        again = pool.submit(follows, key, listener.getsockname()[1])
        connection, _ = listener.accept()
        opened.append(connection)
        received(connection, HELLO)
        connection.sendall(relay.heard[1])
        with pytest.raises(WorldsizeError, match="authentication as the leader"):
            again.result()


def test_a_follower_that_is_announced_as_another_node_notices(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any], give_up: Callable[[], None]
) -> None:
    with socket.create_server((HERE, 0)) as listener:
        leader = pool.submit(arrivals, Node(0, 3, HERE), port, key, patience=60.0, silence=60.0)
        follower = pool.submit(follows, key, listener.getsockname()[1], rank=1)
        connection, _ = listener.accept()
        opened.append(connection)
        onward = dialed(port, opened)
        onward.sendall(hello(2, received(connection, HELLO)[-32:]))
        connection.sendall(received(onward, ANSWER))
        with pytest.raises(WorldsizeError, match="authentication as the leader"):
            follower.result()
        give_up()
        assert leader.result() == []


@pytest.mark.parametrize("change", ["another node", "its own message", "one bit", "twice"])
def test_whoever_passes_a_handshake_on_can_say_nothing_of_its_own(
    change: str, key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any], give_up: Callable[[], None]
) -> None:
    with socket.create_server((HERE, 0)) as listener:
        node = Node(0, 3, HERE)
        leader = pool.submit(arrivals, node, port, key, patience=60.0, silence=60.0)
        follower = pool.submit(follows, key, listener.getsockname()[1], patience=0.0)
        relay = Relay(listener, port, opened)
        facts = relay.facts()
        forged = MessageSeal(sending=bytes(32), receiving=bytes(32)).seal_message({"node": 1, "host": "evil"})
        sent = {
            "another node": facts.replace(b'"node": 1', b'"node": 2'),
            "its own message": forged,
            "one bit": facts[:-1] + bytes([facts[-1] ^ 1]),
            "twice": facts + facts,
        }[change]
        if change == "twice":
            relay.admit(sent)
            opened.append(follower.result())
        else:
            relay.leader.sendall(sent)
            assert is_closed(relay.leader)
        give_up()
        agents = [agent for agent, _ in leader.result()]
        opened += [agent.connection for agent in agents]
        if change == "twice":
            with pytest.raises(NotOfThisRunError, match="invalid message authentication tag"):
                agents[0].connection.receive()
        else:
            assert agents == []
            relay.follower.close()
            with pytest.raises(WorldsizeError, match="failed to connect to"):
                follower.result()


@pytest.mark.parametrize("wrong", ["secret", "run"])
def test_an_agent_of_another_run_is_refused_by_both_ends(
    wrong: str,
    key: RunKey,
    port: int,
    pool: ThreadPoolExecutor,
    give_up: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="worldsize")
    other = RunKey(key.run_id, b"1" * 64) if wrong == "secret" else RunKey("another", key.secret)
    leader = pool.submit(leads, key, port)
    with pytest.raises(WorldsizeError, match="does not belong to this run: authentication as the leader"):
        follows(other, port)
    eventually(lambda: "disconnected before authentication" in caplog.text)
    give_up()
    with pytest.raises(WorldsizeError, match=r"nodes \[1\] of 2 did not connect"):
        leader.result()


def test_a_node_that_is_not_expected_is_refused(
    key: RunKey,
    port: int,
    pool: ThreadPoolExecutor,
    opened: list[Any],
    give_up: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="worldsize")
    leader = pool.submit(arrivals, Node(0, 2, HERE), port, key, patience=60.0, silence=60.0)
    dialed(port, opened)
    with pytest.raises(WorldsizeError, match="failed to connect to"):
        follows(key, port, rank=7, patience=0.0)
    give_up()
    assert leader.result() == []
    assert "invalid greeting for a node of this run" in caplog.text


# ---------------------------------------------------------------- messages


def seals() -> tuple[MessageSeal, MessageSeal]:
    first, second = b"1" * 32, b"2" * 32
    return MessageSeal(sending=first, receiving=second), MessageSeal(sending=second, receiving=first)


def test_messages_are_taken_once_and_in_their_order() -> None:
    here, there = seals()
    first, second = here.seal_message({"n": 1}), here.seal_message({"n": 2})
    with pytest.raises(NotOfThisRunError, match="tag"):
        there.open_message(second[4:])
    assert there.open_message(first[4:]) == {"n": 1}
    with pytest.raises(NotOfThisRunError, match="tag"):
        there.open_message(first[4:])
    assert there.open_message(second[4:]) == {"n": 2}


def test_a_message_does_not_come_back_as_the_peers() -> None:
    here, _ = seals()
    with pytest.raises(NotOfThisRunError, match="tag"):
        here.open_message(here.seal_message({"over": 0})[4:])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": NaN}', "[1]", "{", '{"a": 1e999}'])
def test_what_is_no_message_ends_the_connection_and_nothing_else(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = seals()
    monkeypatch.setattr("worldsize.net.handshake.json.dumps", lambda _: text)
    with pytest.raises(NotOfThisRunError, match="invalid message"):
        there.open_message(here.seal_message({})[4:])


def test_a_message_that_is_too_long_is_not_received() -> None:
    _, there = seals()
    with pytest.raises(NotOfThisRunError, match="is too long"):
        there.bytes_after(struct.pack(">I", 1 << 31))


# ---------------------------------------------------------------- side by side

STRANGERS: dict[str, Callable[[int], bytes]] = {
    "silent": lambda _: b"",
    "half": lambda number: hello(1, bytes(32))[: number % HELLO],
    "greets": lambda number: hello(1 + number % 2, bytes([number]) * 32),
    "garbage": lambda number: bytes([number]) * 100_000,
    "http": lambda _: b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
}


def crowd(port: int, opened: list[Any], count: int) -> None:
    """Open this many connections, a fifth of each kind."""
    kinds = list(STRANGERS.values())
    for number in range(count):
        connection = dialed(port, opened)
        connection.setblocking(False)
        with suppress(OSError):
            connection.sendall(kinds[number % len(kinds)](number))


def test_hosts_come_in_while_fifty_strangers_are_silent_or_send_garbage(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any]
) -> None:
    leader: Future[Any] = pool.submit(leads, key, port, count=3)
    crowd(port, opened, 50)
    opened += [pool.submit(follows, key, port, rank=rank).result() for rank in (1, 2)]
    agents = leader.result()
    opened += [agent.connection for agent, _ in agents]
    assert [agent.rank for agent, _ in agents] == [1, 2]


def test_the_oldest_stranger_gives_way_to_one_more_connection(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_connection, "_AT_ONCE", 8)
    leader = pool.submit(leads, key, port)
    oldest = dialed(port, opened)
    for _ in range(20):
        dialed(port, opened)
    assert is_closed(oldest)
    opened.append(follows(key, port))
    opened += [agent.connection for agent, _ in leader.result()]


def test_a_stranger_that_sends_a_byte_now_and_then_is_not_heard_for_longer(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_connection, "_SECONDS", 0.3)
    leader = pool.submit(leads, key, port)
    slow = dialed(port, opened)
    slow.settimeout(0.02)
    for byte in hello(1, bytes(32)):
        try:
            slow.sendall(bytes([byte]))
            if not slow.recv(1):
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        raise AssertionError("it was received to the end")
    monkeypatch.setattr(agent_connection, "_SECONDS", 120.0)
    opened.append(follows(key, port))
    opened += [agent.connection for agent, _ in leader.result()]


def test_a_host_that_was_turned_away_before_it_was_admitted_comes_again(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any]
) -> None:
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(120.0)
        leader = pool.submit(leads, key, port)
        follower = pool.submit(follows, key, listener.getsockname()[1])
        turned_away = Relay(listener, port, opened)
        turned_away.facts()
        turned_away.leader.close()
        turned_away.follower.close()
        again = Relay(listener, port, opened)
        again.admit(again.facts())
        opened += [follower.result(), *(agent.connection for agent, _ in leader.result())]


def test_as_many_connections_as_a_large_run_has_hosts_are_heard_at_once(key: RunKey) -> None:
    with socket.create_server((HERE, 0)) as listener:
        small, large = (agent_connection.Admission(listener, key, range(1, n), silence=1.0) for n in (8, 1001))
    assert (small._at_once, large._at_once) == (256, 2000)


def test_a_first_host_without_file_descriptors_waits_and_goes_on(
    key: RunKey, port: int, pool: ThreadPoolExecutor, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(agent_connection, "_PAUSE", 0.0123)
    monkeypatch.setattr("time.sleep", pauses.append)
    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE)) for _ in range(3)]

    def accepted(listener: socket.socket) -> Any:
        if refusals and listener.getsockname()[1] == port:  # servers of other tests may still accept, too
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    leader = pool.submit(leads, key, port)
    dialed(port, opened)
    opened.append(follows(key, port))
    opened += [agent.connection for agent, _ in leader.result()]
    assert pauses.count(0.0123) == 3


def test_a_first_host_that_does_not_answer_is_not_waited_for_longer_than_said(
    key: RunKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worldsize.launch.meeting._HANDSHAKE", 0.2)
    with socket.create_server((HERE, 0)) as silent, pytest.raises(WorldsizeError, match="failed to connect to"):
        follows(key, silent.getsockname()[1], patience=0.1)


# ---------------------------------------------------------------- the key


def test_the_key_is_for_its_user_alone_and_is_made_once(tmp_path: Path) -> None:
    write_key(tmp_path)
    first = read_key(tmp_path)
    write_key(tmp_path)
    assert read_key(tmp_path) == first
    assert len(first.secret) == 64
    assert (tmp_path / "agents.key").stat().st_mode & 0o777 == 0o600
    assert first.secret.decode() not in repr(first)


def test_a_key_that_is_empty_is_none(tmp_path: Path) -> None:
    (tmp_path / "agents.key").touch()
    with pytest.raises(ConfigError, match="is truncated"):
        read_key(tmp_path)
