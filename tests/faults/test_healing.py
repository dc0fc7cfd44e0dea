"""A healing gang continues the same step without its dead, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.outcome import outcome
from tests.support.own_recipe import write_held
from tests.support.waiting import wait_until

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]
OPTIONS = ("recipe=digits", "recipe.width=4", "steps=24", "log_every=3", "checkpoint.every=6", "cluster.threads=1")
FOUR = ("cluster.processes=4", "reproducibility=elastic", "logical_ranks=8", "evaluate_every=8")
HEAL = "strategy.on_failure=heal"


def faults(*each: dict[str, Any]) -> str:
    rows = [", ".join(f"{key}: {json.dumps(value)}" for key, value in fault.items()) for fault in each]
    return f"faults=[{', '.join(f'{{{row}}}' for row in rows)}]"


def kill(rank: int, step: int, **more: Any) -> dict[str, Any]:
    return {"action": "kill", "rank": rank, "step": step, **more}


def memberships(folder: Path) -> list[list[int]]:
    """Return the members of each membership of the only attempt."""
    (attempt,) = json.loads((folder / "run_manifest.json").read_text())["attempts"]
    assert attempt["exit_reason"] == "completed"
    return [each["members"] for each in attempt["memberships"]]


@pytest.fixture
def undisturbed(reference_run: Any) -> Callable[..., dict[str, Any]]:
    """``undisturbed(*options)`` is the outcome of one process that is never killed."""

    def run(*options: str) -> dict[str, Any]:
        alone = reference_run(*OPTIONS, *FOUR, "strategy=single", "cluster.processes=1", *options)
        return equal_parts(alone.folder)

    return run


def equal_parts(folder: Path) -> dict[str, Any]:
    """Return the strategy-independent parts: a checkpoint names its strategy, and has one file per rank."""
    whole = outcome(folder)
    return {key: whole[key] for key in ("state_digest", "metrics_digest", "metrics", "steps", "samples", "step")}


@pytest.mark.parametrize("rank", [0, 2], ids=["the one that logs", "another"])
def test_a_killed_rank_costs_no_step_and_no_bit(train: Any, undisturbed: Any, rank: int) -> None:
    run = train(*OPTIONS, *FOUR, HEAL, faults(kill(rank, 10)))
    assert run.code == 0, run.error
    assert memberships(run.folder) == [[0, 1, 2, 3], [each for each in range(4) if each != rank]]
    assert equal_parts(run.folder) == undisturbed()
    (event,) = _events(run.folder)
    assert (event["event"], event["lost"], event["step"]) == ("membership", {str(rank): "killed by SIGKILL"}, 9)
    assert event["update_samples"] == 96
    assert {row["update_samples"] for row in run.steps()} == {96}
    manifest = run.json("run_manifest.json")
    assert manifest["reproducibility"]["level"] == "bitwise"
    assert manifest["attempts"][0]["transport"]["ranks"] == {"socket": 3}  # in the last membership


def test_two_at_once_then_all_but_one_leave_the_last_one_with_everything(train: Any, undisturbed: Any) -> None:
    run = train(*OPTIONS, *FOUR, HEAL, faults(kill(1, 5), kill(3, 5), kill(0, 17)))
    assert run.code == 0, run.error
    assert memberships(run.folder)[-1] == [2]
    assert equal_parts(run.folder) == undisturbed()


@pytest.mark.parametrize(
    "point", ["checkpoint:begin", "checkpoint:in-shard", "checkpoint:after-manifest", "evaluate:begin"]
)
def test_a_kill_during_a_save_or_an_evaluation_costs_neither(train: Any, undisturbed: Any, point: str) -> None:
    run = train(*OPTIONS, *FOUR, HEAL, faults(kill(0, 12, point=point)))
    assert run.code == 0, run.error
    assert memberships(run.folder) == [[0, 1, 2, 3], [1, 2, 3]]
    assert equal_parts(run.folder) == undisturbed()
    assert not list((run.folder / "checkpoints").glob(".*"))


@pytest.mark.parametrize("point", ["log:begin", "log:end"])
@pytest.mark.parametrize("rank", [0, 2], ids=["the one that logs", "another"])
def test_a_kill_while_a_step_is_logged_loses_no_row(train: Any, undisturbed: Any, rank: int, point: str) -> None:
    """The losses are exchanged before the update: either all repeat the step, or the survivors have its row."""
    every = "log_every=1"
    run = train(*OPTIONS, *FOUR, HEAL, every, faults(kill(rank, 10, point=point)))
    assert run.code == 0, run.error
    assert memberships(run.folder) == [[0, 1, 2, 3], [each for each in range(4) if each != rank]]
    assert equal_parts(run.folder) == undisturbed(every)


def test_a_kill_at_the_very_end_leaves_a_complete_run(train: Any, undisturbed: Any) -> None:
    """The last step is saved before it is evaluated, and the process that evaluates and logs it dies."""
    run = train(*OPTIONS, *FOUR, HEAL, faults(kill(0, 24, point="evaluate:begin")))
    assert run.code == 0, run.error
    assert equal_parts(run.folder) == undisturbed()


def test_a_replacement_joins_with_the_state_of_its_peers_and_may_die_too(train: Any, undisturbed: Any) -> None:
    slow = {"action": "sleep", "rank": None, "step": None, "seconds": 0.05, "attempt": None}
    again = kill(2, 16, attempt=2)
    options = ("launcher.max_restarts=2", "steps=40", "checkpoint.every=0", "checkpoint.at_end=true")
    run = train(*OPTIONS, *FOUR, HEAL, *options, faults(kill(2, 6), again, slow))
    assert run.code == 0, run.error
    assert memberships(run.folder)[0] == [0, 1, 2, 3]
    assert memberships(run.folder)[-1] == [0, 1, 3, 2]
    assert len(memberships(run.folder)) >= 3  # it may be ready before the others have stopped because of its own death
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert attempt["steps"] == [0, 40]  # the whole run's, not the last newcomer's
    assert attempt["first_step_at"] < attempt["memberships"][1]["ended"]
    assert equal_parts(run.folder) == undisturbed(*options[1:])


def test_a_spare_takes_the_place_of_a_dead_rank_in_the_same_change(
    train: Any, undisturbed: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    slow = {"action": "slow", "rank": None, "seconds": 0.1}  # so that both wait before the first one dies
    run = train(*OPTIONS, *FOUR, HEAL, "cluster.spares=2", faults(kill(1, 5), kill(4, 14), kill(5, 15), slow))
    assert run.code == 0, run.error
    first, second, *others = memberships(run.folder)
    assert first == [0, 1, 2, 3]
    if second == [0, 2, 3, 4]:  # the one that was ready first
        assert others == [[0, 2, 3, 5], [0, 2, 3]]
    else:
        assert [second, *others] == [[0, 2, 3, 5], [0, 2, 3, 4]]  # past its fault
    assert equal_parts(run.folder) == undisturbed()
    words = ("evaluate", str(run.folder), "cluster.processes=2")
    done = command(*words, cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_hangs_is_left_behind_after_its_bound(train: Any, undisturbed: Any) -> None:
    run = train(*OPTIONS, *FOUR, HEAL, "cluster.timeout=4", faults({"action": "stop", "rank": 1, "step": 9}))
    assert run.code == 0, run.error
    assert memberships(run.folder) == [[0, 1, 2, 3], [0, 2, 3]]
    assert "worker 1 is not responding; continuing without it" in run.error
    assert equal_parts(run.folder) == undisturbed()


def test_a_rank_that_is_busy_with_something_else_is_waited_for(train: Any) -> None:
    """It may read data, or write to a slow disk: that ends, unlike a wait for a dead peer."""
    asleep = {"action": "sleep", "rank": 2, "step": 9, "seconds": 3}
    run = train(*OPTIONS, *FOUR, HEAL, faults(kill(1, 9), asleep))
    assert run.code == 0, run.error
    assert memberships(run.folder) == [[0, 1, 2, 3], [0, 2, 3]]


def test_a_save_in_flight_of_one_process_and_a_newcomer_do_not_meet(train: Any, undisturbed: Any) -> None:
    """The save continues by itself while the newcomer trains and the two of them save."""
    slow = {"action": "slow", "rank": None, "seconds": 0.05, "attempt": None}
    options = ("steps=36", "checkpoint.every=3", "cluster.processes=2", "cluster.timeout=20")
    busy = {"action": "sleep", "rank": 0, "step": 3, "point": "checkpoint:after-rename", "seconds": 2}
    run = train(*OPTIONS, *FOUR, HEAL, *options, "launcher.max_restarts=1", faults(kill(1, 3), busy, slow))
    assert run.code == 0, run.error
    assert memberships(run.folder) in ([[0, 1], [0], [0, 1]], [[0, 1], [0, 1]])  # the latter if it is very quick
    assert equal_parts(run.folder) == undisturbed("steps=36", "checkpoint.every=3")


def test_a_replacement_may_fail_by_an_error_of_its_own_again(train: Any) -> None:
    """An error at a different step is not common to all ranks, and the record has the cause of each."""
    slow = {"action": "slow", "rank": None, "seconds": 0.05, "attempt": None}
    first = {"action": "raise", "rank": 2, "step": 6}
    again = {"action": "raise", "rank": 2, "step": 28, "point": "step:compute", "attempt": 2}
    options = ("steps=60", "launcher.max_restarts=1")
    run = train(*OPTIONS, *FOUR, HEAL, *options, faults(first, again, slow))
    assert run.code == 0, run.error
    assert memberships(run.folder)[-1] == [0, 1, 3]
    (attempt,) = run.json("run_manifest.json")["attempts"]
    causes = [cause for each in attempt["memberships"] for cause in each["lost"].values()]
    assert causes == ["RuntimeError: fault injected by the configuration"] * 2


def test_an_error_of_the_program_is_not_tried_on_every_process(train: Any) -> None:
    """One rank's error is survived; an error that repeats on a second rank ends the run with its cause."""
    one = train(*OPTIONS, *FOUR, HEAL, faults({"action": "raise", "rank": 3, "step": 7}))
    assert one.code == 0, one.error
    assert memberships(one.folder) == [[0, 1, 2, 3], [0, 1, 2]]
    each = train(*OPTIONS, *FOUR, HEAL, faults({"action": "raise", "rank": None, "step": 7}))
    assert each.code == 1
    assert "fault injected by the configuration" in each.error
    assert each.error.count("continuing without it") <= 2


def test_below_the_least_number_the_gang_starts_again_from_its_checkpoint(train: Any, undisturbed: Any) -> None:
    options = ("cluster.min_processes=4", "launcher.max_restarts=1")
    run = train(*OPTIONS, *FOUR, HEAL, *options, faults(kill(1, 15)))
    assert run.code == 0, run.error
    attempts = run.json("run_manifest.json")["attempts"]
    assert [attempt["exit_reason"] for attempt in attempts] == ["failed", "completed"]
    assert equal_parts(run.folder) == undisturbed()


def test_a_seeded_run_heals_too_and_says_what_it_can_promise(train: Any, command: Any, reference_run: Any) -> None:
    seeded = ("cluster.processes=4", "evaluate_every=8", "reproducibility=deterministic")
    run = train(*OPTIONS, *seeded, HEAL, faults(kill(1, 10)))
    assert run.code == 0, run.error
    expected = reference_run(*OPTIONS, *seeded).json("result.json")
    actual = run.json("result.json")
    assert actual["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-3)
    manifest = run.json("run_manifest.json")
    assert manifest["reproducibility"]["level"] == "tolerance"
    assert "3 processes trained from step 10" in manifest["reproducibility"]["why"]


def test_workers_come_and_go_while_it_trains(
    tmp_path: Path,
    reference_run: Any,
    command: Any,
    change_workers: Callable[..., str],
    environment_without_wandb: dict[str, str],
    begun: Any,
    warm_python: Path,
) -> None:
    """4, 3, 5 and 2 processes in one run: the digests match one process."""
    steps = ("steps=110", "log_every=1", "checkpoint.every=0", "checkpoint.at_end=true")
    options, held = (*OPTIONS, *FOUR, *steps), write_held(tmp_path)
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *options, HEAL, "logger=none", "run.root=other", "recipe=held"],
        cwd=tmp_path,
        env=environment_without_wandb,
        stdout=subprocess.DEVNULL,
    )
    folder = begun(tmp_path / "other", after=4)
    workers = partial(change_workers, folder)

    def wait_for(count: int) -> None:
        wait_until(lambda: _members(folder) == count == workers("list").count("worker"), lambda: workers("list"))

    assert "worker 3" in workers("remove")
    wait_for(3)
    assert "worker 4, worker 5" in workers("add", "2")
    wait_for(5)
    too_many = command("workers", "add", "4", "--run", str(folder), cwd=tmp_path, environment=environment_without_wandb)
    assert "logical_ranks=8 supports at most 8" in too_many.stderr
    assert "worker 2, worker 4, worker 5" in workers("remove", "3")
    wait_for(2)
    held.unlink()
    assert process.wait(240) == 0
    sizes = [len(members) for members in memberships(folder)]
    assert [size for place, size in enumerate(sizes) if place == 0 or size != sizes[place - 1]][:2] == [4, 3]
    assert 5 in sizes
    assert sizes[-1] == 2
    alone = reference_run(*options, "strategy=single", "cluster.processes=1").json("result.json")
    result = json.loads((folder / "result.json").read_text())
    assert (result["state_digest"], result["metrics_digest"]) == (alone["state_digest"], alone["metrics_digest"])


def test_a_file_changes_the_number_of_processes_and_no_bit(
    tmp_path: Path, reference_run: Any, environment_without_wandb: dict[str, str], begun: Any, warm_python: Path
) -> None:
    """2, 4 and 1 processes in one run; invalid text in the file in between does not end it."""
    steps = ("steps=80", "log_every=1", "checkpoint.every=0", "checkpoint.at_end=true")
    options, held = (*OPTIONS, *FOUR, *steps), write_held(tmp_path)
    policy = ("recipe=held", "cluster.processes=2", "autoscale=file", "autoscale.every=0.1")
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [warm_python, str(REPOSITORY / "train.py"), *options, HEAL, *policy, "logger=none", "run.root=other"],
            cwd=tmp_path,
            env=environment_without_wandb,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    folder = begun(tmp_path / "other", after=4)

    (folder / "autoscale").write_text("4")
    wait_until(lambda: _members(folder) == 4 and len(_events(folder)) > 0)
    (folder / "autoscale").write_text("a few")
    wait_until(lambda: "expected a number of processes, got 'a few'" in (tmp_path / "said").read_text())
    (folder / "autoscale").write_text("1")
    wait_until(lambda: _members(folder) == 1)
    held.unlink()
    assert process.wait(120) == 0
    assert (tmp_path / "said").read_text().count("'a few'") == 1
    sizes = [len(members) for members in memberships(folder)]
    assert (sizes[0], max(sizes), sizes[-1]) == (2, 4, 1)
    assert {name for event in _events(folder) for name in event["asked"].values()} == {"autoscale"}
    alone = reference_run(*options, "strategy=single", "cluster.processes=1").json("result.json")
    result = json.loads((folder / "result.json").read_text())
    assert (result["state_digest"], result["metrics_digest"]) == (alone["state_digest"], alone["metrics_digest"])


def _events(folder: Path) -> list[Any]:
    path = folder / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["event"] == "membership"]


def _members(folder: Path) -> int:
    events = _events(folder)
    return len(events[-1]["members"]) if events else 4


def test_signals_still_save_and_end_a_gang_that_has_healed(
    tmp_path: Path, environment_without_wandb: dict[str, str], begun: Any, warm_python: Path
) -> None:
    slow = {"action": "sleep", "rank": None, "step": None, "seconds": 0.02, "attempt": None}
    words = (*OPTIONS, *FOUR, HEAL, "steps=2000", "log_every=1", "logger=none", "run.root=other")
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *words, faults(kill(2, 5), slow)],
        cwd=tmp_path,
        env=environment_without_wandb,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = begun(tmp_path / "other", after=12)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 75
    (attempt,) = json.loads((folder / "run_manifest.json").read_text())["attempts"]
    assert attempt["exit_reason"] == "preempted"
    saved = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    assert saved == attempt["steps"][1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("strategy.compress=bf16",), "lost with a process"),
        (("strategy.reduce=hierarchical",), "lost with a process"),
        (("cluster=torchrun",), "dead processes are not reported to their peers"),
        (("cluster.min_processes=5",), "exceeds the 4 processes"),
        (("strategy.on_failure=restart", "cluster.spares=1"), "requires strategy.on_failure=heal"),
        (("strategy.on_failure=restart", "autoscale=file"), "autoscale requires strategy.on_failure=heal"),
        (("strategy.on_failure=heel",), "heal"),
    ],
)
def test_what_cannot_heal_is_refused_before_the_start(train: Any, options: tuple[str, ...], said: str) -> None:
    run = train(*OPTIONS[:1], *FOUR[:1], HEAL, *options)
    assert run.code == 2
    assert said in run.error
    assert run.folder is None


def test_saves_by_measured_cost_go_on_over_changes_that_come_faster_than_they(train: Any, undisturbed: Any) -> None:
    """The first save is due after 10 steps, although no membership lasts that long before it."""
    every = ("checkpoint.every=auto", "cluster.mtbf_hours=0.1", "checkpoint.at_end=false")
    more = (*every, "launcher.max_restarts=1", "evaluate_every=0")
    run = train(*OPTIONS, *FOUR, HEAL, *more, faults(kill(1, 4), kill(2, 8)))
    assert run.code == 0, run.error
    assert len(memberships(run.folder)) >= 3
    saved = sorted(int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step_*"))
    assert 10 <= saved[0] < 18  # a save in flight while a process joins is repeated
    assert run.json("result.json")["state_digest"] == undisturbed()["state_digest"]
