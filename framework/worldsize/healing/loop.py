"""Training in a gang with changing members, which all continue from the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from worldsize.collectives.group import INTERRUPTION, connect_groups
from worldsize.config.learning_rate import update_samples
from worldsize.config.settings import Settings
from worldsize.core import Emit, MembershipChanged, Replica, World
from worldsize.devices import backend_for
from worldsize.healing.copies import ShardRecovery, receive_state, send_state
from worldsize.healing.groups import LEFT_GROUPS, Connections, Meetings, rebuild_groups
from worldsize.healing.loop_state import GangHooks, LogState, LoopState, MembershipTraining
from worldsize.healing.membership import NEWCOMER, Membership, MembershipChannel
from worldsize.healing.pieces import broadcast
from worldsize.loop.fit import TrainingProgress
from worldsize.record.run_directory import RunDirectory
from worldsize.strategies.deferred.model import describe, state_follows
from worldsize.world.environments import Placement


@final
class HealingMember:
    """A process that trains in consecutive memberships of a healing gang.

    Args:
        settings: The settings of the run.
        run: The run folder.
        placement: Placement of this process.
        channel: Receives new memberships.
        make_replica: Creates a replica, given a membership's settings and world, and a context for creating process
            groups; all members call it.
        begin_training: Creates the training loop for a membership.
        emit: Called with each event.
    """

    def __init__(
        self,
        settings: Settings,
        run: RunDirectory,
        placement: Placement,
        channel: MembershipChannel,
        make_replica: Callable[[Settings, World, Connections], Replica],
        begin_training: Callable[[Settings, World, Replica, LoopState, GangHooks], MembershipTraining],
        *,
        emit: Emit,
    ) -> None:
        self._settings = settings = replace(settings, strategy=settings.strategy.healing())
        self._run, self._placement, self._channel = run, placement, channel
        self._make_replica, self._begin_training, self._emit = make_replica, begin_training, emit
        self._state = LoopState()
        self._replica: Replica | None = None  # has the state after the last step that this process completed
        self._meetings = Meetings(
            placement.store, channel.check_membership, timedelta(seconds=settings.cluster.timeout)
        )
        self._logs = False  # whether this process logs the run
        self._has_logged = False  # whether this process logged the run in the previous membership
        self._shards = ShardRecovery(settings, run) if settings.strategy.shards_state else None

    def run(self, world: World) -> int:
        """Train until the run ends or this process leaves; return the exit code.

        ``world`` must not have groups.

        Raises:
            Exception: the program itself failed, not a peer.
        """
        cluster = self._settings.cluster
        ends_waits = backend_for(cluster.backend, cluster.device) == "gloo"  # NCCL's waits end when it is aborted
        INTERRUPTION.start_tracking(self._channel.check_membership if ends_waits else None, longest=cluster.timeout)
        if joins_later(self._placement):
            warm_up(self._settings.recipe.model if self._settings.strategy.shards_state else None)
        before, is_spare = None, False
        replica: Replica | None = None
        while True:
            begun = time.perf_counter()
            membership = self._channel.wait_for_membership(self._step, is_spare=is_spare)
            is_spare = world.global_rank in membership.waiting
            if not is_spare and world.global_rank not in membership.members:
                return 0
            try:
                connections = Connections()
                settings, world = self._join_groups(world, membership, connections)
                if is_spare:
                    if self._shards:
                        self._shards.release_replica()
                    LEFT_GROUPS.free_groups()
                    continue
                replica = self._create_replica(settings, world, membership, connections)
                if before is not None or membership.members != tuple(range(self._settings.roles[world.role].processes)):
                    step = self._state.progress.step if self._state.progress else 0
                    changed = _create_change_event(membership, before, step, time.perf_counter() - begun)
                    samples = update_samples(settings, settings.training.batch_size)
                    axes = settings.strategy.axis_sizes(len(membership.members))
                    self._emit(replace(changed, update_samples=samples, axes=axes))
                before = membership
                return self._run_training(settings, world, replica)
            except Exception as error:
                if not self._channel.has_caused(error):
                    raise
                replica = None  # free it before creating the next one, or while this process waits

    @property
    def _step(self) -> int:
        """Step of the newest state in this process; NEWCOMER if there is none."""
        if self._shards:
            return self._shards.step
        return self._state.progress.step if self._state.progress else NEWCOMER

    def _create_replica(
        self, settings: Settings, world: World, membership: Membership, connections: Connections
    ) -> Replica:
        """Create this process's replica for a membership, with the newest state."""
        context: AbstractContextManager[None] = state_follows()
        if membership.source is None:
            self._state, context = self._state.prepare_start(self._settings, self._run, world)
        make_replica = partial(self._make_replica, settings, world, connections)
        with context:
            if self._shards is None:
                return self._load_newest_state(make_replica(), world, membership)
            self._state = replace(self._state, log=_agree_on_log(self._state.log, world))
            self._shards.release_replica()
            replica, self._state = self._shards.recover_replica(make_replica, world, membership.number, self._state)
            return replica

    def _run_training(self, settings: Settings, world: World, replica: Replica) -> int:
        """Train in a membership until the run ends or this process leaves; return the exit code."""
        hooks = GangHooks(self._channel.begin_step, self._channel.mark_finished)
        if self._shards:
            hooks = replace(hooks, copy=self._shards.copy_state)
        training = self._begin_training(settings, world, replica, self._state, hooks)
        LEFT_GROUPS.free_groups()  # all their users have been replaced
        try:
            code = training.run()
        finally:
            self._state = training.state
        if self._shards:
            self._shards.close()
        return code

    def _join_groups(self, world: World, membership: Membership, connections: Connections) -> tuple[Settings, World]:
        """Join a membership's groups; return its settings and this process's World.

        A process in ``membership.waiting`` only sends its shards, and does not belong to any group afterwards.
        """
        if self._shards:
            self._shards.leave_membership()
        LEFT_GROUPS.keep_groups()
        self._channel.begin_membership(membership.number, connections.cut_sockets)
        settings, copies = self._settings.resize_gang(len(membership.members)), self._shards is not None
        # created before the context, since the stores' connections outlive the membership
        everyones = self._meetings.create_store(membership.number, "everyone") if membership.waiting else None
        store = self._meetings.create_store(membership.number)
        with connections:
            world = self._hand_over_shards(world, membership, settings, everyones)
            if world.global_rank in membership.waiting:
                return settings, world
            world = rebuild_groups(world, membership.members, settings.cluster, store, copies=copies)
            connect_groups(set(world.groups.values()))
        self._has_logged, self._logs = self._logs, self._logs or world.rank == 0
        return settings, world

    def _hand_over_shards(self, world: World, membership: Membership, settings: Settings, store: Store | None) -> World:
        """Transfer shards from processes that become spares to the others, in temporary groups."""
        if store is not None and self._shards:
            everyone = (*membership.members, *membership.waiting)
            world = rebuild_groups(world, everyone, settings.cluster, store, copies=True)
            connect_groups(set(world.groups.values()))
            self._shards.hand_over(world, len(membership.members))
            dist.destroy_process_group()
        return world

    def _load_newest_state(self, replica: Replica, world: World, membership: Membership) -> Replica:
        """Load the newest state of any member into ``replica``, and keep the replica."""
        source, known = membership.source, self._state.progress
        if source is None:
            self._replica, self._state = replica, replace(self._state, progress=None)
            return replica
        step, behind = membership.steps[source], membership.behind
        evaluated, saved = agree_on_ends(step, world, known, has_logged=self._has_logged)
        saves = broadcast(self._state.saves, 0, world.group)  # all members must agree
        self._state = replace(self._state, saves=saves, log=_agree_on_log(self._state.log, world))
        if world.rank in behind:
            assert world.group is not None
            state, facts = receive_state(replica.state(), source, world.group, world.device)
            progress = TrainingProgress(step, facts["skipped"], evaluated, saved, shared=facts["shared"])
        else:
            assert self._replica is not None
            assert known is not None
            state = self._replica.state()
            progress = TrainingProgress(step, known.skipped, evaluated, saved, shared=known.shared)
            if world.rank == source and behind:
                assert world.group is not None
                facts = {"skipped": known.skipped, "shared": known.shared}
                send_state(state, facts, behind, world.group, world.device)
        replica.load(state)
        self._replica, self._state = replica, replace(self._state, progress=progress)
        return replica


def _agree_on_log(log: LogState, world: World) -> LogState:
    """Agree on the last logged step, so that newcomers have it even if all others die."""
    last = log.last
    if world.group is not None:
        step = last.step if last else 0
        # the first element encodes the newest step and a rank that has it
        ends = torch.tensor([step * world.size + world.rank, -step], device=world.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=world.group)
        newest, oldest = int(ends[0]), -int(ends[1])
        if newest // world.size > oldest:
            last = broadcast(last, newest % world.size, world.group)
    return replace(log, last=last, missing=last if world.rank == 0 else None)


def agree_on_ends(step: int, world: World, progress: TrainingProgress | None, *, has_logged: bool) -> tuple[bool, bool]:
    """Return whether evaluation and save after ``step`` are complete; all ranks must call this.

    Each is complete only if rank 0 has completed it and logged the previous membership (``has_logged``). The evaluation
    must also be complete on all other ranks that have completed ``step``: an error may have interrupted it on some.
    """
    known = progress if progress is not None and progress.step == step else None
    if world.rank == 0:
        own = [known.evaluated, known.saved] if known and has_logged else [False, False]
    else:
        own = [known is None or known.evaluated, True]
    ends = torch.tensor(own, dtype=torch.int32, device=world.device)
    if world.group is not None:
        dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=world.group)
    evaluated, saved = ends.bool().tolist()
    return evaluated, saved


def _create_change_event(now: Membership, before: Membership | None, step: int, seconds: float) -> MembershipChanged:
    stayed = () if before is None else [rank for rank in before.members if rank not in now.lost]
    joined = () if before is None else tuple(rank for rank in now.members if rank not in stayed)
    asked = dict(now.asked)
    return MembershipChanged(step, now.number, now.members, dict(now.lost), joined, seconds, asked, waiting=now.waiting)


def joins_later(placement: Placement) -> bool:
    """Return whether this process joins a running gang: a replacement, addition or spare."""
    return placement.starts > 0 or placement.rank >= placement.world_size


def warm_up(model: Callable[[], torch.nn.Module] | None) -> None:
    """Create and discard a process group, and a description of the model if it will be sharded.

    The first creation of each takes several times as long as later ones, and the other members would wait for it.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    if model is not None:
        describe(model)
