"""``metrics.jsonl``: one line a logged step and one an evaluation; strict JSON, readable while it grows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, StepDone
from worldsize.reproducibility.strict import strict

# what follows from the computation alone; the rest of a line is time
_COMPUTED = ("event", "step", "samples", "loss", "lr", "grad_norm", "skipped", "metrics")


@final
class JsonLines:
    """Appends each event to ``path`` and flushes, so that others can follow the file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone():
                self._write({"event": "step", **asdict(event)})
            case Evaluated():
                self._write({"event": "evaluation", "step": event.step, "metrics": dict(event.metrics)})
            case RunEnded() | RunFailed():
                self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(strict(line)) + "\n")


def metrics_digest(path: Path) -> str:
    """SHA-256 of what the lines say of the computation; times are left out."""
    digest = hashlib.sha256()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        computed = {key: row[key] for key in _COMPUTED if key in row}
        digest.update(json.dumps(computed, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
