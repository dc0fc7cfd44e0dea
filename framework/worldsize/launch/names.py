"""Name runs in schedulers."""

from __future__ import annotations

import re

from worldsize.core import Plan


def job_name(plan: Plan) -> str:
    """Name everything that belongs to the run, in at most 40 characters that a host's name may have."""
    words = re.sub("[^a-z0-9]+", "-", f"{plan.run_dir.parts[-2]}-{plan.run_dir.name}".lower())
    return "ws-" + words[-37:].strip("-")
