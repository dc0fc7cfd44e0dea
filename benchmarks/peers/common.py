"""Parts shared by the peers' scripts: model, data, log and measurements."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.tiny.recipe import dataset, model

RANK = int(os.environ.get("RANK", "0"))
WARM_UP = 200
BATCH = 32  # samples per process
LOG_EVERY = 10


class Report:
    """Times the steps after the warm-up, and logs the loss like an ordinary training script."""

    def __init__(self, steps: int, out: Path) -> None:
        self.steps, self.out, self.begun = steps, out, 0.0
        self.log: TextIO = (out.parent / f"{out.stem}_log_{RANK}.jsonl").open("w", buffering=1)

    def step(self, number: int, loss: float | None = None) -> None:
        """Record the end of step ``number``, counted from 1; rank 0 logs ``loss``, if given."""
        if number == 1 and RANK == 0:
            self.out.with_suffix(".first").write_text(str(time.time()))
        if number == min(WARM_UP, self.steps - 1):
            self.begun = time.perf_counter()
        if loss is not None and RANK == 0:
            self.log.write(json.dumps({"step": number, "loss": loss}) + "\n")
        if number == self.steps and RANK == 0:
            self._write()

    def _write(self) -> None:
        measured = self.steps - min(WARM_UP, self.steps - 1)
        figures = {
            "microseconds_per_step": (time.perf_counter() - self.begun) / measured * 1e6,
            "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self.out.write_text(json.dumps(figures))


def arguments() -> tuple[int, Path]:
    return int(sys.argv[1]), Path(sys.argv[2])


__all__ = ["BATCH", "LOG_EVERY", "RANK", "Report", "arguments", "dataset", "model"]
