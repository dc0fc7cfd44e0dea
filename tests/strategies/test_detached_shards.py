"""DTensors are detached like torch does it, but without querying torch for the result's sharding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from worldsize.core import World
from worldsize.strategies.unit_sharding import detach_shards
from worldsize.testing.worlds import run_in_worlds

PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],  # with 5 rows, so that the last rank has none
    [Replicate(), Shard(1)],
    [Partial(), Replicate()],
]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    yield
    handlers.clear()
    handlers.update(before)


def described(tensor: Any) -> tuple[Any, ...]:
    form = (tensor.placements, tensor.device_mesh, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    return (*form, tensor.is_leaf, tensor.grad_fn, tensor.to_local().tolist())


def detached(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    numbers = torch.arange(15.0).reshape(5, 3)
    tensors: list[Any] = [distribute_tensor(numbers, mesh, each) for each in PLACEMENTS if Partial() not in each]
    tensors.append(DTensor.from_local(numbers, mesh, PLACEMENTS[-1]))
    tensors.append(distribute_tensor(numbers, mesh, PLACEMENTS[1]).t())  # with its numbers out of order
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_leaf)
        known = described(tensor.detach())
        detach_shards()
        own = tensor.detach()
        parameter = nn.Parameter(tensor.detach())
        DTensor._op_dispatcher._custom_op_handlers.pop(torch.ops.aten.detach.default)
        assert described(own) == known
        assert isinstance(parameter, nn.Parameter)
        assert described(parameter)[:5] == known[:5]
        assert own.to_local().data_ptr() == tensor.to_local().data_ptr()
        version = tensor._version
        own.zero_()
        assert tensor._version > version  # a backward pass detects that a saved tensor has changed


def test_a_tensor_is_detached_as_torch_does() -> None:
    run_in_worlds(detached, 4)


def propagations(world: World) -> int:
    asked = 0
    propagator: Any = ShardingPropagator
    propagate = propagator.propagate_op_sharding_non_cached

    def counted(self: ShardingPropagator, schema: Any) -> Any:
        nonlocal asked
        asked += 1
        return propagate(self, schema)

    propagator.propagate_op_sharding_non_cached = counted
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    detach_shards()
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    assert all(isinstance(each, DTensor) for each in model.state_dict().values())
    return asked


def test_a_model_is_sharded_without_asking_how_detached_shards_are_sharded() -> None:
    assert run_in_worlds(propagations, 2) == [0, 0]
