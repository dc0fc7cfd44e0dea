"""Collects what a step logs by ``self.log``, as sums and counts."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from plugins.lightning_module.module_metrics import is_metric
from worldsize.core import ConfigError, Metrics
from worldsize.strategies.loss_record import STEP_FIGURES


@final
class StepLog:
    """The values that one step of a LightningModule logs: each the mean over a batch, weighed by its samples."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._samples: int | None = None  # of the batch; None: not counted yet
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.objects: dict[str, Any] = {}
        """Metrics of torchmetrics by the names under which they were logged."""
        self._closed_for = ""  # the hook that may not log; empty: it is open

    def begin(self, batch: Any) -> None:
        """Forget what was logged, before a step on ``batch``."""
        self._batch, self._samples, self._sums, self.objects = batch, None, {}, {}

    def taken(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return and clear the values logged since the last call, by name: (sum, count), two scalars."""
        sums, self._sums, self._batch = self._sums, {}, None
        return sums

    def check_numbers(self) -> None:
        """Raise ConfigError if a metric was logged in training, where values are means over batches."""
        for name, metric in self.objects.items():
            raise ConfigError(
                f"training_step logs {name!r} as a {type(metric).__name__}, whose value is that of a whole epoch. Log "
                "the value of each batch, as the metric's forward pass returns it: self.log(name, metric(...))."
            )

    def close(self, hook: str) -> None:
        """Refuse what is logged from here on, in ``hook``."""
        self._closed_for = hook

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Add a value to the log; the arguments are those of ``LightningModule.log``.

        Raises:
            ConfigError: the value is no number, is not reduced by the mean, or is logged where nothing may be.
        """
        if self._closed_for:
            raise ConfigError(f"{self._closed_for} logs {name!r}. Log it in the step itself, each name in every step.")
        if is_metric(value):
            self.objects[name] = value
            return
        if args:
            options = {
                **dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False)),
                **options,
            }
        reduce = options.get("reduce_fx", "mean")
        if reduce not in ("mean", "avg", torch.mean):
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={getattr(reduce, '__name__', reduce)}) does not come along to "
                "worldsize, where metrics are means. Log the mean of each batch."
            )
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise ConfigError(f"self.log({name!r}, ...) takes one number; it is a {type(value).__name__}.")
        self._add(name, torch.as_tensor(value).detach().double().reshape(()), options.get("batch_size"))

    def _add(self, name: str, mean: Tensor, samples: int | None) -> None:
        count = torch.tensor(float(samples or self._batch_samples()), dtype=torch.float64, device=mean.device)
        total, counted = self._sums.get(name, (torch.zeros_like(mean), torch.zeros_like(count)))
        self._sums[name] = (total + mean * count, counted + count)

    def _batch_samples(self) -> int:
        if self._samples is None:
            self._samples = samples_of(self._batch)
        return self._samples


def training_metrics(logged: Metrics) -> Metrics:
    """Rename what has the name of a figure that each step has anyway: ``loss`` is ``module/loss``."""
    own = (*STEP_FIGURES, "loss/", "lr/")
    return {f"module/{name}" if name.startswith(own[-2:]) or name in own else name: p for name, p in logged.items()}


def mean_over(batch: Any, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean over ``batch``, a scalar, as (sum, count of samples), two scalars."""
    samples = torch.tensor(float(samples_of(batch)), dtype=torch.float64, device=mean.device)
    return mean.detach().double() * samples, samples


def samples_of(batch: Any) -> int:
    """Count the samples of a batch as Lightning does: the length of its first tensor.

    Raises:
        ConfigError: there is no tensor in it.
    """
    from lightning.pytorch.utilities.data import extract_batch_size

    try:
        return int(extract_batch_size(batch))
    except Exception:  # Lightning's own, which it does not export
        raise ConfigError(
            "a batch has no tensor that says how many samples it has. Say self.log(..., batch_size=...)."
        ) from None
