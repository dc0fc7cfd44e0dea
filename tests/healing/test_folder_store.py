"""Processes meet in a folder, and none waits there for a process that will not come."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.core import World
from worldsize.healing.groups import Connections, FolderStore
from worldsize.testing.worlds import run_in_worlds


def never() -> None: ...


def store(folder: Path, seconds: float = 120.0) -> FolderStore:
    return FolderStore(folder / "met", never, timedelta(seconds=seconds))


class Conversation:
    """A connection outside of any process group; one end is watched, as a logger or a loader would."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.one = socket.create_connection(server.getsockname())
            self.other, _ = server.accept()
        self.watched = selectors.EpollSelector()
        self.watched.register(self.other, selectors.EVENT_READ)

    def goes_on(self) -> bool:
        self.one.sendall(b"still there")
        return bool(self.watched.select(60.0)) and self.other.recv(100) == b"still there"


def test_one_reads_what_another_has_written(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path)
    assert not one.check(["default_pg/0//worker/1"])
    threading.Timer(0.1, other.set, ("default_pg/0//worker/1", b"\x00address")).start()
    assert one.get("default_pg/0//worker/1") == b"\x00address"
    assert one.check(["default_pg/0//worker/1"])


def test_a_wait_ends_at_its_timeout_or_when_the_check_raises(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="timed out waiting for missing"):
        store(tmp_path, 0.1).get("missing")

    def ended() -> None:
        raise ConnectionError("the gang has ended")

    with pytest.raises(ConnectionError):
        FolderStore(tmp_path / "other", ended, timedelta(seconds=60)).get("missing")


@pytest.mark.parametrize("late", ["0", "1"], ids=["connected from the beginning", "connected when they communicate"])
def test_a_wait_for_a_silent_peer_ends_when_the_connections_are_cut(tmp_path: Path, late: str) -> None:
    """Gloo's own abort would let it wait until the timeout of the group, here minutes."""
    folder, ended = tmp_path / "groups", tmp_path / "ended"

    def body(world: World) -> bool:
        os.environ["TORCH_GLOO_LAZY_INIT"] = late
        connections, ranks = Connections(), [0, 1]
        meeting = FolderStore(folder, never, timedelta(seconds=120))
        dist.destroy_process_group()
        with connections:
            dist.init_process_group("gloo", store=meeting, rank=world.rank, world_size=2)
            group = cast("ProcessGroup", dist.new_group(ranks, backend="gloo"))
        row = torch.ones(4)
        dist.all_reduce(row, group=group)
        assert torch.equal(row, torch.full((4,), 2.0))
        ours = Conversation()
        if world.rank == 1:  # it sends nothing until its peer has ended the wait
            deadline = time.monotonic() + 120
            while not (has_ended := ended.exists()) and time.monotonic() < deadline:
                time.sleep(0.01)
            return has_ended
        threading.Timer(0.2, connections.cut_sockets).start()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(4), group=group)
        ended.touch()
        return ours.goes_on()

    assert run_in_worlds(body, 2) == [True, True]
