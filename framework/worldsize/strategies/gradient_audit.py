"""Audits of gradients: a process computes its neighbor's logical ranks, too, and compares their bits.

With ordered sums, every process computes the same bits for a logical rank. In an audited step, process p of P also
computes the micro-batches of process p + 1, loading their data itself. Digests of each loss, gradient and saved buffer
are combined into one number per process, and only these numbers are exchanged. If they differ, further passes
vote: process p computes the micro-batches of process p - 1, so that three processes have computed each logical rank. Of
two processes, both repeat all passes, which identifies a process that erred once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from worldsize.collectives.bit_digest import digest_bits
from worldsize.collectives.group import start_collective
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import Dealing, GradientsAudited, MicroBatch, RunContext
from worldsize.data.order import assign_logical_ranks
from worldsize.seeds import derive_seed
from worldsize.strategies.bit_mismatch import Mismatch, broadcast_value, get_whole_group, report_mismatch
from worldsize.strategies.declared_buffers import buffer_slots
from worldsize.strategies.model_replica import keep_buffers
from worldsize.strategies.step_buffers import KeptBuffers

LOSS = "loss"
_Digests = dict[str, int]  # digest of each tensor of a pass, by its name
_Pass = Callable[[MicroBatch], Tensor]  # computes a pass apart from the step; returns the loss


@final
@dataclass
class PassRecord:
    """Digests of the passes of some logical ranks, on this process."""

    passes: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by logical rank, then by name
    _open: dict[str, Tensor] = field(default_factory=dict)

    def observe_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """Record a gradient of the current pass, of any shape; return it unchanged."""
        self._open[f"gradient of {name}"] = digest_bits(gradient)
        return gradient

    def end_pass(self, batch: MicroBatch, loss: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """End the pass of ``batch``, with its loss and the buffers after it."""
        values = {LOSS: loss, **{f"buffer {name}": each for name, each in buffers.items()}}
        digests = {name: digest_bits(get_local_shard(each)) for name, each in values.items()}
        self.passes[batch.logical_rank], self._open = {**self._open, **digests}, {}

    def discard_pass(self) -> None:
        """Discard the gradients of a pass that does not belong to a logical rank."""
        self._open = {}

    def read_digests(self) -> dict[int, _Digests]:
        """Return all digests as numbers, by logical rank; on a GPU, this waits for all of them at once."""
        named = [(rank, name, each) for rank, row in self.passes.items() for name, each in row.items()]
        values = torch.stack([each for *_, each in named]).tolist() if named else []
        found: dict[int, _Digests] = {rank: {} for rank in self.passes}
        for (rank, name, _), value in zip(named, values, strict=True):
            if value:  # a gradient of zeros may also be missing
                found[rank][name] = value
        return found


@final
@dataclass(frozen=True)
class _Vote:
    """What process ``voter`` computed for the logical ranks of another process or its own."""

    voter: int
    digests: Mapping[int, _Digests] | None  # None on other processes
    total: int


@final
class GradientAudit:
    """Audits the steps of one process; all processes of the group audit the same steps.

    Args:
        context: Context of the run, with the data of other logical ranks.
        model: The model, whose buffers are compared.
        dealing: Assignment of logical ranks to processes.
        run_pass: Computes a pass apart from the step, reporting to :attr:`record`; returns the loss.
        shares_weights: Whether processes gather their weights from each other.
    """

    def __init__(
        self, context: RunContext, model: nn.Module, dealing: Dealing, run_pass: _Pass, *, shares_weights: bool
    ) -> None:
        assert context.world.group is not None
        self._context, self._model, self._dealing, self._run_pass = context, model, dealing, run_pass
        self._group: ProcessGroup = context.world.group
        self._rank, self._size = self._group.rank(), self._group.size()
        self._shares_weights = shares_weights
        self.record: PassRecord | None = None
        """Record of the passes that are being computed; None if they are not audited."""
        self._peers = PassRecord()  # the passes of the neighbor
        self._first: KeptBuffers | None = None  # saved buffers at the start of the audited step

    def is_due(self, step: int) -> bool:
        """Return whether ``step`` is audited: for a fraction ``integrity.audit`` of the steps, drawn from the seed."""
        return derive_seed(self._context.seed, "audit", step) < self._context.integrity.audit * 2**63

    @contextmanager
    def audit_step(self, step: int) -> Iterator[None]:
        """Audit the passes in this block, which must be those of this process's logical ranks.

        Raises:
            BitMismatchError: processes have different bits, and the run or this process must end.
        """
        self._first = KeptBuffers(buffer_slots(self._model))
        self._peers = self._compute_passes(step, self._rank + 1)
        self.record = PassRecord()
        try:
            yield
            own = self.record
        finally:
            self.record = None
        self._compare(step, own)
        self._first = None

    def observe_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """Record a gradient of an audited pass, of any shape; return it unchanged."""
        return gradient if self.record is None else self.record.observe_gradient(name, gradient)

    def end_pass(self, batch: MicroBatch, loss: Tensor, *, is_discarded: bool) -> None:
        """End a pass with its detached ``loss``, before buffers are restored."""
        if self.record is None:
            return
        if is_discarded:
            self.record.discard_pass()
        else:
            self.record.end_pass(batch, loss, {slot.name: slot.tensor for slot in buffer_slots(self._model)})

    def _compute_passes(self, step: int, rank: int) -> PassRecord:
        """Compute the passes of process ``rank``, modulo the number of processes.

        Every process computes the same number of passes.
        """
        total = self._context.logical_ranks
        ranks = assign_logical_ranks(rank % self._size, self._size, total, self._dealing)
        record = PassRecord()
        with keep_buffers([self._model]):  # those that are not saved may depend on earlier passes
            self._compute_ranks(step, ranks, total, record)
        return record

    def _compute_ranks(self, step: int, ranks: Sequence[int], total: int, record: PassRecord) -> None:
        for logical_rank in ranks:
            self.record = record
            try:
                self._run_pass(self._context.audit_data(step, logical_rank))
            finally:
                self.record = None
        for _ in range(-(-total // self._size) - len(ranks)):  # sharded models gather parameters in each pass
            self._run_pass(self._context.audit_data(step, ranks[0]))

    def _compare(self, step: int, own: PassRecord) -> None:
        mine, theirs = own.read_digests(), self._peers.read_digests()
        totals = self._gather_totals([mine, theirs])
        differs = any(totals[rank][0] != totals[rank - 1][1] for rank in range(self._size))
        if not self._differs_anywhere(differs=differs):
            self._report_digest(step, sum(total[0] for total in totals) % 2**63)
            return
        votes = self._collect_votes(step, totals, mine, theirs)
        bad = [each for each in votes.values() if len({vote.total for vote in each}) > 1]
        report_mismatch(self._context, step, self._describe(bad) if bad else None)

    def _report_digest(self, step: int, total: int) -> None:
        """Report the sum of the numbers of all logical ranks, unless processes hold different parts of the model."""
        if get_whole_group(self._context.world) is self._group:
            self._context.emit(GradientsAudited(step, f"{total:016x}"))

    def _differs_anywhere(self, *, differs: bool) -> bool:
        """Return whether any process found a difference; those that compute passes together must vote together."""
        everyone = get_whole_group(self._context.world)
        if everyone is self._group:
            return differs
        found = torch.tensor(differs, dtype=torch.int32, device=self._context.world.device)
        start_collective(dist.all_reduce, found, op=dist.ReduceOp.MAX, group=everyone).wait()
        return bool(found)

    def _collect_votes(
        self, step: int, totals: Sequence[Sequence[int]], mine: dict[int, _Digests], theirs: dict[int, _Digests]
    ) -> dict[int, list[_Vote]]:
        """Compute all logical ranks again on further processes; return the votes by the rank that trains them."""
        before, after = [self._rank - 1], [self._rank, self._rank + 1]
        with self._first_buffers():
            again = [self._compute_passes(step, rank).read_digests() for rank in (before if self._size > 2 else after)]
        more = self._gather_totals(again)
        votes = {}
        for rank in range(self._size):
            left, right = (rank - 1) % self._size, (rank + 1) % self._size
            first = [(rank, mine, totals[rank][0]), (left, theirs, totals[left][1])]
            if self._size > 2:
                second = [(right, again[0], more[right][0])]
            else:
                second = [(rank, again[0], more[rank][0]), (left, again[-1], more[left][1])]
            votes[rank] = [
                _Vote(voter, digests if voter == self._rank else None, total)
                for voter, digests, total in first + second
            ]
        return votes

    @contextmanager
    def _first_buffers(self) -> Iterator[None]:
        """Use the saved buffers from the start of the step in this block, although it has changed them since."""
        assert self._first is not None
        last = KeptBuffers(buffer_slots(self._model))
        self._first.restore()
        try:
            yield
        finally:
            last.restore()

    def _gather_totals(self, digests: Sequence[Mapping[int, _Digests]]) -> list[list[int]]:
        """Return one number of each process for each of ``digests``, by rank."""
        own = torch.tensor([_combine(each) for each in digests], device=self._context.world.device)
        all_pn = own.new_empty(self._size * len(digests))
        start_collective(dist.all_gather_into_tensor, all_pn, own, group=self._group).wait()
        totals: list[list[int]] = all_pn.view(self._size, -1).tolist()
        return totals

    def _describe(self, bad: Sequence[Sequence[_Vote]]) -> Mismatch:
        """Describe the first of the votes that differ; all processes of the group must call it."""
        differing = _find_minority(bad[0]) or [bad[0][0]]
        good = next(vote for vote in bad[0] if vote.total != differing[0].total)
        one, other = (
            broadcast_value(vote.digests, vote.voter, self._group, self._context.world.device)
            for vote in (differing[0], good)
        )
        assert one is not None
        assert other is not None
        logical_rank, tensor = _find_difference(one, other)
        voters = {vote.voter for each in bad for vote in each}
        guilty = _find_guilty(bad, shares_weights=self._shares_weights)
        return Mismatch(tensor, self._group, guilty, voters, logical_rank)


def _combine(digests: Mapping[int, _Digests]) -> int:
    """Return one number, int64, for the digests of several passes: the sum over logical ranks, modulo 2^63."""
    return sum(derive_seed(0, json.dumps(each, sort_keys=True), rank) for rank, each in digests.items()) % 2**63


def _find_guilty(votes: Iterable[Sequence[_Vote]], *, shares_weights: bool) -> set[int]:
    """Return the voters that differ from a majority.

    ``shares_weights``: whether voters gather weights from each other. A voter that also belongs to a majority is then
    omitted: it may have the same wrong bits as another one, from a shard that both gathered.
    """
    minority, majority = set[int](), set[int]()
    for each in votes:
        if differing := {vote.voter for vote in _find_minority(each)}:
            minority |= differing
            majority |= {vote.voter for vote in each} - differing
    return minority - majority if shares_weights else minority


def _find_minority(votes: Sequence[_Vote]) -> list[_Vote]:
    """Return the votes that differ from the majority; empty if there is no majority."""
    (total, count), *_ = Counter(vote.total for vote in votes).most_common()
    return [vote for vote in votes if vote.total != total] if 2 * count > len(votes) else []


def _find_difference(one: Mapping[Any, _Digests], other: Mapping[Any, _Digests]) -> tuple[int, str]:
    """Return the first logical rank and tensor with different digests: the loss, if it differs, else a gradient.

    The logical ranks are strings, the keys of JSON objects.
    """
    for rank in sorted(one, key=int):
        first, second = one[rank], other[rank]
        names = [LOSS, *first, *second]
        for name in names:
            if first.get(name, 0) != second.get(name, 0):
                return int(rank), name
    raise AssertionError("the digests are equal")
