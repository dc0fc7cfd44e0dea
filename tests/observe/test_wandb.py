"""The wandb run that a training run leaves, read back from its file."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

records = runpy.run_path(str(Path(__file__).parent / "wandb_file.py"))["records"]
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
    for record in records(file):
        if record.HasField("history"):
            items = record.history.item
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            rows.setdefault(int(row["_step"]), {}).update(row)
    return rows


def test_the_losses_the_config_and_the_run_id_are_in_the_file_and_no_key_is_anywhere(train: Any, home: Path) -> None:
    options = ("recipe=digits", "recipe.width=4", "steps=25", "run.group=trials")
    run = train(*options, logger="wandb", HOME=str(home), WANDB_API_KEY=CANARY)
    assert run.code == 0, run.error
    rows = history(run.folder)
    for line in run.steps():
        assert rows[line["step"]]["train/loss"] == pytest.approx(line["loss"], rel=1e-12)
    assert rows[25]["test/accuracy"] == pytest.approx(run.json("result.json")["metrics"]["accuracy"])

    (file,) = run.folder.glob("wandb/offline-run-*/run-*.wandb")
    (started,) = [record.run for record in records(file) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert (started.run_id, started.run_group, started.project) == (run.folder.name, "trials", "worldsize")
    assert config["steps"] == 25
    assert config["manifest"]["determinism"]["logical_ranks"] == 2

    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [path for path in written if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in run.output + run.error


def test_a_logger_that_fails_does_not_end_the_run(train: Any) -> None:
    run = train("recipe=digits", "recipe.width=4", "steps=3", "logger.project=a/b?c", logger="wandb")
    assert run.code == 0, run.error
    assert "warning: the logger failed and is off for the rest of the run" in run.output
    assert len(run.steps()) == 2
