"""TensorBoard's own reader reads the run's logs."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import plugins.tensorboard.logger
from worldsize.core import CheckpointFailed, ConfigError, NodeAlert, RunEnded, RunStarted, StepDone, TransportFellBack


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_the_event_files_have_the_figures_of_the_run_once_each_also_if_it_was_killed(train: Any) -> None:
    options = ("recipe=digits", "recipe.width=4", "steps=6", "log_every=1", "evaluate_every=2", "checkpoint.every=2")
    kill = ("launcher.max_restarts=1", "faults=[{action: kill, rank: 0, step: 6}]")
    run = train(*options, *kill, "cluster.processes=1", logger="tensorboard")
    assert run.code == 0, run.error
    events = read(run.folder)
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in run.steps()
    ]
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    expected = [(line["step"], line["metrics"]["accuracy"]) for line in lines if line["event"] == "evaluation"]
    accuracies = {scalar.step: scalar.value for scalar in events.Scalars("test/accuracy")}
    assert accuracies == {step: pytest.approx(value) for step, value in expected}
    assert "recipe" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_alerts_are_texts_at_their_steps_also_those_before_the_first_step(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"run_id": "r", "group": None, "config": {}, "manifest": {}, "folder": tmp_path}
    listener = plugins.tensorboard.logger.TensorBoard(folder_name="tensorboard", **facts)
    listener(TransportFellBack("NCCL uses plain sockets.", {"socket": 2}, "eth0"))
    listener(RunStarted("r", 9, first=4))
    listener(StepDone(6, 6, 0.1, 0.1, None, 0, 0.0, (0.1,), 1.0))
    listener(CheckpointFailed(5, "the disk is full", None, 1))
    listener(NodeAlert(1, "n3", "memory", 0.97, 0.95))
    listener(RunEnded(6, "completed"))
    events = read(tmp_path)
    told = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"] if tag.startswith("alerts/")}
    texts = {tag: (each.step, each.tensor_proto.string_val[0].decode()) for tag, (each,) in told.items()}
    assert texts.pop("alerts/transport/text_summary") == (4, "NCCL uses plain sockets.")
    assert texts.pop("alerts/failed_save/text_summary")[0] == 5
    step, text = texts.pop("alerts/node_alert.1.memory/text_summary")
    assert (step, texts) == (6, {})
    assert "n3: 97 % of memory" in text


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Mock(side_effect=PackageNotFoundError("package"))
    monkeypatch.setattr("lightning_utilities.core.imports._version", absent)
    with pytest.raises(ConfigError, match=r"logger=tensorboard requires tensorboard.*uv sync --extra tensorboard"):
        importlib.reload(plugins.tensorboard.logger)
