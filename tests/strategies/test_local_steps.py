"""Optimizers on local shards match plain PyTorch with whole tensors, and save the same state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.utils._pytree import tree_leaves, tree_map

from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import ONE_UPDATE, World
from worldsize.optimizers.schedule_free import adamw_schedule_free
from worldsize.strategies.sharded_steps import step_apart, step_locally
from worldsize.strategies.step_hooks import StrategyHook
from worldsize.strategies.train_state import OptimizerPart, TrainState
from worldsize.testing.worlds import run_in_worlds

SIZES = [(4, 3), (5,), (1, 2)]  # over three ranks; some have fewer rows or none
MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adadelta": lambda model: Adadelta(model.parameters(), lr=0.1, weight_decay=0.1),
    "Adam": lambda model: Adam(model.parameters(), lr=torch.tensor(0.1), weight_decay=0.1, amsgrad=True),
    "Adamax": lambda model: Adamax(model.parameters(), lr=0.1, weight_decay=0.1),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
    "AdamW, foreach": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.1, foreach=True),
    "ASGD": lambda model: ASGD(model.parameters(), lr=0.1, weight_decay=0.1),
    "NAdam": lambda model: NAdam(model.parameters(), lr=0.1, weight_decay=0.1),
    "RAdam": lambda model: RAdam(model.parameters(), lr=0.1, weight_decay=0.1),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda model: Rprop(model.parameters(), lr=0.1),
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, weight_decay=0.1),
    "SGD, momentum": lambda model: SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=True),
}


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator) for size in SIZES]


def module(tensors: list[Tensor]) -> nn.Module:
    return nn.ParameterDict({f"p{place}": nn.Parameter(tensor) for place, tensor in enumerate(tensors)})


def sharded(tensors: list[Tensor], world: World) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    return [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in tensors]


def take_steps(
    own: nn.Module, optimizer: Optimizer, steps: range, form: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    for step in steps:
        for parameter, gradient in zip(own.parameters(), form(values(step)), strict=True):
            parameter.grad = gradient
        optimizer.step()


def whole(tree: object) -> object:
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def same(one: object, other: object) -> bool:
    def equal(first: object, second: object) -> bool:
        return (
            torch.equal(first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else first == second
        )

    return all(tree_leaves(tree_map(equal, one, other)))


def test_updates_of_shards_have_the_bits_and_the_state_of_plain_updates() -> None:
    def trained(world: World) -> list[str]:
        return [name for name, make in MAKERS.items() if not is_equal(make, world)]

    def is_equal(make: Callable[[nn.Module], Optimizer], world: World) -> bool:
        """Train, save, load into a second optimizer, and continue; compare with whole tensors in plain PyTorch."""
        plain = module(values(0))
        reference = make(plain)
        expected = TrainState(plain, {ONE_UPDATE: OptimizerPart(plain, reference)})
        take_steps(plain, reference, range(1, 3), lambda tensors: tensors)
        own = module(sharded(values(0), world))
        first = TrainState(own, {ONE_UPDATE: OptimizerPart(own, make(own))})
        step_locally(first.optimizer)
        first.state()  # the state of an optimizer before its first step; this leaves no trace
        take_steps(own, first.optimizer, range(1, 3), lambda tensors: sharded(tensors, world))
        equal = same(whole(first.state()), expected.state())
        again = module(sharded(values(9), world))
        then = TrainState(again, {ONE_UPDATE: OptimizerPart(again, make(again))})
        step_locally(then.optimizer)
        then.load(first.state())
        take_steps(plain, reference, range(3, 5), lambda tensors: tensors)
        take_steps(again, then.optimizer, range(3, 5), lambda tensors: sharded(tensors, world))
        return equal and same(whole(dict(again.named_parameters())), dict(plain.named_parameters()))

    assert run_in_worlds(trained, 3) == [[], [], []]


def test_gradients_that_are_sums_on_each_rank_are_added_up_first() -> None:
    def stepped(world: World) -> Tensor:
        mesh = init_device_mesh("cpu", (world.size,))
        own = module([DTensor.from_local(torch.zeros(3), mesh, [Replicate()], run_check=False)])
        (parameter,) = own.parameters()
        optimizer = SGD(own.parameters(), lr=1.0)
        step_locally(optimizer)
        parameter.grad = DTensor.from_local(torch.full((3,), 1.0 + world.rank), mesh, [Partial()], run_check=False)
        optimizer.step()
        full: Tensor = whole(parameter.detach())  # type: ignore[assignment]
        return full

    assert [each.tolist() for each in run_in_worlds(stepped, 2)] == [[-3.0] * 3] * 2


def test_shards_that_stay_on_the_host_of_a_mesh_of_gpus_are_updated_and_saved_there() -> None:
    """Shards are there with strategy.cpu_offload=true. The mesh is only described, and not used."""
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size([4, 3]), (3, 1), torch.float32)
    form = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    own = module([DTensor(torch.ones(2, 3), form, requires_grad=False)])
    (parameter,) = own.parameters()
    optimizer = AdamW(own.parameters(), lr=0.1)
    step_locally(optimizer)
    part = OptimizerPart(own, optimizer)
    for _ in range(2):
        saved = part.state()["state"]["p0"]
        assert {get_local_shard(value).device.type for value in saved.values()} == {"cpu"}
        parameter.grad = DTensor(torch.ones(2, 3), form, requires_grad=False)
        optimizer.step()
    plain = module([torch.ones(2, 3)])
    take_steps(plain, AdamW(plain.parameters(), lr=0.1), range(2), lambda _: [torch.ones(2, 3)])
    assert torch.equal(get_local_shard(parameter.detach()), next(plain.parameters()).detach())


class Derived(SGD):
    """An optimizer whose own step may read anything."""


def test_only_optimizers_that_are_known_to_be_elementwise_see_shards() -> None:
    def seen(world: World) -> list[str]:
        adamw, sgd, derived, adagrad = (module(sharded(values(0), world)) for _ in range(4))
        hooked = SGD(sgd.parameters(), lr=0.1)
        hooked.register_step_post_hook(lambda *_: None)  # for example, to average weights
        optimizers = AdamW(adamw.parameters()), hooked, Derived(derived.parameters()), Adagrad(adagrad.parameters())
        return [kind_of_parameters(optimizer) for optimizer in optimizers]

    def kind_of_parameters(optimizer: Optimizer) -> str:
        """Return the type of the parameters while the optimizer steps; they are the same before and after."""
        step_locally(optimizer)
        (group,), kinds = optimizer.param_groups, set[str]()
        before = list(group["params"])
        hook = StrategyHook(lambda: kinds.update(type(parameter.data).__name__ for parameter in group["params"]))
        optimizer.register_step_pre_hook(hook)
        optimizer.step()
        assert all(one is other for one, other in zip(group["params"], before, strict=True))
        (kind,) = kinds
        return kind

    assert run_in_worlds(seen, 2) == [["Tensor", "DTensor", "DTensor", "DTensor"]] * 2


def test_groups_of_shards_and_whole_scalars_keep_their_counters() -> None:
    """Schedule-free AdamW counts steps and sums weights in the options of a group."""

    def make(own: nn.Module) -> Optimizer:
        return adamw_schedule_free(own.parameters(), lr=0.1, weight_decay=0.1, warmup_steps=2)

    def trained(world: World) -> tuple[bool, list[tuple[int, int]]]:
        scalar, steps = torch.tensor(0.5), range(1, 5)
        plain = module([*values(0), scalar.clone()])
        reference = make(plain)
        take_steps(plain, reference, steps, lambda tensors: [*tensors, scalar.clone()])
        own = module([*sharded(values(0), world), scalar.clone()])
        optimizer, seen = make(own), list[tuple[int, int]]()
        optimizer.register_step_post_hook(
            lambda *_: seen.append((len(optimizer.param_groups), optimizer.param_groups[0]["k"]))
        )
        step_apart(optimizer)
        take_steps(own, optimizer, steps, lambda tensors: [*sharded(tensors, world), scalar.clone()])
        return same(whole(dict(own.named_parameters())), dict(plain.named_parameters())), seen

    assert run_in_worlds(trained, 2) == [(True, [(1, 1), (1, 2), (1, 3), (1, 4)])] * 2
