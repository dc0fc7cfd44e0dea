"""All ranks run the collectives of a sharded model in one order, which may be another one in each step."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch import nn
from torch.distributed import TCPStore

from worldsize.core import Cluster, World
from worldsize.strategies.sharded_reducer import Units
from worldsize.strategies.unit_gradients import UnitGradients
from worldsize.strategies.unit_order import UnitOrder
from worldsize.testing.worlds import run_in_worlds
from worldsize.world.meetings import Meetings
from worldsize.world.world import regrouped

CLUSTER = Cluster("test", 1, 2, "cpu", "gloo", threads=1, timeout=60.0)
GATHER, SCATTER, OTHER_GATHER, OTHER_SCATTER = range(4)  # events of two units


def never() -> None: ...


def unit_order(world: World) -> UnitOrder:
    assert world.group is not None
    return UnitOrder(nn.Module(), world.group)


def run_step(order: UnitOrder, events: Sequence[int]) -> None:
    with Units(UnitGradients(nn.Module(), None), order).step():
        for event in events:
            order.check(event)


@pytest.mark.parametrize("place", ["folder", "server"])
def test_units_change_their_order_in_a_gang_that_heals(tmp_path: Path, place: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    url = f"file://{tmp_path}/met" if place == "folder" else f"tcp://127.0.0.1:{server.port}"

    def run_steps(world: World) -> bool:
        meetings = Meetings(url, never, timedelta(seconds=60))
        order = unit_order(regrouped(world, range(world.size), CLUSTER, meetings.store(0)))
        run_step(order, [GATHER, OTHER_GATHER, OTHER_SCATTER, SCATTER])
        run_step(order, [OTHER_GATHER, OTHER_SCATTER])
        run_step(order, [OTHER_GATHER, OTHER_SCATTER])
        return True

    assert run_in_worlds(run_steps, 2) == [True, True]
