"""Operations are recorded by logical rank, so that runs with different numbers of processes are comparable."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worldsize.core import Loss, MicroBatch, Recipe, RunContext, Strategy, World
from worldsize.data.data_wait import StopBetweenSteps
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.recording import RecordingReplica, stop_after
from worldsize.record.first_difference import find_first_difference, find_first_step
from worldsize.record.operations import list_streams
from worldsize.strategies.ddp import DDP
from worldsize.strategies.single import Single
from worldsize.testing.recipes import Chain, TwoPlayers
from worldsize.testing.worlds import run_in_worlds

RANKS, STEPS = 4, 3  # logical ranks


@dataclass(frozen=True)
class ScaledLast(Chain):
    """A chain whose last logical rank scales its loss in the last step."""

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        loss = super().micro_batch_loss(model, batch)
        assert isinstance(loss, Tensor)
        return loss * 1.5 if (batch.logical_rank, batch.step) == (RANKS - 1, STEPS) else loss


def train(
    world: World, recipe: Recipe, strategy: Strategy, folder: Path | None, *, resumes: bool = False
) -> list[Tensor]:
    """Train, record the last step unless ``folder`` is None, and return the weights.

    ``resumes``: load the state again before the last step.
    """
    inner = strategy.replica(recipe, RunContext(world, logical_ranks=RANKS, workers=world.size))
    recorded = partial(RecordingReplica, inner, recipe, rank=world.rank, step=STEPS, saved=None)
    replica = inner if folder is None else recorded(folder)
    order = Order(3, 24, RANKS, assign_logical_ranks(world.rank, world.size, RANKS))
    batches = micro_batches(recipe.data("train"), order, world.device)
    for step in range(1, STEPS + 1):
        if resumes and step == STEPS:
            replica.load(replica.state())
        replica.step(next(batches))
    return [weight.clone() for weight in inner.trained_weights().values()]


def record(folder: Path, recipe: Recipe, strategy: Strategy, processes: int, *, resumes: bool = False) -> Path:
    run_in_worlds(lambda world: train(world, recipe, strategy, folder, resumes=resumes), processes)
    return folder


@pytest.mark.parametrize("recipe", [Chain(), TwoPlayers()], ids=lambda each: type(each).__name__)
def test_a_step_is_recorded_alike_at_one_and_two_processes(recipe: Recipe, tmp_path: Path) -> None:
    one = record(tmp_path / "one", recipe, Single(reduce="ordered"), 1)
    two = record(tmp_path / "two", recipe, DDP(reduce="ordered"), 2)
    ranks = [f"rank_{rank:05d}" for rank in range(RANKS)]
    assert list_streams(one) == ["process_00000", *ranks]
    assert list_streams(two) == ["process_00000", "process_00001", *ranks]
    assert find_first_step(one, two, until=9) == 9
    assert find_first_difference(one, two, step=STEPS, same_processes=False) is None


def test_a_difference_in_one_logical_rank_is_found_in_another_process(tmp_path: Path) -> None:
    one = record(tmp_path / "one", Chain(), Single(reduce="ordered"), 1)
    two = record(tmp_path / "two", ScaledLast(), DDP(reduce="ordered"), 2)
    assert find_first_step(one, two, until=9) == STEPS
    found = find_first_difference(one, two, step=STEPS, same_processes=False)
    assert found is not None
    assert found.stream == f"rank_{RANKS - 1:05d}"
    assert found.second is not None
    assert (found.second.name, found.second.phase) == ("aten.mul.Tensor", "forward")
    assert found.second.line.startswith("tests/loop/test_recording.py:")


@pytest.mark.parametrize("recipe", [Chain(), TwoPlayers()], ids=lambda each: type(each).__name__)
def test_the_same_step_of_two_processes_has_no_difference(recipe: Recipe, tmp_path: Path) -> None:
    one, two = (record(tmp_path / name, recipe, DDP(), 2) for name in ("one", "two"))
    assert find_first_difference(one, two, step=STEPS) is None


@pytest.mark.parametrize("recipe", [Chain(), TwoPlayers()], ids=lambda each: type(each).__name__)
def test_recording_does_not_change_the_trained_weights(recipe: Recipe, tmp_path: Path) -> None:
    world = World.create_single(torch.device("cpu"))
    plain, recorded = (train(world, recipe, Single(), folder) for folder in (None, tmp_path))
    assert all(map(torch.equal, plain, recorded))


def test_the_discarded_pass_of_a_resumed_ddp_is_not_recorded(tmp_path: Path) -> None:
    one, two = (record(tmp_path / str(resumes), Chain(), DDP(), 2, resumes=resumes) for resumes in (False, True))
    assert find_first_difference(one, two, step=STEPS) is None


def test_a_recipe_keeps_the_methods_that_it_has_set_itself(tmp_path: Path) -> None:
    recipe = Chain()
    own = recipe.micro_batch_loss
    vars(recipe)["micro_batch_loss"] = own
    train(World.create_single(torch.device("cpu")), recipe, Single(), tmp_path)
    assert vars(recipe)["micro_batch_loss"] is own
    assert "micro_batch_updates" not in vars(recipe)


def test_training_stops_after_the_recorded_step() -> None:
    steps: Any = stop_after("abcdef", 5, first=3)
    assert [next(steps), next(steps)] == ["a", "b"]
    with pytest.raises(StopBetweenSteps):
        next(steps)
