"""Direct preference optimization, written after eric-mitchell/direct-preference-optimization (Apache-2.0).

A policy is trained against a frozen copy of itself, on padded pairs of answers to one prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from worldsize.core import Batch, LossOutput, Recipe

BETA, IGNORED = 0.1, -100


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(20, 16), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.embedding(tokens_bt))[0])
        return logits


class PolicyAndReference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Language()
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)

    def forward(self, tokens_bt: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            reference = self.reference(tokens_bt)
        return self.policy(tokens_bt), reference


def batch_logps(logits_btv: Tensor, labels_bt: Tensor) -> Tensor:
    labels_bt, logits_btv = labels_bt[:, 1:].clone(), logits_btv[:, :-1]
    mask = labels_bt != IGNORED
    labels_bt[~mask] = 0
    logps = torch.gather(logits_btv.log_softmax(-1), 2, labels_bt.unsqueeze(2)).squeeze(2)
    return (logps * mask).sum(-1)


def preference_loss(policy_logps: Tensor, reference_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and rewards of pairs, of which the chosen answers come before the rejected."""
    rewards = BETA * (policy_logps - reference_logps)
    chosen, rejected = rewards.chunk(2)
    return -F.logsigmoid(chosen - rejected), chosen > rejected


def preferences(count: int, seed: int) -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)

    def answer(prompt: Tensor) -> Tensor:
        length = int(torch.randint(2, 7, (), generator=generator))
        return torch.cat([prompt, torch.randint(1, 20, (length,), generator=generator)])

    prompts = [torch.randint(1, 20, (4,), generator=generator) for _ in range(count)]
    return [(answer(prompt), answer(prompt), len(prompt)) for prompt in prompts]


def original(model: Any, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    policy, reference_model = model.policy, model.reference
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-3)
    scheduler = LambdaLR(optimizer, lr_lambda=lambda step: min(1.0, (step + 1) / (10 + 1)))
    for tokens, labels in batches:
        policy.train()
        policy_logps = batch_logps(policy(tokens), labels)
        with torch.no_grad():
            reference_logps = batch_logps(reference_model(tokens), labels)
        losses, _ = preference_loss(policy_logps, reference_logps)
        loss = losses.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield loss
    return model


@final
class Preferences(Recipe):
    def __init__(self, lr: float, warmup: int) -> None:
        self.lr, self.warmup = lr, warmup

    def model(self) -> nn.Module:
        return PolicyAndReference()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.RMSprop([each for each in model.parameters() if each.requires_grad], lr=self.lr)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup + 1)))

    def data(self, split: str) -> list[tuple[Tensor, Tensor, int]]:
        return preferences(96, 1) if split == "train" else preferences(32, 2)

    def collate(self, samples: list[Any]) -> Batch:
        answers = [(pair[side], pair[2]) for side in (0, 1) for pair in samples]
        tokens = pad_sequence([tokens for tokens, _ in answers], batch_first=True)
        labels = pad_sequence([tokens for tokens, _ in answers], batch_first=True, padding_value=IGNORED)
        prompts = torch.tensor([length for _, length in answers])
        labels[torch.arange(labels.shape[1]) < prompts.unsqueeze(1)] = IGNORED
        return tokens, labels

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:
        losses, better = self._compared(model, batch)
        return LossOutput(losses.mean(), metrics={"accuracy": (better.sum(), torch.tensor(len(better)))})

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        losses, better = self._compared(model, batch)
        count = torch.tensor(len(better))
        return {"loss": (losses.sum(), count), "accuracy": (better.sum(), count)}

    def _compared(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        tokens, labels = batch
        return preference_loss(*(batch_logps(logits, labels) for logits in model(tokens)))
