"""``worldsize scale`` measures real runs and writes a study of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn, final

import pytest

from worldsize.cli.scale import plan_points
from worldsize.config.settings import Settings
from worldsize.core import ConfigError
from worldsize.observe.report.page import render_page
from worldsize.record.manifest import read_manifest

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]


def test_two_world_sizes_are_measured_next_to_their_prediction(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    words = ("recipe=digits", "world_sizes=1,2", "accumulations=2", "steps=8", "cluster.threads=1", "batch_size=24")
    done = command("scale", "--mode", "weak", *words, cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("runs/scaling/*/scaling.json")
    study = json.loads(file.read_text())
    assert (study["schema"], study["recipe"], study["mode"]) == (1, "digits", "weak")
    assert study["command"] == f"worldsize scale --mode weak {' '.join(words)}"
    assert study["cluster"]["links"]["node"]["bandwidth"] == 2e9
    for point, size in zip(study["points"], (1, 2), strict=True):
        assert (point["strategy"], point["world_size"], point["accumulation"]) == ("ddp", size, 2)
        config = read_manifest(Path(point["run"], "run_manifest.json"))["config"]
        assert (config["batch_size"], config["logical_ranks"], config["cluster"]["processes"]) == (
            24 * size,
            2 * size,
            size,
        )
        assert point["samples_per_second"] * point["step_seconds"] == pytest.approx(config["batch_size"])
        assert min(point["spread_seconds"], point["predicted_seconds"], *point["phases"].values()) >= 0
        assert set(point["phases"]) == {"data", "compute", "communication", "update"}
        assert min(point["phases"]["compute"], point["phases"]["data"]) > 0
    assert study["points"][0]["efficiency"] == 1.0
    assert study["knee"]["ddp"] in (1, 2)
    assert "digits, weak scaling" in done.stdout


def test_runs_are_not_submitted_to_a_launcher_that_does_not_wait_for_them(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    done = command("scale", "+cluster=slurm", "world_sizes=1", cwd=tmp_path, environment=environment_without_wandb)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Slurm submits runs without waiting for them. Set launcher.wait=true" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_epochs_of_a_configuration_do_not_decide_how_long_is_measured(
    command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]
) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "short.yaml").write_text("# @package _global_\nepochs: 0.1\n")
    words = ("scale", "recipe=digits", "experiment=short", "steps=4", "world_sizes=1")
    done = command(*words, cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 2
    assert "steps=4 is too small" in done.stderr


def test_a_study_with_a_point_that_cannot_run_starts_nothing(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    done = command("scale", "world_sizes=1,7", cwd=tmp_path, environment=environment_without_wandb)
    assert (done.returncode, done.stdout) == (2, "")
    assert "batch_size=96 is not divisible by 7 logical ranks." in done.stderr
    assert list(tmp_path.iterdir()) == []


@final
class NoPredictor:
    """Predicts nothing."""

    def forecast(self, settings: Settings) -> NoReturn:
        raise ConfigError("nothing is predicted")


def test_an_option_of_a_strategy_is_for_those_that_have_it_and_a_size_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["scale"])
    words = ("recipe=digits", "world_sizes=2,1,2", "strategies=ddp,local_sgd", "strategy.inner_steps=10")
    points = plan_points(words, "strong", NoPredictor())  # type: ignore[arg-type]
    assert [(point.strategy, point.world_size) for point in points] == [
        *(("ddp", size) for size in (1, 2)),
        *(("local_sgd", size) for size in (1, 2)),
    ]
    assert [point.settings.config["strategy"].get("inner_steps") for point in points] == [None, None, 10, 10]
    with pytest.raises(
        ConfigError, match=r"unknown key 'strategy\.inner_stepz' of ddp, local_sgd; did you mean 'inner_steps'"
    ):
        plan_points([*words[:3], "strategy.inner_stepz=10"], "strong", NoPredictor())  # type: ignore[arg-type]


def test_what_was_measured_before_a_point_failed_is_kept(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    words = ("recipe=digits", "world_sizes=1,2", "steps=5", "cluster.threads=1", "faults=[{action: raise, rank: 1}]")
    done = command("scale", *words, cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 1, done.stderr
    (file,) = tmp_path.glob("runs/scaling/*/scaling.json")
    assert [point["world_size"] for point in json.loads(file.read_text())["points"]] == [1]
    assert "digits, strong scaling" in done.stdout


@pytest.mark.slow
def test_nodes_and_processes_of_each_are_measured_on_hosts_of_their_own(hosts: Any, tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-c",
        "from worldsize.cli import main; main()",
        "scale",
        "--one-machine",
        "--knee",
        "0.5",
    ]
    points = ("recipe=digits", "world_sizes=1x1,2x1", "steps=5", "cluster.threads=1", "cluster.folder=null")
    where = ("+cluster=ssh", "cluster.hosts=[h1,h2]", f"cluster.python={sys.executable}", f"run.root={tmp_path}/runs")
    done = subprocess.run(hosts.on(1, [*program, *points, *where]), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("runs/scaling/*/scaling.json")
    study = json.loads(file.read_text())
    assert [(point["nodes"], point["world_size"]) for point in study["points"]] == [(1, 1), (2, 2)]
    attempts = [read_manifest(Path(point["run"], "run_manifest.json"))["attempts"][0] for point in study["points"]]
    assert [len(attempt["hosts"]) for attempt in attempts] == [1, 2]
    assert study["points"][0]["predicted_efficiency"] == 1.0
    first, second = (point["samples_per_second"] for point in study["points"])
    assert study["points"][1]["marginal"] == pytest.approx((second - first) / first)
    assert study["knee"] == {"ddp": 2 if second >= 1.5 * first else 1}
    assert "ddp at the node boundary, 1 × 1 to 2 × 1: efficiency 100% to" in done.stdout
    assert "predicted" in render_page([file.parent])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("+cluster=ssh", "cluster.hosts=[a,b]", "world_sizes=1x1,4x2"),
            "requires 4 nodes, but cluster.hosts has 2",
        ),
        (("world_sizes=2x",), "Write e.g. world_sizes=1,2,4, or world_sizes=1x1,1x2,2x2 for nodes x processes"),
        (("--knee", "1.5", "world_sizes=1,2"), "1.5"),
    ],
)
def test_shapes_and_shares_that_mean_nothing_are_refused(
    command: Any, tmp_path: Path, environment_without_wandb: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    done = command("scale", *words, cwd=tmp_path, environment=environment_without_wandb)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
