"""Names runs in schedulers."""

from __future__ import annotations

import re

from worldsize.core import Plan


def job_name(plan: Plan) -> str:
    """Return a name for the run's jobs, of at most 40 characters that host names may have."""
    words = re.sub("[^a-z0-9]+", "-", f"{plan.run_dir.parts[-2]}-{plan.run_dir.name}".lower())
    return "ws-" + words[-37:].strip("-")
