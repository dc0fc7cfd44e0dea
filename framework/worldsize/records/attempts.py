"""The record of each attempt at a run: when it began, on which hosts, and how it ended."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from worldsize.checkpoints.format import COMPLETE, complete, read, step_of
from worldsize.core import Outcome
from worldsize.errors import CheckpointError
from worldsize.records import manifest
from worldsize.records.metrics import rewind
from worldsize.records.run_directory import RunDirectory
from worldsize.world.environments import job_of


def begin_attempt(run: RunDirectory, others: Sequence[str], world_size: int) -> int:
    """Note that an attempt begins, on this host and ``others``; its number."""
    hosts = [socket.gethostname(), *others]
    number = manifest.begin_attempt(run.manifest, hosts=hosts, world_size=world_size, job=job_of(os.environ))
    _rewind(run)  # before anybody follows the file
    run.result.unlink(missing_ok=True)
    return number


def _rewind(run: RunDirectory) -> None:
    saved, evaluated = complete(run.checkpoints), True
    if saved:
        with suppress(CheckpointError):  # a damaged one is refused by those who load it
            evaluated = read(saved[-1]).facts.get("evaluated", True)
    rewind(run.metrics, step_of(saved[-1]) if saved else 0, evaluated=evaluated)


def end_attempt(run: RunDirectory, outcome: Outcome) -> None:
    """Note how the attempt ended."""
    facts = {key: getattr(outcome, key) for key in ("exit_reason", "exit_code", "steps", "first_step_at")}
    if run.transport.exists():
        facts["transport"] = json.loads(run.transport.read_text())
        run.transport.unlink()
    results = manifest.end_attempt(run.manifest, _result(run, outcome), **facts)
    run.result.write_text(json.dumps(results, indent=2) + "\n")


def _result(run: RunDirectory, outcome: Outcome) -> dict[str, Any]:
    """What rank 0 wrote, or only the exit reason if the run did not get so far; and the checkpoints' digests."""
    digests = {path.name: (path / COMPLETE).read_text().strip() for path in complete(run.checkpoints)}
    if outcome.exit_code != 0 or not run.result.exists():
        return {"exit_reason": outcome.exit_reason, "checkpoints": digests}
    return {**json.loads(run.result.read_text()), "checkpoints": digests}
