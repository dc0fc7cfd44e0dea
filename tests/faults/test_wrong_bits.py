"""A process with wrong bits is found by another one, named, and never restarted; the others keep the run's bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_healing import faults

pytestmark = pytest.mark.heavy

OPTIONS = (
    *("recipe=digits", "recipe.width=4", "steps=12", "log_every=3", "cluster.threads=1", "cluster.processes=3"),
    *("reproducibility=elastic", "logical_ranks=6", "integrity.audit=1", "integrity.replicas=2"),
)
HEAL = ("strategy.on_failure=heal", "integrity.on_mismatch=heal", "launcher.max_restarts=2")


def flip(target: str, **more: Any) -> str:
    return faults({"action": "flip", "target": target, "rank": 1, "step": 5, **more})


def find_mismatch(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row["event"] == "bit_mismatch"]
    return dict(event)


@pytest.fixture
def clean_digest(reference_run: Any) -> str:
    without = [word for word in OPTIONS if not word.startswith(("integrity", "cluster.processes"))]
    alone = reference_run(*without, "strategy=single", "cluster.processes=1")
    return str(alone.json("result.json")["state_digest"])


@pytest.mark.parametrize(
    ("strategy", "fault", "tensor", "step"),
    [
        ("ddp", flip("gradient", bit=3, repeats=True), "gradient of ", 5),
        ("fsdp", flip("product", bit=22, repeats=True, every=7), "", 5),
        ("zero", flip("weight", bit=4), "", 5),
        ("ddp", flip("optimizer", name="2.exp_avg", bit=25), "model/", 7),  # step 6 changed weights
    ],
    ids=["gradient", "every seventh product", "weight", "optimizer"],
)
def test_the_others_repeat_the_step_without_the_guilty_process(
    train: Any, clean_digest: str, strategy: str, fault: str, tensor: str, step: int
) -> None:
    run = train(*OPTIONS, *HEAL, f"strategy={strategy}", fault)
    assert run.code == 0, run.error
    assert run.json("result.json")["state_digest"] == clean_digest
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert [each["members"] for each in attempt["memberships"]] == [[0, 1, 2], [0, 2]]  # never restarted
    assert "wrong bits on rank 1" in attempt["memberships"][1]["lost"]["1"]
    event = find_mismatch(run.folder)
    assert (event["ranks"], event["step"], event["devices"]) == ([1], step, ["cpu"])
    assert event["tensor"].startswith(tensor)


def test_several_processes_with_wrong_bits_leave_in_one_step(train: Any, clean_digest: str) -> None:
    both = faults(
        *({"action": "flip", "target": "gradient", "rank": rank, "step": 5, "repeats": True} for rank in (1, 3))
    )
    options = [word.replace("processes=3", "processes=6") for word in OPTIONS]
    run = train(*options, *HEAL, both)
    assert run.code == 0, run.error
    assert run.json("result.json")["state_digest"] == clean_digest
    assert run.json("run_manifest.json")["attempts"][0]["memberships"][-1]["members"] == [0, 2, 4, 5]
    assert find_mismatch(run.folder)["ranks"] == [1, 3]


@pytest.mark.parametrize(("step", "options"), [(9, ("checkpoint.every=10",)), (12, ())], ids=["before a save", "last"])
def test_copies_are_compared_before_each_save_and_the_result(train: Any, step: int, options: tuple[str, ...]) -> None:
    words = [word for word in OPTIONS if "integrity" not in word]
    fault = faults({"action": "flip", "target": "weight", "rank": 1, "step": step, "bit": 27})
    run = train(*words, *options, "integrity.replicas=50", fault)
    assert run.code == 1
    assert find_mismatch(run.folder)["step"] == (11 if options else 13)
    assert not [*run.folder.glob("checkpoints/step_*")]


def test_a_healing_run_that_stops_drops_no_process(train: Any) -> None:
    run = train(*OPTIONS, *HEAL, "integrity.on_mismatch=stop", flip("gradient", bit=3))
    assert run.code == 1
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert attempt["failure"]["rank"] == 1
    assert [each["members"] for each in attempt["memberships"]] == [[0, 1, 2]]
    assert "continuing without it" not in run.error


def test_a_run_that_stops_names_the_guilty_process_and_is_not_restarted(train: Any) -> None:
    run = train(*OPTIONS, "launcher.max_restarts=2", flip("activation", bit=30, repeats=True))
    assert run.code == 1
    (attempt,) = run.json("run_manifest.json")["attempts"]
    failure = attempt["failure"]
    assert (failure["rank"], failure["step"]) == (1, 5)
    assert "step 5: wrong bits on rank 1" in failure["cause"]
    assert "not restarting" in run.error
    assert find_mismatch(run.folder)["ranks"] == [1]
