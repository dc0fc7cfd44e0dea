"""An audit finds each flipped bit of a gradient, and names its process; healthy steps are never reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from worldsize.core import BitMismatch, FlipTarget, IntegrityConfig, Numerics, Recipe, Strategy, World
from worldsize.errors import BitMismatchError
from worldsize.loop.bit_flips import Flip
from worldsize.strategies.bit_mismatch import Mismatch, report_mismatch
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.flips import FlipCase, FlipResult, FlipTrial, draw_flips, run_flips
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds
from worldsize.worker.replica_check import ReplicaCheck

BATCH = 24
PASSES: tuple[FlipTarget, ...] = ("batch", "activation", "product", "gradient")


@dataclass(frozen=True)
class DrawingChain(Chain):
    """A :class:`Chain` with dropout and a batch norm."""

    depth: int = 1

    def model(self) -> nn.Module:
        first, *others = super().model().children()
        return nn.Sequential(first, nn.BatchNorm1d(16), nn.Dropout(0.2), *others)


STRATEGIES: dict[str, tuple[DDP | ZeRO | FSDP, tuple[FlipTarget, ...]]] = {
    "ddp": (DDP(reduce="ordered"), (*PASSES, "weight")),
    "zero": (ZeRO(reduce="ordered"), (*PASSES, "weight")),
    "fsdp": (FSDP(reduce="ordered"), PASSES),  # all processes gather a wrong shard alike
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_flip_that_changes_a_gradient_is_found_and_its_process_named(name: str) -> None:
    strategy, targets = STRATEGIES[name]
    cases = draw_flips(20, 3, targets, values=12, seed=5)
    results = run_in_worlds(partial(run_trial, strategy, cases), 3)[0]
    assert not any(result.is_false_alarm for result in results)
    changed = [result for result in results if result.is_changed]
    assert len(changed) > 10
    for result in changed:
        (event, *others) = result.found
        assert event is not None
        assert others == [event, event]
        assert (event.ranks, event.step) == ((result.case.rank,), results.index(result) + 2), result
    masked = [result for result in results if not result.is_changed]
    assert all(event is None or event.tensor.startswith("buffer") for each in masked for event in each.found)


def test_a_mesh_names_the_ranks_that_share_a_wrong_replica() -> None:
    """A wrong product of one tensor-parallel rank reaches both; a gradient that flips later stays in its rank."""
    flips = [Flip("product", bit=22, skip=5), Flip("gradient", bit=22)]
    cases = [FlipCase(2, flip) for flip in flips]
    strategy = Mesh(reduce="ordered", data=3, tensor=2)
    by_rank = run_in_worlds(partial(run_trial, strategy, cases, logical_tensor=2), 6)
    assert all(results == by_rank[0] for results in by_rank)
    product, gradient = by_rank[0]
    assert [product.is_false_alarm, gradient.is_false_alarm, product.is_changed] == [False, False, True]
    assert None not in product.found
    assert {event.ranks for event in product.found if event} in ({(2,)}, {(2, 3)})
    assert [event.ranks for event in gradient.found if event] == [(2,)] * 6


def run_trial(
    strategy: Strategy, cases: Sequence[FlipCase], world: World, *, logical_tensor: int = 1
) -> list[FlipResult]:
    recipe = Chain(1) if logical_tensor > 1 else DrawingChain()
    return list(run_flips(strategy, recipe, world, cases, batch_size=BATCH, logical_tensor=logical_tensor))


def test_of_two_processes_the_one_that_erred_once_is_named_and_a_lasting_error_names_both() -> None:
    once, lasting = Flip("gradient", index=3, bit=20), Flip("gradient", index=3, bit=20, repeats=True)
    cases = [FlipCase(0, once), FlipCase(1, once), FlipCase(1, lasting)]
    results = run_in_worlds(partial(run_trial, DDP(reduce="ordered"), cases), 2)[0]
    found = [result.found[0] for result in results]
    assert [(event.ranks, event.suspects) for event in found if event] == [((0,), ()), ((1,), ()), ((), (0, 1))]


def test_the_event_names_tensor_and_logical_rank() -> None:
    """Process 1 of 3 has logical ranks 1 and 4, and first audits process 2, which has 2 and 5."""
    case = FlipCase(1, Flip("gradient", name="0.weight", bit=1, skip=3))
    (result,) = run_in_worlds(partial(run_trial, DDP(reduce="ordered"), [case]), 3)[0]
    assert {(event.tensor, event.logical_rank) for event in result.found if event} == {("gradient of 0.weight", 4)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_warning_leaves_the_step_as_it_is(name: str) -> None:
    """The votes must not change what the step has already summed: only the auditor's own pass was wrong."""

    def train(case: FlipCase | None, world: World) -> list[torch.Tensor]:
        trial = FlipTrial(STRATEGIES[name][0], DrawingChain(), world, batch_size=BATCH)
        if case is not None:
            trial.plan(case, 2)
        trial.run_step(2)
        assert bool(trial.events) == (case is not None)
        return trial.clone_state()

    cases = (None, FlipCase(1, Flip("gradient", index=0, bit=30)))
    clean, flipped = (run_in_worlds(partial(train, case), 3)[1] for case in cases)
    assert all(torch.equal(one, other) for one, other in zip(clean, flipped, strict=True))


@pytest.mark.parametrize("name", STRATEGIES)
def test_audited_steps_have_the_bits_of_others(name: str) -> None:
    """Logical ranks that processes do not divide, too: some then compute a pass that nobody compares."""
    strategy = replace(STRATEGIES[name][0], on_failure="heal")

    def train(audit: float, world: World) -> list[torch.Tensor]:
        trial = FlipTrial(strategy, DrawingChain(), world, batch_size=25, audit=audit, logical_ranks=5)
        for step in range(2, 5):
            trial.run_step(step)
        assert not trial.events
        return trial.clone_state()

    for plain, audited in zip(*(run_in_worlds(partial(train, audit), 3) for audit in (0.0, 1.0)), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, audited, strict=True))


class Caching(nn.Module):
    """Has buffers that are not saved, and depend on the passes so far: a sum, and a cache of varying size."""

    total: torch.Tensor

    def __init__(self, *, varies: bool) -> None:
        super().__init__()
        self.varies = varies
        self.register_buffer("total", torch.zeros(1), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.total += hidden.detach().sum()
        if self.varies:
            self.cache = torch.arange(float(hidden.detach().abs().max() * 10))
        return hidden


@dataclass(frozen=True)
class CachingChain(Chain):
    """A :class:`Chain` with buffers that are not saved, nor used; DDP broadcasts them, so their size must not vary."""

    depth: int = 1
    varies: bool = False

    def model(self) -> nn.Module:
        first, *others = super().model().children()
        return nn.Sequential(first, Caching(varies=self.varies), *others)


@dataclass(frozen=True)
class TwoHeads(Chain):
    """A :class:`Chain` of which each micro-batch uses one of two last layers, and the other gets no gradient."""

    depth: int = 1

    def model(self) -> nn.Module:
        *layers, last = super().model().children()
        return nn.ModuleDict({"body": nn.Sequential(*layers), "one": last, "other": nn.Linear(16, 3)})

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        assert isinstance(model, nn.ModuleDict)
        head = "one" if inputs[0, 0] > 0 else "other"
        return nn.functional.mse_loss(model[head](model["body"](inputs)), targets)


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        (CachingChain(), DDP(reduce="ordered")),
        (CachingChain(varies=True), FSDP(reduce="ordered")),
        (TwoHeads(), DDP(reduce="ordered", find_unused_parameters=True)),
    ],
    ids=["caches in ddp", "caches in fsdp", "unused parameters"],
)
def test_unsaved_buffers_and_unused_parameters_raise_no_alarm_and_keep_the_bits(
    recipe: Recipe, strategy: Strategy
) -> None:
    def train(audit: float, world: World) -> tuple[list[torch.Tensor], list[BitMismatch]]:
        trial = FlipTrial(strategy, recipe, world, batch_size=BATCH, audit=audit)
        for step in range(2, 6):
            trial.plan(FlipCase(1, Flip("gradient", bit=20)) if step == 4 and audit else None, step)
            trial.run_step(step)
        return trial.clone_state(), trial.events

    plain, audited = (run_in_worlds(partial(train, audit), 3) for audit in (0.0, 1.0))
    for (before, _), (after, _) in zip(plain, audited, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert [[(event.step, event.ranks) for event in events] for _, events in audited] == [[(4, (1,))]] * 3


def test_the_audited_steps_are_a_fraction_that_every_process_knows() -> None:
    def list_due(world: World) -> list[int]:
        audit = FlipTrial(DDP(reduce="ordered"), Chain(), world, batch_size=BATCH, audit=0.25).replica._audit  # type: ignore[attr-defined]
        return [step for step in range(1, 4001) if audit.is_due(step)]

    one, other = run_in_worlds(list_due, 2)
    assert one == other
    assert abs(len(one) - 1000) < 3 * (4000 * 0.25 * 0.75) ** 0.5


REPLICAS: dict[str, tuple[Strategy, tuple[FlipTarget, ...]]] = {
    "ddp": (DDP(reduce="ordered"), ("weight", "optimizer")),
    "flat": (DDP(), ("weight", "optimizer")),
    "zero": (ZeRO(), ("weight",)),
}


@pytest.mark.parametrize("name", REPLICAS)
def test_a_flipped_bit_in_the_memory_of_a_copy_is_found_and_its_process_named(name: str) -> None:
    strategy, targets = REPLICAS[name]
    found = run_in_worlds(partial(check_replicas, strategy, targets), 3)
    for events in found:
        assert [event.ranks for event in events] == [(1,)] * len(targets)
        assert [event.tensor.split("/")[0] for event in events] == ["model", "optimizer"][: len(targets)]


def check_replicas(strategy: Strategy, targets: Sequence[FlipTarget], world: World) -> list[BitMismatch]:
    trial = FlipTrial(strategy, DrawingChain(), world, batch_size=BATCH, audit=0.0)
    check = ReplicaCheck(trial.replica, trial.context)
    check.compare(2)
    assert not trial.events
    for step, target in enumerate(targets, 3):
        if world.rank == 1:
            part = "model" if target == "weight" else "optimizer"
            tensor = next(each for name, each in trial.list_state() if name.startswith(part) and each.numel() > 10)
            tensor.view(torch.uint8).reshape(-1)[17] ^= 4
        check.compare(step)
        trial.restore()
    return trial.events


def test_a_buffer_that_all_processes_hold_is_compared_under_fsdp_too() -> None:
    def find(world: World) -> list[BitMismatch]:
        trial = FlipTrial(FSDP(), DrawingChain(), world, batch_size=BATCH, audit=0.0)
        if world.rank == 2:
            mean = next(each for name, each in trial.list_state() if name.endswith("running_mean"))
            mean[3] += 1
        ReplicaCheck(trial.replica, trial.context).compare(2)
        return trial.events

    for (event,) in run_in_worlds(find, 3):
        assert (event.ranks, event.tensor) == ((2,), "model/1.running_mean")


def test_shards_are_compared_with_their_copies_alone() -> None:
    """Of two copies, neither has the majority; without copies, a wrong shard is not seen."""

    def find(strategy: Strategy, world: World) -> list[BitMismatch]:
        return check_replicas(strategy, ("weight",), world)

    for events in run_in_worlds(partial(find, FSDP(reduce="ordered", shard=2)), 4):
        assert [(event.ranks, event.suspects) for event in events] == [((), (1, 3))]
    assert run_in_worlds(partial(find, FSDP(reduce="ordered")), 2) == [[], []]


@pytest.mark.parametrize(
    ("action", "guilty", "expected"),
    [
        ("warn", [1], {"goes on": 3}),
        ("stop", [1], {"other": 2, "guilty": 1}),
        ("stop", [], {"guilty": 3}),
        ("heal", [], {"guilty": 3}),
    ],
)
def test_a_mismatch_ends_what_the_configuration_says(action: str, guilty: list[int], expected: dict[str, int]) -> None:
    def report(world: World) -> str:
        trial = FlipTrial(DDP(reduce="ordered"), Chain(), world, batch_size=BATCH)
        context = replace(trial.context, integrity=IntegrityConfig(on_mismatch=action))  # type: ignore[arg-type]
        assert world.group is not None
        try:
            report_mismatch(context, 7, Mismatch("loss", world.group, {*guilty}, {0, 1, 2}))
        except BitMismatchError as error:
            return "guilty" if error.is_guilty else "other"
        return "goes on"

    assert Counter(run_in_worlds(report, 3)) == expected


def test_steps_in_bf16_are_audited_without_an_alarm() -> None:
    assert run_in_worlds(train_in_bf16, 2) == [[], []]


def train_in_bf16(world: World) -> list[BitMismatch]:
    trial = FlipTrial(
        DDP(reduce="ordered"), DrawingChain(), world, batch_size=BATCH, numerics=Numerics(precision="bf16")
    )
    trial.run_step(2)
    return trial.events
