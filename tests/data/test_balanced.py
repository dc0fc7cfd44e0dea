"""Batches of similar length have the same samples at every world size, and balance the work of all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from worldsize.config.compose import compose_only
from worldsize.data.loader import micro_batches
from worldsize.data.order import Balanced, Order, assign_logical_ranks
from worldsize.errors import ConfigError
from worldsize.launch.execute import build_checked_settings

CPU, SAMPLES, BATCH, LOGICAL, POOL = torch.device("cpu"), 500, 24, 4, 32


class Texts(TensorDataset):
    """A data set whose sample i is the number i, with a random length."""

    def __init__(self) -> None:
        super().__init__(torch.arange(SAMPLES))
        self.lengths = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(1)).exp().mul(40).ceil().long()


def drawn(steps: int, *, balanced: bool = True, rank: int = 0, size: int = 1, **options: Any) -> list[list[Tensor]]:
    """Return the samples of each step and logical rank of this process."""
    order = Order(7, BATCH, LOGICAL, assign_logical_ranks(rank, size, LOGICAL), balanced)
    batches = islice(micro_batches(Texts(), order, CPU, **options), steps)
    return [[batch.data[0] for batch in step] for step in batches]


def flat(steps: list[list[Tensor]]) -> list[int]:
    return sorted(int(index) for step in steps for batch in step for index in batch)


def padded(steps: list[list[Tensor]]) -> int:
    lengths = Texts().lengths
    return sum(int(lengths[batch].max()) * len(batch) for step in steps for batch in step)


def imbalance(steps: list[list[Tensor]]) -> float:
    """Return the maximum over the mean work of logical ranks, padding included, averaged over steps."""
    lengths = Texts().lengths
    work = torch.tensor([[lengths[batch].max() * len(batch) for batch in step] for step in steps]).double()
    return float((work.max(1).values / work.mean(1)).mean())


@pytest.mark.parametrize("samples", [5, 24, 31, 240, 500, 768, 2000])
def test_every_sample_comes_once_an_epoch_however_many_steps_that_has(samples: int) -> None:
    lengths = torch.randint(1, 90, (samples,), generator=torch.Generator().manual_seed(2))
    order = Order(7, BATCH, LOGICAL, tuple(range(LOGICAL)))

    def plain(step: int) -> Tensor:
        return torch.cat([order.compute_indices(step, rank, samples) for rank in range(LOGICAL)])

    dealt = Balanced(plain, lengths, seed=7, logical_ranks=LOGICAL, epoch=samples)
    epochs = max(2, -(-3 * POOL * BATCH // samples))
    steps = range(1, -(-epochs * samples // BATCH) + 1)
    drawn = [torch.cat([dealt.compute_rank_indices(step, rank) for rank in range(LOGICAL)]) for step in steps]
    for epoch in range(1, epochs + 1):
        before, until = epoch * samples // BATCH, -(-epoch * samples // BATCH)  # the step where it ends is in both
        assert max(torch.cat(drawn[:before] or [torch.tensor([0])]).bincount(minlength=samples).tolist()) <= epoch
        assert min(torch.cat(drawn[:until]).bincount(minlength=samples).tolist()) >= epoch


def test_the_order_stays_what_it_is() -> None:
    """A change draws different samples in every run with length_balanced: it needs a new version of ORDER."""
    lengths = torch.tensor([3, 9, 1, 7, 5, 8, 2, 6, 4, 10])
    order = Order(seed=7, batch_size=4, logical_ranks=1, mine=(0,))

    def plain(step: int) -> Tensor:
        return order.compute_indices(step, 0, 10)

    dealt = Balanced(plain, lengths, seed=7, logical_ranks=2, epoch=10)
    assert [[dealt.compute_rank_indices(step, rank).tolist() for rank in range(2)] for step in (1, 2, 3, 33)] == [
        [[9, 3], [1, 5]],
        [[7, 0], [4, 8]],
        [[9, 2], [1, 6]],
        [[9, 2], [6, 6]],
    ]
    whole = Balanced(
        lambda step: torch.arange(4 * step - 4, 4 * step),
        torch.arange(1000) * 7 % 1000,
        seed=7,
        logical_ranks=2,
        epoch=128,
    )
    assert [[whole.compute_rank_indices(step, rank).tolist() for rank in range(2)] for step in (1, 2, 33)] == [
        [[111, 108], [110, 109]],
        [[63, 60], [62, 61]],
        [[182, 179], [181, 180]],
    ]


def test_every_32_steps_hold_the_same_samples_as_without_balancing() -> None:
    balanced, plain = drawn(3 * POOL), drawn(3 * POOL, balanced=False)
    for first in range(0, 3 * POOL, POOL):
        assert flat(balanced[first : first + POOL]) == flat(plain[first : first + POOL])
    assert flat(balanced[:POOL]) != flat(balanced[POOL : 2 * POOL])


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_is_the_same_at_every_world_size_and_after_a_resumption(size: int) -> None:
    whole = drawn(50)
    for rank in range(size):
        part = drawn(10, rank=rank, size=size, first=40)
        for expected, batches in zip(whole[40:], part, strict=True):
            for logical, batch in zip(assign_logical_ranks(rank, size, LOGICAL), batches, strict=True):
                assert batch.tolist() == expected[logical].tolist()


def test_data_workers_draw_the_same_samples() -> None:
    here, there = drawn(3), drawn(3, workers=1)
    assert [[batch.tolist() for batch in step] for step in here] == [[b.tolist() for b in step] for step in there]


def test_ranks_have_equal_work_and_little_of_it_is_padding() -> None:
    balanced, plain = drawn(2 * POOL), drawn(2 * POOL, balanced=False)
    assert imbalance(plain) > 1.5
    assert imbalance(balanced) < 1.05
    assert padded(balanced) < 0.6 * padded(plain)


def test_short_and_long_steps_come_in_an_order_that_depends_on_the_seed() -> None:
    longest = [max(int(Texts().lengths[batch].max()) for batch in step) for step in drawn(POOL)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_data_without_lengths_are_refused() -> None:
    order = Order(7, BATCH, LOGICAL, (0,), balanced=True)
    with pytest.raises(ConfigError, match="TensorDataset does not have the attribute lengths"):
        next(micro_batches(TensorDataset(torch.arange(9)), order, CPU))
    with pytest.raises(ConfigError, match="a stream"):
        next(micro_batches(iter([1, 2, 3]), order, CPU))


@pytest.mark.parametrize(
    ("words", "refused"), [((), True), (("cluster=torchrun",), False), (("run.evaluates=/a/checkpoint",), False)]
)
def test_only_a_training_run_on_this_machine_looks_at_its_data_before(words: tuple[str, ...], refused: bool) -> None:
    cfg = compose_only(["recipe=digits", "logger=none", "length_balanced=true", *words])
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="does not have the attribute lengths") if refused else nullcontext():
        build_checked_settings(cfg)
    assert torch.equal(torch.get_rng_state(), before)
