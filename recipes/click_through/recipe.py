"""Predict clicks with a deep learning recommendation model (DLRM, Naumov et al. 2019, arXiv 1906.00091)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from recipes.click_through.samples import CATEGORIES, COUNTS, Samples
from worldsize.core import Range, Recipe, RowValues

_HASH = 0x9E3779B1  # golden ratio: spreads categories with equal low digits over different rows


def _row_values(rows: int) -> RowValues:
    """Return the initial values of an embedding table with ``rows`` rows."""
    return RowValues("uniform", rows**-0.5)


@final
class DLRM(nn.Module):
    """Combine an MLP over the counts and embeddings of the categories by pairwise dot products.

    Args:
        dim: embedding dimension, and output width of the bottom MLP.
        rows: rows of each of the 26 tables; a category maps to the row given by its hash modulo ``rows``.
        bottom: hidden widths of the MLP over the counts.
        top: hidden widths of the MLP over the dot products.
        sparse: whether the tables have sparse gradients.
    """

    def __init__(self, *, dim: int, rows: int, bottom: Sequence[int], top: Sequence[int], sparse: bool) -> None:
        super().__init__()
        self.rows = rows
        self.bottom = _build_mlp([COUNTS, *bottom, dim], last=nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse) for _ in range(CATEGORIES))
        for table in self.tables:
            assert isinstance(table, nn.EmbeddingBag)
            _row_values(rows).fill_embedding(table)
        self.top = _build_mlp([dim + (CATEGORIES + 1) * CATEGORIES // 2, *top, 1], last=nn.Identity())
        self.register_buffer("below", torch.tril_indices(CATEGORIES + 1, CATEGORIES + 1, -1), persistent=False)

    def forward(self, counts_bc: Tensor, categories_bf: Tensor) -> Tensor:
        """Return logits (b,) for log counts float32 (b, 13) and category ids int64 (b, 26)."""
        dense_bd = self.bottom(counts_bc)
        ids_bf = (categories_bf * _HASH & 0x7FFFFFFFFFFF) % self.rows
        rows = [table(ids_bf[:, [feature]]) for feature, table in enumerate(self.tables)]
        all_bfd = torch.stack([dense_bd, *rows], dim=1)
        products_bff = torch.bmm(all_bfd, all_bfd.transpose(1, 2))
        below = self.get_buffer("below")
        logits: Tensor = self.top(torch.cat([dense_bd, products_bff[:, below[0], below[1]]], dim=1))
        return logits.squeeze(1)


def _build_mlp(sizes: Sequence[int], *, last: nn.Module) -> nn.Sequential:
    """Chain linear layers of the given sizes with ReLUs between them, followed by ``last``."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


@final
@dataclass(frozen=True)
class ClickThrough(Recipe):
    """Train a DLRM to predict clicks; :class:`DLRM` documents ``dim`` to ``sparse``."""

    dim: Annotated[int, Range(least=1)]
    rows: Annotated[int, Range(least=1)]
    bottom: Sequence[Annotated[int, Range(least=1)]]
    top: Sequence[Annotated[int, Range(least=1)]]
    sparse: bool
    samples: Samples
    make_optimizer: Callable[..., Optimizer]
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None

    def model(self) -> nn.Module:
        return DLRM(dim=self.dim, rows=self.rows, bottom=self.bottom, top=self.top, sparse=self.sparse)

    def row_values(self, model: nn.Module) -> Mapping[str, RowValues]:
        return {f"tables.{feature}": _row_values(self.rows) for feature in range(CATEGORIES)}

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer) if self.make_schedule else None

    def data(self, split: str) -> TensorDataset:
        return self.samples.read_split(split)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        counts, categories, labels = batch
        return F.binary_cross_entropy_with_logits(model(counts, categories), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return log loss, mean prediction and mean label (equal if calibrated) as (sum, count)."""
        counts, categories, labels = batch
        logits, count = model(counts, categories).float(), torch.tensor(len(labels))
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").double().sum()
        return {
            "loss": (loss, count),
            "predicted": (logits.sigmoid().double().sum(), count),
            "clicked": (labels.double().sum(), count),
        }

    def files(self) -> Mapping[str, Path]:
        return self.samples.list_files()
