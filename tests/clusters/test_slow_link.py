"""A host with a slow link is detected while a run trains on four hosts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from worldsize.testing.hosts import Hosts

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]
MODEL = ("recipe=stdlib_lm", "recipe.depth=1", "recipe.width=128", "recipe.context=8", "recipe.test_bytes=1000")
RUN = ("batch_size=4", "steps=24", "log_every=3", "checkpoint=none", "logger=none", "cluster.threads=1")


def events_of(four: Hosts, folder: Path, environment: dict[str, str], python: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    hosts = ("+cluster=ssh", "cluster.hosts=[h1,h2,h3,h4]", "cluster.processes_per_node=1")
    own = (f"cluster.ssh=[{','.join(four.ssh)}]", f"cluster.python={python}", "cluster.folder=null")
    command = four.wrap_command(1, [str(python), str(REPOSITORY / "train.py"), *MODEL, *RUN, *hosts, *own])
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=240)
    rows = [json.loads(line) for file in folder.rglob("events.jsonl") for line in file.read_text().splitlines()]
    return [row for row in rows if row["event"] == "straggling"]


def test_a_slow_link_is_measured_and_its_host_named_while_the_run_trains(
    four: Hosts, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    assert events_of(four, tmp_path / "well", environment_without_wandb, warm_python) == []
    four.shape_links("50mbit", host=3)
    try:
        (event,) = events_of(four, tmp_path / "slow", environment_without_wandb, warm_python)
    finally:
        four.shape_links("1gbit", host=3)
    assert (event["cause"], event["rank"], event["host"]) == ("network", 2, "h3")
    assert event["slower"] > 3
    assert event["step"] <= 24
