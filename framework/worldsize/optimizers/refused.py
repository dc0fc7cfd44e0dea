"""Optimizers that are known to break what a run promises, refused before a process starts."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from worldsize.errors import ConfigError

_REASONS: Mapping[str, str] = {
    "torchao": (
        "keeps its state in tensor classes that a checkpoint, which holds plain tensors alone, cannot save; and in "
        "blocks of each shard, so that its bits depend on the number of processes. Use optimizer=adamw, and "
        "strategy=zero or fsdp if its state is too large."
    ),
    "schedulefree": (
        "trains other weights than those that are to be evaluated and saved, and changes them in place between "
        "both, so that a run that dies there would save neither. Use optimizer=adamw; ema.decay=0.999 averages weights."
    ),
}


def refuse_breaking(optimizer: Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` is of a library whose state cannot be saved and loaded as it should be."""
    library = type(optimizer).__module__.partition(".")[0]
    if library in _REASONS:
        raise ConfigError(f"{library}: {type(optimizer).__name__} {_REASONS[library]}")
