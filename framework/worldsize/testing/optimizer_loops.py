"""Small programs with optimizers of their own, see :mod:`worldsize.testing.loops`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, Optimizer

from worldsize.testing.loops import Case, Loop


@final
class Counting(Optimizer):
    """Wraps two optimizers, one for matrices and one for the rest, and takes a share of an update in its first steps.

    Neither the first one's class nor ``warmup`` is among its defaults. It counts steps in an
    attribute, and in its options by numbers of NumPy.
    """

    def __init__(self, params: Iterable[nn.Parameter], kind: Callable[[Any], Optimizer], warmup: int) -> None:
        given = list(params)
        matrices, others = [each for each in given if each.ndim > 1], [each for each in given if each.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.05}]
        super().__init__(groups, {"step": np.int64(0)})
        self._inner: tuple[Optimizer, ...] = (kind(self.param_groups[:1]), SGD(self.param_groups[1:], momentum=0.9))
        self._warmup, self._taken = warmup, 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of both."""
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
    """Divides its rate by the number of steps, and decays its updates; both are entries of its ``state_dict`` only.

    ``by_parameter``: whether it also adds the sum of each parameter's gradients.
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
        """Return the state with the two."""
        return {**super().state_dict(), "taken": self._taken, "decay": self._decay, "sums": [*self._sums.values()]}

    def load_state_dict(self, state: Any) -> None:
        """Load what :meth:`state_dict` returned."""
        self._taken, self._decay = state["taken"], state["decay"]
        self._sums = dict(zip(self._sums, state["sums"], strict=True))
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})


@final
class TrustRatio(Optimizer):
    """Scales each update to the norm of its parameter, as LARS and LAMB do; with ``jointly`` to that of all."""

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
    """Makes its optimizer by ``make``."""

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
