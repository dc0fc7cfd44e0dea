"""Sharded tensors are gathered on the first rank one at a time, on request."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from worldsize.checkpoint.safetensors import build_box
from worldsize.collectives.gather_full import gather_full, use_full
from worldsize.collectives.gather_full import gather_full_tensor as sharded_whole
from worldsize.core import World
from worldsize.healing.pieces import collect_pieces, slice_box
from worldsize.record.determinism import tensor_digests
from worldsize.testing.worlds import run_in_worlds


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(5, 3, generator=generator) for name in ("columns", "last", "own", "plain", "rows")}


def spread(world: World) -> Mapping[str, Tensor]:
    """Give this rank its part of each tensor: shards of two, and two that only one rank holds."""
    mesh, tensors = init_device_mesh("cpu", (world.size,)), whole()
    sharded = {"rows": [Shard(0)], "columns": [Shard(1)]}
    parts = {name: distribute_tensor(tensors[name], mesh, placements) for name, placements in sharded.items()}
    held_by = {"own": 0, "last": world.size - 1}
    alone = {name: tensors[name] if world.rank == rank else tensors[name].to("meta") for name, rank in held_by.items()}
    return {**alone, "plain": tensors["plain"], **parts}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_rank_sees_what_one_process_would_hold(size: int) -> None:
    def body(world: World) -> Any:
        parts = whole() if world.group is None else spread(world)
        return use_full(parts, world, tensor_digests), list(gather_full(parts, world))

    first, *others = run_in_worlds(body, size)
    assert first == (tensor_digests(whole()), sorted(whole()))
    assert others == [(None, [])] * (size - 1)


def test_shards_of_layers_that_ranks_share_become_the_whole_tensor_and_lie_where_they_say() -> None:
    """Two tensor-parallel ranks share each layer, three data-parallel ranks shard it; ten rows do not divide by six."""

    def body(world: World) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 5))
        expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
        fully_shard(model, mesh=mesh["data"])
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(sharded_whole(parameter.detach()), expected[name])  # type: ignore[arg-type]
            piece, own = collect_pieces({name: parameter}).get(name), parameter.to_local()
            place = (
                slice_box(expected[name], build_box([0] * parameter.ndim, parameter.shape), piece.box)
                if piece
                else own[:0]
            )
            assert torch.equal(own, place)

    run_in_worlds(body, 6)


def test_no_tensor_is_kept_while_the_next_one_is_gathered() -> None:
    def body(world: World) -> Any:
        def use(full: Mapping[str, Tensor]) -> list[bool]:
            alive: list[weakref.ref[Tensor]] = []
            seen = []
            for name in ("rows", "columns", "last"):
                tensor = full[name]
                seen.append(any(each() is not None for each in alive))
                alive.append(weakref.ref(tensor))
                del tensor
            return seen

        return use_full(spread(world), world, use)

    assert run_in_worlds(body, 2)[0] == [False, False, False]


def test_a_rank_that_asks_for_few_gathers_few_and_a_failure_lets_the_others_go_on() -> None:
    def body(world: World) -> Any:
        parts, gathered = spread(world), list[torch.Size]()
        original = dist.all_gather_into_tensor

        def counted(full: Tensor, *arguments: Any, **options: Any) -> Any:
            gathered.append(full.shape)
            return original(full, *arguments, **options)

        dist.all_gather_into_tensor = counted  # type: ignore[assignment]

        def use(full: Mapping[str, Tensor]) -> None:
            assert torch.equal(full["rows"], whole()["rows"])
            raise ValueError("no more")

        try:
            use_full(parts, world, use)
        except ValueError as error:
            return str(error), len(gathered)
        return None, len(gathered)

    assert run_in_worlds(body, 2) == [("no more", 1), (None, 1)]
