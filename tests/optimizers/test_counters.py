"""A step that only creates state leaves all of an optimizer's counters unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from worldsize.optimizers.counters import counters_kept
from worldsize.strategies.train_state import collect_named_state, load_named_state
from worldsize.testing.update_loops import Counting


class Everywhere(Optimizer):
    """Counts its steps in all places, and passes each on to an optimizer with separate groups and state."""

    def __init__(self, params: Any) -> None:
        given = list(params)
        super().__init__(given, {"lr": 0.1, "ticks": torch.zeros(())})
        self.taken, self.tensor, self.by_name, self.listed = 0, torch.zeros(()), {"taken": 0}, [0]
        self.inner = {"sgd": SGD(given, lr=0.1, momentum=0.9, weight_decay=0.5)}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.taken += 1
        self.tensor += 1
        self.by_name["taken"] += 1
        self.listed[0] += 1
        for group in self.param_groups:
            group["ticks"] += 1
            group["late"] = group.get("late", 0) + 1
        self.inner["sgd"].step()

    def counts(self) -> list[Any]:
        group = self.param_groups[0]
        counts = [self.taken, self.tensor, self.by_name["taken"], self.listed[0], group["ticks"], group.get("late", 0)]
        return [int(each) for each in counts]


def test_counters_in_all_places_are_kept_and_no_weight_changes() -> None:
    model = nn.Linear(2, 2)
    before: list[Tensor] = [each.detach().clone() for each in model.parameters()]
    optimizer = Everywhere(model.parameters())
    with counters_kept(optimizer):
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        optimizer.step()
        assert optimizer.counts() == [1] * 6
    assert optimizer.counts() == [0] * 6
    assert not optimizer.inner["sgd"].state
    assert optimizer.inner["sgd"].param_groups[0]["weight_decay"] == 0.5
    for own, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(own, value)


def test_saving_before_the_first_step_counts_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = Counting(model.parameters(), AdamW, warmup=3)
    saved = collect_named_state(model, optimizer)
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    assert [group["step"] for group in saved["param_groups"]] == [0, 0]
    load_named_state(model, optimizer, saved)
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    assert optimizer._taken == 0


class Stateless(Optimizer):
    """Counts its steps, in a group and in an attribute, and is otherwise stateless."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "taken": 0})
        self.taken = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.taken += 1
        self.param_groups[0]["taken"] += 1


def test_saving_an_optimizer_without_state_counts_none() -> None:
    model = nn.Linear(2, 2)
    optimizer = Stateless(model.parameters())
    optimizer.step()
    saved = collect_named_state(model, optimizer)
    assert (optimizer.taken, optimizer.param_groups[0]["taken"]) == (1, 1)
    assert saved["param_groups"][0]["taken"] == 1
    load_named_state(model, optimizer, saved)
    assert (optimizer.taken, optimizer.param_groups[0]["taken"], optimizer.param_groups[0]["lr"]) == (1, 1, 0.1)
