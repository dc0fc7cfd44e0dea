"""Collect the values that a step logs with ``self.log``, as sums and counts."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from plugins.lightning_module.module_metrics import is_metric
from worldsize.core import ConfigError, Metrics
from worldsize.strategies.loss_record import STEP_FIGURES


@final
class StepLog:
    """Values logged by one step, as means over a batch weighted by its samples."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._samples: int | None = None  # batch size; None if not counted yet
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.objects: dict[str, Any] = {}
        """Torchmetrics metrics by logged name."""
        self._closed_for = ""  # the hook that must not log; empty while logging is allowed

    def start_step(self, batch: Any) -> None:
        """Clear the log before a step on ``batch``."""
        self._batch, self._samples, self._sums, self.objects = batch, None, {}, {}

    def take_values(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return and clear values logged since the last call, by name: (sum, count), scalars."""
        sums, self._sums, self._batch = self._sums, {}, None
        return sums

    def check_numbers(self) -> None:
        """Raise ConfigError if training logged a metric object, not a mean over a batch."""
        for name, metric in self.objects.items():
            raise ConfigError(
                f"training_step logs {name!r} as a {type(metric).__name__}, whose value covers a whole epoch. Log "
                "the value of each batch from the metric's forward: self.log(name, metric(...))."
            )

    def close(self, hook: str) -> None:
        """Reject values logged from now on, by ``hook``."""
        self._closed_for = hook

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, with the arguments of ``LightningModule.log``.

        Raises:
            ConfigError: the value is not a number, is not reduced by the mean, or is logged in the wrong hook.
        """
        if self._closed_for:
            raise ConfigError(
                f"{self._closed_for} logs {name!r}, which is not supported. Log every value in every step."
            )
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
                f"self.log({name!r}, reduce_fx={getattr(reduce, '__name__', reduce)}) is not supported: metrics "
                "are averaged. Log the mean of each batch."
            )
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise ConfigError(f"self.log({name!r}, ...) requires a single number, got a {type(value).__name__}.")
        self._add_mean(name, torch.as_tensor(value).detach().double().reshape(()), options.get("batch_size"))

    def _add_mean(self, name: str, mean: Tensor, samples: int | None) -> None:
        count = torch.tensor(float(samples or self._batch_samples()), dtype=torch.float64, device=mean.device)
        total, counted = self._sums.get(name, (torch.zeros_like(mean), torch.zeros_like(count)))
        self._sums[name] = (total + mean * count, counted + count)

    def _batch_samples(self) -> int:
        if self._samples is None:
            self._samples = count_samples(self._batch)
        return self._samples


def training_metrics(logged: Metrics) -> Metrics:
    """Prefix names that clash with the step's own metrics: ``loss`` becomes ``module/loss``."""
    own = (*STEP_FIGURES, "loss/", "lr/")
    return {f"module/{name}" if name.startswith(own[-2:]) or name in own else name: p for name, p in logged.items()}


def mean_over(batch: Any, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean over ``batch``, a scalar, as (sum, number of samples), two scalars."""
    samples = torch.tensor(float(count_samples(batch)), dtype=torch.float64, device=mean.device)
    return mean.detach().double() * samples, samples


def count_samples(batch: Any) -> int:
    """Return the batch size like Lightning: the length of the first tensor.

    Raises:
        ConfigError: the batch does not contain a tensor.
    """
    from lightning.pytorch.utilities.data import extract_batch_size

    try:
        return int(extract_batch_size(batch))
    except Exception:  # Lightning's own exception, which it does not export
        raise ConfigError(
            "the batch size of a batch without tensors is unknown. Pass self.log(..., batch_size=...)."
        ) from None
