"""Processes may have different numbers of logical ranks: the gradient matches one process with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _verify_param_shape_across_processes

from tests.support.interruption import end_gang_soon
from worldsize.collectives.gather_full import gather_full_tensor
from worldsize.collectives.group import INTERRUPTION
from worldsize.core import Loss, MicroBatch, Reduction, RunContext, StepResult, World
from worldsize.loop.training_metrics import TrainingMetrics, gather_by_logical_rank
from worldsize.loop.window import LogWindow
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.loss_scaling import weight_factor
from worldsize.strategies.reducers import interruptible_reducer
from worldsize.strategies.synchronous import SynchronousReplica, wrap_in_ddp
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

TOTAL = 5


def batches(ranks: Sequence[int]) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(TOTAL, 4, 6, generator=generator)
    return [MicroBatch(data[rank], rank, 1) for rank in ranks]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


def gradients(world: World, reduce: Reduction) -> tuple[list[Tensor], list[Tensor]]:
    own = model()
    module = wrap_in_ddp(own, world)
    reducer = interruptible_reducer(reduce, module, world, TOTAL)

    def backward(batch: MicroBatch, scale: float) -> LossRecord:
        loss = module(lambda: own(batch.data).square().mean())
        (loss * scale).backward()
        return LossRecord(loss.detach())

    reducer.run(batches(range(world.rank, TOTAL, world.size)), backward)
    grads = [parameter.grad.clone() for parameter in own.parameters() if parameter.grad is not None]
    return grads, [buffer.clone() for buffer in own.buffers()]


def plain() -> tuple[list[Tensor], list[Tensor]]:
    """Compute the mean gradient, and the mean change of the buffers, in a plain PyTorch loop."""
    own, sums, changed = model(), list[Tensor](), list[Tensor]()
    first = [buffer.clone() for buffer in own.buffers()]
    for batch in batches(range(TOTAL)):
        own.zero_grad()
        own(batch.data).square().mean().backward()
        grads = [parameter.grad.clone() for parameter in own.parameters() if parameter.grad is not None]
        sums = [total + grad for total, grad in zip(sums, grads, strict=True)] if sums else grads
        now = [buffer.clone().double() for buffer in own.buffers()]
        changed = [total + each for total, each in zip(changed, now, strict=True)] if changed else now
        for buffer, value in zip(own.buffers(), first, strict=True):
            buffer.data.copy_(value)
    return [total / TOTAL for total in sums], [total / TOTAL for total in changed]


@dataclass(frozen=True)
class Uneven(Chain):
    """Trains :func:`model`; ``passes`` counts the losses that this process computes."""

    passes: list[int] = field(default_factory=list)

    def model(self) -> nn.Module:
        return model()

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return [module for module in model.children() if isinstance(module, nn.Linear)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.passes.append(len(batch))
        loss: Tensor = model(batch).square().mean()
        return loss


def sharded_gradients(world: World, strategy: FSDP) -> tuple[list[Tensor], list[Tensor], Tensor, int]:
    """Return :func:`gradients` of a sharded model, the gradient's norm, and the number of passes."""
    recipe = Uneven()
    replica = strategy.replica(recipe, RunContext(world, logical_ranks=TOTAL))
    assert isinstance(replica, SynchronousReplica)
    losses = replica.reducer.run(batches(range(world.rank, TOTAL, world.size)), replica._backward)
    assert len(losses) == len(range(world.rank, TOTAL, world.size))
    parameters = list(replica.model.parameters())
    grads = [
        gather_full_tensor(parameter.grad).clone() for parameter in parameters if isinstance(parameter.grad, DTensor)
    ]
    norm = replica.reducer.clip(parameters, 1e9)
    return grads, [buffer.clone() for buffer in replica.model.buffers()], norm.clone(), len(recipe.passes)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"accumulate": "whole"}),
        (3, {"accumulate": "sharded"}),
        (4, {"accumulate": "whole", "shard": 2}),
        (4, {"accumulate": "sharded", "shard": 2}),
        (2, {"reduce": "ordered"}),
        (3, {"reduce": "ordered"}),
        (4, {"reduce": "ordered", "shard": 2}),
    ],
)
def test_the_mean_gradient_of_shards_is_that_of_one_process(size: int, options: dict[str, Any]) -> None:
    """Every process runs as many passes as the one with most logical ranks, since each pass gathers parameters."""
    expected, buffers = plain()
    strategy = FSDP(on_failure="heal", **options)
    for grads, changed, norm, passes in run_in_worlds(lambda world: sharded_gradients(world, strategy), size):
        torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close([each.double() for each in changed], buffers, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(norm, torch.cat([each.flatten() for each in expected]).norm(), rtol=1e-5, atol=1e-7)
        assert passes == -(-TOTAL // size)


@dataclass(frozen=True)
class Remembering(Uneven):
    """Counts the passes of each logical rank; ``asked`` lists the logical ranks whose count was requested."""

    counts: dict[int, list[int]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def state(self, logical_rank: int) -> list[int]:
        self.asked.append(logical_rank)
        return self.counts.setdefault(logical_rank, [0])

    def load_state(self, logical_rank: int, state: list[int]) -> None:
        self.counts[logical_rank] = state

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        self.counts.setdefault(batch.logical_rank, [0])[0] += 1
        return self.loss(model, batch.data)


@pytest.mark.parametrize("reduce", ["flat", "ordered"])
def test_a_pass_without_effect_leaves_what_a_recipe_keeps_and_others_copy_nothing(reduce: Reduction) -> None:
    def counts(world: World) -> tuple[dict[int, list[int]], list[int]]:
        recipe = Remembering()
        replica = FSDP(on_failure="heal", reduce=reduce).replica(recipe, RunContext(world, logical_ranks=TOTAL))
        assert isinstance(replica, SynchronousReplica)
        for _ in range(2):
            replica.reducer.run(batches(range(world.rank, TOTAL, world.size)), replica._backward)
        return recipe.counts, recipe.asked

    # two steps of three and of two batches, all of one logical rank; the second process computes one more each time
    assert run_in_worlds(counts, 2) == [({0: [6]}, []), ({0: [4]}, [0, 0])]


def test_a_resumed_ddp_learns_the_order_of_gradients_without_a_change_of_what_a_recipe_keeps() -> None:
    def counts(world: World) -> dict[int, list[int]]:
        recipe = Remembering()
        replica = DDP().replica(recipe, RunContext(world))
        assert isinstance(replica, SynchronousReplica)
        replica.reducer.on_resume()
        replica.reducer.run(batches(range(world.rank, 4, world.size)), replica._backward)
        return recipe.counts

    assert run_in_worlds(counts, 2) == [{0: [2]}] * 2  # one for each of two batches


def test_uneven_shards_have_the_bits_of_any_other_strategy_in_the_fixed_tree() -> None:
    whole_model = run_in_worlds(lambda world: gradients(world, "ordered"), 2)[0]
    strategy = FSDP(on_failure="heal", reduce="ordered")
    for grads, buffers, _, _ in run_in_worlds(lambda world: sharded_gradients(world, strategy), 3):
        assert all(map(torch.equal, [*grads, *buffers], [*whole_model[0], *whole_model[1]]))


@pytest.mark.parametrize(
    ("processes", "shard", "shards"),
    [(4, "all", 4), (3, "all", 3), (4, 2, 2), (3, 2, 3), (6, 4, 6), (9, 2, 3), (2, 4, 2), (1, 2, 1), (2, 1, 1)],
)
def test_those_that_go_on_make_copies_of_at_least_as_many_shards_as_planned(
    processes: int, shard: Any, shards: int
) -> None:
    assert FSDP(shard=shard, on_failure="heal")._shard_size(processes, processes) == shards
    ordered = FSDP(shard=shard, on_failure="heal", reduce="ordered")  # sums in order need two shards
    assert ordered._shard_size(processes, processes) == (max(shards, 2) if processes > 1 else 1)


@pytest.mark.parametrize("reduce", ["flat", "ordered"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_mean_gradient_is_that_of_one_process(size: int, reduce: Reduction) -> None:
    expected, buffers = plain()
    for grads, changed in run_in_worlds(lambda world: gradients(world, reduce), size):
        torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close([each.double() for each in changed], buffers, rtol=1e-5, atol=1e-7)


def test_an_interrupted_step_leaves_the_buffers_as_they_were() -> None:
    def interrupted(world: World) -> bool:
        own = model()
        module = wrap_in_ddp(own, world)
        reducer = interruptible_reducer("ordered", module, world, TOTAL)
        before = [buffer.clone() for buffer in own.buffers()]

        def backward(batch: MicroBatch, scale: float) -> LossRecord:
            module(lambda: own(batch.data))
            raise ConnectionError("the gang has ended")

        with pytest.raises(ConnectionError):
            reducer.run(batches(range(world.rank, TOTAL, world.size)), backward)
        return all(map(torch.equal, own.buffers(), before))

    assert all(run_in_worlds(interrupted, 2))


def test_weights_of_all_logical_ranks_are_summed() -> None:
    weights = [torch.tensor(float(2**rank), dtype=torch.float64) for rank in range(TOTAL)]
    alone = weight_factor(weights, None)

    def shared(world: World) -> Tensor:
        return weight_factor(weights[world.rank :: world.size], world.group, logical_ranks=TOTAL)

    assert all(torch.equal(each, alone) for each in run_in_worlds(shared, 3))


def logged(world: World) -> tuple[float, Any, Any]:
    """Log one step whose losses and metrics equal the numbers of the logical ranks."""
    mine = range(world.rank, TOTAL, world.size)
    sums = torch.tensor([[float(rank), 1.0] for rank in mine], dtype=torch.float64)
    window = LogWindow(world, 10, None, metrics=TrainingMetrics({}), logical_ranks=TOTAL)
    window.fetching()
    window.stepping(measured=False)
    losses = [torch.tensor(float(rank)) for rank in mine]
    window.add_losses(losses, {"hits": sums})
    done = window.close(1, {}).create_event(StepResult(losses, 0.1), skipped=0)
    saved = gather_by_logical_rank({"hits": sums}, mine, world, logical_ranks=TOTAL)
    return done.loss, done.metrics, saved


def test_logged_losses_and_metrics_are_those_of_all_logical_ranks() -> None:
    for loss, metrics, saved in run_in_worlds(logged, 3):
        assert loss == sum(range(TOTAL)) / TOTAL
        assert metrics == {"hits": sum(range(TOTAL)) / TOTAL}
        assert saved == {"hits": [[float(rank), 1.0] for rank in range(TOTAL)]}


def test_a_wait_ends_when_the_gang_does_and_its_collective_is_remembered() -> None:
    def waited(world: World) -> tuple[bool, int]:
        import torch.distributed as dist

        ended = [False]

        def check() -> None:
            if ended[0]:
                raise ConnectionError("the gang has ended")

        INTERRUPTION.start_tracking(check, longest=120.0)
        row = torch.ones(4)
        if world.rank == 0:
            ended[0] = True
            with pytest.raises(ConnectionError):
                INTERRUPTION.wait(dist.all_reduce(row, group=world.group, async_op=True))
            remembered = INTERRUPTION.pop_unfinished()
            dist.barrier(group=world.groups["checkpoint/worker"])  # now the other takes part
            while not all(work.is_completed() for work in remembered):
                pass
            return torch.equal(row, torch.full((4,), 2.0)), len(remembered)
        dist.barrier(group=world.groups["checkpoint/worker"])
        INTERRUPTION.wait(dist.all_reduce(row, group=world.group, async_op=True))
        return torch.equal(row, torch.full((4,), 2.0)), 1

    assert run_in_worlds(waited, 2) == [(True, 1), (True, 1)]


def test_a_replica_that_waits_for_the_weights_of_a_peer_stops_when_the_gang_does() -> None:
    barrier = get_context("fork").Barrier(2)

    def interrupted(world: World) -> int:
        assert world.group is not None
        if world.rank == 0:
            _verify_param_shape_across_processes(world.group, list(model().parameters()))
            barrier.wait(60)  # instead of the weights
            return 1
        end_gang_soon()
        with pytest.raises(ConnectionError):
            wrap_in_ddp(model(), world, interruptible=True)
        barrier.wait(60)
        return len(INTERRUPTION.pop_unfinished())

    assert run_in_worlds(interrupted, 2, timeout=120.0) == [1, 1]


def test_the_weights_of_an_interruptible_replica_are_those_of_the_first_rank() -> None:
    def made(world: World) -> list[Tensor]:
        own = model()
        with torch.no_grad():
            for tensor in (*own.parameters(), *own.buffers()):
                tensor += world.rank
        wrap_in_ddp(own, world, interruptible=True)
        return [*own.state_dict().values()]

    for tensors in run_in_worlds(made, 2):
        assert all(map(torch.equal, tensors, model().state_dict().values()))
