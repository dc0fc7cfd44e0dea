"""Keeps what the result and the checkpoints of a run say of its course."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from worldsize.core import Evaluated, Event, RunStarted, StepDone
from worldsize.record.metrics import last_metrics


@final
@dataclass
class History:
    """A listener that keeps the values for the result and the checkpoints; ``file``: the run's metrics."""

    file: Path
    started: float = field(default_factory=time.perf_counter)
    first: int = 0
    first_step_at: float | None = None  # Unix time
    metrics: Mapping[str, float] = field(default_factory=dict)
    compiled: Mapping[str, Any] = field(default_factory=dict)  # by torch.compile, in this attempt
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self.first, self.metrics = first, last_metrics(self.file) if first else {}
            case StepDone(facts=facts):
                self.first_step_at = self.first_step_at or time.time()
                self.compiled = facts.get("compiled", self.compiled)
            case Evaluated(step=step, metrics=metrics):
                self.metrics = metrics
                self.evaluations.append((step, metrics))
