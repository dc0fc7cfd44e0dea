"""Buffers that a loss changes are merged by the recipe's declared rule, with any number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plugins.parameter_server.strategy import ParameterServer
from worldsize.collectives.gather_full import gather_full
from worldsize.core import BufferRule, Concatenated, ConfigError, Recipe, RunContext, Strategy, TensorStyle, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.plan.construction import check_construction
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.step_buffers import BufferMean
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.training import plain_step
from worldsize.testing.worlds import run_in_worlds

LOGICAL, BATCH, STEPS = 4, 24, 3
KEYS = 40  # rows of the queue: each step writes 24, so that it wraps around
RULES: Mapping[str, BufferRule] = {
    "*.seen": "sum",
    "*.per_sign": "sum",
    "*.average": "mean",
    "*.latest": "last",
    "*.steps": "equal",
    "*.queue": Concatenated(pointer="pointer", dim=1),
}


class Recording(nn.Module):
    """A linear layer that records its inputs in buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("per_sign", torch.zeros(2))
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("latest", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))
        self.register_buffer("queue", torch.zeros(16, KEYS))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.seen: Tensor
        self.average: Tensor

    def forward(self, hidden_bw: Tensor) -> Tensor:
        if self.training:
            self.record(hidden_bw.detach())
        normed: Tensor = self.norm(hidden_bw)
        layer: Tensor = self.layer(normed)
        return hidden_bw + layer.tanh()

    @torch.no_grad()
    def record(self, hidden_bw: Tensor) -> None:
        count, start = len(hidden_bw), int(self.get_buffer("pointer"))
        self.cache = torch.ones(1)
        self.seen += count
        self.get_buffer("per_sign").data.add_(torch.stack([(hidden_bw > 0).sum(), (hidden_bw <= 0).sum()]))
        self.average = 0.5 * self.average + 0.5 * hidden_bw.mean(0)  # a new tensor
        self.get_buffer("latest").copy_(hidden_bw[-1])
        self.get_buffer("steps").add_(1)
        places = torch.arange(start, start + count) % KEYS
        self.get_buffer("queue")[:, places] = nn.functional.normalize(hidden_bw, dim=1).T
        self.get_buffer("pointer")[0] = (start + count) % KEYS


@dataclass(frozen=True)
class Recorded(Chain):
    """A :class:`Chain` whose middle layers record their activations."""

    depth: int = 2
    rules: Mapping[str, BufferRule] = field(default_factory=lambda: RULES)

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(7, 16), Recording(), Recording(), nn.Linear(16, 3))

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        return self.rules

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Recording)]


class Counting(nn.Linear):
    """A linear layer with additional buffers."""

    def __init__(self) -> None:
        super().__init__(7, 16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(7))
        self.register_forward_pre_hook(_count_pass)


def _count_pass(layer: nn.Module, _: Any) -> None:
    if layer.training:
        layer.get_buffer("steps").add_(1)
        layer.get_buffer("average").mul_(0.5).add_(0.25)


class Divided(Chain):
    """A :class:`Chain` of two layers for tensor parallelism; the first has buffers."""

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(Counting(), nn.Tanh(), nn.Linear(16, 3))

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        return {"0.steps": "equal", "0.average": "mean"}

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        return {"0": "column", "2": "row"}


def trained(strategy: Strategy, world: World, recipe: Recipe, logical: int = LOGICAL) -> dict[str, Tensor]:
    """Train STEPS steps and return the model's whole state; it is empty on all ranks but the first."""
    replica = strategy.replica(recipe, RunContext(world, logical_ranks=logical))
    parts, part = strategy.data_parallel(_cluster(world)), strategy.data_rank(world)
    order = Order(3, BATCH, logical, assign_logical_ranks(part, parts, logical, replica.dealing))
    batches = micro_batches(recipe.data("train"), order, world.device)
    for _ in range(STEPS):
        replica.step(next(batches))
    model = gather_full(replica.state()["model"], world)
    replica.close(complete=True)
    return {name: tensor.clone() for name, tensor in model.items()}


def _cluster(world: World) -> Any:
    from worldsize.core import Cluster

    return Cluster("test", 1, world.size, "cpu", "gloo")


def plain() -> dict[str, Tensor]:
    """Train the same steps in plain PyTorch on whole batches."""
    recipe = Recorded()
    model, order = recipe.model(), Order(3, BATCH, 1, (0,))
    step = plain_step(recipe, model)
    for number, (batch,) in zip(range(STEPS), micro_batches(recipe.data("train"), order, torch.device("cpu"))):  # noqa: B905
        step(batch.data, number + 1)
    return model.state_dict()


def on_two(world: World) -> list[dict[str, Tensor]]:
    strategies = (DDP, ZeRO, FSDP, Mesh)
    ordered = [trained(strategy(reduce="ordered"), world, Recorded()) for strategy in strategies]
    flat = [trained(strategy(), world, Recorded()) for strategy in strategies]
    piped = [trained(Mesh(pipeline=2, reduce=reduce), world, Recorded()) for reduce in ("ordered", "flat")]
    return [*ordered, piped[0], *flat, piped[1]]


def test_a_step_records_what_a_whole_batch_would_have_recorded() -> None:
    expected = plain()
    alone = trained(Single(reduce="ordered"), World.create_single(torch.device("cpu")), Recorded())
    assert int(alone["1.seen"]) == STEPS * BATCH
    torch.testing.assert_close(alone, dict(expected))
    two = run_in_worlds(on_two, 2)[0]
    for result in two[:5]:
        different = [name for name in alone if not torch.equal(result[name], alone[name])]
        assert not different
    for result in two[5:]:
        torch.testing.assert_close(result, alone)
    for size in (3, 4):  # 4 logical ranks on 3 processes, as in a gang that has lost one
        strategy = DDP(reduce="ordered", on_failure="heal") if size == 3 else DDP(reduce="ordered")
        many = run_in_worlds(lambda world: trained(strategy, world, Recorded()), size)[0]  # noqa: B023
        assert not [name for name in alone if not torch.equal(many[name], alone[name])]


@pytest.mark.parametrize("name", list(RULES))
def test_a_buffer_without_a_rule_is_refused_in_the_first_step(name: str) -> None:
    rules = {other: rule for other, rule in RULES.items() if other != name}
    message = rf"the loss modifies the buffer 1\.{name[2:]}, which has no rule in Recipe\.buffers"
    recipe = Recorded(rules=rules)
    replica = Single().replica(recipe, RunContext(World.create_single(torch.device("cpu")), logical_ranks=LOGICAL))
    batches = micro_batches(recipe.data("train"), Order(3, BATCH, LOGICAL, tuple(range(LOGICAL))), torch.device("cpu"))
    before = {key: value.clone() for key, value in replica.state()["model"].items()}
    with pytest.raises(ConfigError, match=message):
        replica.step(next(batches))
    assert not [key for key, value in replica.state()["model"].items() if not torch.equal(value, before[key])]


def test_values_that_must_be_equal_and_are_not_are_refused() -> None:
    world = World.create_single(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r'1\.average is declared as "equal" .* differs between logical ranks'):
        trained(Single(), world, Recorded(rules={**RULES, "*.average": "equal"}))

    def body(each: World) -> str:
        try:
            trained(DDP(), each, Recorded(rules={**RULES, "*.average": "equal"}), logical=2)
        except ConfigError as refusal:
            return str(refusal)
        return ""

    assert all("differs between logical ranks" in text for text in run_in_worlds(body, 2))


class Growing(Recording):
    def record(self, hidden_bw: Tensor) -> None:
        self.register_buffer("latest", torch.cat([self.get_buffer("latest"), hidden_bw[-1].detach()]))


@dataclass(frozen=True)
class Grown(Recorded):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 16), Growing(), nn.Linear(16, 3))


def test_a_buffer_that_grows_is_refused_also_where_the_first_pass_does_not_count() -> None:
    """PowerSGD lets DDP build its buckets in a repeated pass."""

    def body(world: World) -> str:
        with pytest.raises(ConfigError) as refusal:
            trained(DDP(compress="powersgd"), world, Grown(), logical=2)
        return str(refusal.value)

    message = "the loss changes the buffer 1.latest from [16] torch.float32 to [32] torch.float32. Keep the shape"
    assert all(text.startswith(message) for text in run_in_worlds(body, 2))


def test_a_process_that_has_one_logical_rank_needs_no_rules() -> None:
    state = trained(Single(), World.create_single(torch.device("cpu")), Recorded(rules={}), logical=1)
    torch.testing.assert_close(state, dict(plain()))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.sen": "sum"}, r"'\*\.sen' is not a buffer of the model"),
        ({"*.cache": "sum"}, "persistent=False"),
        ({"*.seen": "mean"}, 'torch.int64, but "mean" requires a floating-point dtype'),
        ({"*.seen": "add"}, "unknown rule 'add'.*Available: equal, last, mean, sum"),
        ({"*.queue": Concatenated(pointer="average")}, "requires a pointer 'average', a one-element"),
        ({"*.queue": Concatenated(pointer="pointer", dim=2)}, "but its rule has dim=2"),
    ],
)
def test_a_rule_that_suits_no_buffer_is_refused_before_the_start(rules: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_construction(Recorded(rules=rules), DDP())


def test_servers_refuse_declared_buffers_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"this strategy does not synchronize buffers: .* Use strategy=ddp"):
        check_construction(Recorded(), ParameterServer())


def test_restoring_statistics_takes_as_many_kernels_for_many_layers_as_for_few() -> None:
    def added(layers: int) -> tuple[list[str], list[Tensor]]:
        torch.manual_seed(3)
        norms = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(layers)))
        means, batches = BufferMean(norms, None), torch.randn(2, 8, 4)
        first = [buffer.clone() for buffer in norms.buffers()]
        with means.step(2) as buffers:
            norms(batches[0])
            buffers.add(0)
            assert all(map(torch.equal, norms.buffers(), first)), "each pass starts from the same values"
            norms(batches[1])
            with Kernels() as kernels:
                buffers.add(1)
        return kernels.names, list(norms.buffers())

    (few, _), (many, values) = added(2), added(8)
    assert few == many
    reference = [nn.BatchNorm1d(4) for _ in range(2)]
    torch.manual_seed(3)
    for norm, batch in zip(reference, torch.randn(2, 8, 4), strict=True):
        norm(batch)
    mean = sum(norm.get_buffer("running_mean") for norm in reference) / 2
    torch.testing.assert_close(values[0], mean)
    assert int(values[2]) == 1


class Kernels(TorchDispatchMode):
    """Records the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_buffers_of_a_layer_that_ranks_divide_become_those_of_one_process() -> None:
    expected = trained(Single(), World.create_single(torch.device("cpu")), Divided())
    divided, *_ = run_in_worlds(lambda world: trained(Mesh(tensor=2), world, Divided()), 2)
    assert expected["0.steps"] == STEPS
    for name in ("0.steps", "0.average"):
        assert torch.equal(divided[name], expected[name])
