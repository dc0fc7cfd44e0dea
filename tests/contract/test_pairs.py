"""Every strategy resumes from the checkpoint of every other one, at a different world size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.runs import Once
from worldsize.core import RunContext, Strategy, World
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.contract import assert_same
from worldsize.testing.training import Trained, train
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

STRATEGIES: dict[str, Strategy] = {
    "single": Single(),
    "ddp": DDP(),
    "int8": DDP(reduce="hierarchical", compress="int8"),
    "powersgd": DDP(compress="powersgd"),
    "zero": ZeRO(),
    "fsdp": FSDP(),
    "hsdp": FSDP(shard=2),
    "mesh": Mesh(tensor=2),
}


@pytest.fixture(scope="module")
def saved(once: Once) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Each strategy's checkpoint folder and weights after four steps on four processes of two nodes."""
    root = once("the checkpoints of all strategies", _save_all)
    return {name: (root / name, torch.load(root / f"{name}.pt")) for name in STRATEGIES}


def _save_all(root: Path) -> None:
    for name, strategy in STRATEGIES.items():
        (root / name).mkdir()
        torch.save(dict(_saved(strategy, root / name).model), root / f"{name}.pt")


def _saved(strategy: Strategy, folder: Path) -> Trained:
    size = 1 if isinstance(strategy, Single) else 4
    return run_in_worlds(
        lambda world: train(strategy, RunContext(world), 4, folder, save=True), size, local_size=min(size, 2)
    )[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_resumes_from_the_checkpoint_of_every_strategy(
    saved: dict[str, tuple[Path, dict[str, Tensor]]], name: str
) -> None:
    strategy = STRATEGIES[name]

    def load_all(world: World) -> list[Trained]:
        return [train(strategy, RunContext(world), 4, folder) for folder, _ in saved.values()]

    size = 1 if name == "single" else 2
    loaded = run_in_worlds(load_all, size)[0]
    for result, (_, weights) in zip(loaded, saved.values(), strict=True):
        assert_same(result.model, weights)
