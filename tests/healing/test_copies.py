"""Copies of a state in the memory of peers: two processes keep each part, and any of them may die."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from worldsize.core import StateDict, World
from worldsize.errors import CheckpointError
from worldsize.healing import recovery
from worldsize.healing.copies import ShardCopies
from worldsize.healing.pieces import Generation, Held, PieceLayout, Place
from worldsize.healing.placements import Piece, build_inventory
from worldsize.healing.recovery import Recovery, hand_over_shards
from worldsize.testing.worlds import run_in_worlds

ROWS = 11
TABLE = torch.arange(ROWS * 3, dtype=torch.float64).view(ROWS, 3)


def state(ranks: Sequence[int], step: int, filled: bool = True) -> StateDict:
    """Return a state: each rank holds a shard of ``table``, one rank holds ``single``, and all hold ``common``."""
    mesh = init_device_mesh("cpu", (len(ranks),))
    table = distribute_tensor(TABLE + step if filled else torch.zeros_like(TABLE), mesh, [Shard(0)])
    single = torch.full((5,), step, dtype=torch.int16) if filled else torch.zeros(5, dtype=torch.int16)
    if dist.get_rank() != 1:
        single = single.to("meta")
    common = torch.tensor(float(step)) if filled else torch.tensor(0.0)
    return {"model": {"table": table, "common": common}, "optimizer": {"single": single, "lr": 0.1 * step}}


def kept(world: World, steps: int) -> list[Generation]:
    copies = ShardCopies(1, dist.group.WORLD, Place("one"), device=world.device)
    for step in range(steps + 1):
        copies.start_copy(state(range(world.size), step), step=step, skipped=step // 2)
    copies.close()
    return copies.collect_generations()


def restored(world: World, dead: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Let ``dead`` forget everything, like their replacements, and restore the state everywhere."""
    left = kept(world, 3)
    own = [] if world.rank in dead else left
    template = state(range(world.size), 3, filled=False)
    newest = Recovery(template, own, dist.group.WORLD, Place("one")).run()
    assert newest is not None
    expected = state(range(world.size), newest.step)
    tables = [each["model"]["table"] for each in (newest.state, expected)]
    locals_: list[Tensor] = [each.to_local() for each in tables if isinstance(each, DTensor)]
    same = torch.equal(*locals_) and torch.equal(newest.state["model"]["common"], expected["model"]["common"])
    if world.rank == 1:
        same = same and torch.equal(newest.state["optimizer"]["single"], expected["optimizer"]["single"])
    same = same and newest.state["optimizer"]["lr"] == expected["optimizer"]["lr"]
    return [(newest.step, newest.skipped, same)]


@pytest.mark.parametrize("dead", [[0], [1], [3], [0, 2], [1, 3]])
def test_whoever_dies_without_a_peer_loses_nothing(dead: list[int]) -> None:
    assert run_in_worlds(lambda world: restored(world, dead), 4) == [[(3, 1, True)]] * 4


def test_parts_of_any_size_are_sent_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sends its peer at most 32 bytes at once, though the parts of the table have 72."""
    monkeypatch.setattr(recovery, "_ROUND", 4 * 16)
    send, sent, run = dist.all_to_all_single, list[int](), recovery._PieceExchange.run

    def noted(answer: Tensor, message: Tensor, taken: list[int], given: list[int], **more: Any) -> Any:
        sent.append(max(given))
        return send(answer, message, taken, given, **more)

    def without_copies(exchange: Any, transfers: Any) -> None:
        sent.clear()
        run(exchange, transfers)

    monkeypatch.setattr(dist, "all_to_all_single", noted)
    monkeypatch.setattr(recovery._PieceExchange, "run", without_copies)

    def body(world: World) -> tuple[Any, int, int]:
        (result,) = restored(world, [1, 3])
        return result, max(sent), len(sent)

    results = run_in_worlds(body, 4)
    assert {result for result, _, _ in results} == {(3, 1, True)}
    assert 0 < max(largest for _, largest, _ in results) <= 32
    assert results[0][2] > 1


def test_a_process_that_dies_with_its_peer_takes_a_part_along() -> None:
    def lost(world: World) -> str:
        own = [] if world.rank in (1, 2) else kept(world, 3)
        if world.rank in (1, 2):
            kept(world, 3)
        with pytest.raises(CheckpointError) as error:
            Recovery(state(range(world.size), 3, filled=False), own, dist.group.WORLD, Place("one")).run()
        return str(error.value)

    for said in run_in_worlds(lost, 4):
        assert "of the state after step 3 are lost" in said
        assert "launcher.max_restarts" in said


def test_copies_that_did_not_arrive_leave_the_generation_before() -> None:
    def interrupted(world: World) -> tuple[int, bool]:
        older, newer = kept(world, 2), kept(world, 3)
        own = [newer[0], older[0]]
        if world.rank == 0:
            own = [older[0]]  # its own part of step 3 is lost
        if world.rank == 1:  # and its copy was on the way
            received = {piece: part for piece, part in newer[0].parts.items() if piece.name != "model/table"}
            own = [replace(newer[0], parts=received), older[0]]
        newest = Recovery(state(range(world.size), 3, filled=False), own, dist.group.WORLD, Place("one")).run()
        assert newest is not None
        return newest.step, newest.state["model"]["common"].item() == 2

    assert run_in_worlds(interrupted, 3) == [(2, True)] * 3


def test_a_state_is_divided_anew_for_fewer_processes() -> None:
    """Two of three processes continue, each with a part of the table whose bounds are new."""
    assert torch.equal(divided_among_two([0, 1, 2]), TABLE + 3)


def test_one_that_goes_on_no_more_hands_over_what_only_it_keeps() -> None:
    """The last of four processes has died with the only copy of the third one's part."""
    assert torch.equal(divided_among_two([0, 1, 2], size=4), TABLE + 3)


def divided_among_two(survivors: Sequence[int], size: int = 3) -> Tensor:
    """Return the first two processes' table after the others of ``size`` have died."""

    def divided(world: World) -> Tensor | None:
        left = kept(world, 3)
        if world.size > len(survivors):
            everyone = dist.new_group(list(survivors))
            left = hand_over_shards(left, everyone, 2) if isinstance(everyone, dist.ProcessGroup) else []
        group = dist.new_group([0, 1])
        if not isinstance(group, dist.ProcessGroup):  # this rank is not a member
            return None
        half = DeviceMesh.from_group(group, "cpu")
        mine = torch.zeros(6 - world.rank, 3, dtype=torch.float64)
        table = DTensor.from_local(mine, half, [Shard(0)], shape=TABLE.shape, stride=TABLE.stride())
        single = torch.zeros(5, dtype=torch.int16)
        template = {"model": {"table": table, "common": torch.tensor(0.0)}, "optimizer": {"single": single, "lr": 0.0}}
        newest = Recovery(template, left, group, Place("one")).run()
        assert newest is not None
        assert torch.equal(newest.state["optimizer"]["single"], torch.full((5,), 3, dtype=torch.int16))
        return mine.clone()

    first, second, *_ = run_in_worlds(divided, size)
    assert first is not None
    assert second is not None
    return torch.cat([first, second])


def test_a_part_that_several_ranks_hold_is_kept_by_two_of_them_and_sent_by_none() -> None:
    def taken(world: World) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2))
        table = distribute_tensor(TABLE, mesh, [Replicate(), Shard(0)])
        copies = ShardCopies(1, dist.group.WORLD, Place("one"), device=world.device)
        copies.start_copy({"model": {"table": table}}, step=1, skipped=0)
        before = sum(part.numel() for part in copies.collect_generations()[0].parts.values())
        copies.close()
        return before, sum(part.numel() for part in copies.collect_generations()[0].parts.values())

    assert run_in_worlds(taken, 4) == [(18, 18), (15, 15)] * 2


def test_peers_are_on_other_hosts_and_train_other_data_if_there_are_several() -> None:
    rows = [Piece("table", ((rank, rank + 1),)) for rank in range(4)]
    layout = layout_of(rows, "aabb")
    assert [layout.find_peer(rank) for rank in range(4)] == [2, 3, 0, 1]
    assert [layout.peer_before(layout.find_peer(rank)) for rank in range(4)] == [0, 1, 2, 3]
    common = layout_of([Piece("bias", ((0, 4096),))] * 4, "aabb")
    keepers = [rank for rank in range(4) if common.list_shared(rank)]
    assert len(keepers) == 2
    assert {"aabb"[rank] for rank in keepers} == {"a", "b"}
    assert [layout_of(rows, "aaaa", (0, 0, 1, 1)).find_peer(rank) for rank in range(4)] == [2, 3, 0, 1]
    both = layout_of([Piece("bias", ((4 * part, 4 * part + 4),)) for part in (0, 0, 1, 1)], "aaaa", (0, 0, 1, 1))
    assert [len(both.list_sole(rank)) for rank in range(4)] == [1, 0, 0, 1]  # one of a part's ranks sends a copy
    count = layout_of([Piece("step", ((0, 1),))] * 4, "aabb")
    assert all(count.list_shared(rank) for rank in range(4))


def layout_of(pieces: Sequence[Piece], hosts: str, parts: Sequence[int | None] = (None,) * 4) -> PieceLayout:
    """Return the layout of ranks that each hold one part of the same tensor."""
    dtypes = {pieces[0].name: torch.float32}
    told = zip(pieces, hosts, parts, strict=True)
    return PieceLayout(
        [Held(build_inventory([piece], dtypes), Place(host, part)) for piece, host, part in told], dtypes
    )
