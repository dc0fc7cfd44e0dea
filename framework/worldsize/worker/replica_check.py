"""Comparison of the weights, optimizer state and buffers that several processes hold, for ``integrity.replicas``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
from worldsize.strategies.gradient_audit import broadcast_value, report_mismatch


@final
class ReplicaCheck:
    """Compares the state of ``replica`` between processes that hold the same shards.

    Of the weights and of the rest of the state, only a number for the held shards and their digest are exchanged.
    Processes with equal numbers hold copies. A shard without a copy, as in FSDP, is not compared.
    """

    def __init__(self, replica: Replica, context: RunContext) -> None:
        self._replica, self._context = replica, context

    def compare(self, step: int) -> None:
        """Compare all copies before ``step``; all processes must call it.

        Raises:
            BitMismatchError: copies differ, and the run or this process must end.
        """
        state = dict(self._replica.state())
        state.pop("strategy", None)  # holds values of this process alone
        parts = [split_tensors(part)[0] for part in ({"model": state.pop("model")}, state)]
        digests = [_digest_tensors(part) for part in parts]
        holdings = [derive_seed(0, repr(sorted(collect_pieces(part).items()))) for part in parts]
        everyones = self._gather([*holdings, *(derive_seed(0, repr(sorted(each.items()))) for each in digests)])
        for part, own in enumerate(digests):
            if bad := _find_copies(everyones[:, [part, part + len(parts)]].tolist()):
                self._report(step, own, *bad)

    def _gather(self, values: Sequence[int]) -> Tensor:
        """Return the int64 values of all ranks, (ranks, values)."""
        world = self._context.world
        assert world.group is not None
        own = torch.tensor(values, device=world.device)
        everyones = own.new_empty(world.size * len(values))
        start_collective(dist.all_gather_into_tensor, everyones, own, group=world.group).wait()
        return everyones.view(world.size, -1)

    def _report(self, step: int, own: Mapping[str, int], copies: Sequence[int], guilty: Sequence[int]) -> None:
        group = self._context.world.group
        assert group is not None
        differing = guilty[0] if guilty else copies[0]
        named = broadcast_value(own, differing, group)
        for rank in copies:
            other = broadcast_value(own, rank, group)
            if rank not in guilty and other != named:
                tensor = next(name for name in named if named[name] != other.get(name))
                break
        else:
            raise AssertionError("the digests are equal")
        report_mismatch(self._context, step, tensor, guilty, suspects=copies)


def _digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    held = {name: shard for name, each in tensors.items() if not (shard := get_local_shard(each)).is_meta}
    if not held:
        return {}
    digests = torch.stack([digest_bits(each) for each in held.values()])
    return dict(zip(held, digests.tolist(), strict=True))


def _find_copies(rows: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]] | None:
    """Find ranks with equal holdings but different digests, from the (holding, digest) of all ranks.

    Returns:
        Ranks that hold copies, and those among them that differ from the majority (empty without a majority); None if
        all copies are equal.
    """
    for holding in dict.fromkeys(row[0] for row in rows):
        ranks = [rank for rank, row in enumerate(rows) if row[0] == holding]
        counted = Counter(rows[rank][1] for rank in ranks)
        (digest, count), *others = counted.most_common()
        if others:
            is_majority = 2 * count > len(ranks)
            return ranks, [rank for rank in ranks if rows[rank][1] != digest] if is_majority else []
    return None
