"""Measure time and memory of ``status`` with many runs, and of ``watch`` and ``report`` with many steps.

    python benchmarks/records.py 5000 1000000

The runs are written to a temporary folder in the usual format. Each command runs in a separate process, as for a user;
CPU seconds and peak resident memory are from the kernel's accounting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from worldsize.record.manifest import write_manifest

STEP = {
    "event": "step",
    "samples": 96,
    "loss": 2.0,
    "lr": 0.005,
    "grad_norm": None,
    "skipped": 0,
    "data_seconds": 0.001,
}


def manifest(name: str, steps: int) -> dict[str, Any]:
    """Return the manifest of a completed run of four processes, with 300 packages."""
    attempt = {"number": 1, "start": "2026-11-18T08:26:40+00:00", "start_at": 1.8e9, "end_at": 1.8e9 + 60}
    ended = {"exit_reason": "completed", "exit_code": 0, "hosts": ["here"], "world_size": 4, "steps": [0, steps]}
    torch = {"version": "2.15.0"}
    packages = {f"package-{number}": "1.0" for number in range(300)}
    return {
        "run_id": name,
        "parent_run": None,
        "command": ["train.py"],
        "attempts": [{**attempt, **ended, "end": None, "first_step_at": 1.8e9 + 4, "pid": 1}],
        "results": {"metrics": {}},
        "config": {"steps": steps, "batch_size": 96, "precision": "fp32", "run": {"group": None}, "faults": []},
        "config_sha256": "",
        "overrides": ["recipe=digits"],
        "code": {"commit": None, "dirty": False},
        "plugins": [],
        "environment": {"python": "3.11.7", "platform": "Linux", "torch": torch, "packages": packages},
        "hardware": [{"host": "laptop", "cpu": "", "cores": 4, "memory": 2**34, "gpus": []}],
        "cluster": {
            "name": "laptop",
            "nodes": 1,
            "processes": 4,
            "processes_per_node": 4,
            "backend": "gloo",
            "device": "cpu",
            "roles": [{"role": "worker", "processes": 4}],
            "links": {},
            "groups": {"data": [[0, 1, 2, 3]]},
        },
        "determinism": {"seed": 7, "logical_ranks": 4},
        "data": {"files": {}, "sha256": ""},
        "reproducibility": {"level": "tolerance", "why": ""},
    }


def write_run(folder: Path, steps: int) -> None:
    """Write a run with ``steps`` lines of metrics."""
    (folder / "checkpoints" / "step_0000010").mkdir(parents=True)
    write_manifest(folder / "run_manifest.json", manifest(folder.name, steps))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            times = {"step_seconds": [0.01, 0.011, 0.012, 0.013], "samples_per_second": 9000.0}
            file.write(json.dumps({**STEP, "step": step, **times}) + "\n")


def measure(folder: Path, *words: str) -> None:
    """Run a worldsize command in ``folder``; print CPU seconds, elapsed seconds and peak memory."""
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "worldsize", *words], cwd=folder, stdout=subprocess.DEVNULL
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    own = used.ru_utime + used.ru_stime
    print(f"{words[0]:8} {own:6.1f} s of processor time, {time.monotonic() - begun:6.1f} s, {used.ru_maxrss >> 10} MB")


def main() -> None:
    runs, lines = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(runs):
            write_run(folder / "runs" / "digits" / f"run_{number:05d}", 0)
        measure(folder, "status")
        write_run(folder / "long", lines)
        measure(folder, "watch", "long")
        measure(folder, "report", "long")


if __name__ == "__main__":
    main()
