"""Local SGD, DiLoCo and streaming DiLoCo match plain PyTorch that trains the workers in turn in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from plugins.diloco.strategy import DiLoCo
from plugins.local_sgd.strategy import LocalSGD
from plugins.streaming_diloco.strategy import StreamingDiLoCo
from worldsize.collectives.per_rank import local_row
from worldsize.core import EvaluationBatch, EvaluationBatches, Recipe, RunContext, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.strategies.ddp import DDP
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

STEPS, EVERY, BATCH, SAMPLES = 30, 7, 24, 101  # batches straddle epochs, and the last round is incomplete


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, like the compared processes; two would also spin on a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Regression(Recipe):
    """A regression with four blocks, and with a BatchNorm that has buffers."""

    sgd: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Tanh()) for _ in range(4))
        return nn.Sequential(nn.Linear(7, 12), *blocks, nn.BatchNorm1d(12), nn.Linear(12, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.sgd:
            return torch.optim.SGD(model.parameters(), lr=0.05)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def data(self, split: str) -> TensorDataset:
        inputs = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs[:, :3].sin() + inputs[:, 3:6])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"error": ((model(batch[0]) - batch[1]).abs().double().sum(), torch.tensor(batch[1].numel()))}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return list(model)[1:5]


# ---------------------------------------------------------------- the reference

Weights = dict[str, Tensor]
Rule = Callable[[int, list[Weights], list[Optimizer]], None]  # (step, weights of each worker, their optimizers)


def reference(workers: int, rule: Rule, recipe: Regression, steps: int = STEPS) -> Weights:
    """Train the workers in turn in each step, let ``rule`` synchronise them, and return their mean."""
    models = [recipe.model() for _ in range(workers)]
    optimizers = [recipe.optimizer(model) for model in models]
    inputs, targets = recipe.data("train").tensors
    for step in range(1, steps + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = Order(seed=3, batch_size=BATCH, logical_ranks=workers, mine=()).compute_indices(
                step, worker, SAMPLES
            )
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        rule(step, [weights_of(model) for model in models], optimizers)
    return {name: mean([weights_of(model)[name] for model in models]) for name in weights_of(models[0])}


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def mean(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


def averaging(every: int, optimizer_state: str = "local") -> Rule:
    def rule(step: int, workers: list[Weights], optimizers: list[Optimizer]) -> None:
        if step % every:
            return
        rows = [list(weights.values()) for weights in workers]
        if optimizer_state == "mean":
            states = [[value for kept in own.state.values() for value in kept.values()] for own in optimizers]
            rows = [[*row, *state] for row, state in zip(rows, states, strict=True)]
        for tensors in zip(*rows, strict=True):
            average = mean(tensors)
            for tensor in tensors:
                tensor.copy_(average)
        if optimizer_state == "zero":
            for optimizer in optimizers:
                optimizer.state.clear()

    return rule


class Options(NamedTuple):
    lr: float
    momentum: float
    offsets: Mapping[str, int]  # by prefix of a parameter's name
    delay: int = 0
    mix: float = 0.0
    rounded: Callable[[Tensor], Tensor] = torch.clone  # rounds a row like the wire format
    twice: bool = False


def outer_steps(every: int, options: Options) -> Rule:
    """Return algorithm 1 of arXiv 2311.08105, or with offsets and a delay algorithm 2 of arXiv 2501.18512."""
    first = weights_of(Regression().model())
    agreed = {name: tensor.clone() for name, tensor in first.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    sent: dict[tuple[int, int], Weights] = {}  # keys: offset, and the step that applies it
    is_buffer = {name: "running" in name for name in first}

    def names(offset: int, buffers: bool) -> list[str]:
        return [name for name in first if is_buffer[name] == buffers and offset_of(name) == offset]

    def offset_of(name: str) -> int:
        return next(offset for begin, offset in options.offsets.items() if name.startswith(begin))

    def row(weights: Weights, chosen: list[str]) -> Tensor:
        return torch.cat([(agreed[name] - weights[name]).flatten() for name in chosen])

    def send(workers: list[Weights], offset: int) -> Weights:
        gradients: Weights = {}
        for buffers in (False, True):
            if chosen := names(offset, buffers):
                rounded = torch.clone if buffers else options.rounded
                total = mean([rounded(row(weights, chosen)) for weights in workers])
                total = rounded(total) if options.twice else total
                parts = torch.split(total, [first[name].numel() for name in chosen])
                gradients |= {name: part.view(first[name].shape) for name, part in zip(chosen, parts, strict=True)}
        return gradients

    def step_of(name: str, gradient: Tensor) -> None:
        lr, momentum = (1.0, 0.0) if is_buffer[name] else (options.lr, options.momentum)
        velocity[name] = momentum * velocity[name] + gradient
        agreed[name] = agreed[name] - lr * (gradient + momentum * velocity[name])

    def rule(step: int, workers: list[Weights], optimizers: list[Optimizer]) -> None:
        for offset in set(options.offsets.values()):
            if (step - offset) % every == 0:
                sent[offset, step + options.delay] = send(workers, offset)
            for name, gradient in sent.pop((offset, step), {}).items():
                step_of(name, gradient)
                for weights in workers:
                    weights[name].copy_(options.mix * weights[name] + (1 - options.mix) * agreed[name])

    return rule


def nearest(row: Tensor) -> Tensor:
    """Round each number to the nearest of ± 0, 2^-6 ... 1 times its block's scale; ties go to the even code."""
    codes = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))])
    known = torch.cat([codes[::2], -codes[::2], codes[1::2], -codes[1::2]])
    powers = 2.0 ** torch.arange(126.0, -127.0, -1)
    rounded = row.clone()
    for block in torch.split(rounded, 32):
        scale = powers[(powers - block.abs().max()).abs().argmin()]
        block.copy_(known[(block[:, None] / scale - known).abs().argmin(1)] * scale)
    return rounded


# ---------------------------------------------------------------- ours


def trained(strategy: Strategy, world: World, recipe: Regression, steps: int = STEPS) -> dict[str, Any]:
    order = Order(seed=3, batch_size=BATCH, logical_ranks=world.size, mine=(world.rank,))
    batches = micro_batches(recipe.data("train"), order, world.device)
    replica = strategy.replica(recipe, RunContext(world))
    for _ in range(steps):
        replica.step(next(batches))
    state = replica.state()
    mine = local_row(state.get("strategy", {}).get("workers", {}).get("model", {}))
    copied: dict[str, Any] = {name: {key: value.clone() for key, value in weights.items()} for name, weights in
                              (("mean", state["model"]), ("own", mine))}  # fmt: skip
    return {**copied, "facts": replica.facts()}


def worlds(strategy: Strategy, size: int, recipe: Regression = Regression(), steps: int = STEPS) -> list[Any]:
    return run_in_worlds(lambda world: trained(strategy, world, recipe, steps), size)


def assert_equal_weights(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            continue
        error = (actual[name] - tensor).norm() / tensor.norm()
        assert error < 1e-5, f"{name}: relative difference {error}"


EVERYTHING = {"": 0}
STRIDED = {"1.": 0, "3.": 0, "2.": 2, "4.": 2, "": 4}  # fragments: blocks 0 and 2, 1 and 3, the rest; 7 steps a round


@pytest.mark.parametrize(("size", "optimizer_state"), [(1, "local"), (2, "zero"), (3, "local"), (3, "mean")])
def test_local_sgd_agrees_with_the_reference(size: int, optimizer_state: Any) -> None:
    expected = reference(size, averaging(EVERY, optimizer_state), Regression())
    for worker in worlds(LocalSGD(inner_steps=EVERY, optimizer_state=optimizer_state), size):
        assert_equal_weights(worker["mean"], expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_diloco_agrees_with_the_reference(size: int) -> None:
    expected = reference(size, outer_steps(EVERY, Options(0.7, 0.9, EVERYTHING)), Regression())
    for worker in worlds(DiLoCo(inner_steps=EVERY), size):
        assert_equal_weights(worker["mean"], expected)


@pytest.mark.parametrize(("size", "delay", "mix"), [(1, 3, 0.0), (2, 0, 0.0), (3, 3, 0.0), (3, 5, 0.5)])
def test_streaming_diloco_agrees_with_the_reference(size: int, delay: int, mix: float) -> None:
    expected = reference(size, outer_steps(EVERY, Options(0.4, 0.9, STRIDED, delay, mix)), Regression())
    strategy = StreamingDiLoCo(inner_steps=EVERY, fragment_blocks=2, delay=delay, mix=mix, wire="fp32")
    for worker in worlds(strategy, size):
        assert_equal_weights(worker["mean"], expected)


@pytest.mark.parametrize(
    ("size", "wire", "twice"), [(2, "e3m0_scatter", True), (3, "e3m0_gather", False), (3, "e3m0_scatter", True)]
)
def test_streaming_diloco_in_four_bits_agrees_with_the_reference(size: int, wire: Any, twice: bool) -> None:
    options = Options(0.4, 0.9, STRIDED, delay=2, mix=0.5, rounded=nearest, twice=twice)
    expected = reference(size, outer_steps(EVERY, options), Regression())
    exact = reference(size, outer_steps(EVERY, options._replace(rounded=torch.clone)), Regression())
    strategy = StreamingDiLoCo(inner_steps=EVERY, fragment_blocks=2, delay=2, mix=0.5, wire=wire)
    for worker in worlds(strategy, size):
        assert_equal_weights(worker["mean"], expected)
    assert (exact["0.weight"] - expected["0.weight"]).norm() > 1e-3, "otherwise the test would show nothing"


def test_outer_steps_of_rate_one_without_momentum_average() -> None:
    averaged = worlds(LocalSGD(inner_steps=1), 3)[0]["mean"]
    assert_equal_weights(worlds(DiLoCo(inner_steps=1, outer_lr=1.0, outer_momentum=0.0), 3)[0]["mean"], averaged)


def test_averaging_after_every_step_of_plain_sgd_is_data_parallel_training() -> None:
    recipe = Regression(sgd=True)
    (averaged, *_), (expected, *_) = worlds(LocalSGD(inner_steps=1), 2, recipe), worlds(DDP(), 2, recipe)
    parameters = dict(recipe.model().named_parameters())
    assert_equal_weights(averaged["mean"], {name: expected["mean"][name] for name in parameters})


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        (LocalSGD(inner_steps=EVERY), 2 * EVERY),
        (DiLoCo(inner_steps=EVERY), 2 * EVERY),
        (StreamingDiLoCo(inner_steps=1, delay=0, mix=0.0), 5),
    ],
    ids=["local_sgd", "diloco", "streaming_diloco"],
)
def test_workers_are_equal_to_the_last_bit_after_a_round_and_not_before(strategy: Strategy, steps: int) -> None:
    first, *others = worlds(strategy, 3, steps=steps)
    for other in others:
        assert all(torch.equal(other["own"][name], tensor) for name, tensor in first["own"].items())
        assert other["facts"] == first["facts"]
    if steps > EVERY:
        first, other, _ = worlds(strategy, 3, steps=steps - 1)
        assert not torch.equal(first["own"]["0.weight"], other["own"]["0.weight"])
        assert torch.equal(first["mean"]["0.weight"], other["mean"]["0.weight"])


@dataclass(frozen=True)
class Unequal(Regression):
    """A recipe that builds different weights on every rank, against the rules."""

    def model(self) -> nn.Module:
        model = Regression.model(self)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.distributed.get_rank())
        return model


def test_workers_begin_with_the_weights_of_the_first() -> None:
    workers = worlds(DiLoCo(), 2, Unequal(), steps=0)
    for name, parameter in Regression().model().named_parameters():
        assert all(torch.equal(worker["own"][name], parameter) for worker in workers)


def test_evaluation_uses_the_mean_model_and_leaves_training_unchanged() -> None:
    recipe = Regression()
    whole = EvaluationBatch(0, tuple(tensor[:20] for tensor in recipe.data("test").tensors))
    padding = EvaluationBatch(0, whole.data, counted=False)

    def body(world: World) -> tuple[float, Weights, Weights, list[Tensor]]:
        order = Order(seed=3, batch_size=BATCH, logical_ranks=2, mine=(world.rank,))
        batches = micro_batches(recipe.data("train"), order, world.device)
        replica = DiLoCo(inner_steps=EVERY).replica(recipe, RunContext(world))
        for _ in range(3):
            replica.step(next(batches))
        before, mean_model = replica.state()["strategy"]["workers"]["model"], replica.state()["model"]
        kept = {name: tensor.clone() for name, tensor in local_row(before).items()}
        shares = [[whole if world.rank == rank else padding] for rank in range(2)]
        errors = [replica.evaluate(EvaluationBatches(lambda: iter(share)))["error"] for share in shares]  # noqa: B023
        assert errors[0] == errors[1], "it does not matter who evaluates"
        return errors[0], mean_model, kept, list(local_row(replica.state()["strategy"]["workers"]["model"]).values())

    for error, weights, kept, after in run_in_worlds(body, 2):
        model = recipe.model()
        model.load_state_dict(weights)
        with torch.no_grad():
            sums, count = recipe.evaluate(model.eval(), whole.data)["error"]
        assert error == pytest.approx(float(sums / count), rel=1e-6)
        assert all(torch.equal(tensor, now) for tensor, now in zip(kept.values(), after, strict=True))


def test_bytes_are_counted_by_the_formula() -> None:
    recipe = Regression()
    parameters = sum(parameter.numel() for parameter in recipe.model().parameters())
    buffers = 24
    (worker, _) = worlds(DiLoCo(inner_steps=EVERY), 2)
    assert worker["facts"] == {"sent_bytes": 4 * 2 * 4 * (-(-parameters // 2) + buffers // 2)}
    (worker, _) = worlds(StreamingDiLoCo(inner_steps=EVERY, fragment_blocks=4), 2, steps=EVERY)
    assert worker["facts"]["sent_bytes"] == pytest.approx(4 * parameters / 7.53 + 4 * buffers, rel=0.1)
