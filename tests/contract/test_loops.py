"""Strategies train what a plain loop trains, or refuse it; with ordered sums, with one digest at every world size."""

from __future__ import annotations

import torch

from worldsize.core import Strategy
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.cases import CASES
from worldsize.testing.loops import faults, outcomes

ORDERED: dict[str, tuple[Strategy, int]] = {
    "single": (Single(reduce="ordered"), 1),
    "ddp": (DDP(reduce="ordered"), 2),
    "ddp that finds unused parameters": (DDP(reduce="ordered", find_unused_parameters=True), 4),
    "zero": (ZeRO(reduce="ordered"), 2),
    "fsdp": (FSDP(reduce="ordered"), 2),
    "fsdp in small units": (FSDP(reduce="ordered", wrap="size", wrap_parameters=1), 2),
    "mesh": (Mesh(reduce="ordered"), 2),
}
LOGICAL_RANKS = 4


def test_ordered_sums_give_every_case_one_digest_or_a_refusal() -> None:
    ended = {
        name: outcomes(strategy, CASES, size, logical_ranks=LOGICAL_RANKS) for name, (strategy, size) in ORDERED.items()
    }
    wrong = [f"{name}: {line}" for name, each in ended.items() for line in faults(CASES, each)]
    for case in CASES:
        trained = {name: each[case.name].weights for name, each in ended.items() if not each[case.name].refusal}
        first = next(iter(trained.values()), {})
        wrong += [
            f"{case.name}: other bits under {name}, in {key}"
            for name, weights in trained.items()
            for key, value in first.items()
            if not torch.equal(weights[key], value)
        ]
    assert not wrong, "\n".join(wrong)


def test_a_mesh_of_data_and_summed_shards_train_what_a_plain_loop_trains() -> None:
    for strategy in (Mesh(), FSDP(wrap="size", wrap_parameters=1, accumulate="sharded")):
        wrong = faults(CASES, outcomes(strategy, CASES, 2))
        assert not wrong, "\n".join((str(strategy), *wrong))
