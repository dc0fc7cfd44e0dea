"""A character model, written after karpathy/nanoGPT (MIT).

It decays matrices alone, warms the rate up and lets it fall along a cosine, clips the gradient, and accumulates it. As
in train.py of nanoGPT, no layer has a bias.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from worldsize.core import Recipe

CONTEXT, WIDTH, HEADS, DEPTH = 32, 32, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        wide, narrow = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(0.1))

    def forward(self, x_btc: Tensor) -> Tensor:
        heads = self.attention(self.ln_1(x_btc)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x_btc = x_btc + self.projection(attended.transpose(1, 2).flatten(2))
        result: Tensor = x_btc + self.mlp(self.ln_2(x_btc))
        return result


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, 128, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> tuple[Tensor, Tensor]:
        x_btc = self.wte(tokens_bt) + self.wpe(torch.arange(tokens_bt.shape[1]))
        for block in self.h:
            x_btc = block(x_btc)
        logits_btv = self.lm_head(self.ln_f(x_btc))
        return logits_btv, F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def decayed_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.AdamW(decayed_groups(model), lr=1e-2, betas=(0.9, 0.95))
    accumulate, steps, warmup, lr, min_lr = 2, 20, 5, 1e-2, 1e-3
    for step in range(steps):
        if step < warmup:
            now = lr * (step + 1) / (warmup + 1)
        else:
            ratio = (step - warmup) / (steps - warmup)
            now = min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (lr - min_lr)
        for group in optimizer.param_groups:
            group["lr"] = now
        total = torch.zeros(())
        for _ in range(accumulate):
            tokens, targets = next(batches)
            _, loss = model(tokens, targets)
            loss = loss / accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total
    return model


@final
class NanoGPT(Recipe):
    def __init__(self, lr: float, steps: int, warmup: int) -> None:
        self.lr, self.steps, self.warmup = lr, steps, warmup

    def model(self) -> nn.Module:
        return GPT()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(decayed_groups(model), lr=self.lr, betas=(0.9, 0.95))

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        def share(step: int) -> float:
            if step < self.warmup:
                return (step + 1) / (self.warmup + 1)
            ratio = (step - self.warmup) / (self.steps - self.warmup)
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * ratio))

        return LambdaLR(optimizer, share)

    def data(self, split: str) -> TensorDataset:
        text = torch.tensor(list(Path(__file__).read_bytes())).clamp(max=127)
        windows = text.unfold(0, CONTEXT + 1, 1 if split == "train" else CONTEXT)
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        _, loss = model(*batch)
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        _, loss = model(*batch)
        count = torch.tensor(batch[1].numel())
        return {"loss": (loss * count, count)}

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return list(model.h)
