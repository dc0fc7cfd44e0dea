"""Requests of the leading server to all shards: its own, and those of the other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from worldsize.strategies.parameter_server.operations import Operation
from worldsize.strategies.parameter_server.peers import Peer, Peers
from worldsize.strategies.parameter_server.server import ShardServer


@final
class AllShards:
    """All shards of the run, for the leading server: ``own`` is its shard, ``peers`` have the others."""

    def __init__(self, own: ShardServer, peers: Peers) -> None:
        self.own, self._master, self._peers = own, own.master, peers

    def reset(self, step: int, factor: float | None) -> None:
        """Bring every shard to the step of this server, which has become the leader; see :meth:`Shard.reset`."""
        self._master.reset(step, factor)
        self._peers.command(Operation.RESET, {"step": step, "factor": factor})

    def apply(self, step: int, factor: float | None) -> None:
        """Commit the update of ``step`` on every shard; see :meth:`Shard.apply`."""
        self._master.apply(step, factor)  # the commit is now final, even if this server dies
        self._peers.command(Operation.APPLY, {"step": step, "factor": factor})

    def begin(self, step: int) -> None:
        """Make every shard save its state at the start of ``step``; see :class:`StepStart`."""
        self.own.start_of_step.keep(step)
        self._peers.command(Operation.BEGIN, {"step": step})

    def roll_back(self) -> None:
        """Restore every shard's state at the start of the step; see :meth:`StepStart.roll_back`."""
        updates = self._master.shard.step + 1  # the number of the update in progress
        self.own.start_of_step.roll_back(updates)
        self._peers.command(Operation.ROLL_BACK, {"updates": updates})

    def weigh(self, step: int, factor: float) -> None:
        """Multiply the mean gradient of ``step`` on every shard by ``factor``; see :meth:`Shard.weigh`."""
        self._master.weigh(step, factor)
        self._peers.command(Operation.WEIGH, {"step": step, "factor": factor})

    def advance(self, value: float, step: int) -> None:
        """Advance every shard's schedule by a metric; see :meth:`ShardMaster.advance`."""
        self._master.advance(value, step)
        self._peers.command(Operation.ADVANCE, {"value": value, "step": step})

    def norms(self) -> dict[str, list[float]]:
        """Return the norms of the pieces of the uncommitted gradient, by parameter."""
        norms = self._master.norms()
        for others in self._peers.ask(Operation.NORMS):
            for name, more in others.items():
                norms.setdefault(name, []).extend(more)
        return norms

    def states(self) -> list[Mapping[str, Any]]:
        """Copy the state of every shard."""
        return [self._master.state(), *self._peers.request(Peer.state)]

    def facts(self) -> list[Mapping[str, Any]]:
        """Return the load of every server since the last call."""
        return [self.own.facts(), *self._peers.ask(Operation.FACTS)]

    def stop(self) -> None:
        """Tell every server that the run is over."""
        self._master.log.ended.set()
        self._peers.command(Operation.STOP, {})
