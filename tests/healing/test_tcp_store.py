"""Processes of several hosts meet at a server, and none waits there for a process that will not come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from worldsize.healing.groups import Meetings


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meetings(server: TCPStore, check: Callable[[], None], seconds: float) -> Meetings:
    return Meetings(f"tcp://127.0.0.1:{server.port}", check, timedelta(seconds=seconds))


def test_one_reads_what_another_has_written_for_the_same_membership(server: TCPStore) -> None:
    one, other = (meetings(server, lambda: None, 120.0) for _ in range(2))
    threading.Timer(0.1, other.create_store(2).set, ("default_pg/0//worker/1", b"\x00\xff")).start()
    assert not one.create_store(2).check(["default_pg/0//worker/1"])
    assert one.create_store(2).get("default_pg/0//worker/1") == b"\x00\xff"
    assert not one.create_store(3).check(["default_pg/0//worker/1"])


def test_a_wait_ends_at_its_timeout_or_when_the_membership_does(server: TCPStore) -> None:
    with pytest.raises(TimeoutError, match="timed out waiting for missing"):
        meetings(server, lambda: None, 0.1).create_store(1).get("missing")

    def ended() -> None:
        raise ConnectionError("the members of the process group have changed")

    with pytest.raises(ConnectionError):
        meetings(server, ended, 60.0).create_store(1).get("missing")
