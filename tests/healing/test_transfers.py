"""Each rank works out its own sends and receives; no process is started."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from worldsize.checkpoint.manifest_tree import Box
from worldsize.checkpoint.safetensors import slices_in
from worldsize.errors import CheckpointError
from worldsize.healing.pieces import Held, PieceLayout, Place
from worldsize.healing.placements import (
    Piece,
    TensorPlacement,
    Transfer,
    build_inventory,
    build_placements,
    plan_handover,
    plan_transfers,
)
from worldsize.healing.recovery import _newest_complete, _Offer

Sharding = Callable[[str, int, int], Sequence[Box]]  # a rank's parts of a table, for a number of ranks
ROWS, COLUMNS = 11, 6
NAMES = [f"model/{number}" for number in range(5)]
DTYPES = dict.fromkeys(NAMES, torch.float32)


def cut(length: int, place: int, parts: int) -> tuple[int, int]:
    size = -(-length // parts)
    return min(length, place * size), min(length, place * size + size)


def rows(_: str, rank: int, ranks: int) -> Sequence[Box]:
    return [(cut(ROWS, rank, ranks), (0, COLUMNS))]


def rows_and_those_of_a_peer(name: str, rank: int, ranks: int) -> Sequence[Box]:
    return [*rows(name, rank, ranks), *rows(name, (rank - 1) % ranks, ranks)]


def whole(_: str, _rank: int, _ranks: int) -> Sequence[Box]:
    return [((0, ROWS), (0, COLUMNS))]


def whole_in_turns(name: str, rank: int, ranks: int) -> Sequence[Box]:
    return whole(name, rank, ranks) if (NAMES.index(name) - rank) % ranks < 2 else []


def grid(_: str, rank: int, ranks: int) -> Sequence[Box]:
    return [(cut(ROWS, rank // 2, ranks // 2), cut(COLUMNS, rank % 2, 2))]


def replicas(name: str, rank: int, ranks: int) -> Sequence[Box]:
    return rows(name, rank % 2, 2)


def pieces(sharding: Sharding, rank: int, ranks: int, names: Sequence[str] = NAMES) -> list[Piece]:
    parts = [Piece(name, box) for name in names for box in sharding(name, rank, ranks)]
    return [piece for piece in parts if piece.elements]


def placed(by_rank: Sequence[Sequence[Piece]], names: Sequence[str] = NAMES) -> list[TensorPlacement]:
    return build_placements([build_inventory(each, dict.fromkeys(names, torch.float32)) for each in by_rank])


def agreed(by_rank: Sequence[Sequence[Transfer]]) -> None:
    """Check that each rank has just its own transfers, and that both ends list the same ones in the same order."""
    for rank, transfers in enumerate(by_rank):
        assert all(rank in (each.source, each.target) for each in transfers)
    for source, target in product(range(len(by_rank)), repeat=2):
        lists = [
            [each for each in by_rank[rank] if (each.source, each.target) == (source, target)]
            for rank in (source, target)
        ]
        assert lists[0] == lists[1]


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        (rows_and_those_of_a_peer, 4, rows),
        (rows_and_those_of_a_peer, 4, grid),
        (grid, 4, rows_and_those_of_a_peer),
        (replicas, 4, rows),
        (whole_in_turns, 4, whole),
        (whole_in_turns, 3, replicas),
        (whole, 3, rows),
    ],
)
def test_every_rank_takes_each_number_that_it_needs_once(before: Sharding, ranks: int, after: Sharding) -> None:
    """Six ranks need the state; the last ones hold nothing of it."""
    kept = [pieces(before, rank, ranks) if rank < ranks else [] for rank in range(6)]
    needed = [pieces(after, rank, 6) for rank in range(6)]
    by_rank = [plan_transfers(rank, placed(kept), placed(needed), NAMES) for rank in range(6)]
    agreed(by_rank)
    for rank in range(6):
        taken = {piece: torch.zeros(ROWS, COLUMNS) for piece in needed[rank]}
        for each in by_rank[rank]:
            if each.target == rank:
                assert each.kept in kept[each.source]
                assert each.source == rank or each.kept not in kept[rank]
                assert each.kept.name == each.needed.name
                taken[each.needed][slices_in(each.box, (0, 0))] += 1
        for piece, table in taken.items():
            expected = torch.zeros(ROWS, COLUMNS)
            expected[slices_in(piece.box, (0, 0))] = 1
            assert torch.equal(table, expected)


def test_what_only_those_keep_that_leave_is_divided_among_the_others() -> None:
    kept = [pieces(rows_and_those_of_a_peer, rank, 6) for rank in range(6)]
    by_rank = [plan_handover(2, rank, placed(kept), NAMES) for rank in range(6)]
    agreed(by_rank)
    given = [each for rank, transfers in enumerate(by_rank) for each in transfers if each.target == rank]
    mine = {*kept[0], *kept[1]}
    assert Counter(each.kept for each in given) == Counter({piece for each in kept for piece in each} - mine)
    targets = Counter(each.target for each in given)
    assert set(targets) == {0, 1}
    assert abs(targets[0] - targets[1]) <= len(NAMES)


@pytest.mark.parametrize("sharding", [rows_and_those_of_a_peer, replicas])
def test_what_is_told_and_known_of_a_state_does_not_grow_with_the_number_of_tensors(sharding: Sharding) -> None:
    def sizes(tensors: int) -> tuple[int, int]:
        names = [f"model/{number:04}" for number in range(tensors)]
        told = [
            build_inventory(pieces(sharding, rank, 8, names), dict.fromkeys(names, torch.float32)) for rank in range(8)
        ]
        known = sum(len(ranks) for placement in build_placements(told) for ranks in placement.ranks.values())
        return len(pickle.dumps(told[0])), known

    (told, known), (told_of_more, known_of_more) = sizes(10), sizes(1000)
    assert told_of_more < 2 * told
    assert known_of_more == known


def test_ranks_that_hold_the_same_keep_as_many_bytes() -> None:
    shapes = {name: ((0, size),) for name, size in zip("abcdefgh", (4000, 2000) * 4, strict=True)}
    dtypes = dict.fromkeys(shapes, torch.float32)
    held = [Held(build_inventory([Piece(*each) for each in shapes.items()], dtypes), Place("one")) for _ in range(4)]
    layout = PieceLayout(held, dtypes)
    assert [sum(map(layout.count_bytes, layout.list_shared(rank))) for rank in range(4)] == [2 * 4 * 6000] * 4
    keepers = Counter(piece for rank in range(4) for piece in layout.list_shared(rank))
    assert set(keepers.values()) == {2}


def test_a_generation_counts_that_is_older_but_whole() -> None:
    def offer(step: int, ranks: Sequence[int]) -> _Offer:
        parts = [piece for rank in ranks for piece in pieces(rows, rank, 4)]
        return _Offer(step, 1, len(NAMES) * ROWS * COLUMNS, build_inventory(parts, DTYPES))

    (step, _), keepers = _newest_complete([[offer(7, [0]), offer(6, [0, 1])], [], [offer(7, [3]), offer(6, [2, 3])]])
    assert step == 6
    assert {box: ranks for each in keepers for box, ranks in each.ranks.items()} == {
        rows("", rank, 4)[0]: [0 if rank < 2 else 2] for rank in range(4)
    }
    with pytest.raises(CheckpointError, match=r"90 of 330 elements of the state after step 7 are lost"):
        _newest_complete([[offer(7, [0, 1])], [offer(7, [3])]])


def test_states_of_other_tensors_are_not_mixed() -> None:
    told = [build_inventory([], dtypes) for dtypes in (DTYPES, {**DTYPES, "model/0": torch.float16})]
    with pytest.raises(CheckpointError, match="tensor names or dtypes differ"):
        build_placements(told)
