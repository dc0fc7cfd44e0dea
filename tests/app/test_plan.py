"""``worldsize plan`` against the textbook, arithmetic by hand, and what a run needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXTBOOK = ("--model-size", "1e9", "--precision", "fp16", "--compute", "250ms", "+cluster=slurm", "batch_size=64")


@pytest.fixture
def plan(command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]) -> Any:
    def run(*words: str) -> Any:
        return command("plan", *words, cwd=tmp_path, environment=environment_without_wandb)

    return run


def rows(output: str) -> dict[str, list[str]]:
    """Cells of the table of strategies, by strategy."""
    lines = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 7}


@pytest.mark.parametrize(
    ("nodes", "each", "expected"),
    [
        (1, 8, ["8.00 GB", "3.50 GB", "0 B", "11.68 ms", "261.68 ms", "95.5%"]),
        (8, 1, ["8.00 GB", "3.50 GB", "3.50 GB", "280.07 ms", "530.07 ms", "47.2%"]),
    ],
)
def test_a_billion_parameters_on_eight_gpus(plan: Any, nodes: int, each: int, expected: list[str]) -> None:
    done = plan(*TEXTBOOK, f"cluster.nodes={nodes}", f"cluster.gpus_per_node={each}")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert found["ddp"] == expected
    assert found["fsdp"][0] == "1.00 GB"
    assert "single: strategy=single runs on one process; the cluster has 8." in done.stdout


def test_options_of_the_chosen_strategy_count(plan: Any) -> None:
    words = (*TEXTBOOK, "cluster.nodes=8", "cluster.gpus_per_node=8", "strategy=ddp")
    flat = rows(plan(*words).stdout)["ddp"]
    by_node = rows(plan(*words, "strategy.reduce=hierarchical", "strategy.compress=int8").stdout)["ddp"]
    assert flat[2] == "3.94 GB"  # 2 · 63/64 · 2 GB
    assert by_node[2] == "878.42 MB"  # 2 · 7/8 · 2 GB · (1/4 + 1/1024)
    assert flat[3] == "315.63 ms"
    # inside: 14 µs + 2 · 7/8 · 2 GB / 300 GB/s; across: 70 µs + 878.42 MB / 12.5 GB/s
    assert by_node[3] == f"{0.014 + 11.6667 + 0.07 + 70.2734:.2f} ms"


def test_a_recipe_is_calibrated_by_a_few_steps(plan: Any, tmp_path: Path) -> None:
    done = plan("recipe=digits", "cluster.processes=2", "strategy=ddp")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert found["ddp"][0].endswith(" MB")
    assert float(found["ddp"][4].removesuffix(" ms")) > 0
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_planned_is_refused(plan: Any) -> None:
    done = plan("--model-size", "1e9")
    assert (done.returncode, done.stderr) == (
        2,
        "--model-size says nothing of time. Give --compute too, e.g. --compute 250ms.\n",
    )
    assert "has no unit" in plan("--compute", "250").stderr
