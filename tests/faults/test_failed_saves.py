"""A failed save does not end training by default; every rank is notified, and checkpoints stay intact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.outcome import outcome
from worldsize.checkpoint.format import complete, read_checkpoint, verify_checkpoint

pytestmark = pytest.mark.heavy
OPTIONS = (
    "recipe=digits",
    "recipe.width=4",
    "steps=14",
    "log_every=1",
    "checkpoint.every=4",
    "checkpoint.keep.last=99",
    "cluster.threads=1",
    "cluster.processes=2",
)
REFUSED = "No space left on device"
# hits the first save written by its process; a second one, the second save
FULL = "action: disk_full, point: 'checkpoint:in-shard'"
SLOW = "action: sleep, seconds: 0.05, attempt: null"


def planted(*faults: str) -> str:
    return f"faults=[{', '.join(f'{{{fault}}}' for fault in faults)}]"


def events(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "checkpoint_failed"]


def verified(folder: Path) -> Sequence[int]:
    """Return the steps of a run's checkpoints, after reading and verifying each."""
    checkpoints = [read_checkpoint(path) for path in complete(folder / "checkpoints")]
    for each in checkpoints:
        verify_checkpoint(each)
    return [each.step for each in checkpoints]


def test_training_goes_on_with_the_same_bits_and_the_failure_is_told_everywhere(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    run = train(*OPTIONS, planted(f"{FULL}, rank: 1", f"{FULL}, rank: 1"))
    assert run.code == 0, run.error
    assert [(row["step"], row["newest"], row["in_a_row"]) for row in events(run.folder)] == [(4, None, 1), (8, None, 2)]
    assert all(REFUSED in row["reason"] for row in events(run.folder))
    assert events(run.folder)[0]["reason"].startswith("rank 1: ")
    said = " ".join((run.output + run.error).split())
    assert "step 4: failed to write the checkpoint: rank 1: [Errno 28]" in said
    assert "2 saves in a row have failed. A restart would resume from the beginning" in said
    assert [each["step"] for each in run.json("result.json")["failed_saves"]] == [4, 8]
    assert verified(run.folder) == [12, 14]
    undisturbed = train(*OPTIONS)
    assert "failed_saves" not in undisturbed.json("result.json")
    assert outcome(run.folder) == outcome(undisturbed.folder)
    done = command("report", str(run.folder), cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    (page,) = run.folder.glob("report*.html")
    assert "failed saves" in page.read_text()
    assert "A restart would resume from the beginning" in page.read_text()


def test_a_run_that_is_to_stop_agrees_on_a_step_saves_again_and_fails(train: Any) -> None:
    long = ("steps=400", "checkpoint.on_failure=stop")
    run = train(*OPTIONS, *long, planted(f"{FULL}, rank: 1", SLOW))
    assert run.code == 1
    assert "failed to write the checkpoint of step 4: rank 1" in run.error
    assert [row["step"] for row in events(run.folder)] == [4]
    assert verified(run.folder)[-1] == run.steps()[-1]["step"] < 400


def test_a_run_whose_last_save_fails_is_not_complete_and_can_be_resumed(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    run = train(*OPTIONS, "checkpoint.every=0", planted(f"{FULL}, rank: 0"))
    assert run.code == 1
    assert "training has finished, but its last checkpoint is missing" in run.error
    assert run.json("result.json")["exit_reason"] == "failed"
    assert verified(run.folder) == []
    done = command("resume", str(run.folder), cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert outcome(run.folder) == outcome(train(*OPTIONS, "checkpoint.every=0").folder)


def test_a_run_that_is_asked_to_stop_and_has_saved_nothing_does_not_end_as_saved(train: Any) -> None:
    asked = "action: terminate, rank: 1, step: 6"
    run = train(*OPTIONS, "checkpoint.every=0", "steps=400", planted(asked, f"{FULL}, rank: 0", SLOW))
    assert run.code == 1, run.output
    assert "before a checkpoint of this attempt was saved" in run.error
    (event,) = events(run.folder)
    assert (event["newest"], event["in_a_row"]) == (None, 1)
    assert REFUSED in event["reason"]
    assert event["step"] == run.steps()[-1]["step"] < 400
