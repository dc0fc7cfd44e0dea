"""Replacement for ``self.trainer`` with basic facts about the run; rejects other attributes."""

from __future__ import annotations

from typing import Any, NoReturn, final

import torch.distributed as dist

from plugins.lightning_module.positions import Positions, RunValues
from worldsize.core import ConfigError


@final
class RunFacts:
    """Facts about a run under their names in ``lightning.Trainer``.

    The module sees one device with the whole batch. Only ``is_global_zero`` differs between processes, so that one of
    them can print.
    """

    world_size = num_devices = num_nodes = accumulate_grad_batches = 1
    global_rank = local_rank = node_rank = 0
    barebones = fast_dev_run = sanity_checking = predicting = should_stop = False
    logger = profiler = checkpoint_callback = early_stopping_callback = None
    loggers: tuple[Any, ...] = ()
    callbacks: tuple[Any, ...] = ()

    def __init__(self, run: RunValues, positions: Positions, *, is_manual: bool = False) -> None:
        self._run, self._positions, self._is_manual = run, positions, is_manual
        self._step, self._stage = 1, "training_step"

    def __deepcopy__(self, memo: dict[int, Any]) -> RunFacts:
        """Return this object itself, since a copied model belongs to the same run."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        from lightning.pytorch import Trainer

        if name.startswith("_") or not hasattr(Trainer, name):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        known = sorted(each for each in dir(self) if not each.startswith("_") and each != "set_step")
        raise ConfigError(f"self.trainer.{name} is not supported. Remove it, or use one of {', '.join(known)}.")

    def set_step(self, step: int, stage: str) -> None:
        """Set the next step, counted from 1, and the name of the method that runs it."""
        self._step, self._stage = step, stage

    @property
    def current_epoch(self) -> int:
        return self._positions.find_epoch(self._step)

    @property
    def global_step(self) -> int:
        if self._is_manual:
            raise ConfigError(
                "self.global_step is not supported with manual optimization: Lightning counts the steps of all "
                "optimizers, worldsize counts batches. Use batch_idx + self.current_epoch * "
                "self.trainer.num_training_batches."
            )
        return self._step - 1

    @property
    def is_last_batch(self) -> bool:
        return self._positions.ends_epoch(self._step)

    @property
    def num_training_batches(self) -> float:
        return self._positions.steps_of_epoch or float("inf")

    @property
    def max_epochs(self) -> int:
        return self._positions.count_epochs(self._run.steps) or -1

    @property
    def max_steps(self) -> int:
        return self._run.steps

    @property
    def estimated_stepping_batches(self) -> int:
        return self._run.steps

    @property
    def is_global_zero(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def training(self) -> bool:
        return self._stage == "training_step"

    @property
    def validating(self) -> bool:
        return self._stage == "validation_step"

    @property
    def testing(self) -> bool:
        return self._stage == "test_step"
