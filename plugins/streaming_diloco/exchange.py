"""Means over workers, with rows sent in four bits per element and summed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.streaming_diloco.e3m0 import BLOCK, count_bytes, decode_rows, encode_rows
from worldsize.collectives.group import start_collective
from worldsize.collectives.ordered import sum_level
from worldsize.strategies.periodic_exchange import Begun, Exchange


@final
class Gathered(Exchange):
    """All-gather rows, and sum them on every worker. Rounds once, sends (workers − 1) × n / 2 bytes."""

    def _start_average(self, row_n: Tensor) -> Begun:
        padded, numel = _pad_to_blocks(row_n, 1), row_n.numel()
        mine = encode_rows(padded)
        theirs_kp = mine.new_empty(self.size, mine.shape[1])
        work = start_collective(dist.all_gather_into_tensor, theirs_kp.view(-1), mine.view(-1), group=self.group)

        def compute_mean() -> Tensor:
            work.wait()
            return (sum_level(decode_rows(theirs_kp, padded.shape[1]).unbind()) / self.size)[:numel]

        return lambda: compute_mean

    def count_sent_bytes(self, numel: int) -> int:
        return (self.size - 1) * count_bytes(-(-numel // BLOCK) * BLOCK)


@final
class Scattered(Exchange):
    """Reduce-scatter, then all-gather. Rounds twice, sends 2 × (workers − 1) / workers × n / 2 bytes."""

    def _start_average(self, row_n: Tensor) -> Begun:
        numel = row_n.numel()
        mine_ks = _pad_to_blocks(row_n, self.size)
        sent_kp = encode_rows(mine_ks)
        theirs_kp = torch.empty_like(sent_kp)
        work = start_collective(dist.all_to_all_single, theirs_kp, sent_kp, group=self.group)

        def start_all_gather() -> Callable[[], Tensor]:
            work.wait()
            shard = mine_ks.shape[1]
            mean_1s = (sum_level(decode_rows(theirs_kp, shard).unbind()) / self.size)[None]
            gathered_kp = torch.empty_like(theirs_kp)
            row = encode_rows(mean_1s).view(-1)
            last = start_collective(dist.all_gather_into_tensor, gathered_kp.view(-1), row, group=self.group)

            def decode_mean() -> Tensor:
                last.wait()
                return decode_rows(gathered_kp, shard).flatten()[:numel]

            return decode_mean

        return start_all_gather

    def count_sent_bytes(self, numel: int) -> int:
        return 2 * (self.size - 1) * count_bytes(-(-numel // (self.size * BLOCK)) * BLOCK)


def _pad_to_blocks(row_n: Tensor, rows: int) -> Tensor:
    """Zero-pad ``row_n`` and reshape it to float32 (rows, length), with whole blocks per row."""
    length = -(-row_n.numel() // (rows * BLOCK)) * BLOCK
    return torch.nn.functional.pad(row_n.float(), (0, rows * length - row_n.numel())).view(rows, length)
