"""A recipe that can make one rank communicate differently from its peers, in six ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Recipe

FAULTS = ("skip", "shape", "order", "dtype", "group", "branch")


def line(comment: str) -> str:
    """Return this file and the line that ends with ``comment``, in the format of a rehearsal."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"# {comment}"))
    return f"tests/plan/rehearsal/faulty.py:{number}"


@final
@dataclass(frozen=True)
class Faulty(Recipe):
    """Three linear layers; in each loss all ranks all-reduce two numbers and then one, but ``rank`` has a ``fault``.

    With the fault "branch", the faulty rank is the one whose batch has the largest sample.
    """

    fault: str
    rank: int

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def data(self, split: str) -> Any:
        samples_n6 = torch.randn(256, 6, generator=torch.Generator().manual_seed(3)).clamp(-3, 3)
        samples_n6[17] = 100.0
        return TensorDataset(samples_n6)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (samples_b6,) = batch
        self._talk(samples_b6)
        loss: Tensor = model(samples_b6).square().mean()
        return loss

    def _talk(self, samples_b6: Tensor) -> None:
        mine = dist.get_rank() == self.rank
        pair, one = torch.zeros(2), torch.zeros(1)
        group = _others(self.rank) if self.fault == "group" else None
        if mine and self.fault == "shape":
            dist.all_reduce(torch.zeros(3))  # shape
        elif mine and self.fault == "dtype":
            dist.all_reduce(pair.double())  # dtype
        elif mine and self.fault == "order":
            dist.all_reduce(one)  # order
            dist.all_reduce(pair)
            return
        elif mine and self.fault == "group":
            dist.all_reduce(pair, group=group)  # group
        elif not mine or self.fault != "skip":
            dist.all_reduce(pair)  # pair
        if self.fault == "branch" and samples_b6.max() > 50:
            dist.broadcast(one, 0)  # branch
        dist.all_reduce(one)  # one

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        (samples_b6,) = batch
        return {"loss": (model(samples_b6).square().sum(), torch.tensor(len(samples_b6)))}

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)


def _others(rank: int) -> Any:
    """Return a group of ``rank`` and its neighbour, created only by its two members."""
    return dist.new_group([rank, (rank + 1) % dist.get_world_size()], use_local_synchronization=True)
