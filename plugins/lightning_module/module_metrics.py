"""Metrics of torchmetrics that are parts of a module: updated and logged in its evaluation step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, StateMetric, StateReduction
from worldsize.metrics import TorchMetric

_LONGEST = 200  # bytes of a logged name
_NAME = "logged name"  # the part of a state that has it


def is_metric(part: object) -> bool:
    """Return whether ``part`` is a metric of torchmetrics, which need not be installed."""
    return any(f"{kind.__module__}.{kind.__name__}" == "torchmetrics.metric.Metric" for kind in type(part).__mro__)


def metrics_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the metrics that are parts of ``module``, with their paths."""
    for path, part in module.named_modules():
        if is_metric(part):
            yield path, part


def reset_metrics(module: nn.Module) -> None:
    """Let all metrics begin anew, so that each has the state of one batch after it."""
    for _, metric in metrics_in(module):
        metric.reset()


@final
class ModuleMetric(StateMetric):
    """A metric that the module updates itself; its value is that over the whole split, under the name that it logs.

    A metric that the step does not log has no value.
    """

    def __init__(self, metric: Any) -> None:
        self._merging = TorchMetric(metric)
        self._parts = sorted(metric._reductions)

    def inputs(self, metric: Any, logged: str) -> tuple[Tensor, ...]:
        """Return the name under which the module logs ``metric``, empty if it does not, and its state in its shapes."""
        code = logged.encode()
        if len(code) > _LONGEST:
            raise ConfigError(f"self.log({logged!r}, ...) names a metric of more than {_LONGEST} bytes. Shorten it.")
        name = torch.tensor([*code, *[0] * (_LONGEST - len(code))], dtype=torch.uint8)
        return name, *(_whole(getattr(metric, part)) for part in self._parts)

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        """Return the state that :meth:`inputs` has read, with tensors in their shapes."""
        return dict(zip((_NAME, *self._parts), inputs, strict=True))

    def reduction(self, name: str) -> StateReduction:
        """Return how torchmetrics merges a part; the logged name is the same in all batches."""
        return "max" if name == _NAME else self._merging.reduction(name)

    def compute(self, state: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Compute the metric from tensors with the shapes of :meth:`state`; return it under the module's name."""
        logged = bytes(state[_NAME].tolist()).rstrip(b"\0").decode()
        return {logged: self._merging.compute({part: state[part] for part in self._parts})} if logged else {}


def _whole(state: Tensor | list[Tensor]) -> Tensor:
    if isinstance(state, Tensor):
        return state.detach().clone()
    return torch.cat([part if part.ndim else part[None] for part in state]).detach() if state else torch.empty(0)
