"""Requests of the server that leads to all shards: its own, and those of the other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from worldsize.strategies.parameter_server.operations import Operation
from worldsize.strategies.parameter_server.peers import Peer, Peers
from worldsize.strategies.parameter_server.server import ShardServer


@final
class AllShards:
    """Every shard of the run, as the server that leads sees them: ``own``, and ``peers`` for the others."""

    def __init__(self, own: ShardServer, peers: Peers) -> None:
        self.own, self._master, self._peers = own, own.master, peers

    def reset(self, step: int, factor: float | None) -> None:
        """Bring every shard to where this server is, which leads from now on; see :meth:`Shard.reset`."""
        self._master.reset(step, factor)
        self._peers.command(Operation.RESET, {"step": step, "factor": factor})

    def apply(self, step: int, factor: float | None) -> None:
        """Commit the update of ``step`` on every shard; see :meth:`Shard.apply`."""
        self._master.apply(step, factor)  # from here on it is decided, also if this server dies
        self._peers.command(Operation.APPLY, {"step": step, "factor": factor})

    def begin(self, step: int) -> None:
        """Have every shard keep where ``step`` begins, which has several updates; see :class:`StepStart`."""
        self.own.start_of_step.keep(step)
        self._peers.command(Operation.BEGIN, {"step": step})

    def roll_back(self) -> None:
        """Bring every shard back to where the step began; see :meth:`StepStart.roll_back`."""
        updates = self._master.shard.step + 1  # after the one in progress
        self.own.start_of_step.roll_back(updates)
        self._peers.command(Operation.ROLL_BACK, {"updates": updates})

    def weigh(self, step: int, factor: float) -> None:
        """Multiply the mean gradient of ``step`` on every shard; see :meth:`Shard.weigh`."""
        self._master.weigh(step, factor)
        self._peers.command(Operation.WEIGH, {"step": step, "factor": factor})

    def norms(self) -> dict[str, list[float]]:
        """Return the norms of the pieces of the gradient that waits for its commit, by parameter."""
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
