"""A process's whole state reaches its peers bit for bit, in few messages of bounded size."""

from __future__ import annotations

from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.interruption import end_gang_soon
from worldsize.core import World
from worldsize.healing import copies
from worldsize.healing.copies import receive_state, send_state
from worldsize.testing.worlds import run_in_worlds


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(5, 7, generator=generator)
    return {
        "model": {"across": matrix.t(), "whole": matrix, "nothing": torch.zeros(0, 3), "flag": torch.tensor(seed > 0)},
        "optimizer": [{"step": torch.tensor(float(seed)), "half": matrix.bfloat16(), "count": torch.tensor([seed])}],
        "lr": 0.1 * seed,
    }


def exchanged(world: World, most: int) -> tuple[bool, int]:
    """Let rank 1 send its state to the others; return whether it has arrived, and the number of messages."""
    copies._MESSAGE = most
    assert world.group is not None
    expected, sent = state(7), {"skipped": 3}
    if world.rank == 1:
        send_state(expected, sent, [0, 2], world.group, world.device)
        received, facts = expected, dict[str, Any](sent)
    else:
        received, told = receive_state(state(0), 1, world.group, world.device)
        facts = dict(told)
    pairs = [
        *((received["model"][name], tensor) for name, tensor in expected["model"].items()),
        *((received["optimizer"][0][name], tensor) for name, tensor in expected["optimizer"][0].items()),
    ]
    same = all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
    forms = [(str(number), other.dtype, tuple(other.shape)) for number, (_, other) in enumerate(pairs)]
    return same and received["lr"] == expected["lr"] and facts == sent, len([*copies._messages(forms)])


@pytest.mark.parametrize(("most", "messages"), [(1 << 20, 4), (200, 5), (1, 7)])
def test_a_state_arrives_whole_whatever_a_message_holds(most: int, messages: int) -> None:
    assert run_in_worlds(partial(exchanged, most=most), 3) == [(True, messages)] * 3


def test_whoever_sends_to_a_process_that_does_not_receive_stops_when_the_gang_does() -> None:
    """A message to a killed process would otherwise last until the timeout of the group."""
    barrier = get_context("fork").Barrier(2)

    def interrupted(world: World) -> None:
        assert world.group is not None
        if world.rank == 1:
            dist.recv_object_list([None, None, None], group=world.group, group_src=0)
            barrier.wait(60)  # instead of the tensors
            return
        end_gang_soon()
        with pytest.raises(ConnectionError):
            send_state(state(7), {}, [1], world.group, world.device)
        barrier.wait(60)

    run_in_worlds(interrupted, 2, timeout=120.0)
