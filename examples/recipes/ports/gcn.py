"""A graph convolution over one whole graph, written after gcn of pytorch/examples (BSD-3-Clause).

The program has one batch, the graph. Here the samples are its labelled nodes, and the graph is a buffer of the model:
so each process computes the loss of a part of the nodes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Recipe

NODES, CLASSES, LABELLED = 96, 3, 48


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, nodes @ self.kernel) + self.bias


class GCN(nn.Module):
    features: Tensor
    adjacency: Tensor

    def __init__(self, features: Tensor, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("features", features, persistent=False)
        self.register_buffer("adjacency", adjacency, persistent=False)
        self.gc1, self.gc2 = GraphConv(features.shape[1], 16), GraphConv(16, CLASSES)

    def forward(self) -> Tensor:
        hidden = F.dropout(F.relu(self.gc1(self.features, self.adjacency)), 0.5, self.training)
        return F.log_softmax(self.gc2(hidden, self.adjacency), dim=1)


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Return features, the normalized adjacency matrix as a sparse tensor, and the class of each node."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (NODES,), generator=generator)
    features = F.one_hot(labels, 8).float() + torch.randn(NODES, 8, generator=generator)
    alike = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    edges = (torch.rand(NODES, NODES, generator=generator) < 0.02 + 0.08 * alike).float()
    edges = ((edges + edges.t() + torch.eye(NODES)) > 0).float()
    degree = edges.sum(1).rsqrt()
    return features, (degree.unsqueeze(1) * edges * degree).to_sparse(), labels


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    criterion, (_, _, labels) = nn.NLLLoss(), graph()
    for idx_train, _ in batches:
        model.train()
        optimizer.zero_grad()
        output = model()
        loss = criterion(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        yield loss
    return model


@final
class Graph(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        features, adjacency, _ = graph()
        return GCN(features, adjacency)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr, weight_decay=5e-4)

    def data(self, split: str) -> TensorDataset:
        nodes = torch.arange(LABELLED) if split == "train" else torch.arange(LABELLED, NODES)
        return TensorDataset(nodes, graph()[2][nodes])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        nodes, labels = batch
        return F.nll_loss(model()[nodes], labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        nodes, labels = batch
        return {"accuracy": ((model()[nodes].argmax(1) == labels).sum(), torch.tensor(len(nodes)))}
