"""A loss without a gradient, or with a different form on one rank, ends the run at once, with the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.own_recipe import write_recipe
from worldsize.core import Batch, ConfigError, LossOutput, RunContext, Update, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.strategies.loss_record import trainable
from worldsize.strategies.single import Single
from worldsize.testing.loops import Loop
from worldsize.testing.update_loops import SharedLoss

_TEXT = "# @package _global_\n# own\nsteps: 4\nbatch_size: 24\nrecipe: {_target_: worldsize.testing.loss_loops.KIND}\n"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.zeros(()), "the recipe's loss does not require grad"),
        (None, "the recipe's loss returned None. Return the mean"),
        (LossOutput(3.5), "the recipe's loss returned an object of type float. Return the mean"),  # type: ignore[arg-type]
        (torch.zeros(3, requires_grad=True), r"a tensor of shape \[3\], expected a scalar"),
        ((torch.zeros(()), torch.ones(())), "does not require grad"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainable(loss)


@dataclass(frozen=True)
class OneOfTwoForms(SharedLoss):
    """Updates both optimizers by a summed loss, and then one of them by a mean."""

    def updates(self, model: nn.Module, batch: Batch, step: int) -> Iterable[Update]:
        loss = Loop().loss(model, batch)
        yield ("others", "matrices"), (loss * len(batch[0]), torch.tensor(float(len(batch[0]))))
        yield "matrices", Loop().loss(model, batch)


def test_an_optimizer_may_have_other_forms_of_loss_alone_and_with_another() -> None:
    recipe = OneOfTwoForms()
    replica = Single().replica(recipe, RunContext(World.create_single(torch.device("cpu"))))
    for batches in islice(micro_batches(recipe.data("train"), Order(3, 24, 1, (0,)), torch.device("cpu")), 2):
        replica.step(batches)


@pytest.mark.parametrize(
    ("kind", "message", "step"),
    [
        ("ConstantLoss", "does not require grad", 1),
        ("LateConstantLoss", "does not require grad", 3),
        ("ChangingForm", "(sum, weight)", 1),
    ],
)
def test_such_a_loss_is_refused_at_once_or_its_rank_and_step_are_named(
    train: Any, tmp_path: Path, kind: str, message: str, step: int
) -> None:
    write_recipe(tmp_path, "own", "", own=_TEXT.replace("KIND", kind))
    words = (
        "log_every=1",
        "cluster.processes=2",
        "cluster.threads=1",
        "checkpoint=none",
        "allow_targets=[worldsize.testing]",
    )
    run = train("recipe=own", *words)
    if step == 1:  # refused, as before a start
        assert (run.code, run.folder) == (2, None)
        assert message in run.error
        return
    assert run.code == 1
    first, sentence, *_ = run.error.splitlines()
    assert first.startswith("worker ")
    failed = re.search(r" failed at step (\d+):", first)
    assert failed is not None
    assert int(failed[1]) >= step
    assert len(run.steps()) < int(failed[1])
    assert message in sentence
    assert "Traceback" not in run.error
