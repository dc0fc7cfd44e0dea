"""The training loop: steps a replica and tells what happened."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worldsize.collectives.exact import share
from worldsize.core import (
    Emit,
    Evaluated,
    MicroBatch,
    NonfiniteLossError,
    Replica,
    StepDone,
    StepResult,
    World,
)
from worldsize.engine.data import Order


@dataclass(frozen=True)
class Pace:
    """When a run stops, and every how many steps it logs and evaluates (0: only at the end)."""

    steps: int
    log_every: int = 10
    evaluate_every: int = 0

    def logs(self, step: int, *, first: int) -> bool:
        return step % self.log_every == 0 or step in (first + 1, self.steps)

    def evaluates(self, step: int) -> bool:
        return step == self.steps or (self.evaluate_every > 0 and step % self.evaluate_every == 0)


def fit(
    replica: Replica,
    batches: Iterable[Sequence[MicroBatch]],
    world: World,
    *,
    order: Order,
    pace: Pace,
    evaluate: Callable[[], Mapping[str, float]],
    emit: Emit,
    first: int = 0,
    stop_on_nonfinite: bool = True,
) -> None:
    """Run steps ``first + 1`` to ``pace.steps``; ``batches`` starts at the first of them.

    Nothing here waits for the device or for other ranks between logged steps.

    Raises:
        NonfiniteLossError: on every rank alike, at the first logged step after the loss became NaN or infinite.
    """
    window = _Window(world, order)
    source = iter(batches)
    for step in range(first + 1, pace.steps + 1):
        window.fetching()
        micro_batches = next(source)
        window.stepping()
        window.add(replica.step(micro_batches))
        if pace.logs(step, first=first):
            done = window.close(step)
            emit(done)
            if stop_on_nonfinite and not math.isfinite(done.loss):
                raise NonfiniteLossError(_explain(done))
        if pace.evaluates(step):
            emit(Evaluated(step, evaluate()))
            window.restart()


def _explain(done: StepDone) -> str:
    return (
        f"the loss is {done.loss} at or before step {done.step}. Lower lr, set clip_norm, or choose "
        "nonfinite=skip (leave such steps out) or nonfinite=ignore."
    )


@dataclass
class _Window:
    """The steps since the last logged one: their losses and where their time went."""

    world: World
    order: Order
    results: list[StepResult] = field(default_factory=list)
    waited: float = 0.0
    mark: float = 0.0
    opened: float = field(default_factory=time.perf_counter)

    def fetching(self) -> None:
        self.mark = time.perf_counter()

    def stepping(self) -> None:
        self.waited += time.perf_counter() - self.mark

    def add(self, result: StepResult) -> None:
        self.results.append(result)

    def restart(self) -> None:
        """Forget the time spent outside of training."""
        self.opened = time.perf_counter()

    def close(self, step: int) -> StepDone:
        """Agree with the other ranks on the window's losses, in one all-reduce, and open the next window."""
        count, last = len(self.results), self.results[-1]
        losses_sl, step_seconds = self._shared(count)
        elapsed = time.perf_counter() - self.opened
        done = StepDone(
            step=step,
            samples=step * self.order.batch_size,
            loss=_logged_loss(losses_sl),
            lr=last.lr,
            grad_norm=None if last.grad_norm is None else float(last.grad_norm),
            skipped=sum(result.skipped for result in self.results),
            data_seconds=self.waited / count,
            step_seconds=step_seconds,
            samples_per_second=count * self.order.batch_size / elapsed,
        )
        self.results, self.waited = [], 0.0
        self.restart()
        return done

    def _shared(self, count: int) -> tuple[Tensor, tuple[float, ...]]:
        """Losses of every step and logical rank, float64 [steps, logical ranks]; mean step time of each rank."""
        losses = torch.stack([loss for result in self.results for loss in result.losses]).double().cpu()
        busy = time.perf_counter() - self.opened - self.waited  # after .cpu(): the device has caught up
        table_sl = torch.zeros(count, self.order.logical_ranks, dtype=torch.float64)
        table_sl[:, list(self.order.mine)] = losses.view(count, -1)
        times_p = torch.zeros(self.world.size, dtype=torch.float64)
        times_p[self.world.rank] = busy / count
        shared = share(torch.cat([table_sl.flatten(), times_p]), self.world)
        return shared[: table_sl.numel()].view_as(table_sl), tuple(shared[table_sl.numel() :].tolist())


def _logged_loss(losses_sl: Tensor) -> float:
    """Global mean of the last step; the first NaN or infinity of the window, if there is one."""
    means = [math.fsum(row) / len(row) if all(map(math.isfinite, row)) else sum(row) for row in losses_sl.tolist()]
    return next((mean for mean in means if not math.isfinite(mean)), means[-1])
