"""Trains in a gang whose members change: survivors and newcomers go on from the same step.

What a process does for the first time takes it several times as long as afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from worldsize.checkpoint.copies import receive_state, send_state
from worldsize.collectives.peer_waits import INTERRUPTION
from worldsize.collectives.step_timer import connect
from worldsize.config.learning_rate import update_samples
from worldsize.config.settings import Settings
from worldsize.core import Event, Listener, MembershipChanged, Replica, StepDone, World
from worldsize.devices import backend_for
from worldsize.record.run_directory import RunDirectory
from worldsize.strategies.deferred.model import describe, state_follows
from worldsize.train.before_update import BeforeUpdate
from worldsize.train.fit import TrainingProgress
from worldsize.worker.carried import LEFT_GROUPS, Carried
from worldsize.worker.context import global_listeners
from worldsize.worker.shard_recovery import ShardRecovery
from worldsize.worker.training import Training
from worldsize.world.environments import Placement
from worldsize.world.meetings import Connections, Meetings
from worldsize.world.membership import NEWCOMER, Membership, MembershipChannel
from worldsize.world.processes import Preemption
from worldsize.world.world import regrouped


@final
class HealingMember:
    """A process that trains in one membership of the gang after the other.

    Args:
        settings: Those of the run, as it was planned.
        run: The run folder.
        placement: The place of this process.
        channel: Tells of changes.
        listeners: Those of this process, to which those of the whole run are added once it is the first member.
        preemption: Whether somebody asked it to end.
    """

    def __init__(
        self,
        settings: Settings,
        run: RunDirectory,
        placement: Placement,
        channel: MembershipChannel,
        listeners: list[Listener],
        preemption: Preemption,
    ) -> None:
        self._settings = replace(settings, strategy=settings.strategy.healing())
        self._run, self._placement, self._channel = run, placement, channel
        self._listeners, self._preemption = listeners, preemption
        self._replica: Replica | None = None  # with the state of the last step that this process has completed
        timeout = timedelta(seconds=settings.cluster.timeout)
        self._meetings = Meetings(placement.store, channel.check, timeout)
        self._logs = False  # whether the listeners of the whole run are among its own
        self._has_logged = False  # and were in the membership before
        self._shards: ShardRecovery | None = None  # if the strategy shards state

    def run(self, world: World, make_replica: Callable[[Settings, World, BeforeUpdate, Connections], Replica]) -> int:
        """Train until the run ends or this process leaves; return the exit code.

        Args:
            world: This process, in no group.
            make_replica: Makes its replica, given the settings and the world of a membership, what it calls before it
                updates, and what it enters to make process groups; all members call it.

        Raises:
            Exception: the program failed, and not because of a peer.
        """
        cluster = self._settings.cluster
        ends_waits = backend_for(cluster.backend, cluster.device) == "gloo"  # NCCL's own end when it is aborted
        INTERRUPTION.begin(self._channel.check if ends_waits else None, longest=cluster.timeout)
        channel, heartbeat = self._channel, self._placement.heartbeat
        carried = Carried(self._settings, heartbeat, channel.begin_step, channel.finish)
        carried.build(world)
        if joins_later(self._placement):
            warm_up(self._settings)
        if self._settings.strategy.shards_state:
            self._shards = ShardRecovery(
                self._run, carried, every=self._settings.checkpoint.peers, at=self._settings.faults.at
            )
        before, is_spare = None, False
        replica: Replica | None = None
        while True:
            begun = time.perf_counter()
            membership = self._channel.next(self._step(carried), is_spare=is_spare)
            is_spare = world.global_rank in membership.waiting
            if not is_spare and world.global_rank not in membership.members:
                return 0
            try:
                connections = Connections()
                settings, world = self._joined(world, membership, connections)
                if is_spare:
                    if self._shards:
                        self._shards.release()
                    LEFT_GROUPS.free()
                    continue
                make = partial(make_replica, settings, world, carried.before_update, connections)
                replica = self._replica_of(make, world, membership, carried)
                if before is not None or membership.members != tuple(range(self._settings.roles[world.role].processes)):
                    step = carried.progress.step if carried.progress else 0
                    changed = _changed(membership, before, step, time.perf_counter() - begun)
                    self._tell(replace(changed, update_samples=update_samples(settings, settings.training.batch_size)))
                before = membership
                return self._trained(settings, world, replica, carried)
            except Exception as error:
                if not self._channel.is_cause_of(error):
                    raise
                replica = None  # else it and the next one, or none while this process waits, fill the memory

    def _step(self, carried: Carried) -> int:
        """Return the last step of which this process has a state."""
        if self._shards:
            return self._shards.step
        return carried.progress.step if carried.progress else NEWCOMER

    def _replica_of(
        self, make_replica: Callable[[], Replica], world: World, membership: Membership, carried: Carried
    ) -> Replica:
        """Make the replica of this process in a membership, with the newest state."""
        with carried.beginning(self._run, world) if membership.source is None else state_follows():
            if self._shards is None:
                return self._with_newest_state(make_replica(), world, membership, carried)
            self._agree_on_log(world, carried)
            self._shards.release()
            return self._shards.recover(make_replica, world, membership.number, self._settings.loop)

    def _trained(self, settings: Settings, world: World, replica: Replica, carried: Carried) -> int:
        """Train in a membership until the run ends or this process leaves; return the exit code."""
        training = Training(settings, self._run, world, replica, self._listeners, self._preemption, carried)
        LEFT_GROUPS.free()  # now all that knew of them is replaced
        code = training.run()
        if self._shards:
            self._shards.close()
        return code

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    def _joined(self, world: World, membership: Membership, connections: Connections) -> tuple[Settings, World]:
        """Join the groups of a membership; return its settings and the place of this process in it.

        Those that are too many for it only hand over what they keep, and are in no group afterwards.
        """
        if self._shards:
            self._shards.leave()
        LEFT_GROUPS.keep()
        self._channel.begin(membership.number, connections.cut)
        settings, copies = self._settings.among(len(membership.members)), self._shards is not None
        # before the context, since what the stores open outlasts the membership
        everyones = self._meetings.store(membership.number, "everyone") if membership.waiting else None
        store = self._meetings.store(membership.number)
        with connections:
            world = self._handed_over(world, membership, settings, everyones)
            if world.global_rank in membership.waiting:
                return settings, world
            world = regrouped(world, membership.members, settings.cluster, store, copies=copies)
            connect(set(world.groups.values()))
        self._has_logged = self._logs
        if world.rank == 0 and not self._logs:
            self._listeners += global_listeners(settings, self._run, self._preemption)
            self._logs = True
        return settings, world

    def _handed_over(self, world: World, membership: Membership, settings: Settings, store: Store | None) -> World:
        """Let those that train keep what only those keep that will wait, in groups of them all, which they leave."""
        if store is not None and self._shards:
            everyone = (*membership.members, *membership.waiting)
            world = regrouped(world, everyone, settings.cluster, store, copies=True)
            connect(set(world.groups.values()))
            self._shards.hand_over(world, len(membership.members))
            dist.destroy_process_group()
        return world

    def _with_newest_state(self, replica: Replica, world: World, membership: Membership, carried: Carried) -> Replica:
        """Bring ``replica`` to the newest state that any member has, and return it: it is that of this process now."""
        source = membership.source
        if source is None:
            self._replica, carried.progress = replica, None
            return replica
        step, behind, progress = membership.steps[source], membership.behind, carried.progress
        evaluated, saved, carried.saves = self._done_after(step, world, carried)
        self._agree_on_log(world, carried)
        if world.rank in behind:
            assert world.group is not None
            state, facts = receive_state(replica.state(), source, world.group, world.device)
            progress = TrainingProgress(step, facts["skipped"], shared=facts["shared"])
        else:
            assert self._replica is not None
            assert progress is not None
            state = self._replica.state()
            if world.rank == source and behind:
                assert world.group is not None
                facts = {"skipped": progress.skipped, "shared": progress.shared}
                send_state(state, facts, behind, world.group, world.device)
        replica.load(state)
        self._replica = replica
        carried.progress = TrainingProgress(step, progress.skipped, evaluated, saved, shared=progress.shared)
        return replica

    def _agree_on_log(self, world: World, carried: Carried) -> None:
        """Let every member know the last logged step, also if only those remain that join now."""
        carried.log.last = self._last_logged(world, carried)
        carried.log.missing = carried.log.last if world.rank == 0 else None

    def _last_logged(self, world: World, carried: Carried) -> StepDone | None:
        """Return the last step that any member has logged; all of them must call it."""
        if world.group is None:
            return carried.log.last
        own = carried.log.last.step if carried.log.last else 0
        ends = torch.tensor([own * world.size + world.rank, -own], device=world.device)  # the first says who logged it
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=world.group)
        newest, oldest = int(ends[0]), -int(ends[1])
        logged = [carried.log.last]
        if newest // world.size > oldest:
            dist.broadcast_object_list(logged, group=world.group, group_src=newest % world.size)
        return logged[0]

    def _done_after(self, step: int, world: World, carried: Carried) -> tuple[bool, bool, Mapping[str, Any]]:
        """Return whether the evaluation and the save after ``step`` are done.

        The third value is what the first member knows of the interval between saves, on which all must agree.
        """
        progress, interval = carried.progress, carried.interval
        done = agreed_ends(step, world, progress, has_logged=self._has_logged)
        saves: list[Any] = [interval.handed_on() if interval else {}]
        if world.group is not None:
            dist.broadcast_object_list(saves, group=world.group, group_src=0)
        return (*done, saves[0])


def agreed_ends(step: int, world: World, progress: TrainingProgress | None, *, has_logged: bool) -> tuple[bool, bool]:
    """Return whether the evaluation and the save after ``step`` are done; every rank must call it.

    Both are done if the first rank completed and logged them (``has_logged``), and the evaluation only if every rank
    with this step completed it: an error may reach one rank during an evaluation that the others complete. It is
    repeated then.
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


def _changed(now: Membership, before: Membership | None, step: int, seconds: float) -> MembershipChanged:
    stayed = () if before is None else [rank for rank in before.members if rank not in now.lost]
    joined = () if before is None else tuple(rank for rank in now.members if rank not in stayed)
    asked = dict(now.asked)
    return MembershipChanged(step, now.number, now.members, dict(now.lost), joined, seconds, asked, waiting=now.waiting)


def joins_later(placement: Placement) -> bool:
    """Return whether a gang begins without this process, which replaces another, was added, or is a spare."""
    return placement.starts > 0 or placement.rank >= placement.world_size


def warm_up(settings: Settings) -> None:
    """Make a process group of this process alone, and describe the model if the strategy shards it; keep neither."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    if settings.strategy.shards_state:
        describe(settings.recipe.model)
