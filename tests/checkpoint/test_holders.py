"""Each tensor of a checkpoint is written once, by whichever of its holders has the least to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worldsize.checkpoint.holders import partly_held, select_tensors_to_write
from worldsize.core import World
from worldsize.errors import CheckpointError
from worldsize.testing.worlds import run_in_worlds


@given(st.data())
def test_the_least_loaded_holder_writes_each_tensor(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=8))
    tensors = {f"t{place}": torch.zeros(length) for place, length in enumerate(lengths)}
    subsets = st.sets(st.integers(0, ranks - 1), min_size=1)
    held = {name: data.draw(subsets) for name in tensors}
    partly = {
        name: torch.tensor([rank in own for rank in range(ranks)]) for name, own in held.items() if len(own) < ranks
    }
    expected: dict[str, int] = {}
    loads = [0] * ranks
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        expected[name] = min(held[name], key=lambda rank: (loads[rank], rank))
        loads[expected[name]] += tensors[name].nbytes
    worlds = [World("worker", rank, ranks, rank, ranks, rank, 0, torch.device("cpu")) for rank in range(ranks)]
    written = {name: world.rank for world in worlds for name, _ in select_tensors_to_write(tensors, partly, world)}
    assert written == expected


def parts(world: World) -> dict[str, Tensor]:
    """Give each rank one private tensor, one that all share, and one that only the last rank lacks."""
    lacks = {f"own{rank}": rank != world.rank for rank in range(world.size)}
    lacks |= {"all": False, "most": world.rank == world.size - 1}
    return {name: torch.zeros(2, device="meta" if is_lacking else "cpu") for name, is_lacking in lacks.items()}


def test_ranks_learn_what_is_held_by_some_of_them_only() -> None:
    def body(world: World) -> Any:
        return {name: held.tolist() for name, held in partly_held(parts(world), world).items()}

    expected = {f"own{rank}": [other == rank for other in range(3)] for rank in range(3)}
    assert run_in_worlds(body, 3) == [{**expected, "most": [True, True, False]}] * 3


def test_other_names_are_refused_by_every_rank() -> None:
    def body(world: World) -> None:
        tensors = {**parts(world), f"of{world.rank}": torch.zeros(1)}
        with pytest.raises(CheckpointError, match="tensor names, dtypes or shapes differ"):
            partly_held(tensors, world)

    run_in_worlds(body, 2)
