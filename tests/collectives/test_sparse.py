"""Sparse sums match the formulas of the papers, computed in plain PyTorch on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldsize.collectives.per_rank import local_row
from worldsize.collectives.reductions import RandomK, TopKSum, draw_indices
from worldsize.collectives.staged import Summation, finish_reduction
from worldsize.core import ConfigError, Link, Numerics, RunContext, Workload, World
from worldsize.data.batches import fetch_batch, get_collate_fn
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.strategies.communication_hooks import Errors
from worldsize.strategies.ddp import DDP
from worldsize.strategies.reducers import CompressionKind
from worldsize.testing.contract import assert_close, assert_same
from worldsize.testing.training import BATCH, CHAIN, SEED, Trained, create_cluster, train
from worldsize.testing.worlds import run_in_worlds

LENGTH, DENSITY, SIZE, STEPS = 101, 0.07, 3, 6
COUNT = 7


def row(rank: int, step: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * step + rank))


def sums(summation: Summation, world: World) -> tuple[list[Tensor], list[Tensor]]:
    """Sum the rows of all steps; return the sums, and this rank's residual after each step."""
    assert world.group is not None
    error, totals, kept = torch.zeros(LENGTH), [], []
    for step in range(STEPS):
        memory = error if summation.keeps_errors else None
        totals.append(
            finish_reduction(
                summation.all_reduce(row(world.rank, step), world.group, error_n=memory, seed=step)
            ).clone()
        )
        kept.append(error.clone())
    return totals, kept


def largest(gradient_n: Tensor, count: int) -> Tensor:
    """Return a mask of the ``count`` largest numbers, by a threshold as in algorithm 1 of Lin et al. 2018."""
    return gradient_n.abs() >= gradient_n.abs().sort(descending=True).values[count - 1]


def memory_sums(masks: Sequence[Tensor] | None) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Compute algorithm 1 of Stich et al. 2018 for all ranks at once, without the learning rate.

    In each step a rank adds its gradient to its memory, sends comp_k of the memory, and keeps the rest. ``masks``: what
    is sent in each step; None: the largest.
    """
    memories, totals, kept = [torch.zeros(LENGTH) for _ in range(SIZE)], [], []
    for step in range(STEPS):
        total = torch.zeros(LENGTH)
        for rank in range(SIZE):
            whole = memories[rank] + row(rank, step)
            mask = largest(whole, COUNT) if masks is None else masks[step]
            total += whole * mask
            memories[rank] = whole * ~mask
        totals.append(total)
        kept.append(list(memories))
    return totals, kept


def mask_of(seed: int) -> Tensor:
    mask = torch.zeros(LENGTH, dtype=torch.bool)
    mask[draw_indices(LENGTH, COUNT, seed)[0]] = True
    return mask


@pytest.mark.parametrize(("kind", "sent"), [("topk", 320.0), ("randomk", 160.0)])
def test_the_cost_formula_has_the_bytes_of_the_collectives(kind: CompressionKind, sent: float) -> None:
    """Of 800 numbers, 40 are sent: with their indices to the one peer, or in a ring, where 2 (n-1)/n = 1."""
    cluster = replace(create_cluster(2), links={"node": Link(bandwidth=1e9, latency=1e-6)})
    cost = DDP(compress=kind, density=0.05).cost(Workload(parameter_bytes=3200, optimizer_bytes=0), cluster)
    assert cost is not None
    assert cost.sent_bytes == pytest.approx(sent)
    summation = TopKSum(0.05) if kind == "topk" else RandomK(0.05, keeps_errors=True)

    def body(world: World) -> list[int]:
        assert world.group is not None
        with (
            patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathered,
            patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
        ):
            finish_reduction(summation.all_reduce(torch.randn(800), world.group, error_n=torch.zeros(800), seed=0))
        messages = [
            *(call.args[1] for call in gathered.call_args_list),
            *(call.args[0] for call in reduced.call_args_list),
        ]
        return [each.nbytes for each in messages]

    assert run_in_worlds(body, 2) == [[sent]] * 2


@pytest.mark.parametrize("kind", ["topk", "randomk"])
def test_sums_and_memories_are_those_of_sparsified_sgd_with_memory(kind: str) -> None:
    summation = TopKSum(DENSITY) if kind == "topk" else RandomK(DENSITY, keeps_errors=True)
    expected, kept = memory_sums(None if kind == "topk" else [mask_of(step) for step in range(STEPS)])
    for rank, (totals, errors) in enumerate(run_in_worlds(lambda world: sums(summation, world), SIZE)):
        for step in range(STEPS):
            assert int((totals[step] != 0).sum()) in range(COUNT, COUNT * SIZE + 1)
            torch.testing.assert_close(totals[step], expected[step], rtol=1e-6, atol=1e-6)
            assert torch.equal(errors[step], kept[step][rank]), f"rank {rank} keeps other numbers after step {step}"


def test_random_places_follow_from_the_seed_and_leave_out_the_share_of_the_papers() -> None:
    """Check definition 2.1 of Stich et al. for random-k, E|x - comp(x)|^2 = (1 - k/n)|x|^2, and Wangni's E comp(x) = x.

    Each place is drawn with probability 1 / the length of its run, and the runs cover all places.
    """
    places, widths = draw_indices(LENGTH, COUNT, 5)
    assert torch.equal(places, draw_indices(LENGTH, COUNT, 5)[0])
    assert not torch.equal(places, draw_indices(LENGTH, COUNT, 6)[0])
    ends = widths.cumsum(0)
    assert ends[-1] == LENGTH
    assert widths.max() - widths.min() <= 1
    assert bool(((ends - widths <= places) & (places < ends)).all()), "one place of each run"
    times = 4000
    drawings = [draw_indices(LENGTH, COUNT, seed)[0] for seed in range(times)]
    often = torch.bincount(torch.cat(drawings), minlength=LENGTH) / times
    chance = (1 / widths).repeat_interleave(widths)
    assert (often - chance).abs().max() < 5 * (chance.max() / times).sqrt(), "five standard deviations"
    gradient = row(0, 0)
    left_out = torch.stack([gradient.square().sum() - gradient[each].square().sum() for each in drawings]).mean()
    assert_close("what is left out", float(left_out), float((1 - chance) @ gradient.square()), 0.01)


def test_random_numbers_without_memory_are_right_on_average() -> None:
    """Compare the mean of many sums, and their squared norm, with section 2 of Wangni et al. 2018.

    The norm is the sum of x_i^2 / p_i: n/k times the squared norm of the exact sum if all probabilities are equal.
    """
    times, width = 2000, 5

    def body(world: World) -> tuple[Tensor, Tensor]:
        assert world.group is not None
        mean, squares = torch.zeros(8 * width), torch.zeros(())
        for seed in range(times):
            mine = row(world.rank, 0)[: 8 * width].clone()
            total = finish_reduction(
                RandomK(1 / width, keeps_errors=False).all_reduce(mine, world.group, error_n=None, seed=seed)
            )
            mean += total / times
            squares += total.square().sum() / times
        return mean, squares

    exact = (row(0, 0) + row(1, 0))[: 8 * width]
    for mean, squares in run_in_worlds(body, 2):
        assert ((mean - exact).abs() <= 5 * exact.abs() * ((width - 1) / times) ** 0.5).all(), "five deviations"
        assert_close("squared norm", float(squares), width * float(exact.square().sum()), 0.05)


@pytest.mark.parametrize("summation", [TopKSum(DENSITY), RandomK(DENSITY, keeps_errors=True)], ids=["topk", "randomk"])
def test_a_number_that_is_not_finite_reaches_all_ranks_and_is_not_kept(summation: Summation) -> None:
    def body(world: World) -> tuple[Tensor, Tensor, Tensor]:
        assert world.group is not None
        error, gradient = torch.zeros(LENGTH), row(world.rank, 0)
        if world.rank == 1:
            gradient[3] = float("nan")
            gradient[40] = float("inf")
        broken = finish_reduction(summation.all_reduce(gradient, world.group, error_n=error, seed=1)).clone()
        kept = error.clone()
        after = finish_reduction(summation.all_reduce(row(world.rank, 1), world.group, error_n=error, seed=2))
        return broken, kept, after

    for broken, kept, after in run_in_worlds(body, 2):
        assert not broken.isfinite().all()
        assert kept.isfinite().all()
        assert after.isfinite().all()


def plain(density: float, ranks: int, steps: int) -> tuple[list[float], list[Tensor]]:
    """Train sparsified SGD with memory in plain PyTorch on one process that plays all ranks.

    Returns:
        The losses, and the memory of each rank after the last step, in the order of parameters.
    """
    model, data, order = CHAIN.model(), CHAIN.data("train"), Order(SEED, BATCH, ranks, tuple(range(ranks)))
    optimizer, losses = CHAIN.optimizer(model), []
    parameters = list(model.parameters())
    memories = [torch.zeros(sum(each.numel() for each in parameters)) for _ in range(ranks)]
    for number in range(1, steps + 1):
        total, loss_of_all = torch.zeros_like(memories[0]), 0.0
        for rank, memory in enumerate(memories):
            loss = CHAIN.loss(
                model, fetch_batch(data, order.compute_indices(number, rank, len(data)), get_collate_fn(CHAIN))
            )
            memory += nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters)) / ranks
            mask = largest(memory, int(len(memory) * density))
            total += memory * mask
            memory *= ~mask
            loss_of_all += float(loss.detach()) / ranks
        begun = 0
        for each in parameters:
            each.grad = total[begun : begun + each.numel()].view_as(each).clone()
            begun += each.numel()
        optimizer.step()
        losses.append(loss_of_all)
    return losses, memories


def test_training_by_top_k_is_sparsified_sgd_with_memory() -> None:
    """Compare losses, and each rank's memory in a checkpoint: it is stored per parameter, independent of buckets."""

    def body(world: World) -> tuple[Trained, Tensor]:
        replica = strategy.replica(CHAIN, RunContext(world))
        order = Order(SEED, BATCH, SIZE, (world.rank,))
        for batches in islice(micro_batches(CHAIN.data("train"), order, world.device), 12):
            replica.step(batches)
        memory = local_row(replica.state()["strategy"]["errors"])
        return train(strategy, RunContext(world), 12), memory

    strategy = DDP(compress="topk", density=0.1)
    losses, memories = plain(0.1, SIZE, 12)
    for (result, memory), expected in zip(run_in_worlds(body, SIZE), memories, strict=True):
        for actual, loss in zip(result.losses, losses, strict=True):
            assert_close("loss", actual, loss, 1e-4)
        assert (memory - expected).norm() < 1e-3 * expected.norm()


def test_what_is_kept_belongs_to_parameters_and_not_to_buckets() -> None:
    """Distribute the errors over buckets, change them, and distribute them over different buckets."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    first, *others = model.parameters()
    errors = Errors(model, shares=1)
    errors.get_errors(0, first.numel(), [first]).fill_(5.0)
    assert errors.copy_errors().tolist() == [5.0] * 6 + [0.0] * 5
    errors.get_errors(1, 5, others[::-1]).copy_(torch.arange(5.0))  # the last parameter first
    kept = errors.copy_errors()
    assert kept.tolist() == [5.0] * 6 + [3.0, 4.0] + [1.0, 2.0] + [0.0]
    errors.restore_errors(kept)
    assert errors.get_errors(0, 11, [*others, first]).tolist() == [3.0, 4.0, 1.0, 2.0, 0.0] + [5.0] * 6
    assert errors.copy_errors().tolist() == kept.tolist()


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (DDP(compress="topk", density=0.1, bucket_mb=0.001), 3),
        (DDP(compress="randomk", density=0.1, bucket_mb=0.001, reduce="hierarchical"), 4),
    ],
    ids=["topk", "randomk by node"],
)
def test_a_resumed_run_goes_on_with_what_was_left_out(strategy: DDP, size: int, tmp_path: Path) -> None:
    """Compare the bits of 7 steps with 4 steps, a checkpoint and 3 more, over buckets that DDP rebuilds."""

    def trained(steps: int, folder: Path | None, *, save: bool) -> Trained:
        def body(world: World) -> Trained:
            return train(strategy, RunContext(world), steps, folder, save=save, perturbed=not save)

        return run_in_worlds(body, size, local_size=2 if size == 4 else None)[0]

    straight = trained(7, None, save=False)
    trained(4, tmp_path, save=True)
    resumed = trained(7, tmp_path, save=False)
    assert resumed.losses == straight.losses[4:]
    assert_same(resumed.model, straight.model)


def test_what_cannot_keep_its_promise_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"compress=randomk.*reproducibility=elastic\): compression omits different values at each world size",
    ):
        DDP(reduce="ordered", compress="randomk")
    with pytest.raises(ConfigError, match=r"compression is biased\. Set strategy.error_feedback=true"):
        DDP(compress="topk", error_feedback=False)
    with pytest.raises(ConfigError, match=r"strategy.density=0.2 .* on 8 ranks: .* at most 1/8"):
        DDP(compress="topk", density=0.2).roles(create_cluster(8))
    DDP(compress="topk", density=0.2, reduce="hierarchical").roles(create_cluster(8, nodes=2))
    with pytest.raises(ConfigError, match=r"Set precision=bf16"):
        DDP(compress="topk").check_numerics(Numerics(precision="fp16"))
    DDP(compress="randomk", error_feedback=False).check_numerics(Numerics(precision="fp16"))
