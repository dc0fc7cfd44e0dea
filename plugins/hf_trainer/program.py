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
    "training_step": "compute the loss in compute_loss, or write a recipe",
    "create_optimizer": "give the Trainer optimizer_cls_and_kwargs",
    "create_optimizer_and_scheduler": "give the Trainer optimizer_cls_and_kwargs, and name a schedule",
    "create_scheduler": "name a schedule by TrainingArguments(lr_scheduler_type=...)",
    "get_train_dataloader": "give the Trainer a data set and a data_collator",
    "evaluate": "give the Trainer compute_metrics",
}


def check_trainer(trainer: Any) -> None:
    """Raise ConfigError for customizations beyond model, data, loss, optimizer, schedule."""
    if refused := [*_overrides(trainer), *_find_unsupported(trainer)]:
        raise ConfigError("\n".join(refused))


def _overrides(trainer: Any) -> Iterator[str]:
    import transformers

    own = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("transformers.")]
    names = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    for name in sorted(names):
        if hasattr(transformers.Trainer, name) and not name.startswith("__") and name not in _METHODS:
            remedy = _REMEDIES.get(name, "leave it out")
            yield f"{type(trainer).__name__}.{name} would not be called by worldsize: {remedy}."


def _find_unsupported(trainer: Any) -> Iterator[str]:
    if trainer.train_dataset is None:
        yield "the Trainer has no train_dataset. Give it one."
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        yield (
            "Trainer(optimizers=...) would not train the model's copies: give it optimizer_cls_and_kwargs, "
            "and name a schedule by TrainingArguments(lr_scheduler_type=...)."
        )
    for callback in trainer.callback_handler.callbacks:
        if not (
            type(callback).__name__ in _CALLBACKS or type(callback).__module__.startswith("transformers.integrations")
        ):
            yield (
                f"Trainer(callbacks=[{type(callback).__name__}]) would not be called by worldsize: leave it out; "
                "a logger of worldsize is told of every step."
            )
    if getattr(trainer.model, "peft_config", None) or getattr(trainer.model, "_hf_peft_config_loaded", False):
        yield "the model has adapters of PEFT, which do not come along to worldsize: give the Trainer the whole model."
    if getattr(trainer.model, "is_quantized", False):
        yield "the model is quantized, which does not come along to worldsize: load it without quantization_config."
    if isinstance(trainer.eval_dataset, dict):
        yield "Trainer(eval_dataset={...}) has several data sets: give it one."
    if has_metrics(trainer) and getattr(trainer.args, "predict_with_generate", False):
        yield (
            "TrainingArguments(predict_with_generate=True) would give compute_metrics generated tokens, and worldsize "
            "does not generate any: leave it out, and compute_metrics is given logits; or leave compute_metrics out."
        )
