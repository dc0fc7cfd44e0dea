"""``worldsize doctor`` on a cluster that takes jobs: start it, and check it against its job's folder."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

LINKS = "cluster.links.network={bandwidth: 1e6, latency: 1e-4}"


@final
class DoctorJob:
    """A doctor whose submitted job is in the file ``submitted``.

    Args:
        words: Options of the cluster.
        python: The interpreter.
        folder: Working directory.
        environment: Its environment.
        submitted: File where the cluster's command stores the job.
    """

    def __init__(
        self, words: Sequence[str], *, python: Path, folder: Path, environment: Mapping[str, str], submitted: Path
    ) -> None:
        self._report = folder / "report.json"
        command = [str(python), "-m", "worldsize", "doctor", "--patience=100", "--json", str(self._report)]
        self._process = subprocess.Popen(
            [*command, *words, LINKS],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 200
        while not submitted.exists():
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def check(self, log: Path, text: str, runs: Path) -> None:
        """Write ``text`` to the job's ``log`` for the cluster's command, and check the doctor's output about it."""
        draft = log.with_name("draft")
        draft.write_text(text)
        draft.rename(log)
        output, _ = self._process.communicate(timeout=100)
        assert self._process.returncode == 0, output
        assert "4 ranks agree" in output
        (left,) = runs.rglob("report.json")
        assert json.loads(left.read_text())["checks"] == json.loads(self._report.read_text())["checks"]
