"""Records of the losses of a step's micro-batches, and of the metrics returned with them.

``AgreedLosses`` exchanges properties of losses between ranks before their gradients are summed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.collectives.exact import start_all_gather
from worldsize.core import ConfigError, Loss, LossOutput, World
from worldsize.strategies.loss_scaling import fp16_share

# names under "train/" that are reserved in each logged step
STEP_FIGURES = (
    "loss",
    "lr",
    "grad_norm",
    "samples",
    "samples_per_second",
    "data_seconds",
    "step_seconds",
    "tokens_per_second",
    "mfu",
)


@final
@dataclass(frozen=True, slots=True)
class LossRecord:
    """The detached loss and metrics of one micro-batch.

    Attributes:
        loss: The mean, a scalar in the loss's dtype; or (sum, weight), float64 (2,).
        metrics: Metrics returned with the loss, each (sum, count), float64 (2,).
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def is_weighted(self) -> bool:
        """Whether the loss is (sum, weight)."""
        return self.loss.ndim == 1

    def to_message(self) -> dict[str, Any]:
        """Return the record as plain values, for :meth:`from_message`."""
        return {"loss": self.loss.tolist(), "metrics": {name: pair.tolist() for name, pair in self.metrics.items()}}

    @staticmethod
    def from_message(message: Mapping[str, Any]) -> LossRecord:
        """Create a record from the result of :meth:`to_message`, in float64 on the CPU."""
        metrics = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in message["metrics"].items()}
        return LossRecord(torch.tensor(message["loss"], dtype=torch.float64), metrics)

    def copy_with_zero_metrics(self) -> LossRecord:
        """Return the record with zero sums and counts in its metrics."""
        return LossRecord(self.loss, {name: torch.zeros_like(pair) for name, pair in self.metrics.items()})

    def copy_with_metrics(self, records: Sequence[LossRecord]) -> LossRecord:
        """Return the record with the summed metrics of ``records``, or zeros if there are none.

        Raises:
            ConfigError: the records have different metric names.
        """
        if not records:
            return self.copy_with_zero_metrics()
        return LossRecord(self.loss, {name: pairs_n2.sum(0) for name, pairs_n2 in step_metrics(records).items()})


def differentiable(loss: Loss) -> tuple[Tensor, LossRecord]:
    """Split the result of ``Recipe.loss`` into the scalar to differentiate and the record.

    Raises:
        ConfigError: a metric has an invalid or reserved name, or is not a pair of real scalars.
    """
    if isinstance(loss, Tensor):
        return loss, LossRecord(loss.detach())
    output = LossOutput.from_loss(loss)
    scalar = output.loss if isinstance(output.loss, Tensor) else output.loss[0]
    metrics = {name: _parse_metric(name, pair, scalar.device) for name, pair in output.metrics.items()}
    if isinstance(output.loss, Tensor):
        return scalar, LossRecord(scalar.detach(), metrics)
    return scalar, LossRecord(_stack_pair(*output.loss, scalar.device), metrics)


def trainable(loss: Loss) -> tuple[Tensor, LossRecord]:
    """Validate the result of ``Recipe.loss``, and split it like :func:`differentiable`.

    Raises:
        ConfigError: it is not a scalar loss, or does not depend on any trained parameter.
    """
    output: Any = LossOutput.from_loss(loss).loss
    total = output[0] if isinstance(output, tuple) and len(output) == 2 else output
    if not isinstance(total, Tensor):
        returned = "None" if output is None else f"an object of type {type(output).__name__}"
        raise ConfigError(
            f"the recipe's loss returned {returned}. Return the mean as a scalar tensor, or (sum, weight)."
        )
    if total.ndim and total.numel() != 1:
        raise ConfigError(
            f"the recipe's loss returned a tensor of shape {list(total.shape)}, expected a scalar. Return loss.mean(), "
            "or (loss.sum(), weight)."
        )
    if not total.requires_grad:
        raise ConfigError(
            "the recipe's loss does not require grad. Compute it from the model's output for each micro-batch, "
            "outside torch.no_grad() and without detach(). If no sample of a micro-batch counts, multiply the loss by "
            "0, or return (sum, 0)."
        )
    return differentiable(loss)


def check_same_form(records: Sequence[LossRecord]) -> None:
    """Raise ConfigError if some losses are means and others are (sum, weight)."""
    if len({record.is_weighted for record in records}) > 1:
        raise forms_differ("in one micro-batch", "in another")


def forms_differ(one: str, other: str) -> ConfigError:
    """Return the error for a loss that is a mean in ``one`` case and (sum, weight) in ``other``."""
    return ConfigError(
        f"the recipe's loss returned a mean {one} and (sum, weight) {other}. Return the same form each time. If no "
        "sample of a micro-batch counts, return a sum of 0 computed from the model's output, and a weight of 0."
    )


def _stack_pair(total: Tensor | float, count: Tensor | float, device: torch.device) -> Tensor:
    return torch.stack([_convert_to_float64(each, device) for each in (total, count)])


def _convert_to_float64(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a float64 scalar on ``device``, without a GPU sync if ``value`` is on the CPU."""
    is_here = not isinstance(value, Tensor) or value.device.type == "cpu"
    if is_here and device.type != "cpu":
        number = float(value.detach() if isinstance(value, Tensor) else value)
        return torch.full((), number, dtype=torch.float64, device=device)  # a copy would wait for the GPU
    return torch.as_tensor(value, device=device).detach().double()


def _parse_metric(name: str, pair: Any, device: torch.device) -> Tensor:
    if not isinstance(name, str) or not re.fullmatch(r"[\w./-]+", name):
        raise ConfigError(
            f"invalid metric name {name!r} in the recipe's loss. Use only letters, digits and the characters _ . / -."
        )
    if name in STEP_FIGURES:
        raise ConfigError(f"the metric name {name!r} in the recipe's loss is reserved. Rename the metric.")
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_is_real_scalar, pair)):
        raise ConfigError(f"the metric {name!r} in the recipe's loss must be (sum, count), two real scalars.")
    total, count = (x.reshape(()) if isinstance(x, Tensor) else x for x in pair)
    return _stack_pair(total, count, device)


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def mean_loss(loss: Loss) -> Tensor:
    """Return the mean loss of a micro-batch, a scalar, from any result of ``Recipe.loss``."""
    own = LossOutput.from_loss(loss).loss
    return own if isinstance(own, Tensor) else own[0] / own[1]


def step_metrics(records: Sequence[LossRecord], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Stack the metrics of a step's micro-batches as in :class:`StepResult`: (records, 2).

    Args:
        records: One or more records, one per micro-batch.
        names: Required metric names, or None for those of the first micro-batch.

    Raises:
        ConfigError: metric names differ between micro-batches.
    """
    names = sorted(records[0].metrics if names is None else names)
    for record in records:
        if sorted(record.metrics) != names:
            raise metrics_differ(names, record.metrics, where="two micro-batches")
    return {name: torch.stack([record.metrics[name] for record in records]) for name in names}


def metrics_differ(first: Iterable[str], second: Iterable[str], *, where: str) -> ConfigError:
    """Return the error for different names of training metrics; ``where``: e.g. "two steps"."""
    one, other = (", ".join(sorted(names)) or "none" for names in (first, second))
    return ConfigError(
        f"the recipe's loss returned different metrics in {where}: [{one}] and [{other}]. Return the same names each "
        "time, with (0, 0) for a metric without values."
    )


@final
class AgreedLosses:
    """Exchanges properties of losses between the ranks of ``world``; None: a single process."""

    def __init__(self, world: World | None) -> None:
        self._world = world
        self._forms: dict[tuple[str, ...], bool] = {}  # whether losses are weighted, by update
        self._share: Tensor | None = None  # scale of a summed loss in float16, agreed for each gradient

    @property
    def group(self) -> ProcessGroup | None:
        """The group over which gradients are summed, or None for this rank alone."""
        return self._world.group if self._world else None

    def check_form(self, record: LossRecord, update: Sequence[str] = ()) -> None:
        """Refuse losses that are means on some ranks but weighted sums on others.

        All ranks compare the form at the first update of the optimizers ``update``; later updates must keep it.

        Raises:
            ConfigError: the form differs between ranks, or from an earlier step.
        """
        key = (*update,)
        if key not in self._forms:
            self._exchange(record)
            self._forms[key] = record.is_weighted
        elif record.is_weighted != self._forms[key]:
            means, sums = (
                ("in an earlier step", "in this step") if record.is_weighted else ("in this step", "in an earlier step")
            )
            raise forms_differ(means, sums)

    def _exchange(self, record: LossRecord) -> None:
        if self._world is None:
            return
        forms = start_all_gather(torch.tensor([int(record.is_weighted)]), self._world)().flatten().tolist()
        if len({*forms}) > 1:
            raise forms_differ(f"on rank {forms.index(0)}", f"on rank {forms.index(1)}")

    def fp16_share(self, weight: Tensor) -> Tensor:
        """Return the scale (scalar) for summed float16 losses, the same until :meth:`take_share`."""
        if self._share is None:
            self._share = fp16_share(weight, self.group)
        return self._share

    def take_share(self) -> Tensor | None:
        """Pop the scale (scalar) of the accumulated gradient, or None if it was not scaled."""
        share, self._share = self._share, None
        return share
