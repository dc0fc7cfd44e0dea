"""MLflow's own client reads the run's logs."""

from __future__ import annotations

import importlib
import json
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlflow
import pytest

import plugins.mlflow.logger
from worldsize.core import CheckpointFailed, ConfigError, TransportFellBack

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),  # mlflow's use of it
]
OPTIONS = ("recipe=digits", "recipe.width=4", "steps=6", "log_every=1", "evaluate_every=2", "checkpoint.every=2")
TWO = ("cluster.processes=2", "cluster.threads=1", "logger.experiment=digits")


@pytest.fixture
def client(tmp_path: Path) -> mlflow.MlflowClient:
    """Create the working directory's database first: two attempts of a tiny run might create it at the same time."""
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    client.search_experiments()
    return client


def logged(client: mlflow.MlflowClient) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """Return the only run in the database, and the steps and values of its metrics."""
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return run, {name: sorted((each.step, each.value) for each in rows) for name, rows in histories.items()}


def expected(run: Any) -> dict[str, list[tuple[int, float]]]:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "train/loss": [(line["step"], line["loss"]) for line in lines if line["event"] == "step"],
        "test/accuracy": [
            (line["step"], line["metrics"]["accuracy"]) for line in lines if line["event"] == "evaluation"
        ],
    }


def test_a_killed_run_is_one_run_with_the_figures_of_each_step(train: Any, client: mlflow.MlflowClient) -> None:
    kill = ("launcher.max_restarts=1", "faults=[{action: kill, rank: 0, step: 6}]")
    run = train(*OPTIONS, *TWO, *kill, "run.group=nightly", logger="mlflow")
    assert run.code == 0, run.error
    while len(dict(logged(client)[1]["train/loss"])) < 6:  # the killed attempt's logger exits by itself
        time.sleep(0.2)
    found, metrics = logged(client)
    assert found.info.run_name == run.folder.name
    for name, rows in expected(run).items():
        assert dict(metrics[name]) == pytest.approx(dict(rows))
    assert found.data.params["strategy._target_"].endswith("DDP")
    assert found.data.params["recipe.width"] == "4"
    assert found.data.tags["worldsize.group"] == "nightly"


def test_a_preempted_run_is_gone_on_with_where_it_was_logged(
    train: Any, command: Any, client: mlflow.MlflowClient, environment_without_wandb: dict[str, str]
) -> None:
    terminate = "faults=[{action: terminate, rank: 1, step: 3}, {action: sleep, seconds: 0.1, attempt: null}]"
    run = train(*OPTIONS, *TWO, terminate, "launcher.save_grace=120", logger="mlflow")
    assert run.code == 75, run.error
    assert logged(client)[0].info.status == "KILLED"
    done = command("resume", str(run.folder), cwd=run.folder.parents[2], environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    found, metrics = logged(client)
    assert found.info.status == "FINISHED"
    assert [step for step, _ in metrics["train/loss"]] == [1, 2, 3, 4, 5, 6]


def test_alerts_are_tags_also_that_of_a_slower_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow keeps the run in files here, since creating a database takes seconds."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    facts: dict[str, Any] = {"run_id": "r", "group": None, "config": {}, "folder": tmp_path, "experiment": "e"}
    uri = f"file:{tmp_path}/runs"
    listener = plugins.mlflow.logger.MLflow(tracking_uri=uri, manifest={"code": {"commit": None}}, **facts)
    listener(TransportFellBack("NCCL uses plain sockets.", {"socket": 2}, "eth0"))
    listener(CheckpointFailed(5, "the disk is full" * 99, None, 1))
    tags = logged(mlflow.MlflowClient(tracking_uri=uri))[0].data.tags
    assert tags["worldsize.transport"] == "NCCL uses plain sockets."
    assert tags["worldsize.failed_save"].startswith("step 5: failed to write the checkpoint: the disk is full")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Mock(side_effect=PackageNotFoundError("package"))
    monkeypatch.setattr("lightning_utilities.core.imports._version", absent)
    with pytest.raises(ConfigError, match=r"logger=mlflow requires mlflow.*uv sync --extra mlflow"):
        importlib.reload(plugins.mlflow.logger)
