"""All reads of a rank's data are counted, in any process, and shown in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.data.range_server import served
from tests.support.own_recipe import write_recipe
from worldsize.observe.report.page import collect_summary
from worldsize.observe.report.read import read_run

RECIPE = '''
import torch

from worldsize.testing.recipes import Chain


class Sums(Chain):
    """The features of a sample are its tokens; only tokens that a step needs are read."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def data(self, split):
        return self.source if split == "train" else super().data(split)

    def loss(self, model, batch):
        rows = batch.float() / 100
        return super().loss(model, (rows[:, :7], rows[:, :3]))
'''
CONF = """# @package _global_
defaults:
  - /data: tokens
  - _self_
steps: 12
batch_size: 4
lr: null
data: {length: 15, dtype: uint8}
recipe:
  _target_: recipes.sums.recipe.Sums
  source: ${data}
"""
STEPS, BATCH, SAMPLE = 12, 4, 16  # bytes of a sample


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    write_recipe(tmp_path, "sums", RECIPE, sums=CONF)
    data = tmp_path / "data"
    data.mkdir()
    numpy.random.default_rng(0).integers(0, 100, 1 << 20, dtype=numpy.uint8).tofile(data / "text.bin")
    return data


def counted(folder: Path, name: str) -> list[int]:
    """Return each rank's sum over all lines."""
    files = sorted((folder / "timing").rglob("worker_*.jsonl"))
    return [sum(json.loads(line).get(name, 0) for line in file.read_text().splitlines()) for file in files]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_rank_counts_the_bytes_that_it_needs(train: Any, tokens: Path, workers: int) -> None:
    options = ("recipe=sums", "cluster.processes=2", "log_every=3", f"data_workers={workers}")
    done = train(*options, f"data.path={tokens}")
    assert done.code == 0, done.error
    needed = STEPS * BATCH // 2 * SAMPLE
    ahead = workers * 2 * BATCH // 2 * SAMPLE  # from steps that were loaded but not computed
    assert all(needed <= count <= needed + ahead for count in counted(done.folder, "read_bytes"))
    assert counted(done.folder, "fetched_bytes") == [0, 0]
    assert ("data read", "768 B") in collect_summary(read_run(done.folder)) or workers


def test_blocks_of_a_url_are_fetched_once_for_all_ranks(train: Any, tokens: Path) -> None:
    with served(tokens) as server:
        path = f"data.path={server.url}/text.bin"
        cache = (f"data.cache.folder={tokens}/cache", "data.cache.block=65536")
        done = train("recipe=sums", "cluster.processes=2", "log_every=3", path, *cache)
        assert done.code == 0, done.error
        fetched = sum(counted(done.folder, "fetched_bytes"))
        assert 0 < fetched <= server.sent <= 1 << 20
        again = train("recipe=sums", "cluster.processes=2", "log_every=3", path, *cache)
    assert sum(counted(again.folder, "fetched_bytes")) == 0
    assert counted(again.folder, "read_bytes") == counted(done.folder, "read_bytes")
    assert again.json("result.json")["state_digest"] == done.json("result.json")["state_digest"]
    assert any(name == "data read from other machines" for name, _ in collect_summary(read_run(done.folder)))
