"""A launcher of one's own: one file, one YAML, nothing changed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_a_launcher_of_ones_own_is_one_file_and_one_yaml(
    train: Any, command: Any, tmp_path: Path, warm_python: Path, environment_without_wandb: dict[str, str]
) -> None:
    made = command("new", "launcher", "programs", cwd=tmp_path, environment=environment_without_wandb)
    assert made.returncode == 0, made.stderr
    options = ("recipe=digits", "steps=10", "reproducibility=elastic", "cluster.threads=1")
    run = train(*options, "+cluster=programs", "launcher.niceness=5", python=warm_python)
    assert run.code == 0, run.error
    alone = train(*options, "cluster.processes=2").json("result.json")
    assert run.json("result.json")["state_digest"] == alone["state_digest"]
    assert run.json("run_manifest.json")["attempts"][0]["exit_reason"] == "completed"
    assert "2 × nice -n 0" in train(*options, "+cluster=programs", "launch=show").output
    refused = train(*options, "+cluster=programs", "cluster.nodes=2", "cluster.processes=2")
    assert (refused.code, "cluster=programs has one node; cluster.nodes=2" in refused.error) == (2, True)
