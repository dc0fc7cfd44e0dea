"""Training on hosts that are network namespaces with shaped links; needs root."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from worldsize.testing.hosts import Hosts

REPOSITORY = Path(__file__).parents[1]


def trained_on(hosts: Hosts, *options: str) -> list[dict[str, Any]]:
    """The logged steps of a run by ``cluster=ssh`` on all of ``hosts``."""
    with tempfile.TemporaryDirectory() as runs:
        words = [
            *("+cluster=ssh", f"cluster.hosts=[{','.join(f'h{host + 1}' for host in range(hosts.count))}]"),
            *(f"cluster.ssh=[{','.join(hosts.ssh)}]", f"cluster.python={sys.executable}", "cluster.folder=null"),
            *("log_every=1", "logger=none", "cluster.threads=1", f"run.root={runs}", "evaluate_every=0"),
            *("recipe.test_bytes=1000", "optimizer=sgd", "checkpoint=none", *options),
        ]
        command = hosts.on(1, [sys.executable, "train.py", *words])
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(runs).rglob("metrics.jsonl")
        return [each for each in map(json.loads, file.read_text().splitlines()) if each["event"] == "step"]
