"""Runs see every sample exactly once per epoch, from every source, over kills, resumes and other world sizes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from tests.data.every_source.recipe import number_of
from tests.data.formats import FORMATS, SAMPLES
from tests.data.range_server import served
from worldsize.core import ConfigError
from worldsize.data.source import check_paths
from worldsize.data.sources.documents import DocumentWindows, PackedDocuments
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.sources.tokens import TokenFiles, TokenWindows
from worldsize.data.storage.cache import Cache

BATCH, STEPS = 12, 48  # of 50 samples: eleven and a half epochs
LENGTH = 8  # tokens that a sample predicts
OPTIONS = {
    "json_lines": "jsonl",
    "parquet": "parquet",
    "feather": "arrow",
    "arrow": "arrow",
    "webdataset": "webdataset",
    "images": "images",
    "hf_datasets": "hf_dataset",
}
TOKENS: Mapping[str, Callable[..., TokenFiles]] = {
    "tokens": TokenWindows,
    "documents": DocumentWindows,
    "packed": PackedDocuments,
}
MIXED = {"files": ("packed", 0.3), "more": ("tokens", 0.7)}  # the source and weight of each folder


def project(folder: Path, name: str) -> Path:
    """Write a project with the recipe and one format's files."""
    shutil.copytree(Path(__file__).parent / "every_source", folder / "recipes" / "every_source")
    (folder / "files").mkdir()
    if name in FORMATS:
        FORMATS[name].write(folder / "files")
    else:
        write_tokens(folder / "files", 0)
        (folder / "more").mkdir()
        write_tokens(folder / "more", 1000)
    return folder


def write_tokens(folder: Path, first: int) -> None:
    """Write documents of unequal length to two files; each token is its predecessor plus one."""
    bounds = numpy.cumsum([0, *(1 + number * 7 % 13 for number in range(60))])
    for shard, documents in enumerate((bounds[:38], bounds[37:])):
        tokens = numpy.arange(first + documents[0], first + documents[-1], dtype=numpy.uint16)
        numpy.save(folder / f"tokens_{shard:05d}.npy", tokens)
        numpy.save(folder / f"documents_{shard:05d}.npy", documents - documents[0])


def chosen(name: str) -> list[str]:
    """Return the options that select a source."""
    if name == "mixture":
        parts = [(f"data.sources.{folder}", kind, weight) for folder, (kind, weight) in MIXED.items()]
        sources = [word for key, kind, _ in parts for word in (f"+data@{key}.source={kind}", *where(f"{key}.source"))]
        return ["data=mixture", *sources, *(f"+{key}.weight={weight}" for key, _, weight in parts)]
    if name in TOKENS:
        return [f"data={name}", *where("data")]
    return [f"data={OPTIONS[name]}", "data.path=files", "data.cache.folder=cache"]


def where(key: str) -> tuple[str, ...]:
    """Return the options for the location of a token source and the length of its samples."""
    cache = f"+{key}.cache={{_target_: worldsize.data.storage.cache.Cache, folder: cache}}"
    return f"{key}.path={'more' if 'more' in key else 'files'}", f"{key}.length={LENGTH}", cache


def numbers(name: str, folder: Path) -> list[set[int]]:
    """Return the numbers of the samples of each source that a name stands for."""
    if name in FORMATS:
        return [set(range(SAMPLES))]
    kinds = {below: kind for below, (kind, _) in MIXED.items()} if name == "mixture" else {"files": name}
    found = []
    for below, kind in kinds.items():
        source = TOKENS[kind](str(folder / below), length=LENGTH, cache=Cache(folder=str(folder / "cache")))
        found.append({number_of(source[index]) for index in range(len(source))})
        assert len(found[-1]) == len(source)
    return found


def seen(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step; repeated steps have the same ones in each logical rank."""
    by_rank: dict[tuple[int, int], list[int]] = {}
    for path in folder.iterdir():
        for step, seed, numbers in map(json.loads, path.read_text().splitlines()):
            assert by_rank.setdefault((step, seed), numbers) == numbers
    steps = sorted({step for step, _ in by_rank})
    return {
        each: sorted(number for (step, _), numbers in by_rank.items() if step == each for number in numbers)
        for each in steps
    }


IN_THE_GATE = ("parquet", "webdataset", "mixture")  # each reads and resumes differently


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.heavy if name in IN_THE_GATE else pytest.mark.slow)
        for name in (*FORMATS, *TOKENS, "mixture")
    ],
)
def test_every_sample_is_seen_once_an_epoch_over_kills_resumes_and_other_world_sizes(
    name: str, train: Any, command: Any, environment_without_wandb: dict[str, str], tmp_path: Path
) -> None:
    project(tmp_path, name)
    run_options = ("reproducibility=elastic", "logical_ranks=12", "cluster.threads=1", "checkpoint.every=5")
    options = ("recipe=every_source", *chosen(name), *run_options)
    for part in ("whole", "parts"):
        (tmp_path / part).mkdir()
    whole = train(*options, f"recipe.seen={tmp_path}/whole", "strategy=single", "cluster.processes=1")
    assert whole.code == 0, whole.error

    kill = "faults=[{action: kill, rank: 2, step: 19, attempt: 2}]"
    run = train(*options, f"recipe.seen={tmp_path}/parts", "steps=8", "data_workers=1")
    assert run.code == 0, run.error
    for words in (
        ("cluster.processes=3", "steps=23", "launcher.max_restarts=1", kill),
        ("cluster.processes=4", "faults=[]", f"steps={STEPS}"),
    ):
        done = command("resume", str(run.folder), *words, cwd=tmp_path, environment=environment_without_wandb)
        assert done.returncode == 0, done.stderr
    attempts = run.json("run_manifest.json")["attempts"]
    assert [each["exit_reason"] for each in attempts] == ["completed", "failed", "completed", "completed"]
    assert run.json("result.json")["state_digest"] == whole.json("result.json")["state_digest"]

    steps = seen(tmp_path / "parts")
    assert steps == seen(tmp_path / "whole")
    assert list(steps) == list(range(1, STEPS + 1))
    assert {len(numbers) for numbers in steps.values()} == {BATCH}
    counts = Counter(number for drawn in steps.values() for number in drawn)
    sources = numbers(name, tmp_path)
    for source in sources:
        epochs, rest = divmod(sum(counts[number] for number in source), len(source))
        assert epochs >= 2
        assert Counter(counts[number] for number in source) == Counter({epochs: len(source) - rest, epochs + 1: rest})
    assert sum(counts.values()) == sum(counts[number] for source in sources for number in source)


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


def test_a_path_of_data_that_is_not_here_is_refused_before_anything_starts(train: Any, tmp_path: Path) -> None:
    project(tmp_path, "json_lines")
    run = train("recipe=every_source", "data=jsonl", "data.path=nowhere", "recipe.seen=seen", "cluster.processes=1")
    assert (run.code, run.folder) == (2, None)
    assert run.error.startswith("nowhere: no such file, or no .jsonl or ")


def test_data_in_a_list_or_a_mapping_of_a_recipe_are_looked_for_too(tmp_path: Path) -> None:
    missing = JsonLines(str(tmp_path / "nowhere"))
    for parts in ([missing], (missing,), {"a": missing}, missing):
        with pytest.raises(ConfigError, match="nowhere: no such file"):
            check_paths(SimpleNamespace(parts=parts))
    check_paths(SimpleNamespace(parts=[1, "text"]))
