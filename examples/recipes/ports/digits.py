"""The handwritten digits of the digits recipe, which stand in for data sets that would have to be fetched."""

from __future__ import annotations

from torch import Tensor

from recipes.digits.recipe import DATA, read_digits


def digits(split: str) -> tuple[Tensor, Tensor]:
    """Return 512 images for training or 256 others, float32 [n, 1, 8, 8] in 0..1, and their labels int64 [n]."""
    images, labels = read_digits(DATA)
    rows = slice(0, 512) if split == "train" else slice(512, 768)
    return images[rows], labels[rows]
