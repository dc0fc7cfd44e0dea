"""Recovery of a state on a new group from shards in the ranks' memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.checkpoint.manifest_tree import join_tensors, order_like, split_tensors
from worldsize.collectives.group import start_collective
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import StateDict
from worldsize.errors import CheckpointError
from worldsize.healing.pieces import (
    Generation,
    Held,
    PieceLayout,
    Place,
    broadcast,
    collect_dtypes,
    collect_pieces,
    gather_values,
    slice_box,
)
from worldsize.healing.placements import (
    Inventory,
    Piece,
    TensorPlacement,
    Transfer,
    build_inventory,
    build_placements,
    check_same,
    elements_in,
    plan_handover,
    plan_transfers,
)

_ROUND = 64 << 20  # approximate bytes that a rank sends per round, to limit memory
_ALIGNED = 16  # alignment in bytes of each part in a message

_Key = tuple[int, int]  # step and membership number of a generation


@final
@dataclass(frozen=True)
class _Offer:
    """The shards of one generation that one rank stores."""

    step: int
    number: int
    elements: int
    inventory: Inventory


@final
@dataclass(frozen=True)
class Recovered:
    """A recovered state: this rank's shards and metadata."""

    step: int
    skipped: int
    shared: Any
    state: StateDict
    kept: Generation | None
    """The recovered generation as stored by this rank; None if this rank did not store any shard."""


@final
@dataclass(frozen=True)
class _Account:
    """One rank's ``offers`` (stored shards), ``held`` (needed shards), and values for others."""

    offers: Sequence[_Offer]
    held: Held
    facts: Any


@final
class Recovery:
    """Restores a state on a group's ranks, which exchange lists of stored and needed shards.

    The constructor is a collective: all ranks must call it at the same point.

    Args:
        template: The state of this rank, with tensors distributed over the new group.
        own: The generations that this rank stores.
        group: A gloo group of all ranks; None for a single process.
        place: This rank's host and data-parallel rank.
        facts: Plain values from the first rank for the others; ignored on other ranks.

    Attributes:
        layout: The distribution of shards in the new group.
        facts: The first rank's values.

    Raises:
        CheckpointError: the tensors of two states differ in names or dtypes.
    """

    def __init__(
        self,
        template: StateDict,
        own: Sequence[Generation],
        group: ProcessGroup | None,
        place: Place,
        *,
        facts: Any = None,
    ) -> None:
        self._template, self._own, self._group = template, own, group
        self._tensors, _ = split_tensors({part: child for part, child in template.items() if part != "strategy"})
        self._pieces = collect_pieces(self._tensors)
        dtypes = collect_dtypes(self._tensors)
        held = Held(build_inventory(self._pieces.values(), dtypes), place)
        is_first = group is None or group.rank() == 0
        accounts: list[_Account] = gather_values(
            _Account(_create_offers(own), held, facts if is_first else None), group
        )
        offered = [offer.inventory for each in accounts for offer in each.offers]
        check_same([held.inventory, *offered])
        self._offers = [each.offers for each in accounts]
        self.layout = PieceLayout([each.held for each in accounts], dtypes)
        self.facts = accounts[0].facts

    def run(self) -> Recovered | None:
        """Fill the tensors of the template with the newest complete generation.

        All ranks must call this. Returns None if no rank stores a generation.

        Raises:
            CheckpointError: every generation has lost shards.
        """
        if not any(self._offers):
            return None
        key, keepers = _newest_complete(self._offers)
        kept = next((each for each in self._own if (each.step, each.number) == key), None)
        facts = (kept.values, kept.skipped, kept.shared) if kept else None
        if not all(any((each.step, each.number) == key for each in theirs) for theirs in self._offers):
            facts = _broadcast_from_first(facts, keepers, self._group)
        assert facts is not None
        values, skipped, shared = facts
        targets = {piece: get_local_shard(self._tensors[name]).detach() for name, piece in self._pieces.items()}
        exchange = _PieceExchange(self._group, targets, kept.parts if kept else {})
        rank = self._group.rank() if self._group else 0
        exchange.run(plan_transfers(rank, keepers, self.layout.placements, [*self.layout.dtypes]))
        return Recovered(key[0], skipped, shared, order_like(join_tensors(values, self._tensors), self._template), kept)


def hand_over_shards(own: Sequence[Generation], group: ProcessGroup, ranks: int) -> list[Generation]:
    """Transfer shards that only leaving ranks store to the first ``ranks`` ranks of ``group``.

    All ranks must call this.

    Args:
        own: The generations that this rank stores, from any earlier membership.
        group: A gloo group of all ranks that store shards.
        ranks: Number of ranks that continue.

    Returns:
        The generations that this rank stores afterwards.

    Raises:
        CheckpointError: every generation has lost shards.
    """
    gathered: list[Sequence[_Offer]] = gather_values(_create_offers(own), group)
    if not any(gathered):
        return [*own]
    (step, number), keepers = _newest_complete(gathered)
    kept = next((each for each in own if (each.step, each.number) == (step, number)), None)
    facts = (kept.values, kept.skipped, kept.elements, kept.dtypes, kept.shared) if kept else None
    values, skipped, elements, dtypes, shared = _broadcast_from_first(facts, keepers, group)
    given = plan_handover(ranks, group.rank(), keepers, sorted(dtypes))
    mine = [each.kept for each in given if each.target == group.rank()]
    received = {piece: torch.empty(piece.sizes, dtype=dtypes[piece.name]) for piece in mine}
    before = kept.parts if kept else {}
    _PieceExchange(group, received, before).run(given)
    dist.barrier(group=group)  # leaving ranks destroy the group next
    others = [each for each in own if each is not kept]
    return [Generation(number, step, skipped, values, elements, dtypes, {**before, **received}, shared), *others]


def _create_offers(own: Sequence[Generation]) -> list[_Offer]:
    return [_Offer(each.step, each.number, each.elements, build_inventory(each.parts, each.dtypes)) for each in own]


def _broadcast_from_first(value: Any, keepers: Sequence[TensorPlacement], group: ProcessGroup | None) -> Any:
    """Return ``value`` of the first rank that stores a shard; all ranks must call this."""
    source = min(min(ranks) for placement in keepers for ranks in placement.ranks.values())
    return broadcast(value, source, group)


def _newest_complete(offers: Sequence[Sequence[_Offer]]) -> tuple[_Key, list[TensorPlacement]]:
    """Return the newest complete generation, and the ranks that store its shards."""
    elements = {(offer.step, offer.number): offer.elements for theirs in offers for offer in theirs}
    lost: dict[_Key, int] = {}
    for key in sorted(elements, reverse=True):
        by_rank = ({(each.step, each.number): each.inventory for each in theirs} for theirs in offers)
        keepers = build_placements([inventories.get(key) for inventories in by_rank])
        lost[key] = elements[key] - sum(len(each.tensors) * sum(map(elements_in, each.ranks)) for each in keepers)
        if lost[key] == 0:
            return key, keepers
    step, number = max(elements)
    raise CheckpointError(
        f"{lost[step, number]} of {elements[step, number]} elements of the state after step {step} are lost: all "
        "processes with a copy died. The run resumes from its last checkpoint if launcher.max_restarts allows it."
    )


def _split_transfer(transfer: Transfer, most: int) -> Iterator[Transfer]:
    """Split a transfer into parts of at most ``most`` elements, halving the longest dimension."""
    sizes = transfer.sizes
    if math.prod(sizes) <= max(1, most):
        yield transfer
        return
    dimension = sizes.index(max(sizes))
    begin, end = transfer.box[dimension]
    middle = (begin + end) // 2
    for half in ((begin, middle), (middle, end)):
        box = (*transfer.box[:dimension], half, *transfer.box[dimension + 1 :])
        yield from _split_transfer(replace(transfer, box=box), most)


@final
class _PieceExchange:
    """Transfers shards between ranks.

    ``parts``: shards that this rank stores. ``targets``: shards that this rank needs.
    """

    def __init__(
        self, group: ProcessGroup | None, targets: Mapping[Piece, Tensor], parts: Mapping[Piece, Tensor]
    ) -> None:
        self._group, self._parts, self._targets = group, parts, targets
        self._rank, self._size = (group.rank(), group.size()) if group else (0, 1)

    def run(self, transfers: Iterable[Transfer]) -> None:
        """Perform this rank's transfers; all ranks must call this."""
        at_once = _ROUND // self._size
        rounds: dict[int, list[Transfer]] = {}
        sums: dict[tuple[int, int], int] = {}
        for each in transfers:
            pair = (each.source, each.target)
            if pair == (self._rank, self._rank):
                self._slice_target(each).copy_(self._slice_source(each))
            else:
                for part in _split_transfer(each, at_once // self._get_dtype(each).itemsize):
                    rounds.setdefault(sums.get(pair, 0) // at_once, []).append(part)
                    sums[pair] = sums.get(pair, 0) + self._count_bytes(part)
        if self._group is not None:
            last = torch.tensor(max(rounds, default=-1))
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._group)
            for number in range(int(last) + 1):
                self._run_round(rounds.get(number, []), self._group)

    def _run_round(self, transfers: Sequence[Transfer], group: ProcessGroup) -> None:
        sent = sorted((each for each in transfers if each.source == self._rank), key=lambda each: each.target)
        taken = sorted((each for each in transfers if each.target == self._rank), key=lambda each: each.source)
        to, from_ = [0] * self._size, [0] * self._size
        for each in sent:
            to[each.target] += self._count_bytes(each)
        for each in taken:
            from_[each.source] += self._count_bytes(each)
        message, answer = (torch.empty(sum(sizes), dtype=torch.uint8) for sizes in (to, from_))
        for each, place in self._slice_message(sent, message):
            place.copy_(self._slice_source(each))
        start_collective(dist.all_to_all_single, answer, message, from_, to, group=group).wait()
        for each, place in self._slice_message(taken, answer):
            self._slice_target(each).copy_(place)

    def _slice_message(self, transfers: Sequence[Transfer], message: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
        """Yield each transfer with the view of its part in a message, in the part's shape and dtype."""
        offset = 0
        for each in transfers:
            dtype = self._get_dtype(each)
            size = dtype.itemsize * Piece(each.kept.name, each.box).elements
            yield each, message[offset : offset + size].view(dtype).view(each.sizes)
            offset += self._count_bytes(each)

    def _count_bytes(self, each: Transfer) -> int:
        size = self._get_dtype(each).itemsize * Piece(each.kept.name, each.box).elements
        return -(-size // _ALIGNED) * _ALIGNED

    def _get_dtype(self, each: Transfer) -> torch.dtype:
        kept = self._parts.get(each.kept) if each.source == self._rank else self._targets[each.needed]
        assert kept is not None
        return kept.dtype

    def _slice_source(self, each: Transfer) -> Tensor:
        return slice_box(self._parts[each.kept], each.kept.box, each.box)

    def _slice_target(self, each: Transfer) -> Tensor:
        return slice_box(self._targets[each.needed], each.needed.box, each.box)
