"""Decides which checkpoints are kept; deleting the others can be interrupted at any point."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from worldsize.checkpoint.format import complete, read, step_of, sync_folder
from worldsize.core import metric_key, split_of
from worldsize.core.limits import Range, check_limits
from worldsize.errors import CheckpointError

_DELETING = ".deleting_"


@dataclass(frozen=True)
class Retention:
    """Keeps the ``last`` checkpoints, those of every ``every``-th step (0: none), and the ``best`` by a metric.

    ``best`` is a metric of the last evaluation before the save, ``accuracy`` of the test data or
    ``validation/accuracy`` of another split; ``direction`` tells whether higher or lower is better.
    """

    last: Annotated[int, Range(least=1, hint="at least the newest checkpoint is kept")] = 2
    every: Annotated[int, Range(least=0, hint="0: none")] = 0
    best: str | None = None
    direction: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        check_limits(type(self), vars(self), key="checkpoint.keep")

    def kept(self, folders: Sequence[Path]) -> set[Path]:
        """Return the checkpoints to keep among ``folders``, which are complete and sorted oldest first."""
        spaced = {path for path in folders if self.every and step_of(path) % self.every == 0}
        best = self.best_of(folders)
        return {*folders[-self.last :], *spaced, *([best] if best else [])}

    def best_of(self, folders: Sequence[Path]) -> Path | None:
        """Return the best of ``folders``, the newest if several are equal; None if none has the metric."""
        scored = {path: score for path in folders if (score := self._score(path)) is not None}
        sign = 1 if self.direction == "max" else -1
        return max(scored, key=lambda path: (sign * scored[path], step_of(path))) if scored else None

    def _score(self, path: Path) -> float | None:
        if self.best is None:
            return None
        try:
            value = read(path).facts.get("metrics", {}).get(metric_key(*split_of(self.best)))
        except CheckpointError:
            return None
        return None if value is None or math.isnan(value) else float(value)


def apply(retention: Retention, written: Path, at: Callable[[str], None]) -> None:
    """Delete checkpoints that are not kept, and remains of interrupted deletions; ``written`` was just saved.

    Checkpoints of later steps are ignored: they are damaged, or training would have resumed from them.
    """
    at("retention:begin")
    root = written.parent
    folders = [path for path in complete(root) if step_of(path) <= step_of(written)]
    for path in set(folders) - retention.kept(folders):
        path.rename(root / f"{_DELETING}{path.name}")  # from here on it does not count as a checkpoint
    sync_folder(root)
    for path in sorted(root.glob(f"{_DELETING}*")):
        _delete(path, at)
    at("retention:end")


def _delete(path: Path, at: Callable[[str], None]) -> None:
    for number, file in enumerate(sorted(path.iterdir())):
        if number == 1:
            at("retention:in-delete")
        file.unlink()
    shutil.rmtree(path)
