"""Calls a Trainer's compute_metrics on all predictions, like Trainer.evaluate()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from worldsize.core import ConfigError, StateMetric, StateReduction

NAME = "compute_metrics"  # key in Recipe.metrics; compute_metrics decides the names of the values
_PADDING = -100  # pads shorter sequences, as everywhere in transformers
_HALVES = (torch.bfloat16, torch.float16)


def has_metrics(trainer: Any) -> bool:
    """Return whether ``Trainer.evaluate()`` would call ``compute_metrics``."""
    return (
        trainer.compute_metrics is not None
        and trainer.eval_dataset is not None
        and not trainer.args.prediction_loss_only
        and (len(trainer.label_names) > 0 or trainer.can_return_loss)
    )


@final
class PredictionMetrics(StateMetric):
    """Collects predictions and labels, and calls ``compute_metrics`` once for the whole split.

    Each process receives all predictions and calls the function.

    Args:
        trainer: the Trainer, with its model unchanged by strategies.
        casts_halves: whether the model runs in bf16 or fp16 with fp32 parameters. If so, its outputs are cast to fp32,
            as accelerate does under the Trainer.
    """

    def __init__(self, trainer: Any, *, casts_halves: bool) -> None:
        self._trainer = trainer
        self._casts_halves = casts_halves
        self._included = tuple(trainer.args.include_for_metrics)
        self._input_name = getattr(trainer.model, "main_input_name", "input_ids")
        config = getattr(trainer.model, "config", None)
        own = [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        self._ignored = {*own, "loss"}
        self._form: TreeSpec | None = None

    def collect_inputs(self, batch: Mapping[str, Any], outputs: Any, loss: Tensor, *, rows: int) -> tuple[Tensor, ...]:
        """Return one batch's inputs, like ``Trainer.prediction_step``: tensors (samples, ...).

        Raises:
            ConfigError: labels are missing, outputs are not tensors, or their structure differs between batches.
        """
        labels = self._get_labels(batch)
        if isinstance(outputs, dict):
            predictions: Any = tuple(value for name, value in outputs.items() if name not in self._ignored)
        else:
            predictions = outputs[1:]
        if len(predictions) == 1:
            predictions = predictions[0]
        if self._casts_halves:
            predictions = _cast_halves(predictions)
        if self._trainer.preprocess_logits_for_metrics is not None:
            predictions = self._trainer.preprocess_logits_for_metrics(predictions, labels)
        given = {"predictions": predictions, "label_ids": labels}
        if "inputs" in self._included:
            given["inputs"] = batch[self._input_name]
        if "loss" in self._included:
            given["losses"] = loss.detach().mean().repeat(rows)
        leaves, form = tree_flatten(given)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ConfigError(
                    f"the model's outputs contain a {type(leaf).__name__}, but metrics require tensors. Add the "
                    "output's name to keys_to_ignore_at_inference in the model's config."
                )
        if self._form not in (None, form):
            raise ConfigError(
                "the structure of the model's outputs differs between batches. Return the same tensors for every "
                "batch in preprocess_logits_for_metrics."
            )
        self._form = form
        return tuple(leaves)

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        """Return a batch's tensors flattened, with their shapes, which may differ between batches.

        The results stay in host memory, since a whole split may not fit into GPU memory.
        """
        numbers = {f"{place:03d}/numbers": each.flatten().cpu() for place, each in enumerate(inputs)}
        return numbers | {
            f"{place:03d}/shapes": torch.tensor([each.shape], dtype=torch.int64) for place, each in enumerate(inputs)
        }

    def reduction(self, name: str) -> StateReduction:
        return "cat"

    def compute(self, state: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Call ``compute_metrics`` on predictions (samples, ...); strip ``eval_`` from names.

        Raises:
            ConfigError: it returns a value that is not a number.
        """
        from transformers import EvalPrediction
        from transformers.trainer_pt_utils import nested_numpify
        from transformers.trainer_utils import denumpify_detensorize

        assert self._form is not None
        places = sorted({name.split("/")[0] for name in state})
        leaves = [
            _concatenate_batches(_restore_batches(state[f"{each}/numbers"], state[f"{each}/shapes"])) for each in places
        ]
        given = nested_numpify(tree_unflatten(leaves, self._form))  # type: ignore[no-untyped-call]
        told = self._trainer.compute_metrics(EvalPrediction(**given))
        values = denumpify_detensorize(told)  # type: ignore[no-untyped-call]
        for name, value in values.items():
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"compute_metrics returned a {type(value).__name__} for {name!r}, expected a number. Return a "
                    "number for each metric."
                )
        return {name.removeprefix("eval_"): float(value) for name, value in values.items()}

    def _get_labels(self, batch: Mapping[str, Any]) -> Any:
        names = self._trainer.label_names
        if missing := [name for name in names if batch.get(name) is None]:
            raise ConfigError(
                f"compute_metrics requires labels, but the evaluation batches do not contain {missing[0]!r}. Add "
                "it to the eval_dataset, or set TrainingArguments(label_names=[...])."
            )
        labels = tuple(batch[name].detach() for name in names)
        return labels[0] if len(labels) == 1 else labels


def _cast_halves(predictions: Any) -> Any:
    leaves, form = tree_flatten(predictions)
    cast = [leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALVES else leaf for leaf in leaves]
    return tree_unflatten(cast, form)


def _restore_batches(numbers_n: Tensor, shapes_bd: Tensor) -> list[Tensor]:
    """Restore the tensors flattened by :meth:`PredictionMetrics.state`, one per batch."""
    shapes = [tuple(shape) for shape in shapes_bd.tolist()]
    pieces = torch.split(numbers_n, [torch.Size(shape).numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _concatenate_batches(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate batches, padding dimension 1 with -100 to the longest."""
    if len(batches) == 1:
        return batches[0]
    batches = [batch if batch.ndim else batch[None] for batch in batches]
    widths = {batch.shape[1] for batch in batches if batch.ndim > 1}
    if len(widths) < 2:
        return torch.cat(list(batches))
    rows = sum(len(batch) for batch in batches)
    padded = batches[0].new_full((rows, max(widths), *batches[0].shape[2:]), _PADDING)
    first = 0
    for batch in batches:
        padded[first : first + len(batch), : batch.shape[1]] = batch
        first += len(batch)
    return padded
