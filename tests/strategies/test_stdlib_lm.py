"""Sharded strategies train the language model to the loss of a plain PyTorch loop, on 2, 3, 4 and 8 processes."""

from __future__ import annotations

from functools import cache
from typing import cast

import pytest
import torch
from torch.optim import Optimizer

from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.core import RunContext, Strategy, World
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.contract import assert_close
from worldsize.testing.training import STEPS, Trained, reference, train
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy


def sgd(parameters: object) -> Optimizer:
    return torch.optim.SGD(cast("list[torch.Tensor]", parameters), lr=0.3, momentum=0.9)


class _Seeded(StdlibLM):
    """A recipe whose model has the same initial weights in every process."""

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return super().model()


RECIPE = _Seeded(32, 2, 4, 16, 0.0, 400, sgd)
STRATEGIES: dict[str, Strategy] = {
    "zero": ZeRO(),
    "fsdp": FSDP(),
    "hsdp": FSDP(shard="node"),
    "mesh": Mesh(),
}


@cache
def expected() -> Trained:
    return reference(RECIPE)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fsdp", 2),
        ("fsdp", 3),
        ("fsdp", 4),
        ("fsdp", 8),
        ("zero", 3),
        ("zero", 8),
        ("hsdp", 4),
        ("hsdp", 8),
        ("mesh", 3),
    ],
)
def test_the_loss_after_twenty_steps_is_that_of_one_process(name: str, size: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected()
    finally:
        torch.set_num_threads(threads)

    def body(world: World) -> Trained:
        return train(STRATEGIES[name], RunContext(world), STEPS, recipe=RECIPE)

    result = run_in_worlds(body, size, local_size=2 if size % 2 == 0 else None)[0]
    assert_close("loss", result.losses[-1], expected().losses[-1], 1e-5)
    assert_close("bits per byte", result.error, expected().error, 1e-5)
