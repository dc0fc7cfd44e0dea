"""Hosts that knock at each other's doors."""

from __future__ import annotations

import socket

from worldsize.launch.doors import Door, knock, knock_all


def test_a_door_that_is_open_closed_or_anothers() -> None:
    with Door("127.0.0.1", 3) as door:
        assert knock("127.0.0.1", door.port, 3) is None
        assert knock("127.0.0.1", door.port, 2) == "another process answers there (3)"
        doors = [{"address": "127.0.0.1", "port": door.port, "node": node} for node in (1, 2, 3)]
        assert knock_all(doors, own=2) == {1: "another process answers there (3)"}
    assert "refused" in str(knock("127.0.0.1", door.port, 3))


def test_a_door_does_not_outlive_its_context() -> None:
    with Door("127.0.0.1", 0) as door:
        pass
    socket.create_server(("127.0.0.1", door.port)).close()
