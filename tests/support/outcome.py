"""Collects the results of a run, for tests that compare runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def outcome(folder: Path) -> dict[str, Any]:
    """Return what equal runs have in common: digests, metrics, sizes, and the contents of the last checkpoint."""
    result = json.loads((folder / "result.json").read_text())
    state = json.loads((max((folder / "checkpoints").glob("step_*")) / "manifest.json").read_text())
    results = {key: result[key] for key in ("state_digest", "metrics_digest", "metrics", "steps", "samples")}
    return {**results, **{key: state[key] for key in ("step", "values", "files", "tensors")}}
