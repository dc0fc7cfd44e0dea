"""Clicks predicted from counts and categories, written after facebookresearch/dlrm (MIT).

The tables are embeddings with sparse gradients, as many rows of each sample as it likes, summed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Recipe

TABLES, ROWS, WIDTH, COUNTS = 3, 40, 8, 4


class DLRMNet(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse) for _ in range(TABLES))
        self.bot_l = nn.Sequential(nn.Linear(COUNTS, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top_l = nn.Sequential(nn.Linear(WIDTH + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, ids_btk: Tensor) -> Tensor:
        x = self.bot_l(dense)
        vectors = torch.stack([x, *(table(ids) for table, ids in zip(self.emb_l, ids_btk.unbind(1), strict=True))], 1)
        products = vectors @ vectors.transpose(1, 2)
        low = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        result: Tensor = self.top_l(torch.cat([x, products[:, low[0], low[1]]], dim=1)).squeeze(1)
        return result


def clicks(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(count, COUNTS, generator=generator)
    ids = torch.randint(ROWS, (count, TABLES, 2), generator=generator)
    return TensorDataset(dense, ids, ((dense.sum(1) + ids[:, 0, 0] / ROWS) > 2.5).float())


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), nn.BCELoss(reduction="mean")
    for dense, ids, clicked in batches:
        model.train()
        z = model(dense, ids)
        loss = loss_fn(z, clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    return model


@final
class Clicks(Recipe):
    def __init__(self, lr: float, sparse: bool) -> None:
        self.lr, self.sparse = lr, sparse

    def model(self) -> nn.Module:
        return DLRMNet(self.sparse)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def data(self, split: str) -> TensorDataset:
        return clicks(512, 1) if split == "train" else clicks(128, 2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        dense, ids, clicked = batch
        return nn.functional.binary_cross_entropy(model(dense, ids), clicked)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        dense, ids, clicked = batch
        right = (model(dense, ids) > 0.5) == (clicked > 0.5)
        return {"accuracy": (right.sum(), torch.tensor(len(clicked)))}
