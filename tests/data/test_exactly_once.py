"""Runs see every sample exactly once an epoch, from every source, over kills, resumes and other world sizes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.formats import FORMATS, SAMPLES
from tests.data.range_server import served

BATCH, STEPS = 12, 48  # eleven and a half epochs
OPTIONS = {
    "json_lines": "jsonl",
    "parquet": "parquet",
    "feather": "arrow",
    "arrow": "arrow",
    "webdataset": "webdataset",
    "images": "images",
    "hf_datasets": "hf_dataset",
}


def project(folder: Path, name: str) -> Path:
    """Write a project with the recipe and the files of a format."""
    shutil.copytree(Path(__file__).parent / "every_source", folder / "recipes" / "every_source")
    (folder / "files").mkdir()
    FORMATS[name].write(folder / "files")
    return folder


def seen(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step; a step that is trained again has the same ones in each logical rank."""
    by_rank: dict[tuple[int, int], list[int]] = {}
    for path in folder.iterdir():
        for step, seed, numbers in map(json.loads, path.read_text().splitlines()):
            assert by_rank.setdefault((step, seed), numbers) == numbers
    steps = sorted({step for step, _ in by_rank})
    return {
        each: sorted(number for (step, _), numbers in by_rank.items() if step == each for number in numbers)
        for each in steps
    }


@pytest.mark.heavy
@pytest.mark.parametrize("name", FORMATS)
def test_every_sample_is_seen_once_an_epoch_over_kills_resumes_and_other_world_sizes(
    name: str, train: Any, command: Any, environment_without_wandb: dict[str, str], tmp_path: Path
) -> None:
    project(tmp_path, name)
    where = ("recipe=every_source", f"data={OPTIONS[name]}", "data.path=files", "data.cache.folder=cache")
    options = (*where, "reproducibility=elastic", "logical_ranks=12", "cluster.threads=1", "checkpoint.every=5")
    for part in ("whole", "parts"):
        (tmp_path / part).mkdir()
    whole = train(*options, f"recipe.seen={tmp_path}/whole")
    assert whole.code == 0, whole.error

    kill = "faults=[{action: kill, rank: 3, step: 19, attempt: 2}]"
    run = train(*options, f"recipe.seen={tmp_path}/parts", "steps=8", "data_workers=1")
    assert run.code == 0, run.error
    for words in (
        ("cluster.processes=4", "steps=23", "launcher.max_restarts=1", kill),
        ("cluster.processes=2", "steps=31", "faults=[]"),
        ("cluster.processes=3", f"steps={STEPS}"),
    ):
        done = command("resume", str(run.folder), *words, cwd=tmp_path, environment=environment_without_wandb)
        assert done.returncode == 0, done.stderr
    attempts = run.json("run_manifest.json")["attempts"]
    assert [each["exit_reason"] for each in attempts] == ["completed", "failed", "completed", "completed", "completed"]
    assert run.json("result.json")["state_digest"] == whole.json("result.json")["state_digest"]

    steps = seen(tmp_path / "parts")
    assert steps == seen(tmp_path / "whole")
    assert list(steps) == list(range(1, STEPS + 1))
    assert {len(numbers) for numbers in steps.values()} == {BATCH}
    counts = Counter(number for numbers in steps.values() for number in numbers)
    assert set(counts) == set(range(SAMPLES))
    assert set(counts.values()) == {STEPS * BATCH // SAMPLES, STEPS * BATCH // SAMPLES + 1}


def test_a_run_reads_from_a_server_what_it_reads_from_this_machine(train: Any, tmp_path: Path) -> None:
    project(tmp_path, "webdataset")
    options = ("recipe=every_source", "data=webdataset", "data.cache.folder=cache", "steps=6", "cluster.processes=2")
    digests = []
    with served(tmp_path / "files") as server:
        for number, place in enumerate(("files", f"[{server.url}/a.tar,{server.url}/b.tar]")):
            (tmp_path / f"seen{number}").mkdir()
            run = train(*options, f"data.path={place}", f"recipe.seen={tmp_path}/seen{number}", "data_workers=1")
            assert run.code == 0, run.error
            digests.append(run.json("result.json")["state_digest"])
            assert list(seen(tmp_path / f"seen{number}")) == list(range(1, 7))
    assert digests[0] == digests[1]
    assert server.ranges
