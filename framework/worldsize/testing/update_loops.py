"""Small programs with unusual updates or optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import default_collate

from worldsize.core import Batch, Loss, MicroBatch, MultiUpdateRecipe, Numerics, Update
from worldsize.testing.loops import Case, Loop
from worldsize.testing.recipes import ByMetric
from worldsize.testing.training import BATCH


@dataclass(frozen=True)
class SharedLoss(MultiUpdateRecipe):
    """A :class:`Loop` with separate optimizers for matrices and others, and a single loss."""

    def model(self) -> nn.Module:
        return Loop().model()

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        return {
            "matrices": torch.optim.SGD(matrices, lr=0.05, momentum=0.5),
            "others": torch.optim.AdamW(others, lr=0.01),
        }

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        return {name: StepLR(each, place + 2, 0.5) for place, (name, each) in enumerate(optimizers.items())}

    def data(self, split: str) -> Any:
        return Loop().data(split)

    def updates(self, model: nn.Module, batch: Batch, step: int) -> Iterable[Update]:
        yield ("others", "matrices"), Loop().loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        return Loop().evaluate(model, batch)


def train_shared_loss(case: Case, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """Train with one backward pass, joint clipping and one update of both optimizers per step.

    ``batches``: inputs (batch, 4) and targets (batch, 1) of each step.
    """
    recipe, limit = case.recipe, case.numerics.clip_norm
    assert isinstance(recipe, SharedLoss)
    assert limit is not None
    model = recipe.model()
    optimizers = recipe.optimizers(model)
    schedules = recipe.schedules(optimizers)
    for batch in batches:
        model.zero_grad()
        Loop().loss(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        for name, optimizer in optimizers.items():
            optimizer.step()
            schedules[name].step()
    return model.state_dict()


@dataclass(frozen=True)
class ByRank(Loop):
    """The first logical rank adds a loss term: the output for an extra row of each batch."""

    def collate(self, samples: list[Any]) -> Batch:
        inputs, targets = default_collate(samples)
        return torch.cat([inputs, torch.ones(1, 4)]), targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        total, weight = self._compute_loss_sum(model, batch, adds=True)
        return total / weight

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        return self._compute_loss_sum(model, batch.data, adds=batch.logical_rank == 0)

    def _compute_loss_sum(self, model: nn.Module, batch: Batch, *, adds: bool) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        *_, last = outputs = model(inputs)
        total = (outputs[:-1] - targets).square().sum()
        return total + (BATCH * 0.1 * last.square().sum() if adds else last.sum() * 0), torch.tensor(len(targets))

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        inputs, targets = batch
        return super().evaluate(model, (inputs[:-1], targets))


@dataclass(frozen=True)
class Plateau(Loop, ByMetric):
    """The learning rate falls unless an evaluation halves the best error so far.

    One module of the model stays in evaluation mode.
    """

    def build_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9).eval(), nn.Tanh(), nn.Linear(8, 1))

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.3, patience=1, threshold=0.5, cooldown=1)


@dataclass(frozen=True)
class Closures(Loop):
    """The optimizer computes the loss several times per step."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(model.parameters())


@dataclass(frozen=True)
class ByEpoch(Loop):
    """The schedule's ``step`` requires the epoch, as in timm."""

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        schedule: Any = _EpochSchedule()
        return schedule  # type: ignore[no-any-return]


@final
class _EpochSchedule:
    def step(self, epoch: int) -> None:
        """Accept ``epoch``, which torch's schedules do not require."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


UPDATES: Sequence[Case] = (
    Case("shared-loss", SharedLoss(), numerics=Numerics(clip_norm=0.5), reference=train_shared_loss),
    Case("loss-by-logical-rank", ByRank()),
    Case("plateau", Plateau(), steps=9),
    Case("closures", Closures()),
    Case("schedule-by-epoch", ByEpoch()),
)


@final
class Counting(Optimizer):
    """Wraps optimizers for matrices and other parameters, with learning-rate warmup.

    Neither the class of the first optimizer nor ``warmup`` is in its defaults. It counts steps in an attribute, and in
    its options as NumPy integers.
    """

    def __init__(self, params: Iterable[nn.Parameter], kind: Callable[[Any], Optimizer], warmup: int) -> None:
        given = list(params)
        matrices, others = [each for each in given if each.ndim > 1], [each for each in given if each.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.05}]
        super().__init__(groups, {"step": np.int64(0)})
        self._inner: tuple[Optimizer, ...] = (kind(self.param_groups[:1]), SGD(self.param_groups[1:], momentum=0.9))
        self._warmup, self._taken = warmup, 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step both optimizers."""
        self._taken += 1
        for optimizer, group in zip(self._inner, self.param_groups, strict=True):
            optimizer.param_groups, optimizer.state = [group], self.state
            group["step"] += 1
            rate = group["lr"]
            group["lr"] = rate * min(1, (group["step"] + self._taken) / (2 * self._warmup))
            optimizer.step()
            group["lr"] = rate


@final
class Remembering(Optimizer):
    """Optimizer whose step count and decay are saved only by its own ``state_dict``.

    ``by_parameter``: whether to store the sum of each parameter's gradients, too.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, *, by_parameter: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self._taken, self._decay = 0, torch.ones(3)
        own = self.param_groups[0]["params"] if by_parameter else []
        self._sums = {id(each): torch.zeros_like(each) for each in own}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        self._taken += 1
        self._decay = self._decay * 0.9
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self._sums |= {id(each): self._sums[id(each)] + each.grad} if self._sums else {}
                    each.sub_(group["lr"] * self._decay.max().item() * each.grad / self._taken)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, including step count, decay and sums."""
        return {**super().state_dict(), "taken": self._taken, "decay": self._decay, "sums": [*self._sums.values()]}

    def load_state_dict(self, state: Any) -> None:
        """Load a :meth:`state_dict`."""
        self._taken, self._decay = state["taken"], state["decay"]
        self._sums = dict(zip(self._sums, state["sums"], strict=True))
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})


@final
class TrustRatio(Optimizer):
    """Scales updates by parameter norms, like LARS and LAMB; by a joint ratio if ``jointly``."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, jointly: bool) -> None:
        super().__init__(params, {"lr": lr})
        self._jointly = jointly

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            ratios = [each.norm() / (1 + each.grad.norm()) for each in trained]
            if self._jointly:
                ratios = [sum(ratios, torch.zeros(())) / len(ratios) for _ in ratios]
            for each, ratio in zip(trained, ratios, strict=True):
                each.sub_(group["lr"] * ratio * each.grad)


@dataclass(frozen=True)
class Optimized(Loop):
    """Trains with the optimizer that ``make`` creates."""

    make: Callable[[nn.Module], Optimizer] = lambda model: SGD(model.parameters(), lr=0.1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make(model)


OPTIMIZERS: Sequence[Case] = (
    Case("optimizer-that-counts", Optimized(lambda model: Counting(model.parameters(), Adam, warmup=5))),
    Case("optimizer-that-saves-more", Optimized(lambda model: Remembering(model.parameters()))),
    Case("norm-of-each-parameter", Optimized(lambda model: TrustRatio(model.parameters(), lr=0.05, jointly=False))),
    Case("norm-of-all-parameters", Optimized(lambda model: TrustRatio(model.parameters(), lr=0.05, jointly=True))),
    Case("adafactor", Optimized(lambda model: Adafactor(model.parameters(), lr=0.05))),
)
