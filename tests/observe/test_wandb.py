"""The wandb run of a training run is read back from its file."""

from __future__ import annotations

import json
import runpy
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.observe.test_health import CALM
from worldsize.core import CheckpointSaved, Evaluated, NodeAlert, RunEnded, StepDone, Straggling
from worldsize.observe.health.files import HealthFile
from worldsize.observe.subprocess_listeners import SubprocessListeners
from worldsize.observe.wandb import WandbListener, format_upload_command
from worldsize.record.run_directory import RunDirectory

pytestmark = pytest.mark.heavy

_reader = runpy.run_path(str(Path(__file__).parent / "wandb_file.py"))
records, histories = _reader["records"], _reader["histories"]
CANARY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with a wandb key in its netrc."""
    folder = tmp_path_factory.mktemp("home")
    netrc = folder / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {CANARY}\n")
    netrc.chmod(0o600)
    return folder


def history(folder: Path) -> dict[int, dict[str, float]]:
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows: dict[int, dict[str, float]] = {}
    for row in histories(file):
        rows.setdefault(int(row["_step"]), {}).update(row)
    return rows


def test_the_losses_the_config_and_the_run_id_are_in_the_file_and_no_key_is_anywhere(train: Any, home: Path) -> None:
    taken = ("logger.project='${oc.env:PROJECT}'", "cluster.name='${oc.env:PLACE}'")
    options = ("recipe=digits", "recipe.width=4", "steps=25", "run.group=trials", *taken)
    variables = {"WANDB_API_KEY": CANARY, "PROJECT": "canary-of-wandb", "PLACE": "canary-of-nobody"}
    run = train(*options, logger="wandb", HOME=str(home), **variables)
    assert run.code == 0, run.error
    rows = history(run.folder)
    for line in run.steps():
        assert rows[line["step"]]["train/loss"] == pytest.approx(line["loss"], rel=1e-12)
    assert rows[25]["test/accuracy"] == pytest.approx(run.json("result.json")["metrics"]["accuracy"])

    (file,) = run.folder.glob("wandb/offline-run-*/run-*.wandb")
    (started,) = [record.run for record in records(file) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert (started.run_id, started.run_group, started.project) == (run.folder.name, "trials", "canary-of-wandb")
    assert config["steps"] == 25
    assert [config[f"{group}_name"] for group in ("recipe", "strategy", "cluster")] == ["digits", "ddp", "laptop"]
    assert rows[20]["train/epoch"] / rows[10]["train/epoch"] == pytest.approx(2.0)
    assert config["manifest"]["determinism"]["logical_ranks"] == 2

    written = [path for path in run.folder.rglob("*") if path.is_file()]
    for secret in (CANARY, "canary-of-nobody"):
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
        assert secret not in run.output + run.error
    where = {path.relative_to(run.folder).parts[0] for path in written if b"canary-of-wandb" in path.read_bytes()}
    assert where == {"wandb"}, "the logger's own keys are in its own files alone"


def test_a_logger_that_fails_does_not_end_the_run(train: Any) -> None:
    run = train("recipe=digits", "recipe.width=4", "steps=3", "logger.project=a/b?c", logger="wandb")
    assert run.code == 0, run.error
    assert "warning: the logger failed and is disabled for the rest of the run" in run.output
    assert len(run.steps()) == 2


def test_a_second_attempt_continues_the_same_run_at_the_right_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    facts: dict[str, Any] = {"project": "p", "run_id": "same", "group": None, "config": {}, "mode": "offline"}
    for attempt, first in (("one", 1), ("two", 4)):
        (tmp_path / attempt).mkdir()
        HealthFile(RunDirectory(tmp_path / attempt), 0).add_row({**CALM, "time": time.time()}, [])
        make = partial(WandbListener, **facts, manifest={}, folder=tmp_path / attempt)
        listener = SubprocessListeners({"logger": make})
        for number in range(first, first + 3):
            listener(StepDone(number, number, number / 10, 0.1, None, 0, 0.0, (0.1,), 1.0))
        listener(Straggling(first + 2, 1, "n3", "cpu", "data", 1.25, first))
        listener(NodeAlert(1, "n3", "memory", 0.97, 0.95))
        listener(RunEnded(first + 2, "completed"))
        rows = history(tmp_path / attempt)
        assert rows[first]["health/memory"] == rows[first]["health/node_0/memory"] == CALM["memory"]
        assert "health/memory" not in rows[first + 1]  # too early for a second sample
        losses = {step: row["train/loss"] for step, row in rows.items()}
        assert losses == {number: number / 10 for number in range(first, first + 3)}
        (file,) = (tmp_path / attempt).glob("wandb/offline-run-*/run-*.wandb")
        assert [record.run.run_id for record in records(file) if record.HasField("run")] == ["same"]
        alert, other = [record.alert for record in records(file) if record.HasField("alert")]
        assert (alert.title, alert.level) == ("rank 1 is slow", "WARN")
        assert "25% slower" in alert.text
        assert other.title == "n3: memory"
        assert "97 % of memory in use" in other.text


def test_the_keys_name_the_run_and_its_summary_has_last_and_best_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved = tmp_path / "step_0000002"
    saved.mkdir()
    (saved / "weights").write_bytes(b"numbers")
    goal = {"checkpoint": {"keep": {"best": "accuracy", "direction": "max"}}}
    words: dict[str, Any] = {
        "entity": "team",
        "name": "wide",
        "tags": ["a", "b"],
        "notes": "why",
        "job_type": "ablation",
    }
    facts: dict[str, Any] = {"mode": "offline", "run_id": "r", "group": None, "manifest": {}, "folder": tmp_path}
    make = partial(WandbListener, project="p", checkpoints=True, config=goal, **facts, **words)
    listener = SubprocessListeners({"logger": make}, timeout=600.0)  # on a busy machine, too
    for step, loss, accuracy in ((1, 0.5, 0.7), (2, 0.2, 0.9), (3, 0.4, 0.8)):
        listener(StepDone(step, 96 * step, loss, 0.1, None, 0, 0.0, (0.1,), 1.0, tokens=960 * step, epoch=0.25 * step))
        listener(Evaluated(step, {"loss": loss, "accuracy": accuracy}))
    listener(Evaluated(4, {"accuracy": 0.6}))
    listener(CheckpointSaved(2, saved))
    listener(CheckpointSaved(4, tmp_path / "deleted"))
    listener(RunEnded(4, "completed"))

    rows = history(tmp_path)
    assert [rows[3][f"train/{axis}"] for axis in ("samples", "tokens", "epoch")] == [288, 2880, 0.75]
    assert [rows[4][f"train/{axis}"] for axis in ("samples", "tokens", "epoch")] == [384, 3840, 1.0]
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    read = [*records(file)]
    (started,) = [record.run for record in read if record.HasField("run")]
    assert (started.entity, started.display_name, started.notes, started.job_type) == (
        "team",
        "wide",
        "why",
        "ablation",
    )
    assert sorted(started.tags) == ["a", "b"]
    kinds = {each.metric.name: each.metric.summary for each in read if each.HasField("metric")}
    assert {name for name, kind in kinds.items() if kind.min and kind.last} == {"train/loss", "test/loss"}
    assert {name for name, kind in kinds.items() if kind.max and kind.last} == {"test/accuracy"}
    (artifact,) = [each.artifact for each in read if each.HasField("artifact")]
    assert (artifact.name, artifact.type, sorted(artifact.aliases)) == ("r-checkpoint", "model", ["latest", "step-2"])
    assert [each.path for each in artifact.manifest.contents] == ["weights"]
    updates = [each for row in read for each in row.summary.update]
    summary = {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in updates}
    assert (summary["train/loss"], summary["test/accuracy"]) == ({"min": 0.2, "last": 0.4}, {"max": 0.9, "last": 0.6})


def test_auto_with_a_key_and_no_server_keeps_an_offline_run(train: Any, home: Path) -> None:
    closed = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online", "WANDB_API_KEY": CANARY}
    run = train("recipe=digits", "recipe.width=4", "steps=3", logger="wandb", HOME=str(home), **closed)
    assert run.code == 0, run.error
    assert "warning: wandb is offline for this run" in run.output
    (row,) = [line for line in run.output.splitlines() if "wandb sync" in line]
    command = f"wandb sync runs/digits/{run.folder.name}/wandb/offline-run-*"
    assert row.split(maxsplit=1) == ["wandb", f"offline; {command}"]
    assert "step 3/3" in run.output.partition(row)[0]
    assert history(run.folder)[3]["train/loss"] == pytest.approx(run.steps()[-1]["loss"], rel=1e-12)
    assert CANARY not in run.output + run.error


def test_only_offline_runs_that_are_not_uploaded_have_an_upload_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a run"
    assert format_upload_command(folder) is None
    (folder / "wandb" / "run-1-online").mkdir(parents=True)
    assert format_upload_command(folder) is None
    first, second = (folder / "wandb" / f"offline-run-{number}-x" for number in (1, 2))
    for path in (first, second):
        path.mkdir()
    monkeypatch.chdir(tmp_path)
    assert format_upload_command(folder) == "wandb sync 'a run/wandb'/offline-run-*"
    expanded = subprocess.check_output(f"echo {format_upload_command(folder)}", shell=True, text=True)
    assert expanded == "wandb sync a run/wandb/offline-run-1-x a run/wandb/offline-run-2-x\n"
    monkeypatch.chdir("/usr/lib")
    assert str(tmp_path) in str(format_upload_command(folder)), "the absolute path is shorter"
    for path in (first, second):
        (path / "run-x.wandb.synced").touch()
    assert format_upload_command(folder) is None
