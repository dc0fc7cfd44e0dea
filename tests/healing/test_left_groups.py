"""A process continues although a collective of the previous membership is stuck, and frees its group later."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.collectives.exact import start_all_reduce
from worldsize.collectives.group import INTERRUPTION
from worldsize.core import World
from worldsize.healing.groups import LEFT_GROUPS
from worldsize.testing.worlds import run_in_worlds

NUMBERS = 4 << 20  # far more than socket buffers hold


def known(row: Tensor, world: World) -> None:
    start_all_reduce(row, world)


def unknown(row: Tensor, world: World) -> None:
    dist.all_reduce(row, group=world.group, async_op=True)


def interrupted(start: Callable[[Tensor, World], None], world: World) -> weakref.ref[ProcessGroup]:
    """Start a collective in a new group, and leave the group as if the gang had ended before the wait."""
    group = cast("ProcessGroup", dist.new_group([0, 1]))
    own: list[Any] = [replace(world, groups={world.role: group})]
    own.append(own)  # like a replica: it refers to itself
    try:
        start(torch.ones(NUMBERS), own[0])
        raise ConnectionError("the gang has ended")
    except ConnectionError:
        LEFT_GROUPS.keep_groups()
    dist.destroy_process_group()
    return weakref.ref(group)


def freed(start: Callable[[Tensor, World], None]) -> list[tuple[bool, bool]]:
    """Return whether the group existed when it was freed before its collective had ended, and whether it does after."""
    barrier = get_context("fork").Barrier(2)  # the peer joins in when the first process releases it

    def body(world: World) -> tuple[bool, bool]:
        INTERRUPTION.start_tracking(lambda: None, longest=120.0)
        if world.rank == 1:
            peers = cast("ProcessGroup", dist.new_group([0, 1]))
            barrier.wait(60)
            dist.all_reduce(torch.ones(NUMBERS), group=peers)
            barrier.wait(60)
            return True, False
        group = interrupted(start, world)
        LEFT_GROUPS.free_groups()
        existed = group() is not None
        barrier.wait(60)
        barrier.wait(60)
        while group() is not None:
            LEFT_GROUPS.free_groups()
            for thread in threading.enumerate():
                if thread.name == "groups":
                    thread.join()
        return existed, group() is not None

    return run_in_worlds(body, 2, timeout=120.0)


def test_the_group_of_a_collective_whose_wait_was_never_reached_is_kept_until_it_ends() -> None:
    assert freed(known) == [(True, False)] * 2


def test_whoever_frees_the_group_of_a_collective_that_nobody_knows_of_does_not_wait_for_it() -> None:
    assert freed(unknown)[0][1] is False
