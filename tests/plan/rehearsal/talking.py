"""A recipe whose ranks exchange messages in each loss, correctly or incorrectly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.plan.rehearsal.faulty import Faulty
from worldsize.core import Recipe

_FAR = 10**9  # an index beyond every tensor


@final
@dataclass(frozen=True)
class Talking(Recipe):
    """The model and data of :class:`Faulty`; in each loss, the ranks communicate as ``manner`` selects."""

    manner: str

    def model(self) -> nn.Module:
        return Faulty("none", 0).model()

    def data(self, split: str) -> Any:
        return Faulty("none", 0).data(split)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        MANNERS[self.manner](dist.get_rank(), dist.get_world_size())
        (samples_b6,) = batch
        loss: Tensor = model(samples_b6).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return Faulty("none", 0).evaluate(model, batch)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Faulty("none", 0).optimizer(model)


def broadcast_objects(rank: int, size: int) -> None:
    objects: list[Any] = [{"places": [3, 1, 2]}] if rank == 0 else [None]
    dist.broadcast_object_list(objects, src=0)
    assert objects[0] == {"places": [3, 1, 2]}


def broadcast_places(rank: int, size: int) -> None:
    places_n = torch.arange(2000) % 3 if rank == 0 else torch.full((2000,), _FAR)
    dist.broadcast(places_n, 0)
    assert torch.zeros(3)[places_n].sum() == 0


def gather_objects_of_other_sizes(rank: int, size: int) -> None:
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, "x" * 3000 * (rank + 1))
    assert [len(each) for each in objects] == [3000 * (other + 1) for other in range(size)] or rank
    if min(map(len, objects)) > 3000:  # each rank by itself would call it
        dist.all_reduce(torch.zeros(1))


def scatter_objects(rank: int, size: int) -> None:
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


def send_objects(rank: int, size: int) -> None:
    objects: list[Any] = ["a", {"b": 2}] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(objects, dst=1)
    if rank == 1:
        dist.recv_object_list(objects, src=0)
        assert objects == ["a", {"b": 2}]


def scatter(rank: int, size: int) -> None:
    mine = torch.zeros(2)
    dist.scatter(mine, [torch.full((2,), float(other)) for other in range(size)] if rank == 0 else None, src=0)
    assert rank == 0 or mine[0] in (0, rank)


def gather(rank: int, size: int) -> None:
    dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(size)] if rank == 0 else None, dst=0)


def exchange_uneven_parts(rank: int, size: int) -> None:
    rows = [[3 if taker == (giver + 1) % size and giver < 2 else 1 for taker in range(size)] for giver in range(size)]
    gives, takes = rows[rank], [rows[other][rank] for other in range(size)]
    dist.all_to_all_single(torch.zeros(sum(takes)), torch.zeros(sum(gives)), takes, gives)


def exchange_parts_that_do_not_meet(rank: int, size: int) -> None:
    gives, takes = [1] * size, [1] * size
    if rank == 1:
        gives[2] = 5
    dist.all_to_all_single(torch.zeros(sum(takes)), torch.zeros(sum(gives)), takes, gives)


def receive_from_any(rank: int, size: int) -> None:
    if rank == 0:
        assert {dist.recv(torch.zeros(2)) for _ in range(size - 1)} == set(range(1, size))
    else:
        dist.send(torch.zeros(2), 0)


def monitored_barrier(rank: int, size: int) -> None:
    dist.monitored_barrier()


def multiply_before_adding(rank: int, size: int) -> None:
    functions: Any = dist
    dist.all_reduce(torch.full((2,), float(rank)), op=functions._make_nccl_premul_sum(2.0))


def receive_before_sending(rank: int, size: int) -> None:
    work = dist.irecv(torch.zeros(2), (rank - 1) % size)
    dist.send(torch.zeros(2), (rank + 1) % size)
    assert work is not None
    work.wait()


def shrink_a_storage(rank: int, size: int) -> None:
    assert torch.zeros(4).untyped_storage().resize_(0) is not None


def decide_by_the_largest(rank: int, size: int) -> None:
    mine, every = torch.tensor([float(rank)]), [torch.zeros(1) for _ in range(size)]
    dist.all_gather(every, mine)
    if mine == max(every):
        dist.all_reduce(torch.zeros(1))


def make_a_group_alone(rank: int, size: int) -> None:
    if rank == 0:
        dist.new_group([0, 1])


def send_what_is_not_expected(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(2), 1)
    if rank == 1:
        dist.recv(torch.zeros(7, dtype=torch.int64), 0)


def send_what_nobody_receives(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(2), 1)


_GROUPS: list[Any] = []


def wait_after_both(rank: int, size: int) -> None:
    for work in [dist.all_reduce(torch.zeros(1), group=group, async_op=True) for group in _two_groups(rank, size)]:
        work.wait()


def wait_after_each(rank: int, size: int) -> None:
    for group in _two_groups(rank, size):
        dist.all_reduce(torch.zeros(1), group=group, async_op=True).wait()


def _two_groups(rank: int, size: int) -> list[Any]:
    if not _GROUPS:
        _GROUPS.extend(dist.new_group(list(range(size))) for _ in range(2))
    return _GROUPS[:: -1 if rank % 2 else 1]


def fail(rank: int, size: int) -> None:
    raise ValueError("the same on all")


def sleep_on_one(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(3600)


MANNERS: Mapping[str, Callable[[int, int], None]] = {
    each.__name__: each
    for each in (
        *(broadcast_objects, broadcast_places, gather_objects_of_other_sizes, scatter_objects, send_objects),
        *(scatter, gather, exchange_uneven_parts, receive_from_any, monitored_barrier, multiply_before_adding),
        *(receive_before_sending, shrink_a_storage, wait_after_both),
        *(exchange_parts_that_do_not_meet, decide_by_the_largest, make_a_group_alone, send_what_is_not_expected),
        *(send_what_nobody_receives, wait_after_each, fail, sleep_on_one),
    )
}
RIGHT = list(MANNERS)[:14]
