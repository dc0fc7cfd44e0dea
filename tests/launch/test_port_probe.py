"""Hosts that probe each other's ports."""

from __future__ import annotations

import socket

from worldsize.launch.port_probe import PortProbe, probe, probe_all


def test_a_port_that_is_open_closed_or_anothers() -> None:
    with PortProbe("127.0.0.1", 3) as opened:
        assert probe("127.0.0.1", opened.port, 3) is None
        assert probe("127.0.0.1", opened.port, 2) == "another process answers there (3)"
        probes = [{"address": "127.0.0.1", "port": opened.port, "node": node} for node in (1, 2, 3)]
        assert probe_all(probes, own=2) == {1: "another process answers there (3)"}
    assert "refused" in str(probe("127.0.0.1", opened.port, 3))


def test_a_probe_does_not_outlive_its_context() -> None:
    with PortProbe("127.0.0.1", 0) as opened:
        pass
    socket.create_server(("127.0.0.1", opened.port)).close()
