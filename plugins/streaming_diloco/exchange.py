"""Means over workers, with rows sent in four bits per element and summed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.streaming_diloco.e3m0 import BLOCK, decode, encode, size
from worldsize.collectives.group import start
from worldsize.collectives.ordered import sum_level
from worldsize.strategies.periodic_exchange import Begun, Exchange


@final
class Gathered(Exchange):
    """All-gather rows; every worker sums them. Rounds once, sends (workers − 1) × n / 2 bytes."""

    def _begin(self, row_n: Tensor) -> Begun:
        padded, numel = _blocks(row_n, 1), row_n.numel()
        mine = encode(padded)
        theirs_kp = mine.new_empty(self.size, mine.shape[1])
        work = start(dist.all_gather_into_tensor, theirs_kp.view(-1), mine.view(-1), group=self.group)

        def mean() -> Tensor:
            work.wait()
            return (sum_level(decode(theirs_kp, padded.shape[1]).unbind()) / self.size)[:numel]

        return lambda: mean

    def sent(self, numel: int) -> int:
        return (self.size - 1) * size(-(-numel // BLOCK) * BLOCK)


@final
class Scattered(Exchange):
    """Reduce-scatter, then all-gather. Rounds twice, sends 2 × (workers − 1) / workers × n / 2 bytes."""

    def _begin(self, row_n: Tensor) -> Begun:
        numel = row_n.numel()
        mine_ks = _blocks(row_n, self.size)
        sent_kp = encode(mine_ks)
        theirs_kp = torch.empty_like(sent_kp)
        work = start(dist.all_to_all_single, theirs_kp, sent_kp, group=self.group)

        def second() -> Callable[[], Tensor]:
            work.wait()
            shard = mine_ks.shape[1]
            mean_1s = (sum_level(decode(theirs_kp, shard).unbind()) / self.size)[None]
            gathered_kp = torch.empty_like(theirs_kp)
            row = encode(mean_1s).view(-1)
            last = start(dist.all_gather_into_tensor, gathered_kp.view(-1), row, group=self.group)

            def mean() -> Tensor:
                last.wait()
                return decode(gathered_kp, shard).flatten()[:numel]

            return mean

        return second

    def sent(self, numel: int) -> int:
        return 2 * (self.size - 1) * size(-(-numel // (self.size * BLOCK)) * BLOCK)


def _blocks(row_n: Tensor, rows: int) -> Tensor:
    """Zero-pad ``row_n`` and reshape it to float32 (rows, length), with whole blocks per row."""
    length = -(-row_n.numel() // (rows * BLOCK)) * BLOCK
    return torch.nn.functional.pad(row_n.float(), (0, rows * length - row_n.numel())).view(rows, length)
