"""The click_through recipe reads Criteo's format, generates samples and trains its model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.click_through.recipe import DLRM, ClickThrough
from recipes.click_through.samples import CATEGORIES, COUNTS, Criteo, Synthetic
from worldsize.core import ConfigError

pytestmark = pytest.mark.heavy

MADE_UP = Synthetic(rows=4000, test_rows=1000, categories=500, exponent=1.1, seed=0)


def line(label: int, counts: list[str], categories: list[str]) -> str:
    return "\t".join([str(label), *counts, *categories]) + "\n"


@pytest.fixture
def criteo(tmp_path: Path) -> Criteo:
    counts, categories = ["7", "", "-1", *["3"] * 10], ["68fd1e64", "", *["0b153874"] * 24]
    (tmp_path / "train.txt").write_text("".join(line(i % 2, counts, categories) for i in range(5)))
    return Criteo(str(tmp_path), rows=3, test_rows=2)


def test_a_file_of_criteo_is_read_as_it_is_documented(criteo: Criteo) -> None:
    counts, categories, labels = criteo.read_split("train").tensors
    assert counts.shape == (3, COUNTS)
    torch.testing.assert_close(counts[0, :4], torch.tensor([7.0, 0.0, 0.0, 3.0]).log1p())
    assert categories.shape == (3, CATEGORIES)
    assert categories[0, :3].tolist() == [0x68FD1E64, 0, 0x0B153874]
    assert labels.tolist() == [0.0, 1.0, 0.0]
    assert criteo.read_split("test").tensors[2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\t2\t3\n", "line 1: expected 40 fields, got 3"),
        (line(1, ["x"] * 13, ["1"] * 26), "line 1: invalid literal for int"),
        (line(1, ["1"] * 13, ["xyz"] * 26), "line 1: invalid literal for int"),
        ("", "does not have enough lines"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.txt").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Criteo(str(tmp_path), rows=3, test_rows=2).read_split("train")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.txt not found. Set data.path"):
        Criteo(str(tmp_path), rows=3, test_rows=2).read_split("train")


def test_made_up_categories_follow_a_power_law() -> None:
    _, categories, labels = MADE_UP.read_split("train").tensors
    shares = torch.bincount(categories.flatten(), minlength=500).double() / categories.numel()
    expected = torch.arange(1, 501).double() ** -1.1
    torch.testing.assert_close(shares[:5], (expected / expected.sum())[:5], rtol=0.05, atol=0.0)
    assert 0.1 < float(labels.mean()) < 0.6
    assert not torch.equal(categories[:1000], MADE_UP.read_split("test").tensors[1])


def test_the_model_multiplies_each_pair_of_features_once() -> None:
    model = DLRM(dim=4, rows=10, bottom=[8], top=[8], sparse=False)
    first = model.top[0]
    assert isinstance(first, torch.nn.Linear)
    assert first.in_features == 4 + 27 * 26 // 2
    assert model(torch.rand(3, COUNTS), torch.randint(1 << 32, (3, CATEGORIES))).shape == (3,)


def test_made_up_clicks_are_learnt(train: Any) -> None:
    options = ("recipe=click_through", "data.rows=60000", "data.test_rows=4000", "data.categories=500", "steps=150")
    size = ("strategy=hybrid_parameter_server", "cluster.processes=3", "recipe.rows=500", "batch_size=256")
    run = train(*options, *size, "cluster.threads=1")
    assert run.code == 0, run.error
    metrics = run.json("result.json")["metrics"]
    recipe = ClickThrough(4, 10, [8], [8], True, MADE_UP, partial(torch.optim.SGD, lr=0.1))
    assert recipe.files() == {}
    clicked = torch.tensor(metrics["clicked"])
    without_features = float(-(clicked * clicked.log() + (1 - clicked) * (1 - clicked).log()))
    assert metrics["loss"] < without_features - 0.02
    assert metrics["predicted"] == pytest.approx(metrics["clicked"], abs=0.08)


def test_the_files_of_criteo_are_chosen_by_one_override(train: Any, criteo: Criteo) -> None:
    options = ("recipe=click_through", "data=criteo", f"data.path={criteo.path}", "data.rows=3", "data.test_rows=2")
    run = train(*options, "strategy=parameter_server", "cluster.processes=2", "batch_size=2", "steps=2")
    assert run.code == 0, run.error
    assert list(run.json("run_manifest.json")["data"]["files"]) == ["train.txt"]
