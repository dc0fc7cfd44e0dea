"""The record of a run stays readable and intact, has one writer, and reports a run that died as killed."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.observe.run_folders import write_run
from worldsize.core import Outcome
from worldsize.errors import WorldsizeError
from worldsize.record import run_record as module
from worldsize.record.inputs import fingerprint
from worldsize.record.level import read_recorded_level
from worldsize.record.manifest import read_manifest, write_manifest
from worldsize.record.run_directory import RunDirectory, is_locked, run_lock
from worldsize.record.run_record import note_job, open_record, read_result, refresh_run, write_result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run recorded as running, though its lock is free."""
    write_manifest(tmp_path / "run_manifest.json", {"attempts": [], "results": None, "config": {"log_every": 10}})
    with open_record(RunDirectory(tmp_path)) as record:
        record.begin_attempt([], world_size=1)
    return tmp_path


def test_a_manifest_is_as_readable_as_the_other_files_of_its_run(run: Path) -> None:
    (run / "other").touch()
    modes = {stat.S_IMODE((run / name).stat().st_mode) for name in ("run_manifest.json", "other")}
    assert len(modes) == 1


def test_the_next_attempt_records_that_the_last_was_killed(run: Path) -> None:
    with open_record(RunDirectory(run)) as record:
        assert record.begin_attempt([], world_size=1) == 2
        killed, running = read_manifest(run / "run_manifest.json")["attempts"]
    assert (killed["exit_reason"], running["exit_reason"]) == ("killed", "running")
    assert killed["start_at"] <= killed["end_at"] <= running["start_at"]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    before = (run / "run_manifest.json").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(run / "run_manifest.json", {"attempts": []})
    assert (run / "run_manifest.json").read_bytes() == before
    assert not list(run.glob(".draft_*"))


def test_a_killed_run_ended_when_it_last_wrote_and_keeps_its_results(run: Path) -> None:
    (run / "metrics.jsonl").touch()
    for path in run.iterdir():
        os.utime(path, (0, 0))
    wrote = 86400 * 365 * 100  # in 2069
    os.utime(run / "metrics.jsonl", (wrote, wrote))
    manifest = refresh_run(RunDirectory(run)).manifest
    last = manifest["attempts"][-1]
    assert (last["exit_reason"], last["exit_code"], last["end"]) == (
        "killed",
        None,
        "2069-12-07T00:00:00+00:00",
    )
    assert manifest["results"] is None
    assert refresh_run(RunDirectory(run)).manifest == manifest


def test_a_run_that_wrote_before_it_began_ended_when_it_began(run: Path) -> None:
    """The clock was set back, or files were restored from a copy."""
    for path in run.iterdir():
        os.utime(path, (0, 0))
    last = refresh_run(RunDirectory(run)).manifest["attempts"][-1]
    assert last["end_at"] == last["start_at"]


def test_an_attempt_of_the_far_future_on_no_host_is_ended_like_others(run: Path) -> None:
    manifest = read_manifest(run / "run_manifest.json")
    manifest["attempts"][-1] |= {"hosts": [], "start_at": 1e18}
    write_manifest(run / "run_manifest.json", manifest)
    last = refresh_run(RunDirectory(run)).manifest["attempts"][-1]
    assert (last["exit_reason"], last["end"]) == ("killed", "9999-12-31T23:59:59+00:00")


def test_a_clock_that_is_set_back_makes_no_time_negative(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt's duration follows the monotonic clock; values from other processes are bounded."""
    day, now = 86400.0, time.time
    with open_record(RunDirectory(run)) as record:
        for _ in range(2):
            record.begin_attempt([], world_size=1)
            monkeypatch.setattr(time, "time", lambda: now() - day)
            record.end_attempt(Outcome("completed", 0, steps=(0, 5), first_step_at=time.time()))
    *_, first, second = read_manifest(run / "run_manifest.json")["attempts"]
    measured = read_manifest(run / "run_manifest.json")["results"]["goodput"]
    assert 0 <= first["end_at"] - first["start_at"] < day / 2
    assert second["start_at"] < first["end_at"] - day / 2, "the clock says so"
    assert 0 <= measured["useful_seconds"] <= measured["total_seconds"] < day / 2
    assert all(seconds >= 0 for seconds in measured["recover_seconds"])


def test_a_file_of_the_far_future_or_of_before_1970_makes_no_date_impossible(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "metrics.jsonl").touch()
    for path in run.iterdir():
        os.utime(path, (0, 0))
    os.utime(run / "metrics.jsonl", (0, 2**38))  # a disk that cannot store this time stores a different one
    last = (run / "metrics.jsonl").stat().st_mtime
    assert refresh_run(RunDirectory(run)).manifest["attempts"][-1]["end_at"] == min(last, 253_402_300_799.0)


def test_a_run_that_ends_while_it_is_looked_at_keeps_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = {**read_manifest(run / "run_manifest.json"), "results": {"loss": 1}}
    manifest["attempts"] = [{**manifest["attempts"][0], "exit_reason": "completed", "exit_code": 0}]

    def ends_meanwhile(run_dir: Path) -> bool:
        write_manifest(run / "run_manifest.json", manifest)
        return is_locked(run_dir)

    monkeypatch.setattr(module, "is_locked", ends_meanwhile)
    assert refresh_run(RunDirectory(run)).exit_reason == "completed"
    assert read_manifest(run / "run_manifest.json")["results"]["loss"] == 1


def test_a_run_whose_lock_is_taken_while_it_is_looked_at_is_left_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_locked", lambda _: False)
    with run_lock(run):
        assert refresh_run(RunDirectory(run)).exit_reason == "running"


def test_a_job_that_is_noted_while_the_record_is_open_stays_in_it(run: Path) -> None:
    """A submitter records its job without the lock, since the job may already hold it."""
    with open_record(RunDirectory(run)) as record:
        note_job(record.directory, "7")
        record.begin_attempt([], world_size=1)
        note_job(record.directory, "8")
        record.end_attempt(Outcome("completed", 0))
    view = refresh_run(RunDirectory(run))
    assert [job["id"] for job in view.manifest["jobs"]] == ["7", "8"]
    assert (view.job, view.exit_reason) == ("8", "completed")


def test_the_manifest_is_read_once_for_a_record_that_is_held(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    def counted(path: Path) -> dict[str, object]:
        reads.append(path)
        return read_manifest(path)

    monkeypatch.setattr(module, "read_manifest", counted)
    with open_record(RunDirectory(run)) as record:
        record.begin_attempt([], world_size=1)
        write_result(record.directory, {"loss": float("nan")})
        record.end_attempt(Outcome("completed", 0))
    assert len(reads) == 1
    assert read_manifest(run / "run_manifest.json") == record.manifest


def test_a_damaged_checkpoint_that_nobody_loads_costs_no_result(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    digest = hashlib.sha256(b"{}\n").hexdigest()
    marks = {1: f"{digest}\n".encode(), 2: f"{digest}\n".encode() + b"\xef\xff", 3: None}
    for step, mark in marks.items():
        folder = run / "checkpoints" / f"step_{step:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}\n")
        if mark:
            (folder / "COMPLETE").write_bytes(mark)
    with open_record(RunDirectory(run)) as record:
        record.begin_attempt([], world_size=1)
        write_result(record.directory, {"loss": 1.0})
        record.end_attempt(Outcome("completed", 0))
    checkpoints = {"step_0000001": digest}
    assert json.loads((run / "result.json").read_text())["checkpoints"] == checkpoints
    assert [f"step_{step:07d}" in text for step, text in zip((2, 3), caplog.messages[-2:], strict=True)] == [True, True]


@pytest.mark.parametrize(("lines", "lost"), [(range(1, 7), 0), ((1, 3, 5), 3), ((), 6)])
def test_logged_steps_that_were_lost_are_told_and_leave_no_digest(
    tmp_path: Path, lines: Sequence[int], lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run", steps=6)
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] in lines]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
    (run / "checkpoints" / "step_0000006").mkdir(parents=True)
    manifest = read_manifest(run / "run_manifest.json")
    write_manifest(run / "run_manifest.json", {**manifest, "config": {**manifest["config"], "log_every": 1}})
    with open_record(RunDirectory(run)) as record:
        record.begin_attempt([], world_size=1)
        write_result(record.directory, {"loss": 1.0, "metrics_digest": "ab"})
        record.end_attempt(Outcome("completed", 0))
        assert record.attempts[-1].get("lost_metrics", 0) == lost
    assert (read_result(RunDirectory(run)).get("metrics_digest") is None) == (lost > 0)
    assert any(f"is missing {lost} logged steps" in text for text in caplog.messages) == (lost > 0)


def test_a_record_that_is_closed_can_be_opened_by_the_job_that_it_was_closed_for(run: Path) -> None:
    with open_record(RunDirectory(run)) as record:
        record.close()
        assert not is_locked(run)
        with open_record(RunDirectory(run)):
            assert is_locked(run)


def test_entries_are_examined_only_under_the_lock(run: Path) -> None:
    os.mkfifo(run / "pipe")
    with run_lock(run), pytest.raises(WorldsizeError, match="already being trained by"), open_record(RunDirectory(run)):
        pass
    with pytest.raises(WorldsizeError, match="pipe is not a regular file"), open_record(RunDirectory(run)):
        pass
    assert not is_locked(run)


def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match="cannot be read: No such file"), open_record(RunDirectory(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_only_the_record_knows_the_files_of_the_record() -> None:
    """Other code gets these files from the record; copying a whole folder is not reading it."""
    framework = Path(module.__file__).parents[1]
    naming = {"run_manifest.json", "overrides.yaml", "result.json"}
    found = [
        f"{path.relative_to(framework)}:{node.lineno}"
        for path in framework.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Constant) and node.value in naming)
        or (
            isinstance(node, ast.ImportFrom)
            and {each.name for each in node.names} & {"read_manifest", "write_manifest"}
        )
    ]
    allowed = ("files.py", "record/", "launch/kubernetes.py", "testing/runs.py", "observe/report/page.py")
    assert [place for place in found if not place.startswith(allowed)] == []


ATTEMPT = {"number": 1, "start": "", "exit_reason": "failed", "exit_code": 1, "hosts": [], "world_size": 1, "pid": 1}


@pytest.mark.parametrize(
    ("field", "facts"),
    [
        ("config.steps", {"config": {"steps": "many"}}),
        ("config.run.group", {"config": {"run": {"group": 5}}}),
        ("results.metrics", {"results": {"metrics": []}}),
        ("results.metrics.a", {"results": {"metrics": {"a": "x"}}}),
        ("results.goodput", {"results": {"goodput": 5}}),
        ("reproducibility.level", {"reproducibility": {"level": "perfect"}}),
        ("attempts[0].steps[0]", {"attempts": [{**ATTEMPT, "steps": ["a", "b"]}]}),
        ("attempts[0].steps", {"attempts": [{**ATTEMPT, "steps": [1]}]}),
        ("attempts[0].number", {"attempts": [{**ATTEMPT, "number": True}]}),
        ("hardware", {"hardware": 5}),
        ("cluster.nodes", {"cluster": {"nodes": 10**12}}),
        ("cluster.links.network.bandwidth", {"cluster": {"links": {"network": {"bandwidth": "x"}}}}),
        ("resumed[0].changes[0]", {"resumed": [{"attempt": 1, "changes": [["a"]]}]}),
    ],
)
def test_a_field_that_is_not_what_its_schema_says_is_named(tmp_path: Path, field: str, facts: dict[str, Any]) -> None:
    path = tmp_path / "run_manifest.json"
    write_manifest(path, {"attempts": [], "results": None, **facts}, own=False)
    said = f"{re.escape(str(path))} is not a run manifest.*: {re.escape(field)} (has the wrong type|is out of range): "
    with pytest.raises(WorldsizeError, match=said):
        read_manifest(path)


@pytest.mark.parametrize("move", ["into a field", "twice"])
def test_a_signature_counts_only_where_it_was_written(tmp_path: Path, move: str) -> None:
    """A record signed by this user needs no further check; only an attacker moves the signature's line."""
    path = tmp_path / "run_manifest.json"
    written = write_manifest(path, {"attempts": 5, "code": {"a": 1}})
    assert read_manifest(path) == written  # has a wrong type, but is signed
    text = path.read_text()
    seals = [line for line in text.splitlines() if line.startswith(('  "digest"', '  "signature"'))]
    if move == "into a field":
        text = "\n".join(line for line in text.splitlines() if line not in seals).replace(",\n}", "\n}") + "\n"
    inserted = "".join(f"{seal.rstrip(',')},\n" for seal in seals)
    path.write_text(text.replace('  "code": {\n', f'  "code": {{\n{inserted}'))
    with pytest.raises(WorldsizeError, match="attempts has the wrong type: '5'"):
        read_manifest(path)


def test_a_level_that_lacks_its_reason_is_an_error_of_the_record(tmp_path: Path) -> None:
    write_manifest(tmp_path / "run_manifest.json", {"reproducibility": {"x": 1}})
    with pytest.raises(WorldsizeError, match="missing field 'level'"):
        read_recorded_level(read_manifest(tmp_path / "run_manifest.json"))


@pytest.mark.parametrize("kind", ["pipe", "endless", "too large"])
def test_a_manifest_that_is_no_small_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run_manifest.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(200 << 30)
    with pytest.raises(WorldsizeError, match=r"cannot be read: (not a regular file|larger than)"):
        read_manifest(path)


def test_a_user_without_a_home_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert write_manifest(tmp_path / "run_manifest.json", {"attempts": []})["signature"] is None


def test_a_data_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match=r"failed to read the data file 'train' from .*missing: No such file"):
        fingerprint({"train": tmp_path / "missing"})
