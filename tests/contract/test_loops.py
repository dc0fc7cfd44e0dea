"""Strategies match a plain loop or refuse it; with ordered sums, every world size gives the same digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worldsize.core import Strategy
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.cases import CASES
from worldsize.testing.loops import Case, find_faults, outcomes
from worldsize.testing.loss_loops import GRADIENT_CASES, Experts

pytestmark = pytest.mark.heavy

# the other cases need separate processes, and these strategies refuse them as others do
TOGETHER = [case for case in CASES if not case.apart]
GATHERING = {  # parameters for a loss, within a copy of the model
    *("methods", "items", "penalty", "early-penalty", "named-penalty", "block-penalty"),
    *("repeated-part", "input-derivative", "adversarial", "not-copied"),
}
COPIES = [case for case in TOGETHER if case.name not in GATHERING]
ORDERED: dict[str, tuple[Strategy, int, Sequence[Case]]] = {
    "single": (Single(reduce="ordered"), 1, CASES),
    "ddp": (DDP(reduce="ordered"), 2, CASES),
    "ddp that finds unused parameters": (DDP(reduce="ordered", find_unused_parameters=True), 4, GRADIENT_CASES),
    "zero": (ZeRO(reduce="ordered"), 2, TOGETHER),
    "fsdp": (FSDP(reduce="ordered"), 2, CASES),
    "fsdp in small units": (FSDP(reduce="ordered", wrap="size", wrap_parameters=1), 2, GRADIENT_CASES),
    "hsdp": (FSDP(reduce="ordered", shard=2), 4, COPIES),
    "mesh": (Mesh(reduce="ordered"), 2, CASES),
}
LOGICAL_RANKS = 4


@pytest.mark.timeout(900)  # several hundred small runs
def test_ordered_sums_give_every_case_one_digest_or_a_refusal() -> None:
    ended = {
        name: outcomes(strategy, cases, size, logical_ranks=LOGICAL_RANKS)
        for name, (strategy, size, cases) in ORDERED.items()
    }
    wrong = [f"{name}: {line}" for name, each in ended.items() for line in find_faults(ORDERED[name][2], each)]
    for case in CASES:
        outcome = {name: each[case.name] for name, each in ended.items() if case.name in each}
        trained = {name: each.weights for name, each in outcome.items() if not each.refusal}
        first = next(iter(trained.values()), {})
        wrong += [
            f"{case.name}: other bits under {name}, in {key}"
            for name, weights in trained.items()
            for key, value in first.items()
            if not torch.equal(weights[key], value)
        ]
    assert not wrong, "\n".join(wrong)


def test_a_mesh_of_data_and_summed_shards_train_what_a_plain_loop_trains() -> None:
    summed = FSDP(wrap="size", wrap_parameters=1, accumulate="sharded")
    for strategy, cases in ((Mesh(), GRADIENT_CASES), (summed, TOGETHER)):
        wrong = find_faults(cases, outcomes(strategy, cases, 2))
        assert not wrong, "\n".join((str(strategy), *wrong))


@dataclass(frozen=True)
class LateExperts(Experts):
    """All samples use one expert in the first three steps; later ones use the others, each in some micro-batches."""

    def loss_at(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        return self.loss(model, (batch[0], batch[1], batch[2] * (step > 3)))


def test_parameters_that_some_ranks_use_from_a_later_step_on_are_trained_as_in_a_plain_loop() -> None:
    case = Case("late-experts", LateExperts())
    first = outcomes(Single(reduce="ordered"), [case], 1, logical_ranks=LOGICAL_RANKS)[case.name].weights
    for reduce in ("flat", "ordered"):
        replicated = (kind(reduce=reduce, find_unused_parameters=True) for kind in (DDP, ZeRO))
        for strategy in (*replicated, FSDP(reduce=reduce), Mesh(reduce=reduce)):
            ended = outcomes(strategy, [case], 2, logical_ranks=LOGICAL_RANKS)
            assert not find_faults([case], ended), strategy
            assert not ended[case.name].refusal, strategy
            if reduce == "ordered":
                assert all(torch.equal(value, first[name]) for name, value in ended[case.name].weights.items()), (
                    strategy
                )
