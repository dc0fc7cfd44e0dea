"""A recipe with several updates per step matches the original program, at every world size."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from plugins.parameter_server.hybrid import HybridParameterServer
from plugins.parameter_server.strategy import ParameterServer
from tests.strategies.dcgan import BATCH, DCGAN, GAN, SEED, original
from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.collectives.gather_full import gather_full
from worldsize.core import (
    ConfigError,
    LossOutput,
    MicroBatch,
    MultiUpdateRecipe,
    Numerics,
    RunContext,
    StepResult,
    Strategy,
    Update,
    World,
)
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.plan.construction import check_construction, check_trainable
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.multi_update import MultiUpdateReplica
from worldsize.strategies.reducers import update_reducer
from worldsize.strategies.single import Single
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain, TwoPlayers
from worldsize.testing.update_loops import SharedLoss
from worldsize.testing.worlds import run_in_worlds

ALONE = World.create_single(torch.device("cpu"))
PLAIN = Numerics()


def trained(
    strategy: Strategy, world: World, *, logical_ranks: int, steps: int = 20, numerics: Numerics = PLAIN
) -> tuple[Mapping[str, Tensor], list[StepResult]]:
    recipe = DCGAN()
    replica = strategy.replica(recipe, RunContext(world, numerics))
    order = Order(
        SEED, BATCH, logical_ranks, assign_logical_ranks(world.rank, world.size, logical_ranks, replica.dealing)
    )
    batches = micro_batches(recipe.data("train"), order, world.device)
    results = [replica.step(next(batches)) for _ in range(steps)]
    weights = gather_full(replica.state()["model"], world)
    return {name: tensor.clone() for name, tensor in weights.items()}, results


def weights_of(strategy: Strategy, processes: int, numerics: Numerics = PLAIN) -> Mapping[str, Tensor]:
    """Train with four logical ranks, and return the weights gathered on rank 0."""

    def body(world: World) -> Mapping[str, Tensor]:
        return trained(strategy, world, logical_ranks=4, numerics=numerics)[0]

    return run_in_worlds(body, processes)[0]


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("strategy", [Single(), DDP(reduce="ordered"), ZeRO(), FSDP()], ids=lambda each: each.reduce)
def test_on_one_process_a_gan_has_the_bits_of_the_original_loop(strategy: Strategy) -> None:
    """Including BatchNorm's statistics and noise drawn in the step."""
    found, _ = trained(strategy, ALONE, logical_ranks=1)
    assert differing(found, original(20)) == []


@pytest.mark.heavy
def test_two_hundred_steps_of_a_gan_have_the_bits_of_the_original_loop() -> None:
    assert differing(trained(Single(), ALONE, logical_ranks=1, steps=200)[0], original(200)) == []


CLIPPED = Numerics(clip_norm=0.05)


@pytest.fixture(scope="module")
def alone() -> Mapping[str, Tensor]:
    return trained(Single(reduce="ordered"), ALONE, logical_ranks=4, numerics=CLIPPED)[0]


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        (DDP(reduce="ordered", bucket_mb=0.001), 4),
        (ZeRO(reduce="ordered"), 2),
        (FSDP(reduce="ordered", wrap="size", wrap_parameters=100), 2),
        (FSDP(reduce="ordered", shard=2, reshard_after_forward=False, wrap="size", wrap_parameters=100), 4),
        (FSDP(reduce="ordered", accumulate="sharded", wrap="size", wrap_parameters=100), 2),
    ],
    ids=["ddp", "zero", "fsdp", "hsdp", "fsdp, shards added up"],
)
def test_ordered_sums_have_the_same_bits_under_every_strategy_and_at_every_world_size(
    strategy: Strategy, processes: int, alone: Mapping[str, Tensor]
) -> None:
    assert differing(weights_of(strategy, processes, CLIPPED), alone) == []


def test_flat_sums_do_change_bits(alone: Mapping[str, Tensor]) -> None:
    """Without this difference, the test above would prove nothing; they match up to rounding."""
    found, _ = trained(DDP(), ALONE, logical_ranks=4, numerics=CLIPPED)
    assert differing(found, alone) != []
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


@dataclass(frozen=True)
class Two(MultiUpdateRecipe):
    """Two numbers in two optimizers; derived classes make a step invalid."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        return {name: SGD(module.parameters(), lr=0.5) for name, module in model.named_children()}

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(torch.arange(16.0).view(8, 2) / 8)

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        assert isinstance(model, nn.ModuleDict)
        yield "a", model["a"](batch[0]).square().mean()
        yield "b", (model["a"](batch[0]) - model["b"](batch[0])).square().mean()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def replica_of(recipe: MultiUpdateRecipe, numerics: Numerics = PLAIN) -> MultiUpdateReplica:
    replica = Single().replica(recipe, RunContext(ALONE, numerics))
    assert isinstance(replica, MultiUpdateReplica)
    return replica


def batches_of(count: int, step: int = 1) -> list[MicroBatch]:
    rows = Two().data("train").tensors[0]
    return [MicroBatch((part,), seed=7 + place, step=step) for place, part in enumerate(rows.chunk(count))]


class Misspelt(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        yield "aa", model["a"](batch[0]).mean()  # type: ignore[index]


class Silent(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        return iter(())


class Plain(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        return None  # type: ignore[return-value]


class LossAlone(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        yield model["a"](batch[0]).mean()  # type: ignore[index]


class ByData(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        name = "a" if float(batch[0].sum()) < 5 else "b"
        yield name, model[name](batch[0]).mean()  # type: ignore[index]


class ShorterByData(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        for name, loss in super().updates(model, batch, step):
            yield name, loss
            if float(batch[0].sum()) > 5:
                return


class Repeated(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        loss = model["a"](batch[0]).mean() * model["b"](batch[0]).mean()  # type: ignore[index]
        yield "a", loss
        yield "b", loss


class MisspeltTogether(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        yield ("a", "bb"), model["a"](batch[0]).mean()  # type: ignore[index]


class Joint(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        assert isinstance(model, nn.ModuleDict)
        yield ["b", "a"], (model["a"](batch[0]) * model["b"](batch[0])).mean()


class TogetherByData(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        recipe = Joint() if float(batch[0].sum()) < 5 else Two()
        yield from recipe.updates(model, batch, step)


class Vector(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        yield "a", model["a"](batch[0]).mean(dim=0)  # type: ignore[index]


class Detached(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        yield "a", model["a"](batch[0]).mean().detach()  # type: ignore[index]


class TakesName(Two):
    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        yield "a", LossOutput(model["a"](batch[0]).mean(), {"loss/b": (torch.ones(()), torch.ones(()))})  # type: ignore[index]


class Returning(Two):
    def __init__(self, returned: Any) -> None:
        self._returned = returned

    def updates(self, model: nn.Module, batch: Any, step: int) -> Generator[Update, None, Any]:
        yield from super().updates(model, batch, step)
        return self._returned


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (TakesName(), "the metric names loss/b and lr/b are reserved for the optimizer 'b'. Rename the metric"),
        (Returning(3), "Returning.updates returned an object of type int. Return metrics by name"),
        (Returning({"a": 3}), "the metric 'a' in the recipe's loss must be (sum, count)"),
        (Vector(), "Vector.updates yielded a loss of shape [1] for 'a', expected a scalar. Yield loss.mean()"),
        (Detached(), "the loss yielded by Detached.updates for 'a' does not require grad."),
        (
            Repeated(),
            "Repeated.updates yielded the loss of 'a' again for 'b', but its graph was freed after one backward",
        ),
        (MisspeltTogether(), "MisspeltTogether.updates: unknown optimizer 'bb'; did you mean 'b'? Available: a, b."),
        (TogetherByData(), "in step 1, one micro-batch updates 'a' and 'b' but another updates 'a'."),
        (Misspelt(), "Misspelt.updates: unknown optimizer 'aa'; did you mean 'a'? Available: a, b."),
        (Silent(), "Silent.updates yielded nothing in step 1. Yield an update in every step."),
        (Plain(), "Plain.updates returned None, expected a generator. Write it with `yield name_of_optimizer, loss`"),
        (LossAlone(), "LossAlone.updates yielded an object of type Tensor. Yield the name of an optimizer and a loss"),
        (ByData(), "ByData.updates: in step 1, one micro-batch updates 'a' but another updates 'b'."),
        (ShorterByData(), "in step 1, one micro-batch updates 'b' but another ends. The sequence of updates must"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Two) else "",
)
def test_a_step_that_cannot_be_taken_is_refused_in_a_sentence(recipe: MultiUpdateRecipe, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        replica_of(recipe).step(batches_of(2))


def test_metrics_that_a_generator_returns_are_those_of_the_step() -> None:
    result = replica_of(Returning({"seen": (torch.tensor(6.0), 2)})).step(batches_of(2))
    assert result.metrics["seen"].tolist() == [[6.0, 2.0]] * 2


def test_ranks_whose_sequences_differ_are_refused_in_a_sentence() -> None:
    def body(world: World) -> str:
        replica = DDP().replica(ByData(), RunContext(world))
        with pytest.raises(ConfigError) as refusal:
            replica.step([batches_of(2)[world.rank]])
        return str(refusal.value)

    sentence = "ByData.updates: in step 1, rank 0 updates 'a' but rank 1 updates 'b'. The sequence of updates must"
    assert all(text.startswith(sentence) for text in run_in_worlds(body, 2))


class Shared(Two):
    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        return {"a": SGD(model["a"].parameters()), "all": SGD(model.parameters())}  # type: ignore[index]


class NoneAtAll(Two):
    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        return {}


class OneAlone(Two):
    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        return SGD(model.parameters())  # type: ignore[return-value]


class Crossed(Two):
    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        return {"a": StepLR(optimizers["b"], 1)}


class Unknown(Two):
    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        return {"c": StepLR(optimizers["b"], 1)}


class Frozen(Two):
    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        model["b"].requires_grad_(False)  # type: ignore[index]
        return super().optimizers(model)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Frozen(), "Frozen.optimizers: all parameters of 'b' are frozen. Remove the optimizer"),
        (Shared(), "Shared assigns 'a.weight' to two optimizers, 'a' and 'all'. Pass each parameter to one"),
        (NoneAtAll(), "NoneAtAll.optimizers returned an empty mapping."),
        (OneAlone(), "OneAlone.optimizers did not return a mapping of names to optimizers."),
        (Crossed(), "Crossed.schedules: the schedule 'a' belongs to a different optimizer."),
        (Unknown(), "Unknown.schedules: unknown optimizer 'c'"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Two) else "",
)
def test_optimizers_that_do_not_fit_are_refused_before_the_start(recipe: MultiUpdateRecipe, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_construction(recipe, Single())


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            Mesh(),
            "Two requires several updates per step, but Mesh supports one: all gradients are summed and clipped",
        ),
        (
            ParameterServer(consistency="async"),
            "require strategy.consistency=sync. Set strategy.consistency",
        ),
        (ParameterServer(replicas=1), "are not supported with standbys. Set strategy.replicas=0"),
        (
            ParameterServer(compression="bf16"),
            "are not supported with compression. Set strategy.compression=none.",
        ),
        (HybridParameterServer(), "but HybridParameterServer supports one"),
        (
            DDP(compress="int8"),
            "do not support several updates per step (Two). Set strategy.compress=none",
        ),
        (DDP(reduce="hierarchical"), "and strategy.reduce=flat"),
        (FSDP(param_dtype="bf16"), "Set strategy.param_dtype=null"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Strategy) else "",
)
def test_strategies_that_cannot_train_it_refuse_it_before_the_start(strategy: Strategy, message: str) -> None:
    check_trainable(TwoPlayers(), Single())
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_trainable(Two(), strategy)


@pytest.mark.parametrize("name", ["optimizers", "schedules", "micro_batch_updates"])
def test_a_method_of_recipes_with_several_updates_is_refused_in_one_with_a_single_update(name: str) -> None:
    recipe = type("Own", (Chain,), {name: lambda self, *_: {}})()
    with pytest.raises(ConfigError, match=f"Own defines {name}, .*MultiUpdateRecipe, or rename"):
        check_trainable(recipe, Single())
    check_trainable(Chain(), Single())


@dataclass(frozen=True)
class Hooked(Two):
    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        optimizers = super().optimizers(model)
        optimizers["b"].register_step_post_hook(lambda *_: None)
        return optimizers


class Rows(Two):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Embedding(4, 2, sparse=True)})


class Normed(Two):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.BatchNorm1d(2)})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            Hooked(),
            "has a step hook, Hooked.optimizers.<locals>.<lambda>, which is not supported on parameter servers",
        ),
        (
            Rows(),
            "sparse=True of b is not supported with several updates per step (Rows). Set sparse=False.",
        ),
        (Normed(), "running statistics of b (BatchNorm1d) are not supported on parameter servers."),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Two) else "",
)
def test_what_servers_cannot_carry_is_refused_before_the_start(recipe: MultiUpdateRecipe, message: str) -> None:
    check_construction(Two(), ParameterServer())
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_construction(recipe, ParameterServer())


def test_a_staleness_bound_of_zero_is_synchronous() -> None:
    check_trainable(Two(), ParameterServer(consistency="bounded"))


def test_one_update_is_the_case_of_several_with_the_same_bits_and_the_same_checkpoint() -> None:
    recipe, context = Chain(), RunContext(ALONE, CLIPPED, logical_ranks=2)
    one = Single().replica(recipe, context)
    state = TrainState.from_recipe(recipe, recipe.model())
    several = MultiUpdateReplica(recipe, context, train_state=state, reducer=update_reducer("flat", state.model, None))
    batches = micro_batches(recipe.data("train"), Order(3, 16, 2, (0, 1)), ALONE.device)
    for _ in range(3):
        step = next(batches)
        taken = [float(sum(replica.step(step).losses)) for replica in (one, several)]
        assert taken[0] == pytest.approx(taken[1])
    (tensors, values), (others, other_values) = split_tensors(one.state()), split_tensors(several.state())
    assert values == other_values
    assert differing(tensors, others) == []


def test_whoever_asks_for_the_one_loss_of_such_a_recipe_gets_a_sentence() -> None:
    recipe, model = Two(), Two().model()
    with pytest.raises(ConfigError, match="Two has several updates per step and must be trained with"):
        recipe.optimizer(model)
    with pytest.raises(ConfigError, match="Two has several updates per step"):
        recipe.loss(model, None)


def test_an_update_clips_the_gradient_of_its_own_parameters() -> None:
    """Compare with plain PyTorch, clipping each network separately."""
    (batch,) = batches_of(1)
    replica, plain = replica_of(Two(), Numerics(clip_norm=0.1)), Two().model()
    optimizers = Two().optimizers(plain)
    norms = []
    for name, loss in Two().updates(plain, batch.data, 1):
        plain.zero_grad()
        assert isinstance(loss, Tensor)
        assert isinstance(name, str)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.clip_grad_norm_(plain[name].parameters(), 0.1))  # type: ignore[index]
        optimizers[name].step()
    result = replica.step([batch])
    assert differing(replica.state()["model"], plain.state_dict()) == []
    assert result.grad_norm is not None
    torch.testing.assert_close(result.grad_norm, torch.stack(norms).norm())


def test_optimizers_of_one_loss_share_a_backward_pass_and_a_norm() -> None:
    """Compare with plain PyTorch and a norm of all parameters; the loss counts once, and for each optimizer."""
    (batch,) = batches_of(1)
    replica, plain = replica_of(Joint(), Numerics(clip_norm=0.1)), Joint().model()
    optimizers = Joint().optimizers(plain)
    ((_, loss),) = Joint().updates(plain, batch.data, 1)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for optimizer in optimizers.values():
        optimizer.step()
    result = replica.step([batch])
    assert differing(replica.state()["model"], plain.state_dict()) == []
    assert result.grad_norm == norm
    assert result.losses == [loss.detach().double()]
    assert {result.metrics[name].tolist()[0][0] for name in ("loss/a", "loss/b")} == {float(loss.detach())}


class SharedByRank(SharedLoss):
    """A shared loss that depends on the step and the logical rank."""

    def micro_batch_updates(self, model: nn.Module, batch: MicroBatch) -> Iterable[Update]:
        for names, loss in self.updates(model, batch.data, batch.step):
            assert isinstance(loss, Tensor)
            yield names, loss * (1 + batch.logical_rank + batch.step / 8)


def shared_loss(strategy: Strategy, world: World, *, steps: int = 5) -> Mapping[str, Tensor]:
    """Train a loss by logical rank with clipping, on four of them; return all weights."""
    recipe = SharedByRank()
    replica = strategy.replica(recipe, RunContext(world, Numerics(clip_norm=0.5)))
    order = Order(SEED, 24, 4, assign_logical_ranks(world.rank, world.size, 4, replica.dealing))
    batches = micro_batches(recipe.data("train"), order, world.device)
    for _ in range(steps):
        replica.step(next(batches))
    return {name: tensor.clone() for name, tensor in gather_full(replica.state()["model"], world).items()}


def plain_shared_loss(steps: int = 5) -> Mapping[str, Tensor]:
    recipe = SharedLoss()
    model, order = recipe.model(), Order(SEED, 24, 4, (0, 1, 2, 3))
    optimizers = recipe.optimizers(model)
    schedules = recipe.schedules(optimizers)
    for step, parts in zip(range(1, steps + 1), micro_batches(recipe.data("train"), order, ALONE.device), strict=False):
        model.zero_grad()
        for rank, part in enumerate(parts):
            loss = nn.functional.mse_loss(model(part.data[0]), part.data[1]) * (1 + rank + step / 8)
            (loss / 4).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for name, optimizer in optimizers.items():
            optimizer.step()
            schedules[name].step()
    return model.state_dict()


def test_a_shared_loss_by_logical_rank_has_the_same_bits_at_every_size() -> None:
    """It is also the loss of a plain loop over the four logical ranks, up to rounding."""
    expected = shared_loss(Single(reduce="ordered"), ALONE)
    for name, tensor in plain_shared_loss().items():
        torch.testing.assert_close(expected[name], tensor)
    strategies: Sequence[Strategy] = (DDP(reduce="ordered"), ZeRO(reduce="ordered"), FSDP(reduce="ordered"))
    for processes in (2, 4):

        def body(world: World) -> list[Mapping[str, Tensor]]:
            return [shared_loss(strategy, world) for strategy in strategies]

        for found in run_in_worlds(body, processes)[0]:
            assert differing(found, expected) == []


class Endless(Two):
    """The second update's loss is not finite."""

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        assert isinstance(model, nn.ModuleDict)
        yield "a", model["a"](batch[0]).square().mean()
        yield "b", model["b"](batch[0]).mean() * torch.inf


def test_an_update_whose_gradient_is_not_finite_is_left_out_alone() -> None:
    replica = replica_of(Endless(), Numerics(nonfinite="skip"))
    before = {name: tensor.clone() for name, tensor in replica.state()["model"].items()}
    assert replica.step(batches_of(1)).skipped
    assert differing(replica.state()["model"], before) == ["a.weight", "a.bias"]


def test_a_step_says_the_mean_loss_and_the_rate_of_each_optimizer() -> None:
    class Twice(Two):
        """The first is updated twice, the second in every other step."""

        def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
            return {
                name: Adam(module.parameters(), lr=0.1 * n)
                for n, (name, module) in enumerate(model.named_children(), 1)
            }

        def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
            yield "a", self.constant(model, 2.0)
            yield "a", self.constant(model, 4.0)
            if step % 2 == 0:
                yield "b", self.constant(model, 7.0)

        def constant(self, model: nn.Module, value: float) -> Tensor:
            return torch.stack([parameter.sum() * 0 for parameter in model.parameters()]).sum() + value

    replica = replica_of(Twice())
    odd, even = replica.step(batches_of(2, step=1)), replica.step(batches_of(2, step=2))
    assert [float(loss) for loss in (*odd.losses, *even.losses)] == [6, 6, 13, 13]
    assert odd.lr == pytest.approx(0.1)
    assert odd.metrics["loss/a"].tolist() == [[6, 2], [6, 2]]
    assert odd.metrics["loss/b"].tolist() == [[0, 0], [0, 0]]
    assert even.metrics["loss/b"].tolist() == [[7, 1], [7, 1]]
    assert even.metrics["lr/b"].tolist() == [[pytest.approx(0.2), 1]] * 2


def test_each_micro_batch_keeps_its_own_random_numbers_between_updates() -> None:
    drawn: dict[int, list[float]] = {}

    class Drawing(Two):
        def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
            for update in super().updates(model, batch, step):
                drawn.setdefault(int(batch[0][0, 0] * 8), []).append(float(torch.rand(())))
                yield update

    replica_of(Drawing()).step(batches_of(2))
    together = {place: list(numbers) for place, numbers in drawn.items()}
    drawn.clear()
    for batch in batches_of(2):
        replica_of(Drawing()).step([batch])
    assert together == drawn
    assert len({number for numbers in drawn.values() for number in numbers}) == 4


def test_graphs_from_before_an_update_reach_the_next_one_when_buffers_are_averaged() -> None:
    """Averaging writes to BatchNorm's buffers while the generator's graph still waits for its update."""
    weights, _ = trained(Single(reduce="ordered"), ALONE, logical_ranks=2, steps=1)
    assert differing(weights, GAN().state_dict()) != []
    assert int(weights["generator.1.num_batches_tracked"]) == 1
    assert int(weights["discriminator.3.num_batches_tracked"]) == 3


class Small(Two):
    """Losses with gradients inside the range of float16."""

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        for name, loss in super().updates(model, batch, step):
            assert isinstance(loss, Tensor)
            yield name, loss.float() / 100


class TooLarge(Two):
    """Losses with gradients outside that range."""

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        for name, loss in super().updates(model, batch, step):
            assert isinstance(loss, Tensor)
            yield name, loss * 1000


def test_fp16_has_one_loss_scale_for_all_optimizers() -> None:
    for recipe, scale, changed in ((Small(), 65536, 4), (TooLarge(), 65536 / 2, 0)):
        replica = replica_of(recipe, Numerics("fp16", clip_norm=1.0))
        before = {name: tensor.clone() for name, tensor in replica.state()["model"].items()}
        replica.step(batches_of(2))
        assert replica.state()["scaler"]["scale"] == scale
        assert len(differing(replica.state()["model"], before)) == changed


class WithoutRate(Optimizer):
    """Takes a fixed share off each parameter, without a learning rate."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


@dataclass(frozen=True)
class OneRate(Two):
    """One of the optimizers has a learning rate; the other, ``bare``, does not."""

    bare: str = "a"

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        parameters = {name: list(module.parameters()) for name, module in model.named_children()}
        return {name: WithoutRate(own) if name == self.bare else SGD(own, lr=0.5) for name, own in parameters.items()}


def test_an_optimizer_without_a_learning_rate_shows_none() -> None:
    first = replica_of(OneRate(bare="a")).step(batches_of(2))
    assert first.lr is None
    assert first.metrics["lr/b"].tolist() == [[0.5, 1]] * 2
    second = replica_of(OneRate(bare="b")).step(batches_of(2))
    assert second.lr == 0.5
    assert second.metrics.keys() == {"loss/a", "loss/b"}


def test_a_checkpoint_without_a_schedule_that_the_recipe_has_is_refused_in_a_sentence() -> None:
    replica = replica_of(TwoPlayers())
    state = {**replica.state(), "schedule": {}}
    with pytest.raises(ConfigError, match="the checkpoint has no state for the schedule 'critic'"):
        replica.load(state)


def test_what_an_optimizer_draws_leaves_the_random_numbers_of_the_next_update_alone() -> None:
    """This also holds with one micro-batch per process, so that more processes change nothing."""
    drawn: list[float] = []

    class Noisy(Two):
        def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
            optimizers = super().optimizers(model)
            for optimizer in optimizers.values():
                optimizer.register_step_post_hook(draw)
            return optimizers

        def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
            for update in super().updates(model, batch, step):
                drawn.append(float(torch.rand(())))
                yield update

    def draw(*_: object) -> None:
        torch.rand(7)

    (batch,) = batches_of(1)
    replica_of(Noisy()).step([batch])
    torch.manual_seed(batch.seed)
    assert drawn == torch.stack([torch.rand(()) for _ in range(2)]).tolist()
