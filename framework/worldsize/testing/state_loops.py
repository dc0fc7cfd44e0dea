"""Programs with state beyond trained parameters: counters, queues, averages, bounded rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import Batch, BufferRule, Concatenated
from worldsize.testing.loops import Case, Loop


class _Counting(nn.Module):
    """A linear layer that counts samples and stores the last 32 inputs in a ring buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(32, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs_bi: Tensor) -> Tensor:
        if self.training:
            places = (int(self.pointer) + torch.arange(len(inputs_bi))) % len(self.queue)
            self.queue[places] = inputs_bi
            self.pointer[0] = (int(self.pointer) + len(inputs_bi)) % len(self.queue)
            self.seen += len(inputs_bi)
            self.average = 0.9 * self.average + 0.1 * inputs_bi.mean(0)
        output: Tensor = self.layer(inputs_bi)
        return output

    queue: Tensor
    pointer: Tensor
    seen: Tensor
    average: Tensor


@dataclass(frozen=True)
class _Counters(Loop):
    declares: bool = True

    def build_net(self) -> nn.Module:
        return _Counting()

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        rules: dict[str, BufferRule] = {"seen": "sum", "average": "mean", "queue": Concatenated(pointer="pointer")}
        return rules if self.declares else {}


class _Taught(nn.Module):
    """A student and a teacher whose weights are an average of the student's."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs_bi: Tensor) -> Tensor:
        output: Tensor = self.student(inputs_bi) + 0.5 * self.teacher(inputs_bi)
        return output

    @torch.no_grad()
    def update_teacher(self, how: str) -> None:
        for weight, average in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            if how == "assigned":
                average.data = average.data * 0.9 + weight.data * 0.1
            elif how == "data":
                average.data.mul_(0.9).add_(weight.data, alpha=0.1)
            else:
                average.mul_(0.9).add_(weight, alpha=0.1)


@dataclass(frozen=True)
class _Teacher(Loop):
    """Updates the teacher in place, through ``data`` or by assignment (``how``), in a hook or the loss."""

    how: str = "in place"
    in_loss: bool = False

    def build_net(self) -> nn.Module:
        return _Taught()

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        if not self.in_loss:
            follow = [module for module in model.modules() if isinstance(module, _Taught)]

            def update_teachers(*_: object) -> None:
                for each in follow:
                    each.update_teacher(self.how)

            optimizer.register_step_post_hook(update_teachers)
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.in_loss:
            for module in model.modules():
                if isinstance(module, _Taught):
                    module.update_teacher(self.how)
        return super().loss(model, batch)


@dataclass(frozen=True)
class _Clipped(Loop):
    """Clips weights in each computation of the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
        return super().loss(model, batch)


class _Rows(nn.Module):
    """An embedding with bounded row norms."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(16, 4, max_norm=0.4), nn.Linear(4, 1)

    def forward(self, inputs_bi: Tensor) -> Tensor:
        output: Tensor = self.out(self.rows((inputs_bi[:, 0] * 8 + 8).long().clamp(0, 15)))
        return output


@dataclass(frozen=True)
class _Bounded(Loop):
    def build_net(self) -> nn.Module:
        return _Rows()


def _train_and_evaluate(case: Case, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """Train in a plain loop, then evaluate once, since ``max_norm`` also renormalizes rows in evaluation."""
    recipe = case.recipe
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        recipe.loss_at(model, batch, step).backward()  # type: ignore[union-attr]
        optimizer.step()
    recipe.evaluate(model, recipe.data("test")[:])
    return model.state_dict()


STATES: Sequence[Case] = (
    Case("declared-buffers", _Counters()),
    Case("undeclared-buffers", _Counters(declares=False)),
    Case("teacher-in-a-hook", _Teacher()),
    Case("teacher-data-in-a-hook", _Teacher(how="data")),
    Case("teacher-assigned-in-a-hook", _Teacher(how="assigned")),
    Case("teacher-in-the-loss", _Teacher(in_loss=True)),
    Case("teacher-data-in-the-loss", _Teacher(how="data", in_loss=True)),
    Case("teacher-assigned-in-the-loss", _Teacher(how="assigned", in_loss=True)),
    Case("clipped-in-the-loss", _Clipped()),
    Case("bounded-rows", _Bounded(), reference=_train_and_evaluate),
)
