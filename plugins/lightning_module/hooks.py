"""Find overridden hooks of a LightningModule or DataModule that worldsize does not call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from plugins.lightning_module.module_metrics import is_metric
from worldsize.core import ConfigError
from worldsize.errors import neighbours

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


_HOOK_PREFIXES = ("on_", "configure_", "optimizer_", "lr_scheduler_")
_OTHER_HOOKS = {"backward", "transfer_batch_to_device"}
_NO_HOOKS = {"on_gpu"}  # a property


def check_hooks(module: Any, datamodule: Any, ignored: Sequence[str] = ()) -> None:
    """Raise ConfigError, with remedies, if overridden hooks would not be called, except ``ignored`` ones.

    A name in ``ignored`` that is not such a hook is an error, too.
    """
    is_manual = not module.automatic_optimization
    owners = [(module, "LightningModule", _CARRIED | _CARRIED_BY_MANUAL if is_manual else _CARRIED)]
    if datamodule is not None:
        owners.append((datamodule, "LightningDataModule", _CARRIED))
    _check_ignored(ignored, owners)
    uncalled = [(owner, name) for owner, base, carried in owners for name in _find_uncalled(owner, base, carried)]
    uncalled = [(owner, name) for owner, name in uncalled if name not in ignored]
    refused = [_describe_uncalled(owner, name) for owner, name in uncalled]
    refused += [*_signatures(module), *_find_joined_metrics(module)]
    if is_manual:
        refused += _find_clipping_calls(module)
    if hooks := {name for _, name in uncalled if _is_hook(name)}:
        names = ",".join(sorted({*ignored, *hooks}))
        refused.append(f"To train without calling them, set recipe.ignore_hooks=[{names}].")
    if refused:
        raise ConfigError("\n".join(refused))


def _check_ignored(ignored: Sequence[str], owners: Sequence[tuple[Any, str, set[str]]]) -> None:
    known = {name for owner, base, carried in owners for name in _list_names(owner, base) - carried if _is_hook(name)}
    for name in ignored:
        if any(name in carried for _, _, carried in owners):
            raise ConfigError(f"recipe.ignore_hooks: worldsize calls {name}. Remove it from the list.")
        if name not in known | _IRRELEVANT:
            raise ConfigError(f"recipe.ignore_hooks: unknown hook {name!r}{neighbours(name, known)}")


def _is_hook(name: str) -> bool:
    return (name.startswith(_HOOK_PREFIXES) or name in _OTHER_HOOKS | _REMOVED) and name not in _NO_HOOKS


def find_lightning_base(value: object, name: str) -> type | None:
    """Return an object's base class ``name`` from either Lightning package, or None."""
    kinds = [kind for kind in type(value).__mro__ if kind.__name__ == name and _is_lightning(kind)]
    return kinds[0] if kinds else None


def _is_lightning(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning")


def _find_base(value: Any, name: str) -> type:
    base = find_lightning_base(value, name)
    assert base is not None, f"checked when it was built: {name}"
    return base


def _list_names(value: Any, base: str) -> set[str]:
    """Return names of methods, in the Lightning class ``base``, that a program may override."""
    own = {name for name in dir(_find_base(value, base)) if not name.startswith("_")}
    return (own - set(dir(nn.Module)) | _OF_MODULES | _REMOVED) - _IRRELEVANT


def _find_uncalled(value: Any, base: str, carried: set[str]) -> list[str]:
    """Return the names that ``value`` overrides, but worldsize does not call."""
    known = _find_base(value, base)
    own = [kind for kind in type(value).__mro__ if not _is_lightning(kind) and kind not in known.__mro__]
    return sorted({name for kind in own for name in vars(kind)} & _list_names(value, base) - carried)


def _describe_uncalled(value: Any, name: str) -> str:
    remedy = "Remove it; Lightning 2 does not call it" if name in _REMOVED else _REMEDIES.get(name, "Remove it")
    return f"{type(value).__name__}.{name} is not called by worldsize. {remedy}."


def _signatures(module: Any) -> Iterator[str]:
    """Yield an error for each training_step argument that worldsize does not support."""
    for name in inspect.signature(module.training_step).parameters:
        if name in ("dataloader_iter", "optimizer_idx", "hiddens"):
            yield (
                f"the argument {name} of {type(module).__name__}.training_step is not supported. Use "
                "training_step(self, batch, batch_idx)."
            )


def _find_clipping_calls(module: Any) -> Iterator[str]:
    """Yield an error for each gradient-clipping method; gradients do not exist yet."""
    known = _find_base(module, "LightningModule")
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
                f"metrics that share state are not supported: {type(module).__name__}.{name} ({type(part).__name__}). "
                "Assign each metric to a separate attribute of the module."
            )
