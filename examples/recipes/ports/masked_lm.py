"""A masked language model, after examples/pytorch/language-modeling of huggingface/transformers (Apache-2.0).

The model is the library's BERT. A collator masks tokens at random, and the rate is warmed up and falls linearly.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForMaskedLM, get_scheduler

from worldsize.core import Batch, Recipe

LENGTH, MASK, VOCABULARY, IGNORED = 24, 128, 129, -100


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, intermediate_size=64, **sizes)
    return BertForMaskedLM(config)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    plain = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm.weight" in name]
    others = [p for name, p in model.named_parameters() if not ("bias" in name or "LayerNorm.weight" in name)]
    return [{"params": others, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]


def masked(tokens: Tensor) -> dict[str, Tensor]:
    """Choose 15 of 100 tokens; of these 8 in 10 are masked, 1 is another token, and 1 stays as it is."""
    labels, inputs, kind = tokens.clone(), tokens.clone(), torch.rand(tokens.shape)
    chosen = torch.rand(tokens.shape) < 0.15
    labels[~chosen] = IGNORED
    inputs[chosen & (kind < 0.8)] = MASK
    other = chosen & (kind >= 0.9)
    inputs[other] = torch.randint(MASK, tokens.shape)[other]
    return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels}


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=40)
    model.train()
    for batch in batches:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        yield loss
    return model


@final
class MaskedLanguage(Recipe):
    def __init__(self, lr: float, steps: int) -> None:
        self.lr, self.steps = lr, steps

    def model(self) -> nn.Module:
        return bert()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(groups(model), lr=self.lr)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        schedule: LambdaLR = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=self.steps)
        return schedule

    def data(self, split: str) -> TensorDataset:
        text = torch.tensor(list(Path(__file__).read_bytes())).clamp(max=127)
        return TensorDataset(text.unfold(0, LENGTH, 5 if split == "train" else LENGTH))

    def collate(self, samples: list[Any]) -> Batch:
        return masked(torch.stack([tokens for (tokens,) in samples]))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        count = (batch["labels"] != IGNORED).sum()
        return model(**batch).loss * count, count

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"loss": self.loss(model, batch)}
