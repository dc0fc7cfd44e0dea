"""Muon with groups has the same bits on one process and on two that divide its state, and over a resume."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Command, Train


def test_muon_with_groups_keeps_the_bits_on_two_processes_and_when_another_strategy_resumes(
    train: Train, command: Command, tmp_path: Path, environment_without_wandb: dict[str, str]
) -> None:
    options = (
        *("optimizer=muon", 'optimizer.groups={bias:{match:["*.bias"],weight_decay:0.0,lr:0.002}}', "steps=6"),
        *("recipe=digits", "schedule=constant", "reproducibility=elastic", "logical_ranks=2", "cluster.threads=1"),
    )
    whole = train(*options, "strategy=single", "cluster.processes=1")
    half = train(*options, "strategy=zero", "cluster.processes=2", "steps=3")
    assert (whole.code, half.code) == (0, 0), (whole.error, half.error)
    words = ("resume", str(half.folder), "steps=6", "strategy=ddp")
    done = command(*words, cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert half.json("result.json")["state_digest"] == whole.json("result.json")["state_digest"]


def test_fsdp_refuses_muon_before_the_start(train: Train) -> None:
    run = train("recipe=digits", "optimizer=muon", "strategy=fsdp", "cluster.processes=2")
    assert (run.code, run.folder) == (2, None)
    assert "makes an update of a whole matrix" in run.error
