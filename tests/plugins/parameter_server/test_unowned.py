"""Weights without a server must not change on a worker: other processes would not see it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plugins.parameter_server.task_loop import UnownedWeights, create_worker_watch
from worldsize.core import ConfigError, RunContext, World


class Counting(nn.Module):
    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1), persistent=persistent)
        self.seen: Tensor


@pytest.mark.parametrize("how", ["in place", "anew"])
def test_a_changed_buffer_is_named(how: str) -> None:
    model = nn.Sequential(Counting())
    unowned, counting = UnownedWeights(model), model[0]
    assert isinstance(counting, Counting)
    unowned.check_unchanged()
    if how == "in place":
        counting.seen += 1
    else:
        counting.seen = counting.seen + 1
    with pytest.raises(ConfigError, match=r"training changed 0\.seen, .* Use strategy=ddp, or register a cache"):
        unowned.check_unchanged()


def test_a_changed_frozen_parameter_is_named() -> None:
    model = Counting()
    unowned = UnownedWeights(model)
    model.frozen.detach().lerp_(model.layer.weight[0].detach(), 0.5)
    with pytest.raises(ConfigError, match="training changed frozen"):
        unowned.check_unchanged()


def test_trained_weights_and_buffers_that_are_not_saved_may_change() -> None:
    model = Counting(persistent=False)
    unowned = UnownedWeights(model)
    model.seen += 1
    model.layer.weight.detach().add_(1)
    unowned.check_unchanged()


def test_a_loss_of_a_worker_that_communicates_is_told_that_there_is_no_group() -> None:
    watch = create_worker_watch(nn.Linear(2, 2), RunContext(World.create_single(torch.device("cpu"))))
    with (
        pytest.raises(ConfigError, match=r"this strategy has no process group\. .* use strategy=ddp"),
        watch.watching(),
    ):
        dist.all_reduce(torch.ones(1))
