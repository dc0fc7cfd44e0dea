"""The first host's gang starts, messages and ends remote processes through their agent, as if they were local."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from worldsize.core import Block, Cluster, Plan, Role
from worldsize.healing.lost_link import LossPolicy
from worldsize.healing.membership import receive_message, send_message
from worldsize.launch.members import LostHostError, Member
from worldsize.launch.node import NodeRendezvous
from worldsize.launch.outpost import Outpost
from worldsize.launch.remote import RemoteHosts
from worldsize.net.agent_connection import AgentConnection, HeartbeatSender, Mailbox, RemoteAgent
from worldsize.net.handshake import MessageSeal
from worldsize.world.processes import Heartbeat

SILENCE = 60.0  # seconds; hosts are lost here by closed connections


def connected() -> tuple[AgentConnection, AgentConnection]:
    """Connect the first host with a second; return both ends."""
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    accepted, _ = ours.accept()
    ours.close()
    one, other = b"1" * 32, b"2" * 32
    return (
        AgentConnection(accepted, MessageSeal(sending=one, receiving=other), SILENCE),
        AgentConnection(theirs, MessageSeal(sending=other, receiving=one), SILENCE),
    )


def body(pipe: Any, heartbeat: Path) -> None:
    """Answer each message with its double; exit with the code in a message."""
    beats = Heartbeat(heartbeat, 4)
    while True:
        message = receive_message(pipe)
        beats.step(5)
        if "end" in message:
            os._exit(message["end"])
        send_message(pipe, {"stopped": 2 * message["number"]})


class Pair:
    """A first and a second host, each with the threads of an agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gang").mkdir()
        self.first, self.other = connected()
        cluster = Cluster("ssh", nodes=2, processes=2, device="cpu", backend="gloo")
        plan = Plan(folder, cluster, {"worker": Role(2, restart="heal")}, {}, attempt=3)
        self.mail: Mailbox[Any] = Mailbox()
        self.beats = HeartbeatSender([self.first, self.other], SILENCE)
        agents = [RemoteAgent(1, "h2", self.first)]
        self.hosts = RemoteHosts(agents, plan, 1, folder / "gang", SILENCE, None, LossPolicy())
        self.left: list[bool] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def serve(self) -> None:
        """Play the second host's agent in an attempt."""
        assert self.mail.get() == {"attempt": 3, "port": 1}
        self.left.append(Outpost(self._start, self.mail, self.other, 3).run())
        with suppress(OSError):  # the first host has lost this one
            self.other.send(ended=3)

    def _listen(self) -> None:
        try:
            while True:
                self.mail.put(self.other.receive())
        except OSError:
            self.mail.put(None)

    def _start(self, role: str, rank: int, starts: int) -> Member:
        if starts == 7:
            raise OSError("no more processes")
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        beat = self.folder / f"own_{rank}_{starts}"
        process = context.Process(target=body, args=(theirs, beat), daemon=True)
        process.start()
        theirs.close()
        return Member(role, rank, process, self.folder / "log", self.folder / "error", beat, ours)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    agent = threading.Thread(target=pair.serve, daemon=True)
    with pair.beats:
        pair.hosts.start_listeners()
        agent.start()
        yield pair
        pair.hosts.end_attempts()
        agent.join(120)
        pair.first.close()
        pair.other.close()
    assert not agent.is_alive()


@pytest.fixture(autouse=True)
def signals_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an outpost in a thread, where signal handlers cannot be set."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_: None)


def test_those_that_join_later_are_dealt_to_the_hosts_in_groups_that_share_one(tmp_path: Path) -> None:
    cluster = Cluster("ssh", nodes=2, processes=4, device="cpu", backend="gloo")
    plan = Plan(tmp_path, cluster, {"worker": Role(4, restart="heal", blocks=(Block(2, together=2),))}, {})
    ours, theirs = connected()
    hosts = RemoteHosts([RemoteAgent(1, "h2", ours)], plan, 1, tmp_path, SILENCE, None, LossPolicy())
    assert [hosts.find_node(rank) for rank in range(12)] == [0, 0, 1, 1] * 3
    rendezvous = NodeRendezvous(tmp_path, 2, "", {})
    assert [rendezvous.placement(plan, rank).local_rank for rank in range(12)] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    servers = replace(plan, roles={"worker": Role(4, restart="individual")})  # later ones are on the first host
    later = [rendezvous.placement(servers, rank) for rank in range(4, 7)]
    assert [(place.node_rank, place.local_rank) for place in later] == [(0, 2), (0, 3), (0, 4)]
    ours.close()
    theirs.close()


def started(pair: Pair, starts: int = 0) -> Member:
    member = pair.hosts.start_remote_process("worker", 1, starts)
    assert member is not None
    return member


def test_a_process_is_told_and_heard_and_leaves_its_progress_and_its_code(pair: Pair) -> None:
    member = started(pair)
    assert member.pipe is not None
    send_message(member.pipe, {"number": 21})
    assert wait([member.pipe], 120)  # type: ignore[list-item]
    assert receive_message(member.pipe) == {"stopped": 42}
    assert member.process.is_alive()
    assert member.process.pid != os.getpid()
    send_message(member.pipe, {"end": 9})
    assert wait([member.process.sentinel], 120)
    ending = member.read_ending()
    assert (ending.exit_code, ending.error) == (9, None)
    assert ending.beat is not None
    assert (ending.beat.first, ending.beat.done) == (4, 5)


def test_a_process_is_killed_and_another_takes_its_place(pair: Pair) -> None:
    member = started(pair)
    member.process.kill()
    member.process.join()
    assert member.process.exitcode == -signal.SIGKILL
    assert member.read_ending().cause == "killed by SIGKILL"
    again = started(pair, 1)
    assert again.process.is_alive()
    failed = started(pair, 7)
    failed.process.join()
    assert "failed to start: no more processes" in failed.read_ending().cause


def test_processes_of_the_first_host_are_started_there(pair: Pair) -> None:
    assert pair.hosts.start_remote_process("worker", 0, 0) is None
    assert pair.hosts.find_node(2) == 0  # later processes go to each host in turn
    assert pair.hosts.find_node(3) == 1


def test_processes_of_spare_nodes_follow_those_of_the_plan(pair: Pair, tmp_path: Path) -> None:
    cluster = Cluster("ssh", nodes=2, processes=4, device="cpu", backend="gloo", spare_nodes=1)
    plan = Plan(tmp_path, cluster, {"worker": Role(4, restart="heal")}, {})
    ends = [connected(), connected()]
    agents = [RemoteAgent(node, f"h{node + 1}", ends[node - 1][0]) for node in (1, 2)]
    hosts = RemoteHosts(agents, plan, 1, tmp_path, SILENCE, None, LossPolicy())
    assert [hosts.find_node(number) for number in range(10)] == [0, 0, 1, 1, 2, 2, 0, 1, 2, 0]
    rendezvous = NodeRendezvous(tmp_path, 2, "", {})
    places = [rendezvous.placement(plan, number) for number in range(10)]
    assert [place.local_rank for place in places] == [0, 1, 0, 1, 0, 1, 2, 2, 2, 3]
    assert [place.node_rank for place in places] == [hosts.find_node(number) for number in range(10)]
    assert [place.variables()["GROUP_RANK"] for place in places[5:8]] == ["2", "0", "1"]
    for pair_of_ends in ends:
        for end in pair_of_ends:
            end.close()


def test_a_lost_host_is_the_end_of_all_its_processes_and_of_none_by_its_own_error(pair: Pair) -> None:
    member = started(pair)
    assert member.pipe is not None
    send_message(member.pipe, {"number": 1})
    assert wait([member.pipe], 120)  # type: ignore[list-item]
    pair.other.close()
    assert wait([member.process.sentinel], 120)
    ending = member.read_ending()
    assert ending.cause == "the host h2 (node 1) did not respond for 60 s or disconnected"
    assert not ending.has_failed_itself
    with pytest.raises(LostHostError, match="the host h2 is lost"):
        started(pair, 1)
    deadline = time.monotonic() + 120
    while pair.left != [False]:  # the agent has ended its processes
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_first_host_that_leads_no_more_ends_instead_of_going_on_without_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Mailbox[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.put((pid, number)))
    first, other = connected()
    cluster = Cluster("slurm", nodes=2, processes=2, device="cpu", backend="gloo")
    plan = Plan(tmp_path, cluster, {"worker": Role(2, restart="heal")}, {})
    hosts = RemoteHosts([RemoteAgent(1, "h2", first)], plan, 1, tmp_path, SILENCE, None, LossPolicy(lambda: False))
    hosts.start_listeners()
    other.close()
    assert killed.get() == (os.getpid(), signal.SIGKILL)
    hosts.end_attempts()
    first.close()


class _Door:
    """Stands for a rejoin listener with one returned host."""

    def __init__(self, agent: RemoteAgent) -> None:
        self.arrivals: Mailbox[RemoteAgent] = Mailbox()
        self.arrivals.put(agent)


def test_the_gang_does_not_wait_while_it_is_asked_whether_this_host_still_leads(tmp_path: Path) -> None:
    """The gang's loop accepts a returned host before its loss was noticed."""
    ends, answered, asked = [connected(), connected()], threading.Event(), threading.Event()
    answers: Mailbox[bool] = Mailbox()

    def may_go_on() -> bool:
        asked.set()
        answers.put(answered.wait(120))
        return True

    door: Any = _Door(RemoteAgent(1, "h2", ends[1][0]))
    cluster = Cluster("slurm", nodes=2, processes=2, device="cpu", backend="gloo")
    plan = Plan(tmp_path, cluster, {"worker": Role(2, restart="heal")}, {})
    hosts = RemoteHosts([RemoteAgent(1, "h2", ends[0][0])], plan, 1, tmp_path, SILENCE, door, LossPolicy(may_go_on))
    hosts.start_listeners()
    assert [*hosts.admit_host(set())] == [1]
    assert asked.wait(120)
    answered.set()
    assert answers.get()  # otherwise the gang continued only after the question timed out
    for ours, theirs in ends:
        theirs.close()
        ours.close()
    hosts.end_attempts()
