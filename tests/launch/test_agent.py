"""The first host's agent meets the others, and sends them the outcome of the run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.own_recipe import write_recipe
from worldsize.core import Plan, Role
from worldsize.errors import WorldsizeError
from worldsize.launch import agent as leading
from worldsize.launch.agents import Lead
from worldsize.record.run_directory import RunDirectory
from worldsize.world.environments import Node

HERE = "127.0.0.1"
RECIPE = """
from worldsize.data.sources.json_lines import JsonLines
from worldsize.testing.recipes import Chain
class Own(Chain):
    def __init__(self, path):
        super().__init__()
        object.__setattr__(self, "source", JsonLines(path))
"""
OWN = "# @package _global_\nbatch_size: 8\nlr: 0.1\nrecipe: {_target_: recipes.own.recipe.Own, path: nowhere.jsonl}\n"


def test_an_agent_that_cannot_begin_leaves_its_cause_in_the_record(
    train: Any, command: Any, environment_without_wandb: dict[str, str], tmp_path: Path
) -> None:
    write_recipe(tmp_path, "own", RECIPE, own=OWN)
    run = train("recipe=own", "steps=1", "launch=write", "+cluster=slurm", "cluster.nodes=1", PATH="/nowhere")
    assert run.code == 0, run.error

    def begins(rank: int, nodes: object) -> str:
        place = {"WORLDSIZE_NODES": str(nodes), "WORLDSIZE_NODE_RANK": str(rank), "WORLDSIZE_FIRST": HERE}
        done = command("agent", str(run.folder), cwd=tmp_path, environment={**environment_without_wandb, **place})
        assert done.returncode, done.stderr
        return str(done.stderr)

    begins(1, 2)
    assert run.json("run_manifest.json")["attempts"] == [], "the first host tells of itself alone"
    started = "the run has cluster.nodes=1, but was started on 2 nodes."
    causes = [started, "WORLDSIZE_NODES", "nowhere.jsonl: no such file", "RuntimeError: off"]
    begins(0, 2)
    for rank in (0, 1):
        assert causes[1] in begins(rank, "many"), "which hosts without a rank record once"
    begins(0, 1)
    assert [path.name for path in (run.folder / "logs").glob("worker_*")] == []
    (tmp_path / "recipes" / "own" / "recipe.py").write_text("raise RuntimeError('off')\n")
    begins(0, 1)
    attempts = run.json("run_manifest.json")["attempts"]
    assert len(attempts) == 4
    for attempt, cause in zip(attempts, causes, strict=True):
        assert cause in attempt["failure"]["cause"]
        assert attempt["exit_reason"] == "failed"
        assert attempt["failure"]["role"] == "launcher"
    shown = command("status", str(run.folder), cwd=tmp_path, environment=environment_without_wandb).stdout
    assert "RuntimeError: off" in shown
    manifest = run.folder / "run_manifest.json"
    done = json.loads(manifest.read_text())
    done["attempts"][-1]["exit_reason"] = "completed"
    manifest.write_text(json.dumps(done | {"results": {"exit_reason": "completed"}}))
    (tmp_path / "recipes" / "own" / "recipe.py").write_text("raise RuntimeError('gone')\n")
    begins(0, 1)
    kept = run.json("run_manifest.json")
    assert (len(kept["attempts"]), kept["results"]) == (4, {"exit_reason": "completed"})


def test_a_first_host_that_is_not_satisfied_tells_the_others_that_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[object] = []

    class Other:
        rank, host = 1, "b"
        announce_end = log.append

    def refuse(*_: object, **__: object) -> None:
        raise WorldsizeError("the hosts differ")

    def gathered(*_: object, **__: object) -> list[tuple[Other, dict[str, Any]]]:
        log.append("gathered")
        return [(Other(), {})]

    monkeypatch.setattr(leading, "collect_host_facts", lambda *_: log.append("facts"))
    monkeypatch.setattr(leading, "gather_agents", gathered)
    monkeypatch.setattr(leading, "check_hosts", refuse)
    record = SimpleNamespace(
        attempts=[], give_up=lambda cause, unstarted: log.append(f"{unstarted} not started: {cause}")
    )
    monkeypatch.setattr(leading, "open_record", lambda *_: nullcontext(record))
    monkeypatch.setattr(leading, "read_key", lambda _: None)
    monkeypatch.setattr(leading, "_get_port", lambda *_: 1)
    agents = SimpleNamespace(on_node_mismatch="refuse")
    settings = SimpleNamespace(recipe=None, cluster=SimpleNamespace(timeout=1.0), agents=agents)
    run, plan = RunDirectory(tmp_path), Plan(tmp_path, None, {"worker": Role(4)}, {})  # type: ignore[arg-type]
    with pytest.raises(WorldsizeError, match="the hosts differ"):
        leading._run_leader(settings, Lead(), plan, run, Node(0, 2, HERE))  # type: ignore[arg-type]
    assert log == ["facts", "gathered", "4 not started: the hosts differ", 1], "whoever has come is not kept waiting"
