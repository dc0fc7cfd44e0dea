"""The digits recipe reads the same images as scikit-learn's own reader."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from recipes.digits.recipe import DATA, Digits, read_digits

pytestmark = pytest.mark.heavy


def recipe() -> Digits:
    return Digits(width=4, dropout=0.0, make_optimizer=torch.optim.AdamW)


def test_the_images_and_labels_are_scikit_learns() -> None:
    images, labels = read_digits(DATA)
    from sklearn.datasets import load_digits  # slow import

    expected: Any = load_digits()
    assert numpy.array_equal(images[:, 0].numpy() * 16, expected.images)
    assert numpy.array_equal(labels.numpy(), expected.target)


def test_the_split_is_disjoint_and_complete() -> None:
    train, test = (recipe().data(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1437, 360)
    images, _ = read_digits(DATA)
    together = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1)
    assert torch.equal(sorted_rows(together), sorted_rows(images.flatten(1)))


def sorted_rows(rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(rows.tolist()))


def test_training_with_the_defaults_recognises_97_percent_of_unseen_digits(train: Any) -> None:
    run = train("recipe=digits", "cluster.processes=1", "cluster.threads=1")
    assert run.code == 0, run.error
    assert run.json("result.json")["metrics"]["accuracy"] >= 0.97
