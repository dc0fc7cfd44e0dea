"""Check TrainingArguments against the run: compared, replaced and unsupported values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from plugins.hf_trainer.building import isolate_on_cpu
from worldsize.core import ConfigError, PrecisionName

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")  # implemented by torch itself

# applied as by the Trainer: to the optimizer, the schedule, the loss, the model or the data
_CARRIED = {
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "label_smoothing_factor"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("remove_unused_columns", "label_names", "use_cache", "include_for_metrics"),
}

# compared with the run's values in _differences
_COMPARED = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "max_steps"),
    *("num_train_epochs", "learning_rate", "max_grad_norm", "bf16", "fp16", "seed", "data_seed"),
    "dataloader_num_workers",
}

# no effect on training: worldsize has its own logging, checkpoints, evaluation, data loading and devices
_REPLACED = {
    *("output_dir", "overwrite_output_dir", "report_to", "run_name", "project", "disable_tqdm", "log_level"),
    *("log_level_replica", "log_on_each_node", "logging_dir", "logging_strategy", "logging_first_step"),
    *("logging_steps", "logging_nan_inf_filter", "include_num_input_tokens_seen", "skip_memory_metrics", "debug"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "include_tokens_per_second"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps"),
    *("prediction_loss_only", "do_train", "do_eval", "do_predict", "metric_for_best_model", "greater_is_better"),
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node", "save_safetensors"),
    *("enable_jit_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    *("hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision"),
    *("use_cpu", "no_cuda", "local_rank", "ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_static_graph"),
    *("ddp_find_unused_parameters", "ddp_broadcast_buffers", "torch_empty_cache_steps", "length_column_name"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order", "dataloader_drop_last"),
    *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
}

_STRATEGIES = "Set strategy=fsdp, hsdp, zero or mesh instead"
# remedies for unsupported arguments; other arguments with a non-default value are refused too
_REMEDIES = {
    "deepspeed": _STRATEGIES,
    "fsdp": _STRATEGIES,
    "fsdp_config": _STRATEGIES,
    "parallelism_config": _STRATEGIES,
    "torch_compile": "Remove it; models are not compiled",
    "auto_find_batch_size": "Remove it, and raise logical_ranks for smaller micro-batches",
    "average_tokens_across_devices": "Remove it; the mean is always over the tokens of all devices",
    "full_determinism": "Set reproducibility=deterministic instead",
    "tf32": "Set reproducibility=fast instead",
    "train_sampling_strategy": "Remove it; every epoch is shuffled, and length_balanced=true balances sample lengths",
    "group_by_length": "Remove it; every epoch is shuffled, and length_balanced=true balances sample lengths",
    "load_best_model_at_end": "Set checkpoint.keep.best instead",
    "resume_from_checkpoint": "Remove it, and use worldsize resume",
    "push_to_hub": "Remove it, and upload the run's files after training",
    "batch_eval_metrics": "Remove it; compute_metrics is called once, with the predictions of all batches",
    "eval_do_concat_batches": "Remove it; compute_metrics receives the concatenated predictions",
    "bf16_full_eval": "Remove it; evaluation uses the run's precision",
    "fp16_full_eval": "Remove it; evaluation uses the run's precision",
}


@final
@dataclass(frozen=True)
class RunValues:
    """Run settings that also exist in TrainingArguments.

    Args:
        batch_size: samples per step over all ``logical_ranks``.
        logical_ranks: None for one per process.
    """

    steps: int
    epochs: float | None
    batch_size: int
    logical_ranks: int | None
    evaluate_batch_size: int
    lr: float
    clip_norm: float | None
    precision: PrecisionName
    seed: int
    data_workers: int | str


def check_arguments(arguments: Any, run: RunValues, *, run_decides: bool) -> None:
    """Raise ConfigError for unsupported TrainingArguments, and for values that differ from the run's."""
    if refused := list(_find_unsupported(arguments)):
        raise ConfigError("\n".join(refused))
    if not run_decides and (words := _differences(arguments, run)):
        raise ConfigError(
            f"TrainingArguments have {', '.join(f'{name}={value}' for name, (value, _) in words.items())}; "
            f"the run has {', '.join(f'{name}={_format_value(own)}' for name, (_, own) in words.items())}. "
            f"Set {' '.join(f'{name}={value}' for name, (value, _) in words.items())}, or "
            "recipe.run_decides=true."
        )


def _find_unsupported(arguments: Any) -> Iterator[str]:
    """Yield a message with a remedy for each unsupported, non-default argument."""
    defaults = _default_arguments(arguments)
    known = _CARRIED | _COMPARED | _REPLACED
    for name in (field.name for field in fields(defaults)):
        given, usual = getattr(arguments, name, None), getattr(defaults, name)
        if name in known or given == usual or (not given and not usual):
            continue
        remedy = _REMEDIES.get(name, "Remove it")
        yield f"TrainingArguments({name}={given!r}) is not supported. {remedy}."
    if arguments.optim not in OPTIMIZERS:
        yield (
            f"TrainingArguments(optim={str(arguments.optim.value)!r}) is not supported. Use one of "
            f"{', '.join(OPTIMIZERS)}, or pass optimizer_cls_and_kwargs to the Trainer."
        )
    if arguments.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        yield (
            f"TrainingArguments(lr_scheduler_type={str(arguments.lr_scheduler_type.value)!r}) is not supported: the "
            "learning rate must depend only on the step. Use linear, cosine or another schedule that depends only on "
            "the step."
        )


def _default_arguments(arguments: Any) -> Any:
    """Create default arguments of transformers' own class, without a subclass's fields."""
    kind = next(kind for kind in type(arguments).__mro__ if kind.__module__.startswith("transformers."))
    with isolate_on_cpu():
        return kind(output_dir=arguments.output_dir)


def _differences(arguments: Any, run: RunValues) -> Mapping[str, tuple[Any, Any]]:
    """Return (TrainingArguments, run) pairs of differing values by the run's key."""
    wanted: dict[str, Any] = {
        "lr": arguments.learning_rate,
        "clip_norm": arguments.max_grad_norm or None,
        "precision": "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32",
        "evaluate_batch_size": arguments.per_device_eval_batch_size,
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
        "data_workers": arguments.dataloader_num_workers,
        **_get_run_length(arguments),
        **_compute_batch(arguments, run),
    }
    if run.data_workers == "auto":  # chosen by measurement; does not affect results
        del wanted["data_workers"]
    return {
        name: (_format_value(value), getattr(run, name))
        for name, value in wanted.items()
        if value != getattr(run, name)
    }


def _get_run_length(arguments: Any) -> Mapping[str, Any]:
    if arguments.max_steps > 0:
        return {"epochs": None, "steps": arguments.max_steps}
    return {"epochs": arguments.num_train_epochs}


def _compute_batch(arguments: Any, run: RunValues) -> Mapping[str, Any]:
    """Return the required batch: the Trainer's on one device, or on several devices.

    A logical rank corresponds to one micro-batch of a device, whether run in parallel or accumulated.
    """
    of_a_device = arguments.per_device_train_batch_size
    accumulated = of_a_device * arguments.gradient_accumulation_steps
    if run.batch_size % accumulated:
        return {"batch_size": accumulated, "logical_ranks": _choose_logical_ranks(accumulated // of_a_device, run)}
    return {"logical_ranks": _choose_logical_ranks(run.batch_size // of_a_device, run, run.batch_size // accumulated)}


def _choose_logical_ranks(least: int, run: RunValues, devices: int = 1) -> int | None:
    """Return the run's number of logical ranks, or ``least`` if micro-batches would be too large."""
    if run.logical_ranks is None:
        return None if least == devices else least
    return max(least, run.logical_ranks)


def _format_value(value: Any) -> Any:
    return "null" if value is None else value
