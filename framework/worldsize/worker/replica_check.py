"""Comparison of the weights, optimizer state and buffers that several processes hold, for ``integrity.replicas``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.collectives.bit_digest import digest_bits
from worldsize.collectives.group import start_collective
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import Replica, RunContext
from worldsize.healing.pieces import collect_pieces
from worldsize.seeds import derive_seed
from worldsize.strategies.bit_mismatch import Mismatch, broadcast_value, report_mismatch


@final
class ReplicaCheck:
    """Compares the state of ``replica`` between processes that hold the same shards.

    For the weights and for the rest of the state, whole tensors and shards separately, processes exchange only a number
    for what they hold and a digest of it. Processes with equal numbers hold copies. A shard without a copy, as in FSDP,
    is not compared.
    """

    def __init__(self, replica: Replica, context: RunContext) -> None:
        self._replica, self._context = replica, context
        self._compared = 0  # the last step before which copies were compared

    def compare(self, step: int) -> None:
        """Compare all copies before ``step``, unless they were already; all processes must call it.

        Raises:
            BitMismatchError: copies differ, and the run or this process must end.
        """
        if step == self._compared:
            return
        state = dict(self._replica.state())
        state.pop("strategy", None)  # holds values of this process alone
        parts = [
            {name: each for name, each in split_tensors(part)[0].items() if _is_whole(each) is is_whole}
            for part in ({"model": state.pop("model")}, state)
            for is_whole in (True, False)
        ]
        holdings = self._gather([derive_seed(0, repr(sorted(collect_pieces(part).items()))) for part in parts])
        rank = self._context.world.rank
        has_copies = (holdings == holdings[rank]).sum(0) > 1  # others need no digests
        digests = [_digest_tensors(part) if copied else {} for part, copied in zip(parts, has_copies, strict=True)]
        everyones = self._gather([derive_seed(0, repr(sorted(each.items()))) for each in digests])
        for part, own in enumerate(digests):
            rows = list(zip(holdings[:, part].tolist(), everyones[:, part].tolist(), strict=True))
            if copies := _find_copies(rows):
                report_mismatch(self._context, step, self._describe(own, *copies))
        self._compared = step

    def _gather(self, values: Sequence[int]) -> Tensor:
        """Return the int64 values of all ranks, (ranks, values)."""
        world = self._context.world
        assert world.group is not None
        own = torch.tensor(values, device=world.device)
        everyones = own.new_empty(world.size * len(values))
        start_collective(dist.all_gather_into_tensor, everyones, own, group=world.group).wait()
        return everyones.view(world.size, -1)

    def _describe(self, own: Mapping[str, int], copies: Set[int], guilty: Set[int]) -> Mismatch:
        group = self._context.world.group
        assert group is not None
        rows = [broadcast_value(own, rank, group, self._context.world.device) for rank in sorted(copies)]
        names = (name for name, digest in rows[0].items() if any(row[name] != digest for row in rows))
        return Mismatch(next(names), group, guilty, copies)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether this process holds the whole tensor, rather than a shard of it."""
    return get_local_shard(tensor).shape == tensor.shape


def _digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    held = {name: shard for name, each in tensors.items() if not (shard := get_local_shard(each)).is_meta}
    if not held:
        return {}
    digests = torch.stack([digest_bits(each) for each in held.values()])
    return dict(zip(held, digests.tolist(), strict=True))


def _find_copies(rows: Sequence[tuple[int, int]]) -> tuple[Set[int], Set[int]] | None:
    """Find ranks with equal holdings but different digests, from the (holding, digest) of all ranks.

    Returns:
        Ranks that hold copies, and those among them that differ from the majority (empty without a majority); None if
        all copies are equal.
    """
    for holding in dict.fromkeys(row[0] for row in rows):
        digests = {rank: row[1] for rank, row in enumerate(rows) if row[0] == holding}
        (digest, count), *others = Counter(digests.values()).most_common()
        if others:
            is_majority = 2 * count > len(digests)
            return {*digests}, {rank for rank in digests if is_majority and digests[rank] != digest}
    return None
