"""JSON messages between processes: numbers arrive unchanged, and invalid messages are refused in time."""

from __future__ import annotations

import errno
import math
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from enum import IntEnum
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from worldsize.net import endpoints
from worldsize.net.channel import Channel, LostError
from worldsize.net.endpoints import ConnectionServer, connect_channel, open_listener
from worldsize.net.frames import CommonOperation, Header, RefusedError


class Operation(IntEnum):
    """Adds no operations."""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    here, there = socket.socketpair()
    channel = Channel(here, operations=Operation)
    channel.wait_at_most(0.3)
    with there:
        yield channel, there
    channel.close()


def framed(text: bytes) -> bytes:
    return Header(CommonOperation.MESSAGE, shape=(len(text),)).pack() + text


def test_numbers_that_json_lacks_arrive_as_they_are(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    other = Channel(there, operations=Operation)
    facts = {"losses": [0.1, math.inf, -math.inf], "factor": math.nan, "tuple": (1, 2), "text": "nan", "3": None}
    other.send_message(CommonOperation.MESSAGE, facts)
    arrived = channel.receive_message(channel.receive_header())
    assert math.isnan(arrived.pop("factor"))
    assert arrived == {"losses": [0.1, math.inf, -math.inf], "tuple": [1, 2], "text": "nan", "3": None}


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        bytes(range(256)),
        b"x" * (1 << 20),
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"$float": "one"}',
        b"1" * 10_000,
    ],
    ids=["deep", "deep objects", "binary", "a megabyte", "NaN", "infinity", "no float", "a long number"],
)
def test_what_is_no_message_is_refused(ends: tuple[Channel, socket.socket], text: bytes) -> None:
    channel, there = ends
    sending = threading.Thread(target=there.sendall, args=(framed(text),))
    sending.start()
    with pytest.raises(RefusedError, match="not valid JSON"):
        channel.receive_message(channel.receive_header())
    sending.join()


@pytest.mark.parametrize("begun", [0, 104], ids=["header", "message"])
def test_a_peer_that_sends_a_byte_now_and_then_is_lost(ends: tuple[Channel, socket.socket], begun: int) -> None:
    channel, there = ends
    frame, ended = framed(b'"' + b"x" * 1000 + b'"'), threading.Event()
    there.sendall(frame[:begun])

    def drip() -> None:
        for byte in frame[begun:]:
            if ended.wait(0.05):
                return
            there.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(LostError):
            channel.receive_message(channel.receive_header())
    finally:
        ended.set()
        dripping.join()


def test_a_server_goes_on_after_a_join_that_is_nested_too_deeply(tmp_path: Path) -> None:
    listener = open_listener(f"unix:{tmp_path}/server", None)
    services = {"echo": lambda channel, facts: channel.send_message(CommonOperation.WELCOME, facts)}
    server = ConnectionServer(listener, None, services, timeout=60.0, operations=Operation)
    ours, theirs = socket.socketpair()
    with theirs:
        deep = b"[" * 100_000
        theirs.sendall(Header(CommonOperation.JOIN, shape=(len(deep),)).pack() + deep)
        server.serve(ours)
        assert server.refused == 1
    server.start()
    channel = connect_channel(f"unix:{tmp_path}/server", None, peer="", seconds=60.0, operations=Operation)
    channel.send_message(CommonOperation.JOIN, {"kind": "echo", "name": "worker-0"})
    assert channel.receive_message(channel.receive_answer(CommonOperation.WELCOME))["name"] == "worker-0"
    channel.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize(("owner", "step"), [(socket.socket, "accept"), (socket.socket, "dup"), (Thread, "start")])
def test_a_server_goes_on_after_a_connection_for_which_there_is_no_room(
    owner: type, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed = getattr(owner, step)
    failures = [RuntimeError("can't start new thread") if step == "start" else OSError(errno.EMFILE, "no descriptor")]
    others = threading.enumerate()  # servers of other tests may still accept, too

    def once_fails(self: Any) -> Any:
        accepts = threading.current_thread().name == "accept" and threading.current_thread() not in others
        if failures and accepts:
            raise failures.pop()
        return succeed(self)

    monkeypatch.setattr(endpoints, "_PAUSE", 0.0)
    monkeypatch.setattr(owner, step, once_fails)
    listener = open_listener(f"unix:{tmp_path}/server", None)
    services = {"echo": lambda channel, facts: channel.send_message(CommonOperation.WELCOME, facts)}
    server = ConnectionServer(listener, None, services, timeout=60.0, operations=Operation)
    server.start()
    for _ in range(2):
        channel = connect_channel(f"unix:{tmp_path}/server", None, peer="", seconds=60.0, operations=Operation)
        channel.wait_at_most(60.0)
        with closing(channel), suppress(LostError):
            channel.send_message(CommonOperation.JOIN, {"kind": "echo", "name": "worker-0"})
            channel.receive_message(channel.receive_answer(CommonOperation.WELCOME))
            break
    else:
        raise AssertionError("the server no longer answers")
    assert server.refused == 1
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_the_oldest_connection_that_has_not_joined_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldsize.net.endpoints._AT_ONCE", 4)
    address = f"unix:{tmp_path}/server"
    listener = open_listener(address, None)
    ended = threading.Event()

    def attend(channel: Channel, facts: Mapping[str, Any]) -> None:
        channel.send_message(CommonOperation.WELCOME, {})
        ended.wait()
        channel.send_message(CommonOperation.MESSAGE, "still here")

    ConnectionServer(listener, None, {"wait": attend}, timeout=60.0, operations=Operation).start()
    joined = connect_channel(address, None, peer="", seconds=60.0, operations=Operation)
    joined.send_message(CommonOperation.JOIN, {"kind": "wait", "name": "worker-0"})
    joined.receive_message(joined.receive_answer(CommonOperation.WELCOME))
    silent: list[socket.socket] = []
    for _ in range(12):
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].connect(f"{tmp_path}/server")
    silent[0].settimeout(60.0)
    assert silent[0].recv(1) == b""
    ended.set()
    assert joined.receive_message(joined.receive_answer(CommonOperation.MESSAGE)) == "still here", (
        "one that has joined stays"
    )
    for each in silent:
        each.close()
    joined.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
