"""Torchmetrics metrics in a module, updated and logged by its evaluation step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, StateMetric, StateReduction
from worldsize.metrics import TorchMetric

_LONGEST = 200  # maximum length of a logged name in bytes
_NAME = "logged name"  # state key of the logged name


def is_metric(part: object) -> bool:
    """Return whether ``part`` is a torchmetrics metric, without requiring that package."""
    return any(f"{kind.__module__}.{kind.__name__}" == "torchmetrics.metric.Metric" for kind in type(part).__mro__)


def metrics_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the metrics among the submodules of ``module``, with their paths."""
    for path, part in module.named_modules():
        if is_metric(part):
            yield path, part


def reset_metrics(module: nn.Module) -> None:
    """Reset all metrics, so that they accumulate only the next batch."""
    for _, metric in metrics_in(module):
        metric.reset()


@final
class ModuleMetric(StateMetric):
    """A metric updated by the module and computed over the whole split, under its logged name.

    Metrics that the step does not log are omitted.
    """

    def __init__(self, metric: Any) -> None:
        self._merging = TorchMetric(metric)
        self._parts = sorted(metric._reductions)

    def extract_inputs(self, metric: Any, logged: str) -> tuple[Tensor, ...]:
        """Return the name under which ``metric`` was logged, as bytes (200,), and its state tensors."""
        code = logged.encode()
        if len(code) > _LONGEST:
            raise ConfigError(f"self.log({logged!r}, ...): the name is longer than {_LONGEST} bytes. Shorten it.")
        name = torch.tensor([*code, *[0] * (_LONGEST - len(code))], dtype=torch.uint8)
        return name, *(_copy_state(getattr(metric, part)) for part in self._parts)

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of :meth:`extract_inputs` by name."""
        return dict(zip((_NAME, *self._parts), inputs, strict=True))

    def reduction(self, name: str) -> StateReduction:
        """Return the torchmetrics reduction of a state; the logged name is the same for all batches."""
        return "max" if name == _NAME else self._merging.reduction(name)

    def compute(self, state: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Compute the metric from a merged :meth:`state`, and return it under its logged name."""
        logged = bytes(state[_NAME].tolist()).rstrip(b"\0").decode()
        return {logged: self._merging.compute({part: state[part] for part in self._parts})} if logged else {}


def _copy_state(state: Tensor | list[Tensor]) -> Tensor:
    if isinstance(state, Tensor):
        return state.detach().clone()
    return torch.cat([part if part.ndim else part[None] for part in state]).detach() if state else torch.empty(0)
