"""Find overridden hooks of a LightningModule or DataModule that worldsize does not call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from plugins.lightning_module.module_metrics import is_metric
from worldsize.core import ConfigError

# called by the recipe
_CARRIED = {
    *("training_step", "validation_step", "test_step", "configure_optimizers", "forward", "automatic_optimization"),
    *("prepare_data", "setup", "configure_model", "train_dataloader", "val_dataloader", "test_dataloader"),
    *("on_before_batch_transfer", "on_after_batch_transfer"),
}
_CARRIED_BY_MANUAL = {"on_train_epoch_end"}  # called with manual optimization, to advance schedules
_CLIPPING = ("clip_gradients", "clip_grad_norm_", "clip_grad_value_")
# not called during training in Lightning either, or no effect on training
_IRRELEVANT = {
    *("predict_step", "predict_dataloader", "on_predict_start", "on_predict_end", "on_predict_epoch_start"),
    *("on_predict_epoch_end", "on_predict_batch_start", "on_predict_batch_end", "on_predict_model_eval"),
    *("load_from_checkpoint", "from_datasets", "to_onnx", "to_torchscript", "to_tensorrt", "freeze", "unfreeze"),
    *("print", "example_input_array", "strict_loading", "hparams", "hparams_initial", "name", "train", "eval"),
    *("teardown", "on_exception", "extra_repr"),
}
# torch module methods that determine which parameters are saved or trained
_OF_MODULES = {
    *("state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "modules"),
    *("children", "named_children", "named_modules", "zero_grad"),
}
# hooks of Lightning 1 that Lightning 2 no longer calls
_REMOVED = {
    *("training_epoch_end", "validation_epoch_end", "test_epoch_end", "training_step_end", "validation_step_end"),
    *("test_step_end", "tbptt_split_batch", "get_progress_bar_dict", "on_pretrain_routine_start"),
}
_STEP = "Compute it in training_step"
_EPOCH = "Log values in the step itself with self.log; worldsize averages them over all batches"
_REMEDIES = {
    "backward": "Return the loss from training_step",
    "optimizer_step": "Return the loss from training_step; the optimizer steps once per step",
    "optimizer_zero_grad": "Remove it; gradients do not persist between steps",
    "on_before_zero_grad": "Remove it, or use optimizer.register_step_post_hook",
    "on_before_optimizer_step": "Use optimizer.register_step_pre_hook",
    "on_before_backward": _STEP,
    "on_after_backward": "Use optimizer.register_step_pre_hook",
    "configure_gradient_clipping": "Remove it, and set clip_norm",
    "clip_gradients": "Remove it, and set clip_norm",
    "lr_scheduler_step": "Use a torch.optim.lr_scheduler that depends only on the step",
    "on_train_batch_start": _STEP,
    "on_train_batch_end": _STEP,
    "on_train_start": "Move it to setup or configure_model",
    "on_fit_start": "Move it to setup or configure_model",
    "on_train_epoch_start": "Compute it in training_step from self.current_epoch",
    "on_train_epoch_end": _EPOCH,
    "on_validation_epoch_end": _EPOCH,
    "on_test_epoch_end": _EPOCH,
    "configure_callbacks": "Remove it; see early_stopping, checkpoint.keep and ema",
    "on_save_checkpoint": "Use a module buffer; checkpoints contain all buffers",
    "on_load_checkpoint": "Use a module buffer; checkpoints contain all buffers",
    "configure_sharded_model": "Use configure_model, and set strategy=fsdp",
    "transfer_batch_to_device": "Return tensors in lists, tuples and dicts; worldsize moves them to the device",
    "log": "Call self.log instead of overriding it",
    "log_dict": "Call self.log_dict instead of overriding it",
    "state_dict": "Keep saved values in parameters and buffers",
    "load_state_dict": "Keep saved values in parameters and buffers",
}


def check_hooks(module: Any, datamodule: Any) -> None:
    """Raise ConfigError, with remedies, if overridden hooks would not be called."""
    refused = [
        *_overridden(module, "LightningModule", manual=not module.automatic_optimization),
        *_signatures(module),
        *_find_joined_metrics(module),
    ]
    if not module.automatic_optimization:
        refused += _find_clipping_calls(module)
    if datamodule is not None:
        refused += _overridden(datamodule, "LightningDataModule")
    if refused:
        raise ConfigError("\n".join(refused))


def find_lightning_base(value: object, name: str) -> type | None:
    """Return an object's base class ``name`` from either Lightning package, or None."""
    kinds = [kind for kind in type(value).__mro__ if kind.__name__ == name and _is_lightning(kind)]
    return kinds[0] if kinds else None


def _is_lightning(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning")


def _overridden(value: Any, base: str, *, manual: bool = False) -> Iterator[str]:
    known = find_lightning_base(value, base)
    assert known is not None, f"checked when it was built: {base}"
    judged = {name for name in dir(known) if not name.startswith("_")} - set(dir(nn.Module)) | _OF_MODULES | _REMOVED
    own = [kind for kind in type(value).__mro__ if not _is_lightning(kind) and kind not in known.__mro__]
    names = {name for kind in own for name in vars(kind)}
    carried = _CARRIED | _CARRIED_BY_MANUAL if manual else _CARRIED
    for name in sorted(names & judged - carried - _IRRELEVANT):
        remedy = "Remove it; Lightning 2 does not call it" if name in _REMOVED else _REMEDIES.get(name)
        yield f"{type(value).__name__}.{name} is not called by worldsize. {remedy or 'Remove it'}."


def _signatures(module: Any) -> Iterator[str]:
    """Yield an error for each training_step argument that worldsize does not support."""
    for name in inspect.signature(module.training_step).parameters:
        if name in ("dataloader_iter", "optimizer_idx", "hiddens"):
            yield (
                f"{type(module).__name__}.training_step takes {name}, which is not supported. Use "
                "training_step(self, batch, batch_idx)."
            )


def _find_clipping_calls(module: Any) -> Iterator[str]:
    """Yield an error for each gradient-clipping method; gradients do not exist yet."""
    known = find_lightning_base(module, "LightningModule")
    assert known is not None
    own = [kind for kind in type(module).__mro__ if not _is_lightning(kind) and issubclass(kind, known)]
    for method in (each for kind in own for each in vars(kind).values() if inspect.isfunction(each)):
        for name in _CLIPPING:
            if name in method.__code__.co_names:
                yield (
                    f"{method.__qualname__} calls {name}, but gradients are computed in the optimizer's step(). "
                    "Remove the call, and set clip_norm."
                )


def _find_joined_metrics(module: nn.Module) -> Iterator[str]:
    """Yield an error for each metric collection whose metrics share state."""
    for name, part in module.named_modules():
        if type(part).__module__.split(".")[0] == "torchmetrics" and not is_metric(part):
            yield (
                f"{type(module).__name__}.{name} is a {type(part).__name__} whose metrics share state, which is "
                "not supported. Assign each metric to a separate attribute of the module."
            )
