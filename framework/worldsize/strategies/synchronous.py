"""The replica of every strategy in which all ranks take the same optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from worldsize.collectives.exact import Sums, reduce_metrics
from worldsize.core import (
    EvaluationBatch,
    MicroBatch,
    Numerics,
    Recipe,
    Replica,
    StateDict,
    StepResult,
    World,
)
from worldsize.reproducibility.seeds import seed_generators
from worldsize.strategies.accumulation import Accumulation

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
class SynchronousReplica(Replica):
    """Accumulates micro-batches and steps once; ``module`` is the model or what wraps it."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        *,
        model: nn.Module,
        module: nn.Module,
        numerics: Numerics,
        accumulation: Accumulation,
    ) -> None:
        self.recipe = recipe
        self.world = world
        self.model = model
        self.module = module
        self.numerics = numerics
        self.accumulation = accumulation
        self.optimizer = recipe.optimizer(model)
        self.schedule = recipe.schedule(self.optimizer)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=numerics.precision == "fp16")

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.optimizer.zero_grad()
        losses = self.accumulation.run(micro_batches, self._backward)
        lr: float = self.optimizer.param_groups[0]["lr"]
        norm = self._clip()
        skipped = self._update(norm)
        if self.schedule is not None:
            self.schedule.step()
        return StepResult(losses, lr, norm, skipped)

    def _backward(self, batch: MicroBatch, scale: float) -> Tensor:
        seed_generators(batch.seed, self.world.device)
        with self._autocast():
            loss = self.recipe.loss(self.module, batch.data)
        scaled = self.scaler.scale(loss if scale == 1 else loss * scale)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = _DTYPES.get(self.numerics.precision)
        return torch.autocast(self.world.device.type, dtype=dtype) if dtype else nullcontext()

    def _clip(self) -> Tensor | None:
        """Norm of the whole gradient before clipping, where it is clipped or must be finite; else None."""
        if self.numerics.clip_norm is None and self.numerics.nonfinite != "skip":
            return None
        self.scaler.unscale_(self.optimizer)
        limit = self.numerics.clip_norm or float("inf")
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def _update(self, norm: Tensor | None) -> bool:
        """Step the optimizer; True if the step was left out. Gradients are equal on all ranks, so all agree."""
        skipped = self.numerics.nonfinite == "skip" and norm is not None and not bool(norm.isfinite())
        if not skipped:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return skipped

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        sums: dict[int, Sums] = {}
        names: tuple[str, ...] = ()
        self.model.eval()
        with torch.no_grad(), self._autocast():
            for batch in batches:
                metrics = self.recipe.evaluate(self.model, batch.data)
                names = tuple(sorted(metrics))
                if batch.counted:
                    sums[batch.index] = metrics
        self.model.train()
        return reduce_metrics(sums, names, self.world)

    def state(self) -> StateDict:
        schedule = self.schedule.state_dict() if self.schedule is not None else {}
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "schedule": schedule,
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: StateDict) -> None:
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.accumulation.resumed()
