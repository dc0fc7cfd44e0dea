"""Train a program's Trainer by ``Trainer.train()`` itself, and by the recipe made from it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch import nn

from plugins.hf_trainer.arguments import RunValues
from plugins.hf_trainer.recipe import HFTrainer
from tests.plugins import hf_programs as programs
from worldsize.core import Batch, Numerics
from worldsize.testing.port import PortConfig

ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
Make = Callable[..., Any]


def values(**changes: Any) -> RunValues:
    given: dict[str, Any] = {
        "steps": programs.STEPS,
        "epochs": None,
        "batch_size": programs.BATCH,
        "logical_ranks": None,
        "evaluate_batch_size": 8,
        "lr": 1e-3,
        "clip_norm": 0.5,
        "precision": "fp32",
        "seed": programs.SEED,
        "data_workers": 0,
    }
    return RunValues(**{**given, **changes})


def recipe(make: Make, *, run: RunValues | None = None, run_decides: bool = False) -> HFTrainer:
    return HFTrainer("program.make_trainer", make, run or values(), run_decides)


def config(micro_batches: int = 1) -> PortConfig:
    return PortConfig(
        batch_size=programs.BATCH,
        micro_batches=micro_batches,
        steps=programs.STEPS,
        seed=programs.SEED,
        numerics=Numerics(clip_norm=0.5),
    )


class Given:
    """Batches in place of the Trainer's, since its order differs."""

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        self.batches, self.count = batches, count

    def __iter__(self) -> Iterator[Batch]:
        return self.batches

    def __len__(self) -> int:
        return self.count


def trained_by_transformers(make: Make, micro_batches: int = 1) -> Any:
    """Return a reference for same_losses: ``Trainer.train()`` itself, on the given batches."""

    def original(model: nn.Module, batches: Iterator[Batch]) -> Generator[float, None, Any]:
        given = Given(batches, programs.STEPS * micro_batches)

        trainer = make()
        trainer.model.load_state_dict(model.state_dict())
        trainer.get_train_dataloader = lambda: given
        trainer.train()
        yield from [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return trainer.model

    return original
