"""Build a transformers.Trainer as in a single process without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from worldsize.core import ConfigError
from worldsize.seeds import keep_generators

# if any of these is set, accelerate assumes several processes and creates process groups
_PLACES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
)


def build_trainer(make: Callable[[], Any], *, name: str, seed: int) -> Any:
    """Return the ``transformers.Trainer`` built by ``make``, with its model on the CPU.

    Args:
        name: the function's name in the configuration, for error messages.
        seed: seed for Python, NumPy and torch, set before the call like ``transformers.set_seed``. All processes thus
            get the same initial weights.

    Raises:
        ConfigError: the result is not a Trainer, or was built before the call, without the seed.
    """
    import transformers

    with isolate_on_cpu(), keep_generators():
        transformers.set_seed(seed)
        trainer = make()
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(
            f"recipe.trainer={name} returned a {type(trainer).__name__}, expected a transformers.Trainer. "
            "Return the Trainer without calling train()."
        )
    if any(value is trainer for value in getattr(make, "__globals__", {}).values()):
        raise ConfigError(
            f"recipe.trainer={name} returned a Trainer built at import time, before the seed was set. Build "
            "the model and the Trainer inside the function."
        )
    if trainer.state.global_step:
        raise ConfigError(f"recipe.trainer={name} returned a Trainer that was already trained. Remove trainer.train().")
    return trainer


@contextmanager
def isolate_on_cpu() -> Iterator[None]:
    """Make accelerate assume a single process without an accelerator in this block."""
    hidden = {name: os.environ.pop(name) for name in _PLACES if name in os.environ}
    wanted = os.environ.get("ACCELERATE_USE_CPU")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        with torch.device("cpu"):
            yield
    finally:
        os.environ.pop("ACCELERATE_USE_CPU")
        os.environ.update(hidden if wanted is None else {**hidden, "ACCELERATE_USE_CPU": wanted})
