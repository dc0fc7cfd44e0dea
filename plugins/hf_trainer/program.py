"""Find customizations of a Trainer that worldsize does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plugins.hf_trainer.predictions import has_metrics
from worldsize.core import ConfigError

# Trainer methods that the recipe calls, or that worldsize replaces
_METHODS = {
    *("compute_loss", "get_decay_parameter_names", "get_optimizer_cls_and_kwargs"),
    *("log", "train", "predict", "save_model", "push_to_hub", "create_model_card"),
}
_CALLBACKS = (  # default callbacks of the Trainer, for logging, saving and progress
    *("DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback"),
    "JITCheckpointCallback",
)
_REMEDIES = {
    "training_step": "Compute the loss in compute_loss, or write a recipe",
    "create_optimizer": "Pass optimizer_cls_and_kwargs to the Trainer",
    "create_optimizer_and_scheduler": "Pass optimizer_cls_and_kwargs to the Trainer, and set "
    "TrainingArguments(lr_scheduler_type=...)",
    "create_scheduler": "Set TrainingArguments(lr_scheduler_type=...)",
    "get_train_dataloader": "Pass a dataset and a data_collator to the Trainer",
    "evaluate": "Pass compute_metrics to the Trainer",
}


def check_trainer(trainer: Any) -> None:
    """Raise ConfigError if more than model, data, loss, optimizer or schedule is customized."""
    if refused := [*_overrides(trainer), *_find_unsupported(trainer)]:
        raise ConfigError("\n".join(refused))


def _overrides(trainer: Any) -> Iterator[str]:
    import transformers

    own = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("transformers.")]
    names = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    for name in sorted(names):
        if hasattr(transformers.Trainer, name) and not name.startswith("__") and name not in _METHODS:
            remedy = _REMEDIES.get(name, "Remove it")
            yield f"{type(trainer).__name__}.{name} is not called by worldsize. {remedy}."


def _find_unsupported(trainer: Any) -> Iterator[str]:
    if trainer.train_dataset is None:
        yield "the Trainer does not have a train_dataset. Pass train_dataset to the Trainer."
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        yield (
            "Trainer(optimizers=...) is not supported, since worldsize trains copies of the model. Pass "
            "optimizer_cls_and_kwargs to the Trainer, and set TrainingArguments(lr_scheduler_type=...)."
        )
    for callback in trainer.callback_handler.callbacks:
        if not (
            type(callback).__name__ in _CALLBACKS or type(callback).__module__.startswith("transformers.integrations")
        ):
            yield (
                f"Trainer(callbacks=[{type(callback).__name__}]) is not supported. Remove it, or use a worldsize "
                "logger, which receives every step."
            )
    if getattr(trainer.model, "peft_config", None) or getattr(trainer.model, "_hf_peft_config_loaded", False):
        yield "PEFT adapters are not supported. Pass the full model to the Trainer."
    if getattr(trainer.model, "is_quantized", False):
        yield "quantized models are not supported. Load the model without quantization_config."
    if isinstance(trainer.eval_dataset, dict):
        yield "Trainer(eval_dataset={...}) with several datasets is not supported. Pass one dataset."
    if has_metrics(trainer) and getattr(trainer.args, "predict_with_generate", False):
        yield (
            "TrainingArguments(predict_with_generate=True) is not supported: compute_metrics receives logits, not "
            "generated tokens. Remove predict_with_generate, or remove compute_metrics."
        )
