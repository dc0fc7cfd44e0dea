"""The word2vec recipe draws pairs and negatives as defined, and learns."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest
import torch

from recipes.word2vec.prose import pair_words, read_texts, vocabulary
from recipes.word2vec.recipe import Pairs, Word2Vec

pytestmark = pytest.mark.heavy


def recipe(*, sparse: bool = False) -> Word2Vec:
    return Word2Vec(16, 5, 5, 20, sparse, partial(torch.optim.Adagrad, lr=0.1))


def test_the_python_distribution_contains_english_prose() -> None:
    counts = recipe().counts
    assert len(read_texts()) > 1000
    assert sum(counts.values()) > 100_000
    assert {"the", "string", "returns", "exception"} <= counts.keys()


def test_words_are_ordered_by_frequency_and_rare_ones_are_left_out() -> None:
    assert vocabulary([["b", "a", "b"], ["c", "a", "b"]], 2) == {"b": 3, "a": 2}


def test_pairs_lie_within_the_window_and_within_one_text() -> None:
    pages = [numpy.arange(0, 6, dtype=numpy.int32), numpy.arange(10, 13, dtype=numpy.int32)]
    paired = pair_words(pages, 2, seed=0)
    distance = abs(paired[:, 0] - paired[:, 1])
    assert set(distance.tolist()) == {1, 2}
    neighbours = {(i, i + 1) for i in (*range(5), 10, 11)}
    assert {tuple(sorted(pair)) for pair in paired[distance == 1].tolist()} == neighbours
    assert (distance == 1).sum() == 2 * len(neighbours)  # each word of a pair is a center once


def test_negatives_are_drawn_by_frequency_to_the_power_of_three_quarters() -> None:
    counts = torch.tensor([1000, 100, 10])
    dataset = Pairs(torch.zeros(1000, 2, dtype=torch.int32), counts, negatives=50)
    torch.manual_seed(0)
    drawn = dataset.load_batch(torch.arange(1000))[2]
    expected = counts.double().pow(0.75)
    shares = torch.bincount(drawn.flatten(), minlength=3).double() / drawn.numel()
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=0.05, atol=0.0)


def test_the_loss_agrees_with_the_formula() -> None:
    word2vec = recipe()
    model = word2vec.model()
    torch.manual_seed(0)
    for table in (model.get_submodule("inner"), model.get_submodule("outer")):
        torch.nn.init.normal_(table.weight)  # type: ignore[arg-type]
    center, context, negatives = word2vec.data("test").load_batch(torch.arange(7))
    inner, outer = (model.get_parameter(name).detach() for name in ("inner.weight", "outer.weight"))
    total = 0.0
    for c, o, ns in zip(center, context, negatives, strict=True):
        total -= float(torch.log(torch.sigmoid(inner[c] @ outer[o])))
        total -= sum(float(torch.log(torch.sigmoid(-inner[c] @ outer[n]))) for n in ns)
    assert float(word2vec.loss(model, (center, context, negatives)).detach()) == pytest.approx(total / 7, rel=1e-5)


def test_it_learns_which_words_occur_together_and_names_their_neighbours(train: Any) -> None:
    options = ("recipe=word2vec", "recipe.sparse=false", "recipe.dim=32", "recipe.min_count=20", "batch_size=2048")
    run = train(*options, "steps=300", "lr=0.2", "cluster.processes=1", "strategy=single")
    assert run.code == 0, run.error
    assert run.json("result.json")["metrics"]["accuracy"] > 0.55
    assert "string: " in run.output
