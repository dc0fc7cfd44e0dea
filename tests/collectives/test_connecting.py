"""Connections that gloo would defer are made at once where torch waits, and other waits end with the gang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.collectives.group import INTERRUPTION, connect_groups, receive, send
from worldsize.core import World
from worldsize.healing.groups import _list_sockets  # of this process
from worldsize.testing.worlds import run_in_worlds

WAITED = timedelta(seconds=600)


def late_group(world: World) -> ProcessGroup:
    """Create a group of all ranks where a pair connects on first use."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    return cast("ProcessGroup", dist.new_group([*range(world.size)], WAITED, backend="gloo"))


def test_after_that_rings_and_trees_connect_nobody() -> None:
    """They use pairs at power-of-two distances: 8 of the 10 peers of a rank among 11."""

    def body(world: World) -> tuple[int, int, int]:
        group = late_group(world)
        counts = [len(_list_sockets())]
        dist.barrier(world.group)  # before anybody connects
        connect_groups([group])
        dist.barrier(group)  # the other ranks' last connections to this rank exist
        counts.append(len(_list_sockets()))
        for size in (1, 11 * 40_000):
            row = torch.ones(size)
            dist.all_reduce(row, group=group)
            dist.all_gather_into_tensor(torch.empty(11 * size), row, group=group)
            for rank in range(world.size):
                dist.broadcast(row, group=group, group_src=rank)
        dist.reduce_scatter_tensor(torch.empty(5), torch.ones(55), group=group)
        places: list[object] = [None] * world.size
        dist.all_gather_object(places, "place", group=group)
        dist.broadcast_object_list(["place"], group=group, group_src=3)
        counts.append(len(_list_sockets()))
        dist.barrier(world.group)  # a rank that leaves closes its connections
        before, connected, after = counts
        return before, connected, after

    for before, connected, after in run_in_worlds(body, 11):
        assert connected - before == 8  # of 10
        assert after == connected


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("wait", ["connect", "send", "receive"])
def test_a_wait_for_a_rank_that_never_connects_ends_when_the_gang_does(wait: str, waiting: int) -> None:
    """Either of the two ranks may be the one that waits for the other to connect."""

    def body(world: World) -> None:
        group, row = late_group(world), torch.ones(4)
        waits: dict[str, Callable[[], None]] = {
            "connect": lambda: connect_groups([group]),
            "send": lambda: send(row, group, to=1 - waiting),
            "receive": lambda: receive(row, group, source=1 - waiting),
        }
        begun = time.monotonic()

        def check() -> None:
            if time.monotonic() - begun > 0.2:
                raise ConnectionError("the gang has ended")

        if world.rank == waiting:
            INTERRUPTION.start_tracking(check, longest=600)
            with pytest.raises(ConnectionError):
                waits[wait]()
        dist.barrier(world.group)

    run_in_worlds(body, 2)  # otherwise it waits for ten minutes
