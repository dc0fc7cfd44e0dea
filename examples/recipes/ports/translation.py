"""A sequence-to-sequence transformer, written after harvardnlp/annotated-transformer (MIT).

Sequences are padded, labels are smoothed, the loss is a mean over tokens, and the rate is that of the paper (Noam).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from worldsize.core import Batch, Recipe

VOCABULARY, WIDTH, PAD, START, SMOOTHING = 14, 32, 0, 1, 0.1


class EncoderDecoder(nn.Module):
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.arange(16).unsqueeze(1) * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))
        options: dict[str, Any] = {"batch_first": True, "norm_first": True, "dropout": 0.1, "bias": False}
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 64, **options)
        decoder = nn.TransformerDecoderLayer(WIDTH, 2, 64, **options)
        self.encoder = nn.TransformerEncoder(encoder, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2, nn.LayerNorm(WIDTH))
        self.generator = nn.Linear(WIDTH, VOCABULARY)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src_bt: Tensor, tgt_bt: Tensor) -> Tensor:
        source = self.source(src_bt) * math.sqrt(WIDTH) + self.positions[: src_bt.shape[1]]
        target = self.target(tgt_bt) * math.sqrt(WIDTH) + self.positions[: tgt_bt.shape[1]]
        later = torch.ones(tgt_bt.shape[1], tgt_bt.shape[1], dtype=torch.bool).triu(1)
        memory = self.encoder(source, src_key_padding_mask=src_bt == PAD)
        output = self.decoder(target, memory, later, None, tgt_bt == PAD, src_bt == PAD)
        return self.generator(output).log_softmax(-1)


def smoothed(logs_btv: Tensor, labels_bt: Tensor) -> Tensor:
    """Return the divergence from smoothed labels, summed over tokens that are no padding."""
    truth = torch.full_like(logs_btv, SMOOTHING / (VOCABULARY - 2))
    truth.scatter_(2, labels_bt.unsqueeze(2), 1 - SMOOTHING)
    truth[..., PAD] = 0
    truth[labels_bt == PAD] = 0
    return F.kl_div(logs_btv, truth, reduction="sum")


def noam(step: int, warmup: int = 10) -> float:
    return float(WIDTH**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5))


def sentences(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.98), eps=1e-9)
    lr_scheduler = LambdaLR(optimizer, noam)
    model.train()
    for src, tgt in batches:
        tgt, tgt_y = tgt[:, :-1], tgt[:, 1:]
        ntokens = (tgt_y != PAD).sum()
        out = model(src, tgt)
        loss = smoothed(out, tgt_y) / ntokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        lr_scheduler.step()
        yield loss
    return model


@final
class Translation(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return EncoderDecoder()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr, betas=(0.9, 0.98), eps=1e-9)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, noam)

    def data(self, split: str) -> list[Tensor]:
        return sentences(256, 1) if split == "train" else sentences(64, 2)

    def collate(self, samples: list[Tensor]) -> Batch:
        copies = [torch.cat([torch.tensor([START]), each]) for each in samples]
        return pad_sequence(samples, batch_first=True), pad_sequence(copies, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        src, tgt = batch
        return smoothed(model(src, tgt[:, :-1]), tgt[:, 1:]), (tgt[:, 1:] != PAD).sum()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"loss": self.loss(model, batch)}

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return [*model.encoder.layers, *model.decoder.layers]
