"""A word model with an LSTM, written after word_language_model of pytorch/examples (BSD-3-Clause).

Encoder and decoder share their weights, the gradient is clipped, and sequences are truncated. The program may carry
the hidden state over from batch to batch; that is a history, and here each window begins with zeros.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Batch, Recipe

BPTT, WIDTH = 12, 32


class RNNModel(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, WIDTH)
        self.rnn, self.decoder = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2), nn.Linear(WIDTH, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens_tb: Tensor) -> Tensor:
        output, _ = self.rnn(self.drop(self.encoder(tokens_tb)))
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1)


def corpus() -> tuple[Tensor, int]:
    words = Path(__file__).read_text().split()
    known = {word: number for number, word in enumerate(sorted(set(words)))}
    return torch.tensor([known[word] for word in words]), len(known)


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    criterion, lr = nn.NLLLoss(), 2.0
    model.train()
    for data, targets in batches:
        model.zero_grad()
        output = model(data)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-lr)
        yield loss
    return model


@final
class WordModel(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return RNNModel(corpus()[1])

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def data(self, split: str) -> TensorDataset:
        windows = corpus()[0].unfold(0, BPTT + 1, 1 if split == "train" else BPTT)
        return TensorDataset(windows)

    def collate(self, samples: list[Any]) -> Batch:
        tokens_tb = torch.stack([window for (window,) in samples], dim=1)
        return tokens_tb[:-1], tokens_tb[1:].flatten()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        data, targets = batch
        return F.nll_loss(model(data), targets)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        data, targets = batch
        return {"loss": (F.nll_loss(model(data), targets, reduction="sum"), torch.tensor(len(targets)))}
