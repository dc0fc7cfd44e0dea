"""With ``data_workers=auto``, a slow data set gets workers, and the run ends with the same bits as without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.own_recipe import write_recipe

RECIPE = '''
import time

import torch
from torch.utils.data import Dataset

from worldsize.testing.recipes import Chain


class Slow(Dataset):
    """Takes 20 ms for each batch, as a slow disk does, and adds noise to it."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows[0])

    def load_batch(self, indices):
        time.sleep(0.02)
        return tuple(tensor[indices] + 0.01 * torch.rand(tensor[indices].shape) for tensor in self.rows)


class SlowChain(Chain):
    def data(self, split):
        data = super().data(split)
        return Slow(data.tensors) if split == "train" else data
'''
CONF = """# @package _global_
steps: 110
batch_size: 8
lr: null
recipe:
  _target_: recipes.slow.recipe.SlowChain
"""


def test_a_slow_data_set_gets_workers_and_the_bits_stay(train: Any, tmp_path: Path) -> None:
    write_recipe(tmp_path, "slow", RECIPE, slow=CONF)
    words = ("recipe=slow", "cluster.processes=1", "cluster.threads=1", "checkpoint.every=40")
    auto = train(*words, "data_workers=auto")
    assert auto.code == 0, auto.error
    events = [json.loads(line) for line in (auto.folder / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event["event"] == "data_workers")
    assert (first["event"], first["before"], first["workers"], first["step"]) == ("data_workers", 0, 1, 25)
    assert first["waited"] > 0.05, "each step sleeps 20 ms for its data"
    assert "step 25: rank 0: data workers changed from 0 to 1" in auto.output + auto.error
    fixed = train(*words, "data_workers=0", "steps=110")
    assert fixed.json("result.json")["state_digest"] == auto.json("result.json")["state_digest"]
    assert [row["loss"] for row in fixed.steps()] == [row["loss"] for row in auto.steps()]


def test_another_word_than_auto_is_refused_with_what_is_taken(train: Any) -> None:
    run = train("recipe=digits", "data_workers=avto")
    assert run.code == 2
    assert (
        "data_workers='avto' is unknown; did you mean 'auto'? Available: auto. A number of processes is also"
        in run.error
    )
    assert "data_workers=-1 must be between 0 and 256; the limit is per worker" in train("data_workers=-1").error
