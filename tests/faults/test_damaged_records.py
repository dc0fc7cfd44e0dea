"""A damaged or forged record is reported as such; it affects no other record, and causes no traceback."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.observe.run_folders import write_run
from tests.support.runs import Command
from worldsize.cli import _run_command
from worldsize.cli.logs import read_log_lines
from worldsize.config.recorded import read_settings
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.scheduled import Scheduler
from worldsize.observe.report.page import render_page
from worldsize.observe.watch import Watched
from worldsize.record.compare import compare_runs
from worldsize.record.manifest import read_manifest, write_manifest
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import open_record, refresh_run


def seal(path: Path, text: str) -> None:
    """Write a manifest's text like an attacker: with a matching digest."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(text.replace("{\n", f'{{\n  "digest": "{digest}",\n', 1))


def changed(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = dict(read_manifest(run / "run_manifest.json"))
    change(manifest)
    write_manifest(run / "run_manifest.json", manifest, own=False)  # the user's own signature is trusted


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda run: (run / "run_manifest.json").write_text("{"),
    "binary": lambda run: (run / "run_manifest.json").write_bytes(b"\xff\0"),
    "nan": lambda run: seal(run / "run_manifest.json", '{\n  "attempts": [],\n  "schema_version": NaN\n}\n'),
    "infinite": lambda run: seal(run / "run_manifest.json", '{\n  "attempts": [],\n  "schema_version": 1e400\n}\n'),
    "deep": lambda run: (run / "run_manifest.json").write_text("[" * 200_000),
    "no attempts": lambda run: changed(run, lambda manifest: manifest.pop("attempts")),
    "attempts of another type": lambda run: changed(run, lambda manifest: manifest.update(attempts="x")),
    "an attempt of another type": lambda run: changed(run, lambda manifest: manifest.update(attempts=[1])),
    "an attempt without a reason": lambda run: changed(run, lambda m: m["attempts"][-1].pop("exit_reason")),
    "a host of another type": lambda run: changed(run, lambda m: m["attempts"][-1].update(hosts="x")),
    "jobs of another type": lambda run: changed(run, lambda manifest: manifest.update(jobs=[{"id": []}])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_status_shows_a_damaged_run_as_damaged_and_goes_on(
    tmp_path: Path, command: Command, environment_without_wandb: dict[str, str], damage: str
) -> None:
    DAMAGE[damage](write_run(tmp_path / "runs" / "a", steps=1))
    write_run(tmp_path / "runs" / "b", steps=1)
    done = command("status", cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0
    states = [line.split()[0] for line in done.stdout.splitlines()]
    assert states == ["state", "completed", "damaged"]
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("runs/a: ")


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=1)
    changed(run, lambda manifest: manifest.pop("code"))
    with pytest.raises(WorldsizeError, match="missing field 'code'"):
        _ = refresh_run(RunDirectory(run)).manifest["code"]


def test_a_lock_that_is_a_folder_is_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=1)
    changed(run, lambda manifest: manifest["attempts"][-1].update(exit_reason="running"))
    (run / ".lock").mkdir()
    with pytest.raises(WorldsizeError, match=r"\.lock is not a regular file"):
        refresh_run(RunDirectory(run))


@pytest.mark.parametrize(
    "text", ["a: [", "\0", "- 1\n", "a: ${b", "x", "a: 1\n", "run: import_path\n", "run: {import_path: 5}\n"]
)
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        read_settings(RunDirectory(tmp_path))


def test_a_run_with_damaged_metrics_is_compared_watched_and_reported(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=80) for name in ("a", "b")]
    lines = (runs[1] / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[10:10] = [b"torn\n", b'{"event": "step", "step": 10, "loss": []}\n', b"\xff\n"]
    (runs[1] / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"event"')
    assert compare_runs(runs[0], runs[1], tolerance=0.0).metrics
    watched = Watched(runs[1])
    watched.update_rows()
    assert watched.step
    assert watched.step["step"] == 80
    assert watched.evaluation
    assert watched.evaluation["step"] == 80
    assert "3 damaged lines" in render_page([runs[1]])


def replaced(path: Path, *, link: Path | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if link:
        path.symlink_to(link)
    else:
        os.mkfifo(path)


READ = {  # per command: an entry that it reads, a link's target, and whether the run is recorded as running
    "status": (".lock", "new", True),
    "logs": ("logs/worker_00000.log", "/dev/zero", False),
    "cancel": (".lock", "new", True),
    "report": ("metrics.jsonl", "/etc/hosts", False),
    "compare": ("metrics.jsonl", "/etc/hosts", False),
    "watch": (".lock", "new", True),
}


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("command", READ)
def test_a_pipe_or_a_link_in_a_record_is_named_and_waited_for_by_nobody(
    command: str,
    is_link: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_run(tmp_path / "runs" / "a", steps=1)
    entry, target, is_running = READ[command]
    if is_running:
        changed(run, lambda manifest: manifest["attempts"][-1].update(exit_reason="running"))
    replaced(run / entry, link=tmp_path / target if is_link else None)
    before = {path for path in tmp_path.rglob("*")}
    monkeypatch.setattr(sys, "argv", ["worldsize", command, *[str(run)] * (2 if command == "compare" else 1)])
    with nullcontext() if command == "status" else pytest.raises(SystemExit, match="^2$"):  # it continues
        _run_command()
    assert str(run / entry) in capsys.readouterr().err
    assert {path for path in tmp_path.rglob("*")} == before
    with pytest.raises(WorldsizeError, match=f"{entry} is "), open_record(RunDirectory(run)):
        pass


def test_logs_show_what_a_terminal_would_interpret_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", steps=1)
    (run / "logs").mkdir()
    (run / "logs" / "worker_00000.log").write_bytes(b"\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\tseen\r\n\xe2\x80\xaeend")
    shown = [*read_log_lines(Scheduler(RunDirectory(run)), None, follow=False)]
    assert shown == [r"[worker 0] \x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J" + "\tseen", r"[worker 0] \u202eend"]


def test_runs_are_found_below_a_root_but_not_inside_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "digits" / "a", steps=1)
    write_run(tmp_path / "runs" / "digits" / "a" / "copy", steps=1)
    write_run(tmp_path / "runs" / "b", steps=1)
    assert [run.path.name for run in runs_below(tmp_path)] == ["b", "a"]


def test_the_digest_of_a_manifest_is_that_of_its_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "run_manifest.json"
    others: list[dict[str, Any]] = [{}, {"zulu": {"digest": "x", "signature": "y"}}]
    for other in others:
        written = write_manifest(path, {"attempts": [], **other})
        assert read_manifest(path) == written
        path.write_text(path.read_text().replace('"attempts": []', '"attempts": [ ]'))
        with pytest.raises(WorldsizeError, match="was edited: expected digest"):
            read_manifest(path)
    assert json.loads(path.read_text())["zulu"]
