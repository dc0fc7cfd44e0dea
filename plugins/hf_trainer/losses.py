"""Compute the loss of a micro-batch like transformers.Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

_IGNORED = -100  # label ignored by all losses in transformers


@final
class TrainerLoss:
    """Loss of a Trainer: its own ``compute_loss``, ``compute_loss_func``, smoother, or model."""

    def __init__(self, trainer: Any) -> None:
        """Inspect ``trainer``, whose model no strategy has changed yet."""
        self._trainer = trainer
        self._function, self._smoother = trainer.compute_loss_func, trainer.label_smoother
        self._is_own_method = _overrides_compute_loss(trainer)
        self._takes_count = _takes_count(trainer.model)
        self._shifts = _shifts_labels(trainer.model)
        self._smoother_shifts = _is_causal(trainer.model)

    def compute_mean_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Any]:
        """Return the mean loss of the batch (a scalar), its label count, and the model's outputs.

        The count is None if the Trainer does not count labels; gradients are then averaged over micro-batches.
        """
        if self._is_own_method:
            loss, outputs = self._trainer.compute_loss(model, dict(batch), return_outputs=True)
            return loss, None, outputs
        inputs = dict(batch)
        count = self._count_labels(inputs)
        least_one = None if count is None else count.clamp(min=1)  # without labels, the loss is 0, not NaN
        separate = self._function is not None or self._smoother is not None
        labels = inputs.pop("labels", None) if separate else None
        if self._takes_count and least_one is not None:
            inputs["num_items_in_batch"] = least_one
        outputs = model(**inputs)
        return self._compute_loss(outputs, labels, least_one), count, outputs

    def _compute_loss(self, outputs: Any, labels: Any, count: Tensor | None) -> Tensor:
        loss: Tensor
        if self._function is not None:
            loss = self._function(outputs, labels, num_items_in_batch=count)
        elif labels is not None:
            loss = self._smoother(outputs, labels, self._smoother_shifts, **self._smoother_count(count))
        else:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss

    def _smoother_count(self, count: Tensor | None) -> dict[str, Tensor]:
        """Return the label count as an argument if this version's smoother accepts it."""
        takes = "num_items_in_batch" in inspect.signature(type(self._smoother).__call__).parameters
        return {"num_items_in_batch": count} if takes and count is not None else {}

    def _count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Count the labels that the loss averages over; None if the Trainer does not count them."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or not (self._takes_count or self._function is not None):
            return None
        if isinstance(given := batch.get("shift_labels"), Tensor):
            labels = given
        elif self._shifts:
            labels = labels[..., 1:]
        return labels.ne(_IGNORED).sum()


def weigh_loss(mean: Tensor, count: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Return (sum over labels, count) for a global mean, or ``mean`` if labels are not counted."""
    return mean if count is None else (mean * count.clamp(min=1), count)


def _overrides_compute_loss(trainer: Any) -> bool:
    return not type(trainer).compute_loss.__module__.startswith("transformers.")


def _takes_count(model: Any) -> bool:
    """Return whether the Trainer passes the label count to the model."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _shifts_labels(model: Any) -> bool:
    """Return whether the model shifts labels for its loss, so that the first label is unused."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is ForCausalLMLoss and not is_pair


def _is_causal(model: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def count_rows(batch: Any) -> Tensor:
    """Return the number of samples in a batch as a scalar tensor."""
    from transformers.trainer_pt_utils import find_batch_size

    return torch.tensor(find_batch_size(batch) or 1)  # type: ignore[no-untyped-call]
