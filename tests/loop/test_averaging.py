"""The weight average matches torch's, is the same at every world size, and continues after a resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from worldsize.api.custom_loop import evaluate
from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.load import find_newest, load_checkpoint, read_tensors
from worldsize.checkpoint.save import Saver
from worldsize.collectives.gather_full import gather_full
from worldsize.core import (
    EvaluationBatch,
    EvaluationBatches,
    MicroBatch,
    Replica,
    RunContext,
    StateDict,
    StepResult,
    Strategy,
    World,
)
from worldsize.core.sections import WeightAverage
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.averaging import AveragedReplica, evaluate_all
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import AveragedChain, Chain
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

ALONE = World.create_single(torch.device("cpu"))
EMA = WeightAverage(0.7)
RANKS = 4  # logical ones
Averages = tuple[Mapping[str, Tensor], Mapping[str, float]]


def trained(
    world: World,
    strategy: Strategy,
    steps: int,
    *,
    folder: Path | None = None,
) -> Averages:
    """Train up to ``steps``, from the newest checkpoint in ``folder``, and save a new one.

    Returns the average in full on rank 0, and the metrics of weights and average.
    """
    recipe = Chain()
    replica = AveragedReplica(strategy.replica(recipe, RunContext(world)), EMA)
    checkpoint = find_newest(folder, world) if folder else None
    if checkpoint:
        replica.load(load_checkpoint(checkpoint, replica.state()))
    first = checkpoint.step if checkpoint else 0
    part = World(**{**vars(world), "rank": strategy.data_rank(world), "size": parts_of(strategy, world)})
    order = Order(3, 24, RANKS, assign_logical_ranks(part.rank, part.size, RANKS))
    batches = micro_batches(recipe.data("train"), order, world.device, first=first)
    for _ in range(first, steps):
        replica.step(next(batches))
        metrics = evaluate_all(replica, lambda: evaluate(replica, recipe.data("test"), part, batch_size=5))
    if folder:
        saver = Saver(folder, world, world.groups.get(f"checkpoint/{world.role}"), keep=Retention(last=9))
        saver.save(replica.state(), step=steps, facts={"metrics": {}})
        saver.finish()
        saver.close()
    weights = gather_full(replica.state()["ema"]["weights"], world)
    return {name: tensor.clone() for name, tensor in weights.items()}, metrics


def parts_of(strategy: Strategy, world: World) -> int:
    return strategy.create_layout(world.size)["data"] if isinstance(strategy, Mesh) else world.size


@pytest.fixture(scope="module")
def alone() -> Averages:
    averages: Averages = run_in_worlds(lambda world: trained(world, Single(reduce="ordered"), 7), 1)[0]
    return averages


class Normalised(Chain):
    """A chain with a buffer that changes in training, and a parameter that does not."""

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[-1].bias.requires_grad_(False)
        return model.insert(1, nn.BatchNorm1d(16))


@pytest.mark.parametrize("recipe", [Chain(), Normalised(), AveragedChain()], ids=lambda each: type(each).__name__)
def test_the_average_has_the_bits_of_torch_and_is_evaluated_with_the_buffers_of_the_model(recipe: Chain) -> None:
    inner = Single().replica(recipe, RunContext(ALONE))
    replica, model = AveragedReplica(inner, EMA), getattr(inner, "model")  # noqa: B009 - of any replica
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA.decay))  # type: ignore[no-untyped-call]
    batches = micro_batches(recipe.data("train"), Order(3, 24, 1, (0,)), ALONE.device)
    for _ in range(7):
        replica.step(next(batches))
        theirs.update_parameters(model)
    expected = theirs.module.state_dict()
    raw = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with replica.use_average():
        held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    for name, tensor in held.items():
        assert torch.equal(tensor, raw[name] if name in frozen else expected[name]), name
    assert not torch.equal(held["0.weight"], raw["0.weight"])
    assert all(torch.equal(tensor, raw[name]) for name, tensor in model.state_dict().items()), "it trains on unchanged"


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (DDP(reduce="ordered"), 4),
        (ZeRO(reduce="ordered"), 2),
        (FSDP(reduce="ordered"), 1),
        (FSDP(reduce="ordered", reshard_after_forward=False), 2),
        (FSDP(reduce="ordered", shard=2), 4),
    ],
    ids=str,
)
def test_the_average_and_its_metrics_have_the_same_bits_at_every_world_size(
    strategy: Strategy, size: int, alone: Averages
) -> None:
    weights, metrics = run_in_worlds(lambda world: trained(world, strategy, 7), size)[0]
    assert metrics == alone[1]
    assert metrics["ema/error"] != metrics["error"]
    assert weights.keys() == alone[0].keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, alone[0][name])] == []


@pytest.mark.parametrize("strategy", [Mesh(tensor=2), Mesh(pipeline=2, data=1)], ids=str)
def test_a_mesh_averages_what_each_rank_holds(strategy: Mesh, alone: Averages) -> None:
    size = 4 if strategy.tensor > 1 else 2
    (weights, metrics), *others = run_in_worlds(lambda world: trained(world, strategy, 7), size)
    assert metrics == pytest.approx(alone[1], rel=1e-5)
    assert all(other == metrics for _, other in others)
    for name, tensor in alone[0].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_average_goes_on_under_other_strategies_at_other_sizes(tmp_path: Path, alone: Averages) -> None:
    """Save after 2 and 5 steps, and continue elsewhere; the result matches an undisturbed run."""
    ways: list[tuple[Strategy, int, int]] = [(FSDP(reduce="ordered"), 4, 2), (DDP(reduce="ordered"), 2, 5)]
    for strategy, size, steps in ways:
        run_in_worlds(lambda world: trained(world, strategy, steps, folder=tmp_path), size)  # noqa: B023
    weights, metrics = run_in_worlds(lambda world: trained(world, ZeRO(reduce="ordered"), 7, folder=tmp_path), 2)[0]
    assert metrics == alone[1]
    assert all(torch.equal(tensor, alone[0][name]) for name, tensor in weights.items())
    last = find_newest(tmp_path, ALONE)
    assert last is not None
    saved = read_tensors(last, "ema/weights")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in saved.items())


def test_an_average_that_is_not_taken_over_begins_with_the_weights_that_are(tmp_path: Path) -> None:
    trained(ALONE, Single(), 3, folder=tmp_path)
    checkpoint = find_newest(tmp_path, ALONE)
    assert checkpoint is not None
    replica = AveragedReplica(Single().replica(Chain(), RunContext(ALONE)), EMA)
    replica.load(load_checkpoint(checkpoint, replica.state(), ignore=["ema"]))
    state = replica.state()
    assert state["ema"]["updates"] == 0
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in state["ema"]["weights"].items())


@final
class Counted(Replica):
    """A replica whose weight is the number of its step; some of the steps are skipped."""

    def __init__(self, skips: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> None:
        self.weight, self._skips, self._step = nn.Parameter(torch.zeros(1, dtype=dtype)), skips, 0

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self._step += 1
        if self._step not in self._skips:
            self.weight.data.fill_(self._step)
        return StepResult([], 0.1, skipped=self._step in self._skips)

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        return {"weight": float(self.weight.detach())}

    def trained_weights(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight, "tied": self.weight}

    def state(self) -> StateDict:
        return {"model": {"weight": self.weight}}

    def load(self, state: StateDict) -> None: ...


def averages(average: WeightAverage, steps: int, **options: Any) -> list[float]:
    replica = AveragedReplica(Counted(**options), average)
    values = []
    for _ in range(steps):
        replica.step([])
        with replica.use_average():
            values.append(replica.evaluate(EvaluationBatches(lambda: iter(())))["weight"])
    return values


def test_skipped_steps_and_those_between_two_averagings_leave_the_average() -> None:
    assert averages(WeightAverage(0.5), 4, skips=[2, 3]) == [1, 1, 1, 2.5]
    assert averages(WeightAverage(0.5, every=2), 6, skips=[4]) == [1, 2, 2, 2, 3.5, 3.5]


def test_an_evaluation_that_is_cut_off_leaves_the_weights_that_train() -> None:
    inner = Counted()
    replica = AveragedReplica(inner, WeightAverage(0.5))
    for _ in range(2):
        replica.step([])
    seen = []

    def evaluation() -> None:
        with replica.use_average():
            seen.append(inner.weight.item())
            raise ConnectionError("a peer is lost")

    with pytest.raises(ConnectionError):
        evaluation()
    assert seen == [1.5]
    assert inner.weight.item() == 2


def test_a_warm_average_forgets_the_first_weights_sooner() -> None:
    cold, warm = averages(WeightAverage(0.999), 3), averages(WeightAverage(0.999, warmup=True), 3)
    second = 1 + (1 - 2 / 11) * (2 - 1)
    assert warm == pytest.approx([1, second, second + (1 - 3 / 12) * (3 - second)])
    assert cold[-1] < warm[-1]


def test_the_average_of_bfloat16_weights_is_in_float32() -> None:
    """A decay of 0.999 would not change an 8-bit number at all."""
    replica = AveragedReplica(Counted(dtype=torch.bfloat16), WeightAverage(0.999))
    for _ in range(2):
        replica.step([])
    average = replica.state()["ema"]["weights"]["weight"]
    assert average.dtype == torch.float32
    assert float(average) == pytest.approx(1.001, abs=1e-6)
    assert replica.state()["ema"]["weights"]["tied"] is average


@pytest.mark.parametrize("options", [("strategy=parameter_server",), ("strategy=local_sgd",)], ids=str)
def test_a_strategy_that_cannot_average_refuses_before_the_start(train: Any, options: tuple[str, ...]) -> None:
    run = train(*options, "ema.decay=0.9", "cluster.processes=2")
    assert run.code == 2
    assert run.folder is None
    assert "ema.decay=null" in run.error
