"""Samples in Criteo's format (label, 13 counts, 26 categories), read or generated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, final

import numpy
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from worldsize.core import ConfigError, FilePath, Range

COUNTS, CATEGORIES = 13, 26
Array = NDArray[Any]


class Samples(ABC):
    """Source of samples, selected by ``data=``."""

    @abstractmethod
    def read_split(self, split: str) -> TensorDataset:
        """Return counts float32 (n, 13) as log(1 + count), categories int64 (n, 26) and labels float32 (n,)."""

    def list_files(self) -> Mapping[str, Path]:
        """Return the files read by :meth:`read_split`, by name."""
        return {}


@final
@dataclass(frozen=True)
class Criteo(Samples):
    """Read ``train.txt`` of the Criteo Display Advertising Challenge from the folder ``path``.

    The first ``rows`` lines are the training split; the next ``test_rows`` lines are the test split. Each line has a
    label, 13 integers and 26 hexadecimal numbers, separated by tabs. Missing values, except for the label, count as 0.
    """

    path: Annotated[str, FilePath()]
    rows: Annotated[int, Range(least=1)]
    test_rows: Annotated[int, Range(least=1)]

    @property
    def _file(self) -> Path:
        return Path(self.path).expanduser() / "train.txt"

    def read_split(self, split: str) -> TensorDataset:
        first, count = (0, self.rows) if split == "train" else (self.rows, self.test_rows)
        try:
            with self._file.open() as lines:
                return _parse_lines(islice(enumerate(lines, 1), first, first + count), self._file)
        except FileNotFoundError:
            raise ConfigError(f"{self._file} not found. Set data.path, or use data=synthetic.") from None

    def list_files(self) -> Mapping[str, Path]:
        return {"train.txt": self._file}


def _parse_lines(lines: Iterator[tuple[int, str]], path: Path) -> TensorDataset:
    """Parse numbered lines. Raises ConfigError with the line number if a line is malformed."""
    labels, counts, categories = [], [], []
    for number, line in lines:
        fields = line.rstrip("\n").split("\t")
        try:
            label, *rest = fields
            counts.append([int(field or 0) for field in rest[:COUNTS]])
            categories.append([int(field or "0", 16) for field in rest[COUNTS:]])
            labels.append(float(label))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}.") from None
        if len(fields) != 1 + COUNTS + CATEGORIES:
            raise ConfigError(f"{path}, line {number}: expected {1 + COUNTS + CATEGORIES} fields, got {len(fields)}.")
    if not labels:
        raise ConfigError(f"{path} does not have enough lines. Decrease data.rows or data.test_rows.")
    counts_nc = torch.tensor(counts, dtype=torch.float32).clamp(min=0).log1p()
    return TensorDataset(counts_nc, torch.tensor(categories), torch.tensor(labels))


@final
@dataclass(frozen=True)
class Synthetic(Samples):
    """Generate samples with power-law distributed categories, as in real logs.

    Category k of each feature occurs with a probability proportional to (k + 1)^-``exponent``. Each category has a
    hidden normal weight with standard deviation 0.5, each count a normal slope with standard deviation 0.1. The click
    probability is sigmoid(-1 + score / 2), where the score sums the weights and slope × log(1 + count). A model with
    exactly these weights would reach the log loss computed by :meth:`compute_best_loss`.
    """

    rows: Annotated[int, Range(least=1)]
    test_rows: Annotated[int, Range(least=1)]
    categories: Annotated[int, Range(least=1)]
    exponent: Annotated[float, Range()]
    seed: Annotated[int, Range(least=0, most=2**32 - 3)]  # 32 bits in NumPy; the splits use seed + 1 and + 2

    def read_split(self, split: str) -> TensorDataset:
        counts_nc, categories_nf, chance_n, random = self._draw_samples(split)
        labels_n = random.random_sample(len(chance_n)) < chance_n
        return TensorDataset(
            torch.from_numpy(numpy.log1p(counts_nc).astype(numpy.float32)),
            torch.from_numpy(categories_nf),
            torch.from_numpy(labels_n.astype(numpy.float32)),
        )

    def compute_best_loss(self, split: str) -> float:
        """Return the lowest achievable mean log loss: the entropy of the clicks."""
        chance_n = self._draw_samples(split)[2]
        return float(-(chance_n * numpy.log(chance_n) + (1 - chance_n) * numpy.log1p(-chance_n)).mean())

    def _draw_samples(self, split: str) -> tuple[Array, Array, Array, numpy.random.RandomState]:
        """Sample counts, categories and click probabilities; return the generator, too."""
        hidden = numpy.random.RandomState(self.seed)
        weights_fk = hidden.normal(0, 0.5, (CATEGORIES, self.categories))
        slopes_c = hidden.normal(0, 0.1, COUNTS)
        random = numpy.random.RandomState(self.seed + (1 if split == "train" else 2))
        rows = self.rows if split == "train" else self.test_rows
        shares = numpy.arange(1, self.categories + 1, dtype=float) ** -self.exponent
        edges = (shares / shares.sum()).cumsum()
        categories_nf = numpy.searchsorted(edges, random.random_sample((rows, CATEGORIES))).clip(0, self.categories - 1)
        counts_nc = random.geometric(0.2, (rows, COUNTS)) - 1
        score_n = weights_fk[numpy.arange(CATEGORIES), categories_nf].sum(1) + numpy.log1p(counts_nc) @ slopes_c
        return counts_nc, categories_nf.astype(numpy.int64), 1 / (1 + numpy.exp(1 - score_n / 2)), random
