"""Every cause of a difference between a port's losses and the program's is found and named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.testing.token_port import Port, Program, Sequences, groups, net, pad, told
from worldsize.core import Numerics
from worldsize.testing import PortConfig, same_losses


def shuffled_alike(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
    rows = Sequences().rows
    own = [pad(rows[first : first + 8]) for first in range(0, 48, 8)]
    return Program()(model, (row for row, _ in zip(own, batches, strict=False)))


def deeper(_: nn.Module) -> nn.Module:
    return nn.Sequential(*net(), nn.Linear(20, 20))


def frozen(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([each for each in groups(model)[:1]], lr=0.01)


PLANTED: dict[str, tuple[Any, list[str]]] = {
    "order": (shuffled_alike, ["step 1 on", "the order of samples"]),
    "initial weights": (
        Program(own_model=deeper),
        ["step 1 on", "does not start from the passed model"],
    ),
    "schedule one ahead": (Program(early=1), ["step 2 on", "one step ahead"]),
    "schedule one behind": (Program(early=-1), ["step 3 on", "one step behind"]),
    "decay of all": (
        Program(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)),
        [
            "step 2 on",
            "step 1 differs in 3 of 7 tensors: 1.weight, 2.bias, 5.bias",
            "decays all weights, including biases and norms",
        ],
    ),
    "other decay": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model, decay=0.3), lr=0.01)),
        ["step 2 on", "weight decay: the reference decays these weights by 0.002 more"],
    ),
    "usual decay": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model, decay=0.0), lr=0.01)),
        ["step 2 on", "decays nothing"],
    ),
    "rate": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model, decay=0.0), lr=0.03)),
        ["step 2 on", "The update of step 1 differs in all tensors"],
    ),
    "left out": (Program(optimizer=frozen), ["step 2 on", "does not train 1.weight, 1.bias, 2.bias, 5.bias"]),
    "betas": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model), lr=0.01, betas=(0.9, 0.95))),
        ["step 3 on", "betas=(0.9, 0.95)"],
    ),
    "no zero_grad": (Program(zero_grad=False), ["does not zero gradients"]),
    "sum": (Program(times=8.0), ["8 times the recipe's, the number of samples"]),
    "pieces": (Program(pieces=3), ["2 losses for 6 steps and 6 micro-batches", "micro_batches"]),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found_and_named(mistake: str) -> None:
    reference, words = PLANTED[mistake]
    text = told(Port(), reference)
    assert [word for word in words if word not in text] == [], text


def test_dropout_is_told_from_the_batch_and_the_weights() -> None:
    recipe = Port(dropout=0.3)
    assert "Cause: dropout: the losses match without dropout." in told(recipe, Program(draws=True))
    assert "without dropout. Check whether its model is in evaluation mode" in told(
        recipe, Program(own_model=nn.Module.eval)
    )
    assert "the recipe's model has none" in told(Port(), Program(own_model=dropping))


def dropping(model: nn.Module) -> nn.Module:
    own = net(0.3)
    own.load_state_dict(model.state_dict())
    return own


def test_a_mean_of_means_is_told_from_a_mean_over_all() -> None:
    config = PortConfig(batch_size=12, micro_batches=4, steps=4)
    same_losses(Port(weighted=False), Program(pieces=4, means=True), config, tolerance=1e-5)
    averaged = told(Port(), Program(pieces=4, means=True), config)
    assert "the reference averages the means of its micro-batches" in averaged
    summed = told(Port(weighted=False), Program(pieces=4), config)
    assert "the reference's loss is the mean over the whole batch of a step" in summed


def test_clipping_on_one_side_is_named() -> None:
    clipped = PortConfig(batch_size=8, steps=6, numerics=Numerics(clip_norm=0.01))
    same_losses(Port(), Program(clip=0.01), clipped)
    assert "the reference does not clip gradients, but the recipe clips to a norm of 0.01" in told(
        Port(), Program(), clipped
    )


def test_batches_that_are_not_taken_are_named() -> None:
    def own_data(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
        return iter(list(Program()(model, iter([pad(Sequences().rows[:8])] * 6))))

    def other_use(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
        return Program()(model, (pad(Sequences().rows[:8]) for _ in batches))

    assert "without using the passed batches" in told(Port(), own_data)
    assert "its loss does not depend on them" in told(Port(), other_use)


def test_sums_in_another_order_are_rounding() -> None:
    in_pieces = Program(pieces=4)
    text = told(Port(), in_pieces, PortConfig(batch_size=8, micro_batches=4, steps=6), tolerance=0.0)
    assert "Cause: probably rounding" in text


def test_another_loss_is_named_last() -> None:
    def smoothed(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
        for rows_bt in batches:
            logits = model(rows_bt[:, :-1]).flatten(0, 1)
            yield F.cross_entropy(logits, rows_bt[:, 1:].flatten(), ignore_index=0, label_smoothing=0.2)

    assert "Cause: the loss: with the same weights, the same batch and no dropout" in told(Port(), smoothed)
