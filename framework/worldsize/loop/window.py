"""Measurements between two logged steps, and the event created from them."""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from worldsize.collectives.exact import exact_sum, start_all_gather
from worldsize.collectives.step_timer import PHASES, StepTimer
from worldsize.core import StepDone, StepResult, World
from worldsize.devices import move_to_device, synchronize_stream
from worldsize.loop.training_metrics import TrainingMetrics, compute_means, count_missing_ranks

_SPLITS = 1 + len(PHASES)  # times per measured step: the wait for data, then the phases
_COMMUNICATION = 1 + PHASES.index("communication")


@final
@dataclass
class LogWindow:
    """The losses and time breakdowns of the steps since the last logged step."""

    world: World
    batch_size: int
    timer: StepTimer | None
    metrics: TrainingMetrics
    logical_ranks: int | None = None  # total number, if some ranks have one less than others; None: equal
    parts: Sequence[int] | None = None  # one rank per data-parallel replica, in order; None: each rank is a replica
    _losses: list[Sequence[Tensor]] = field(default_factory=list)
    _waited: float = 0.0  # seconds spent waiting for data
    _mark: float = 0.0  # time at which the step started to wait for its data
    _opened: float = field(default_factory=time.perf_counter)

    def fetching(self) -> None:
        """Record that a step starts to wait for its data."""
        self._mark = time.perf_counter()

    def stepping(self, *, measured: bool) -> None:
        """Record that the step has its data; if ``measured``, start its time breakdown."""
        seconds = time.perf_counter() - self._mark
        self._waited += seconds
        if self.timer and measured:
            self.timer.start_step(data=seconds)

    def add_losses(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor], *, occasional: bool = False) -> None:
        """Add the step's losses and metrics.

        Losses are scalars. Each metric has a sum and a count per local micro-batch: float64 (local micro-batches, 2).
        ``occasional``: see :meth:`TrainingMetrics.add`.
        """
        self._losses.append(losses)
        self.metrics.add(metrics, occasional=occasional)

    def get_metric_sums(self) -> Mapping[str, Tensor]:
        """Return this rank's metric sums, float64 (micro-batches, 2), by name."""
        self.metrics.check_names(self.world)
        return self.metrics.sums

    def end_step(self) -> None:
        """Record that the step has ended."""
        if self.timer:
            self.timer.end_step()

    @contextmanager
    def pause_timing(self) -> Iterator[None]:
        """Exclude the time in this block from the duration of steps."""
        begun = time.perf_counter()
        yield
        self._opened += time.perf_counter() - begun

    def close(self, step: int, facts: Mapping[str, Any]) -> LoggedStep:
        """Start to gather the window's measurements from all ranks, and open the next window.

        If called before the update of the current step, its time breakdown is not included.
        """
        elapsed = time.perf_counter() - self._opened
        steps = len(self._losses)
        splits_s4 = self.timer.collect_step_times() if self.timer else torch.empty(0, _SPLITS, dtype=torch.float64)
        times = torch.tensor([(elapsed - self._waited) / steps, elapsed / steps], dtype=torch.float64)
        losses_sb = torch.stack([loss for losses in self._losses for loss in losses]).double().view(steps, -1)
        own = losses_sb.shape[1]
        parts = range(self.world.size) if self.parts is None else self.parts
        padding = count_missing_ranks(own, len(parts), self.logical_ranks)
        names, metrics = self.metrics.take_sums(self.world, padding)
        last_b = F.pad(losses_sb[-1], (0, padding))
        figures = [torch.cat([splits_s4.flatten(), times]), _first_nonfinite(losses_sb), last_b, metrics]
        flat = torch.cat([move_to_device(each, losses_sb.device) for each in figures])
        logged = LoggedStep(
            step=step,
            batch_size=self.batch_size,
            rank=self.world.rank,
            logical_ranks=self.logical_ranks or own * self.world.size,
            parts=parts,
            steps=steps,
            measured=len(splits_s4),
            metrics=names,
            waited=self._waited,
            facts=facts,
            gathered=start_all_gather(flat, self.world),
        )
        self._losses, self._waited, self._opened = [], 0.0, time.perf_counter()
        return logged


@final
@dataclass(frozen=True)
class LoggedStep:
    """The last step of a closed window, while its measurements are gathered from all ranks."""

    step: int
    batch_size: int
    rank: int
    logical_ranks: int
    """Total number of logical ranks; ranks with a high number may have one less than others."""
    parts: Sequence[int]
    """The ranks whose losses and metrics count: one per data-parallel replica."""
    steps: int
    """Number of steps in the window."""
    measured: int
    """Number of steps in the window with a time breakdown."""
    metrics: Sequence[str]
    """Names of the training metrics."""
    waited: float
    """Seconds that this rank waited for data during the window."""
    facts: Mapping[str, Any]
    gathered: Callable[[], Tensor]
    """Waits for the other ranks and returns a float64 matrix with one row per rank.

    A row contains the time breakdowns of the measured steps, the mean step time without and with the wait for data, the
    result of :func:`_first_nonfinite`, the losses of the last step, and the sums and counts of each metric for the
    rank's logical ranks. Losses and metrics are padded with a zero if the rank has one logical rank less than others.
    The length of a row does not depend on the number of unmeasured steps.
    """
    is_received: bool = False
    """Whether the measurements of all ranks have arrived."""

    def receive_measurements(self) -> LoggedStep:
        """Wait for the other ranks' measurements, so that they cannot be lost with a rank."""
        rows_pn = self.gathered()
        return replace(self, gathered=lambda: rows_pn, is_received=True)

    def create_event(self, last: StepResult, skipped: int) -> StepDone:
        """Wait for the other ranks, and return the event of this step.

        Args:
            last: The result of this step.
            skipped: Number of steps with a skipped update since the start of the run.
        """
        own_norm = last.grad_norm
        norm = None if own_norm is None else own_norm.to("cpu", non_blocking=True)
        rows_pn = self.gathered()  # waits for the device, and thus for the norm
        if own_norm is not None and self.is_received:
            synchronize_stream(own_norm.device)
        splits, losses, parts = self.measured * _SPLITS, -(-self.logical_ranks // len(self.parts)), list(self.parts)
        sizes = [splits, 2, 2, losses, rows_pn.shape[1] - splits - 4 - losses]
        splits_pn, times_p2, nonfinite_p2, losses_pb, metrics_pn = torch.split(rows_pn, sizes, dim=1)
        splits_ps4 = splits_pn.view(len(rows_pn), self.measured, _SPLITS)
        means_p4 = splits_ps4.mean(1)
        compute, communication, update = means_p4[self.rank].tolist()[1:] if self.measured else [None] * 3
        # logical ranks are dealt to replicas in rounds; the last round may be incomplete
        last_losses = losses_pb[parts].T.flatten()[: self.logical_ranks].tolist()
        return StepDone(
            step=self.step,
            samples=self.step * self.batch_size,
            loss=_compute_logged_loss(nonfinite_p2.tolist(), last_losses),
            lr=last.lr,
            grad_norm=None if norm is None else float(norm),
            skipped=skipped,
            data_seconds=self.waited / self.steps,
            step_seconds=tuple(times_p2[:, 0].tolist()),
            samples_per_second=self.batch_size / float(times_p2[:, 1].max()),
            facts=self.facts,
            compute_seconds=compute,
            communication_seconds=communication,
            update_seconds=update,
            exposed_seconds=float(means_p4[:, _COMMUNICATION].min()) if self.measured else None,
            metrics=compute_means(self.metrics, metrics_pn[parts]),
            splits=splits_ps4.tolist() if self.measured and self.rank == 0 else (),
            losses_sha256=_digest_losses(last_losses),
        )


def _first_nonfinite(losses_sb: Tensor) -> Tensor:
    """Return (loss sum, index) of the window's first step with a non-finite sum.

    If all sums are finite, return those of step 0.
    """
    sums_s = losses_sb.sum(1)
    first = sums_s.isfinite().logical_not_().byte().argmax(0, keepdim=True)
    return torch.cat([sums_s.gather(0, first), first])


def _compute_logged_loss(nonfinite_p2: Sequence[tuple[float, float]], losses: Sequence[float]) -> float:
    """Return the first NaN or infinite loss in the window.

    If all are finite, return the last step's loss.

    Args:
        nonfinite_p2: The result of :func:`_first_nonfinite` on each rank: (ranks, 2).
        losses: Losses of all micro-batches of the last step.
    """
    nonfinite = [(place, total) for total, place in nonfinite_p2 if not math.isfinite(total)]
    if not nonfinite:
        return exact_sum(losses) / len(losses)
    first = min(place for place, _ in nonfinite)
    return sum(total for place, total in nonfinite if place == first)


def _digest_losses(losses: Sequence[float]) -> str:
    """Return the SHA-256 of the losses of all logical ranks, sorted by their bytes.

    Ranks of a mesh that train the same logical ranks report the same losses, so all counts are divided by their
    greatest common divisor. The result depends neither on the mesh nor on how logical ranks are dealt.
    """
    counts = Counter(struct.pack("<d", loss) for loss in losses)
    divisor = math.gcd(*counts.values())
    return hashlib.sha256(b"".join(loss * (counts[loss] // divisor) for loss in sorted(counts))).hexdigest()
