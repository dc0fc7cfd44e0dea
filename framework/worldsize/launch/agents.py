"""Runs one agent per host: the first host's agent leads the run, the others follow it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, final

from torch.distributed import TCPStore

from worldsize.core import Failure, Job, Launcher, Outcome, Plan
from worldsize.errors import FirstHostLostError
from worldsize.healing.lost_link import LossPolicy
from worldsize.launch.gang import Gang
from worldsize.launch.meeting import Door
from worldsize.launch.node import NodeLauncher, NodeRendezvous, health_processes, start_process
from worldsize.launch.outpost import Outpost
from worldsize.launch.remote import RemoteHosts
from worldsize.net.agent_connection import AgentConnection, HeartbeatSender, Mailbox, RemoteAgent
from worldsize.net.handshake import Message
from worldsize.world.environments import Node
from worldsize.world.processes import PREEMPTED
from worldsize.world.roles import can_heal
from worldsize.world.scratch import socket_folder
from worldsize.world.topology import address_towards, find_interface
from worldsize.world.topology import variables as network_variables


@final
@dataclass(frozen=True)
class Lead(NodeLauncher, Launcher):
    """The first host's agent: a launcher that runs attempts on all hosts."""

    node: Node = field(default_factory=Node)
    others: list[RemoteAgent] = field(default_factory=list)
    door: Door | None = None  # admits returning hosts to a healing gang
    losses: LossPolicy = field(default_factory=LossPolicy)  # decides whether to continue without a lost host

    @staticmethod
    def from_launcher(launcher: NodeLauncher, node: Node, others: list[RemoteAgent], door: Door | None = None) -> Lead:
        """Build the first host's launcher, with the options of ``launcher``."""
        own = {each.name: getattr(launcher, each.name) for each in fields(NodeLauncher)}
        losses = LossPolicy(launcher.is_current, launcher.requeues, launcher.node_timeout)
        return Lead(**own, node=node, others=others, door=door, losses=losses)

    @property
    def other_hosts(self) -> Sequence[str]:
        return [other.host for other in self.others if other.is_there]

    def launch(self, plan: Plan) -> Job:
        if not self.others:
            return self.start_node(plan, self.node, NodeRendezvous.from_plan(plan))
        address = address_towards(self.node.first or "")
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        rendezvous, remote = _rendezvous(plan, address, port, address), None
        if can_heal(plan.roles):
            folder, patience = rendezvous.folder, self.node_timeout
            remote = RemoteHosts(self.others, plan, port, folder, patience, self.door, self.losses)
        for other in () if remote else self.others:
            other.outcome = None
            with suppress(OSError):  # the loss is noticed when receiving from this host
                other.connection.send(attempt=plan.attempt, port=port)
        gang = self.start_node(plan, self.node, rendezvous, remote)
        # created after the fork, since the store has a thread
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        if remote:
            return _Healing(gang, remote, self.node_timeout, store)
        return _Joint(plan.attempt, gang, self.others, self.node_timeout, store)

    def describe(self, plan: Plan) -> str:
        return f"{plan.world_size} processes on {self.node.count} hosts"


@final
@dataclass
class _Joint(Job):
    """The job of a run on several hosts, each with its own gang of processes."""

    attempt: int
    gang: Gang  # this host's processes
    others: Sequence[RemoteAgent]
    patience: float
    store: TCPStore  # the ranks' rendezvous store, kept open while they run

    def wait(self) -> Outcome:
        threads = [threading.Thread(target=self._receive_outcome, args=(other,), daemon=True) for other in self.others]
        with HeartbeatSender([other.connection for other in self.others], self.patience):
            for thread in threads:
                thread.start()
            own = self.gang.wait()
            if own.exit_code not in (0, PREEMPTED):
                self._abort_others()
            for thread in threads:
                thread.join()
        return combine_outcomes([own, *(other.outcome for other in self.others if other.outcome)])

    def cancel(self) -> None:
        self.gang.cancel()

    def _receive_outcome(self, other: RemoteAgent) -> None:
        try:
            message = other.connection.receive()
            other.outcome = _parse_outcome(message["ended"])
        except OSError:
            cause = f"the host {other.host} (node {other.rank}) did not respond for {self.patience:g} s or disconnected"
            other.outcome = Outcome("failed", 1, Failure("node", other.rank, cause, 1, host=other.host))
        if other.outcome.exit_code not in (0, PREEMPTED):
            self._abort_others()
            self.gang.abort()

    def _abort_others(self) -> None:
        for other in self.others:
            with suppress(OSError):
                other.connection.send(abort=self.attempt)


@final
@dataclass
class _Healing(Job):
    """The job of a healing run on several hosts: a single gang, led by the first host."""

    gang: Gang
    others: RemoteHosts
    patience: float
    store: TCPStore  # the members' rendezvous store, kept open while they run

    def wait(self) -> Outcome:
        with HeartbeatSender(self.others.connections, self.patience):
            self.others.start_listeners()
            outcome = self.gang.wait()
            self.others.end_attempts()
        return outcome

    def cancel(self) -> None:
        self.gang.cancel()


def combine_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of a run's hosts; the earliest failure is the cause.

    In a healing gang, all processes of a host may be dead or spares, so the last step is the maximum over the hosts.
    """
    outcome, last = _choose_outcome(outcomes), max((each.steps[1] for each in outcomes if each.steps), default=0)
    if not outcome.memberships or not outcome.steps:
        return outcome
    return replace(outcome, steps=(outcome.steps[0], last))


def _choose_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    failed = [outcome for outcome in outcomes if outcome.failure]
    if failed:
        return min(failed, key=lambda outcome: outcome.failure.time_ns if outcome.failure else 0)
    first, reasons = outcomes[0], {outcome.exit_reason for outcome in outcomes}
    for reason in ("interrupted", "preempted"):
        if reason in reasons:
            return next(outcome for outcome in outcomes if outcome.exit_reason == reason)
    return first


def _parse_outcome(facts: dict[str, Any]) -> Outcome:
    failure = Failure(**facts.pop("failure")) if facts["failure"] else facts.pop("failure")
    steps = facts.pop("steps")
    return Outcome(**facts, failure=failure, steps=tuple(steps) if steps else None)


def _build_network_variables(plan: Plan, address: str) -> dict[str, str]:
    return network_variables(plan.cluster.backend, plan.cluster.interface or find_interface(address), plan.cluster.hca)


def _rendezvous(plan: Plan, first: str, port: int, address: str) -> NodeRendezvous:
    """Return this host's rendezvous; all ranks use the store of the first host's agent."""
    store = {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(plan.attempt),
    }
    variables = {**_build_network_variables(plan, address), **store}
    place = f"tcp://{first}:{port}" if can_heal(plan.roles) else "env://"
    return NodeRendezvous(socket_folder(), plan.cluster.processes_per_node, place, variables, address)


@final
class Follower:
    """The agent on a host other than the first; runs local processes as the first host directs."""

    def __init__(self, launcher: NodeLauncher, plan: Plan, node: Node, connection: AgentConnection) -> None:
        self._launcher, self._plan, self._node, self._connection = launcher, plan, node, connection
        self._messages: Mailbox[Message | None] = Mailbox()
        self._gang: Gang | None = None
        self._attempt = 0
        self._aborted = -1  # the last aborted attempt; it may not have started on this host
        self._is_lost = False  # whether the first host is lost, so that its attempts must be aborted
        self.is_asked = False  # whether a signal has asked this host to save and exit

    def follow_leader(self) -> int:
        """Take part in attempts until the first host announces the end; return the exit code.

        Raises:
            FirstHostLostError: the first host is lost.
        """
        threading.Thread(target=self._receive_from_leader, daemon=True, name="listen").start()
        with HeartbeatSender([self._connection], self._launcher.node_timeout):
            while (message := self._messages.get()) is not None:
                if "over" in message:
                    return int(message["over"])
                if can_heal(self._plan.roles):
                    self._serve_attempt(int(message["attempt"]), int(message["port"]))
                else:
                    self._take_part(int(message["attempt"]), int(message["port"]))
        raise FirstHostLostError(
            f"the first node, {self._node.first}, did not respond for {self._launcher.node_timeout:g} s or "
            "disconnected."
        )

    def _receive_from_leader(self) -> None:
        with suppress(OSError):
            while True:
                message = self._connection.receive()
                if "abort" not in message or can_heal(self._plan.roles):
                    self._messages.put(message)
                else:
                    self._call_off(int(message["abort"]))
        self._is_lost = True
        if gang := self._gang:
            gang.abort()
        self._messages.put(None)

    def _call_off(self, attempt: int) -> None:
        self._aborted = attempt
        if (gang := self._gang) and self._attempt == attempt:
            gang.abort()

    def _serve_attempt(self, attempt: int, port: int) -> None:
        """Run this host's processes of a healing gang, as directed by the first host."""
        plan, first = replace(self._plan, attempt=attempt), self._node.first or ""
        rendezvous = _rendezvous(plan, first, port, address_towards(first))
        try:
            outpost = Outpost(partial(start_process, plan, rendezvous), self._messages, self._connection, attempt)
            with ExitStack() as stack:
                for helper in health_processes(plan, self._node):
                    stack.enter_context(helper)
                is_heard = outpost.run()
            self.is_asked = outpost.is_asked
        finally:
            shutil.rmtree(rendezvous.folder, ignore_errors=True)
        if not is_heard:  # send no report, so that a first host that was only suspended notices its loss
            self._messages.put(None)
            return
        with suppress(OSError):  # the listening thread handles a lost connection
            self._connection.send(ended=attempt)

    def _take_part(self, attempt: int, port: int) -> None:
        self._attempt = attempt
        plan, first = replace(self._plan, attempt=attempt), self._node.first or ""
        try:
            rendezvous = _rendezvous(plan, first, port, address_towards(first))
            self._gang = self._launcher.start_node(plan, self._node, rendezvous)
            if self._is_lost or self._aborted == attempt:
                self._gang.abort()
            outcome = self._gang.wait()
        except OSError as error:  # such as a full disk
            host = socket.gethostname()
            cause = f"failed to start processes on the host {host}: {error}"
            outcome = Outcome("failed", 1, Failure("node", self._node.rank, cause, 1, None, time.time_ns(), host))
        self._gang = None
        with suppress(OSError):  # the listening thread handles a lost connection
            self._connection.send(ended=asdict(outcome))
