"""In-memory copies of the training state in other processes.

:class:`ShardCopies` stores copies of each shard in two processes, so that either of them may die.
:class:`ShardRecovery` starts each membership with the newest complete state.
:func:`send_state` sends a process's whole state to other processes of its group, from memory to memory.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.checkpoint.manifest_tree import join_tensors, order_like, split_tensors
from worldsize.collectives.group import INTERRUPTION, Collective, receive, send, start_collective
from worldsize.config.settings import Settings
from worldsize.core import Replica, StateDict, World
from worldsize.devices import synchronize_stream
from worldsize.healing.loop_state import LoopState
from worldsize.healing.membership import NEWCOMER
from worldsize.healing.pieces import Generation, PieceLayout, Place, copy_pieces, gather_layout
from worldsize.healing.recovery import Recovered, Recovery, hand_over_shards
from worldsize.loop.fit import TrainingProgress
from worldsize.record.metrics import last_row
from worldsize.record.run_directory import RunDirectory
from worldsize.world.environments import host_name


@final
class ShardCopies:
    """One rank's copies of the state.

    All ranks must call :meth:`start_copy` after the same steps. A generation consists of the copies after one step. Up
    to two are stored: copies in flight replace the previous generation once they have arrived on all ranks.

    Args:
        number: Number of the membership.
        group: A gloo group of all ranks, reserved for copies during training; None for a single process.
        place: This rank's host and data-parallel rank.
        device: Device of the state.
        before: Generation left by the previous membership, kept until the first new one is complete.
        layout: The distribution of shards, if it is already known.
        at: Called with the name of each point at which a fault can be injected.
    """

    def __init__(
        self,
        number: int,
        group: ProcessGroup | None,
        place: Place,
        *,
        device: torch.device,
        before: Generation | None = None,
        layout: PieceLayout | None = None,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._at = at
        self._number, self._group, self._place, self._device = number, group, place, device
        self._rank = group.rank() if group else 0
        self._complete: tuple[Generation, _Buffers | None] | None = (before, None) if before else None
        self._flight: tuple[Generation, _Buffers, Collective | None] | None = None
        self._layout = layout
        self.is_unused = True
        """Whether no copy has been started in this membership."""
        self._free: list[_Buffers] = []

    @property
    def newest(self) -> Generation | None:
        """The newest generation that has this process's own shards, possibly in flight."""
        newest = self._flight or self._complete
        return newest[0] if newest else None

    def start_copy(self, state: StateDict, *, step: int, skipped: int, shared: Any = None) -> None:
        """Copy this rank's shards of the state after ``step``.

        First waits until the previous generation is complete on all ranks. Then starts to send the shards that no other
        holder stores, see :meth:`PieceLayout.list_sole`, without waiting for their arrival.
        """
        self.close()
        tensors, values = split_tensors({part: child for part, child in state.items() if part != "strategy"})
        if self._layout is None or self._layout.dtypes.keys() != tensors.keys():
            self._layout = gather_layout(tensors, self._group, self._place)
        self._free = [each for each in self._free if each.layout is self._layout]
        buffers = self._free.pop() if self._free else _Buffers(self._layout, self._rank, self._device)
        buffers.copy_shards(tensors)
        elements = sum(tensor.numel() for tensor in tensors.values())
        dtypes = self._layout.dtypes
        generation = Generation(self._number, step, skipped, values, elements, dtypes, buffers.own, shared)
        self._flight = (generation, buffers, buffers.start_exchange(self._group) if self._group else None)
        self.is_unused = False
        self._at("copies:sent")

    def collect_generations(self) -> list[Generation]:
        """Return this process's generations, newest first, after the end of its membership."""
        kept = []
        if self._flight is not None:
            generation, buffers, work = self._flight
            if work is None or (work.is_completed() and _has_succeeded(work)):
                generation.parts = buffers.all
            kept.append(generation)
        return [*kept, *([self._complete[0]] if self._complete else [])]

    def close(self) -> None:
        """Wait until the copies in flight have arrived on all ranks."""
        if self._flight is None:
            return
        generation, buffers, work = self._flight
        if work is not None:
            work.wait()
            # a barrier: afterwards, all ranks have their copies
            start_collective(dist.all_reduce, torch.zeros(1), group=self._group).wait()
        generation.parts = buffers.all
        before, self._complete, self._flight = self._complete, (generation, buffers), None
        if before is not None and before[1] is not None:
            self._free.append(before[1])


@final
class _Buffers:
    """Memory of one generation: this rank's own shards, and shards received from another rank.

    Shards to send come first, so that a contiguous slice of the buffer can be sent without a copy.
    """

    def __init__(self, layout: PieceLayout, rank: int, device: torch.device) -> None:
        self.layout = layout
        sole, kept = layout.list_sole(rank), layout.list_shared(rank)
        theirs = layout.list_sole(layout.peer_before(rank)) if layout.find_peer(rank) != rank else []
        pinned = device.type == "cuda"
        self._own = torch.empty(layout.compute_offsets([*sole, *kept])[1], dtype=torch.uint8, pin_memory=pinned)
        self._received = torch.empty(layout.compute_offsets(theirs)[1], dtype=torch.uint8)
        self._sent = layout.compute_offsets(sole)[1]  # bytes
        self._peers, self._device = (layout.find_peer(rank), layout.peer_before(rank)), device
        self.own = layout.create_views([*sole, *kept], self._own)
        self.all = {**self.own, **layout.create_views(theirs, self._received)}

    def copy_shards(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards of ``tensors`` into the buffer."""
        copy_pieces(tensors, self.own)
        synchronize_stream(self._device)

    def start_exchange(self, group: ProcessGroup) -> Collective:
        """Start sending this rank's copies to its peer, and receiving another rank's."""
        to, from_ = self._peers
        sent, received = [0] * group.size(), [0] * group.size()
        sent[to], received[from_] = self._sent, len(self._received)
        own = self._own[: self._sent]
        return start_collective(dist.all_to_all_single, self._received, own, received, sent, group=group)


def _has_succeeded(work: Collective) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


@final
class ShardRecovery:
    """Keeps a process's copies across memberships, and recovers replicas from them."""

    def __init__(self, settings: Settings, run: RunDirectory) -> None:
        self._settings, self._run = settings, run
        self._copies: ShardCopies | None = None
        self._replica: Replica | None = None  # the current membership's replica
        self._left: list[Generation] = []  # left by previous memberships

    @property
    def step(self) -> int:
        """Newest step with copies in this process; NEWCOMER without copies."""
        newest = self._copies.newest if self._copies else None
        return max((each.step for each in (*self._left, *([newest] if newest else ()))), default=NEWCOMER)

    def leave_membership(self) -> None:
        """Keep the copies of the ended membership, whose groups must still exist.

        Does not wait for copies in flight. Earlier copies remain if the membership has not made any.
        """
        if self._copies:
            self._left, self._copies = self._copies.collect_generations(), None

    def hand_over(self, world: World, ranks: int) -> None:
        """Send shards that no continuing rank stores to the first ``ranks`` ranks.

        All ranks must call this.

        Raises:
            CheckpointError: every generation has lost a shard.
        """
        self._left = hand_over_shards(self._left, world.groups[f"copies/{world.role}"], ranks)

    def release_replica(self) -> None:
        """Free the last replica after leaving its groups; two might not fit in memory."""
        self._replica = None
        gc.collect()  # replicas have reference cycles

    def recover_replica(
        self, make_replica: Callable[[], Replica], world: World, number: int, state: LoopState
    ) -> tuple[Replica, LoopState]:
        """Create the replica for membership ``number``, and load the newest complete state.

        All members must call this.

        Raises:
            CheckpointError: every generation has lost a shard.
        """
        replica, place = make_replica(), Place(host_name(os.environ), self._settings.strategy.data_rank(world))
        group = world.groups.get(f"copies/{world.role}")
        facts = self._find_recorded_steps(state.progress) if world.rank == 0 else None
        recovery = Recovery(replica.state(), self._left, group, place, facts=facts)
        newest, log = recovery.run(), replace(state.log, step=0, evaluation=0)
        progress = None
        if newest is not None:
            replica.load(newest.state)
            logged, evaluation, saved = recovery.facts
            log = replace(log, step=logged, evaluation=evaluation)
            progress = self._progress(newest, evaluation, saved)
        self._copies = ShardCopies(
            number,
            group,
            place,
            device=world.device,
            before=newest.kept if newest else None,
            layout=recovery.layout,
            at=self._settings.faults.report_point,
        )
        self._left = []  # not earlier: if the recovery is interrupted, the next membership needs these copies
        self._replica = replica
        return replica, replace(state, progress=progress, log=log, saves={})

    def copy_state(self, progress: TrainingProgress) -> None:
        """Copy the state after a step if copies are due."""
        assert self._copies is not None
        assert self._replica is not None
        is_due = self.step < progress.step and progress.step % self._settings.checkpoint.peers == 0
        if self._copies.is_unused or is_due:
            state = self._replica.state()
            self._copies.start_copy(state, step=progress.step, skipped=progress.skipped, shared=progress.shared)

    def close(self) -> None:
        """Wait until the copies in flight have arrived."""
        if self._copies:
            self._copies.close()

    def _progress(self, newest: Recovered, evaluation: int, saved: int | None) -> TrainingProgress:
        """Return the progress after a recovery, given the last evaluated and the last saved step."""
        step, loop = newest.step, self._settings.loop
        # with a schedule on a metric, repeat the evaluation, since the state was copied before the schedule advanced
        is_evaluated = evaluation >= step and self._settings.training.schedule_metric is None
        return TrainingProgress(
            step,
            newest.skipped,
            evaluated=is_evaluated or not loop.evaluates(step),
            saved=saved is None or saved >= step or not loop.saves(step),
            shared=newest.shared,
        )

    def _find_recorded_steps(self, progress: TrainingProgress | None) -> tuple[int, int, int | None]:
        """Return the last logged step, the last evaluated step, and the last saved step.

        The last saved step is None if this process has not completed a step.
        """
        loop = self._settings.loop
        step, is_evaluation = last_row(self._run.metrics)
        logged = step if not is_evaluation or loop.logs(step) else step - 1
        evaluated = step if is_evaluation or (step and not loop.logs(step)) else step - 1
        return logged, evaluated, progress and (progress.step if progress.saved else progress.step - 1)


Facts = Mapping[str, Any]
_Form = tuple[str, torch.dtype, Sequence[int]]  # name, dtype and shape of a tensor

_MESSAGE = 16 << 20  # maximum bytes of small tensors sent in one message


def send_state(
    state: StateDict, facts: Facts, receivers: Sequence[int], group: ProcessGroup, device: torch.device
) -> None:
    """Send this process's complete ``state`` and plain ``facts`` to ``receivers``, one by one.

    The state may span several devices, so each tensor is first moved to ``device``. The backend of ``group`` must
    support ``device``.
    """
    tensors, values = split_tensors(state)
    forms = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    for receiver in receivers:
        head = [values, forms, dict(facts)]
        INTERRUPTION.run_exchange(partial(dist.send_object_list, head, group=group, group_dst=receiver))
        for names in _messages(forms):
            parts = [tensors[name].detach().to(device).flatten() for name in names]
            send(parts[0] if len(parts) == 1 else torch.cat(parts), group, to=receiver)


def receive_state(
    template: StateDict, sender: int, group: ProcessGroup, device: torch.device
) -> tuple[StateDict, Facts]:
    """Receive the state sent by rank ``sender`` with :func:`send_state`.

    Returns:
        The state, with the key order and the devices of ``template``, and the facts.
    """
    places = {name: tensor.device for name, tensor in split_tensors(template)[0].items()}
    received: list[Any] = [None, None, None]
    INTERRUPTION.run_exchange(partial(dist.recv_object_list, received, group=group, group_src=sender))
    values, forms, facts = received
    tensors: dict[str, Tensor] = {}
    kinds = {name: (dtype, shape) for name, dtype, shape in forms}
    for names in _messages(forms):
        sizes = [math.prod(kinds[name][1]) for name in names]
        flat = torch.empty(sum(sizes), dtype=kinds[names[0]][0], device=device)
        receive(flat, group, source=sender)
        for name, part in zip(names, flat.split_with_sizes(sizes), strict=True):
            own = part if len(names) == 1 else part.clone()  # a view would keep the whole message in memory
            tensors[name] = own.view(kinds[name][1]).to(places.get(name, device))
    return order_like(join_tensors(values, tensors), template), facts


def _messages(forms: Sequence[_Form]) -> Iterator[list[str]]:
    """Group tensors of the same dtype into messages, and yield their names.

    A message has up to 16 MiB, or one larger tensor.
    """
    for dtype, same in groupby(sorted(forms, key=lambda form: str(form[1])), key=lambda form: form[1]):
        names, size = list[str](), 0
        for name, _, shape in same:
            if names and size + math.prod(shape) * dtype.itemsize > _MESSAGE:
                yield names
                names, size = [], 0
            names.append(name)
            size += math.prod(shape) * dtype.itemsize
        yield names
