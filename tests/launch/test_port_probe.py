"""Hosts that probe each other's ports."""

from __future__ import annotations

import socket
import threading

import pytest

from worldsize.launch.meeting import PortProbe, probe_all, probe_port


def test_a_port_that_is_open_closed_or_anothers() -> None:
    with PortProbe("127.0.0.1", 3) as opened:
        assert probe_port("127.0.0.1", opened.port, 3) is None
        assert probe_port("127.0.0.1", opened.port, 2) == "a different process is listening on this port (received 3)"
        probes = [{"address": "127.0.0.1", "port": opened.port, "node": node} for node in (1, 2, 3)]
        assert probe_all(probes, own=2) == {1: "a different process is listening on this port (received 3)"}
    assert "refused" in str(probe_port("127.0.0.1", opened.port, 3))


def test_a_probe_does_not_outlive_its_context() -> None:
    with PortProbe("127.0.0.1", 0) as opened:
        pass
    socket.create_server(("127.0.0.1", opened.port)).close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"x" * 100_000, "more than 32 bytes"),
        (b"\xff\x1b[2K\n", r"a different process is listening on this port (received \xff\x1b[2K)"),
        (b"", "closed"),
    ],
)
def test_what_another_process_says_is_bounded_and_shown_as_it_is(said: bytes, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        assert why in str(probe_port("127.0.0.1", listener.getsockname()[1], 3))
        thread.join()
