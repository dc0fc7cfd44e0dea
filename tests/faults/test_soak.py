"""A run whose processes die repeatedly ends with the bits and the log of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_random_points_change_no_bit_and_no_logged_row(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SOAK), "heal", "5"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "5 kills, exit 0" in done.stdout
    assert "equal to the undisturbed run: state_digest, metrics_digest" in done.stdout
