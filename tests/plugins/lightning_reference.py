"""Lightning itself trains a module on worldsize's batches: the reference for recipes of LightningModules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import nn

Losses = Generator[Any, None, Any]


class _Epochs:
    """Batches like a Lightning DataLoader's: each pass takes those in one epoch."""

    def __init__(self, batches: Iterator[Any], steps_of_epoch: int) -> None:
        self._batches, self._steps = batches, steps_of_epoch

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._steps)


class _Losses(L.Callback):
    """Keeps the loss of each step, as returned or logged by the module."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        if outputs:
            self.values.append(float(outputs["loss"]))
        else:
            self.values.append(sum(float(value) for value in trainer.logged_metrics.values()))


def trainer(**options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, deterministic=True, enable_model_summary=False, **quiet, **options)


def fitted(
    make: Callable[[], Any], *, steps: int = 20, steps_of_epoch: int = 4, **options: Any
) -> Callable[[nn.Module, Iterator[Any]], Losses]:
    """Return the loop of ``lightning.Trainer.fit`` over ``steps``, in the form for same_losses."""

    def reference(model: nn.Module, batches: Iterator[Any]) -> Losses:
        module, losses = make(), _Losses()
        module.load_state_dict(model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice about loaders and loggers
            length = {"max_epochs": steps // steps_of_epoch, "limit_val_batches": 0}
            fit = trainer(callbacks=[losses], **length, **options)
            fit.fit(module, train_dataloaders=_Epochs(batches, steps_of_epoch))
        torch.use_deterministic_algorithms(False)
        yield from losses.values
        return module.state_dict()

    return reference


def validated(module: Any, loader: Any) -> dict[str, float]:
    """Return the result of ``lightning.Trainer.validate``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (metrics,) = trainer().validate(module, dataloaders=loader, verbose=False)
    torch.use_deterministic_algorithms(False)
    return dict(metrics)
