"""A survivor in a healing gang repeats a step from the state at the step's beginning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.strategies.test_gathered_features import Chosen, batches_of
from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.core import Reduction, RunContext, Strategy, World
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.gathered_features import GatheredFeatures
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.contract import StrategyContract
from worldsize.testing.worlds import run_in_worlds

NAMES = ("ddp", "zero", "fsdp", "hsdp", "mesh")


@pytest.mark.parametrize("reduce", ["ordered", "flat"])
def test_a_step_that_ends_before_its_update_changes_nothing(reduce: Reduction) -> None:
    class Healing(StrategyContract):
        strategy = DDP(reduce=reduce, on_failure="heal")

    Healing().test_a_step_that_ends_before_its_update_changes_nothing()


@pytest.mark.parametrize("strategy", [DDP, ZeRO, FSDP, partial(FSDP, shard=2), Mesh], ids=NAMES)
def test_a_repeated_step_begins_with_what_its_recipe_kept_before(
    strategy: Callable[..., Strategy], tmp_path: Path
) -> None:
    class Healing(StrategyContract): ...

    Healing.strategy, Healing.sizes = strategy(reduce="ordered", on_failure="heal"), (2,)
    Healing().test_values_that_a_recipe_keeps_outlast_restarts_and_healing(tmp_path)


@pytest.mark.parametrize("reduce", ["ordered", "flat"])
def test_a_step_that_ends_before_its_first_pass_does_not_undo_the_one_before(
    reduce: Reduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(world: World) -> list[str]:
        replica = DDP(reduce=reduce, on_failure="heal").replica(Chosen(), RunContext(world, logical_ranks=2))
        batches = [batches_of(Chosen())[world.rank]]
        replica.step(batches)
        before = {name: each.clone() for name, each in split_tensors(replica.state())[0].items()}
        monkeypatch.setattr(GatheredFeatures, "gather_features", lost)
        with pytest.raises(ConnectionError):
            replica.step(batches)
        after = split_tensors(replica.state())[0]
        return [name for name, each in before.items() if not each.equal(after[name])]

    def lost(*_: object) -> None:
        raise ConnectionError

    assert run_in_worlds(body, 2) == [[], []]
