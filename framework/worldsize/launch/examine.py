"""One host's part in examining the cluster: its own facts, the connection of all hosts, and measurements by processes.

Every host writes its facts to the run's folder and sends them to the first host, so that neither a blocked port nor a
folder that cannot be written hides the rest.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypedDict

import torch
from rich.console import Console

from worldsize.config.settings import Settings
from worldsize.core import Cluster, Plan, Recipe
from worldsize.devices import device_count
from worldsize.errors import WorldsizeError
from worldsize.launch.agents import Follower, Lead
from worldsize.launch.host_check import facts_of
from worldsize.launch.meeting import PortProbe, arrivals, probe_all, reach
from worldsize.launch.node import NodeLauncher
from worldsize.net.agent_connection import AgentConnection, HeartbeatSender, RemoteAgent
from worldsize.net.credentials import read_key
from worldsize.net.handshake import Message
from worldsize.plan.doctor.evaluate import evaluate
from worldsize.plan.doctor.findings import REPORT, read_facts, read_findings, write_facts
from worldsize.record.run_directory import RunDirectory
from worldsize.strict_json import strict
from worldsize.world.environments import Node
from worldsize.world.topology import address_towards, interface_of, interfaces

_logger = logging.getLogger(__name__)

_CLOCK_REQUESTS = 5  # number of requests for a host's clock
_VISIBLE = 3.0  # seconds within which a file written by one host must be visible to another
_POLL = 0.05
_COLUMNS = 160  # of a table in a log


class Meeting(TypedDict, total=False):
    """The findings of all hosts after they have met.

    Attributes:
        hosts: The facts of each host that came, the first one's first.
        clocks: Seconds by which the clock of each other host is ahead, by rank.
        unreached: Ports that each host could not reach, by its rank.
        unseen: Why the first host does not see what another has written, or the reverse, by that one's rank.
        skipped: Why no processes measure; None: they do.
        outcome: How the processes that measured have ended.
    """

    hosts: Sequence[Message]
    clocks: dict[int, float]
    unreached: dict[int, Any]
    unseen: dict[int, str]
    skipped: str | None
    outcome: Mapping[str, Any]


def examine(
    settings: Settings, launcher: NodeLauncher, plan: Plan, run: RunDirectory, place: Node, *, port: int = 0
) -> int:
    """Examine this host until the first host has all findings; return the exit code."""
    waits = {"patience": plan.cluster.timeout, "silence": launcher.node_timeout}
    facts = _facts(settings, run, place, port)
    connection, others, meeting = None, list[RemoteAgent](), Meeting()
    with _port_probe(facts):  # closed before processes are forked, since it has a thread
        facts["folder"]["error"] = _write_facts(run, facts)
        if place.rank:
            connection = _join(run, place, facts, port, waits)
        else:
            others, meeting = _meet(run, place, facts, port, waits)
    if place.rank == 0:
        try:
            return _measure(Lead.of(launcher, place, others), plan, run, meeting)
        finally:
            leave_report(settings, run)
    return Follower(launcher, plan, place, connection).follow() if connection else 1


# ---------------------------------------------------------------- one host alone


def _facts(settings: Settings, run: RunDirectory, place: Node, port: int) -> dict[str, Any]:
    return {
        **facts_of(settings.recipe, place),
        "data": _unreadable(settings.recipe),
        "folder": {"path": str(run.path), "error": None, "free": shutil.disk_usage(run.path).free},
        "cpus": len(os.sched_getaffinity(0)),
        "devices": device_count(settings.cluster.device) if settings.cluster.device != "cpu" else 0,
        "first": _first(place, port),
        "interface": _interface(settings.cluster, place),
        "interfaces": interfaces(),
        "nonce": secrets.token_hex(8),
    }


def _unreadable(recipe: Recipe) -> list[str]:
    """List the data files that cannot be read, each with the cause."""
    unreadable = []
    for name, path in recipe.files().items():
        try:
            path.open("rb").close()
        except OSError as error:
            unreadable.append(f"{name}: {error.strerror} ({path})")
    return unreadable


def _first(place: Node, port: int) -> dict[str, Any] | None:
    """Resolve the name of the first host; None if there is no other host."""
    if place.count == 1:
        return None
    try:
        return {"name": place.first, "port": port, "address": address_towards(place.first or ""), "error": None}
    except OSError as error:
        return {"name": place.first, "port": port, "address": None, "error": str(error)}


def _interface(cluster: Cluster, place: Node) -> dict[str, Any] | None:
    """Describe the interface of the collectives, and the one that ``leads`` to the first host; None on one host."""
    if place.count == 1:
        return None
    try:
        leads = interface_of(address_towards(place.first or ""))
    except OSError:
        leads = None
    name, there = cluster.interface or leads, interfaces()
    known = ", ".join(f"{each} {facts['address']}" for each, facts in there.items())
    error = None if name in there else f"no interface {name} with an IPv4 address; there are {known}"
    return {"name": name, "address": there[name]["address"] if name in there else None, "leads": leads, "error": error}


@contextmanager
def _port_probe(facts: Mapping[str, Any]) -> Iterator[None]:
    """Open a port that the other hosts probe, if this host has the address."""
    interface = facts["interface"]
    if not interface or interface["error"]:
        yield
        return
    with PortProbe(interface["address"], facts["node"]) as probe:
        interface["probe"] = probe.port
        yield


def _write_facts(run: RunDirectory, facts: Mapping[str, Any]) -> str | None:
    """Write the facts of this host to the run's folder; return why that failed, None if it did not."""
    try:
        write_facts(run.findings, f"node_{facts['node']:05d}", {**facts, "written": time.time()})
    except OSError as error:
        _logger.error("%s cannot be written: %s", run.path, error.strerror)
        return str(error.strerror)
    return None


def _unseen(run: RunDirectory, facts: Message) -> str | None:
    """Wait for a file that another host wrote; return why it is not visible here, None if it is or was not written."""
    deadline = time.monotonic() + _VISIBLE
    while facts["folder"]["error"] is None:
        if read_facts(run.findings, f"node_{facts['node']:05d}").get("nonce") == facts["nonce"]:
            return None
        if time.monotonic() > deadline:
            return f"what {facts['host']} has written is not seen within {_VISIBLE:g} s"
        time.sleep(_POLL)
    return None


# ---------------------------------------------------------------- all hosts


def _join(
    run: RunDirectory, place: Node, facts: Mapping[str, Any], port: int, waits: Mapping[str, float]
) -> AgentConnection | None:
    """Connect to the first host and answer its requests; return None if it cannot be reached."""
    try:
        connection = reach(place, port, read_key(run.path), facts=facts, **waits)
        with HeartbeatSender([connection], waits["silence"]):
            while "probes" not in (question := connection.receive()):
                connection.send(clock=time.time())
            connection.send(unreached=probe_all(question["probes"], place.rank), unseen=_unseen(run, question["first"]))
            connection.receive()  # all hosts have probed
        return connection
    except (WorldsizeError, OSError) as error:
        _logger.error("%s", error)
        _write_facts(run, {**facts, "unreached": str(error.__cause__ or error)})
        return None


def _meet(
    run: RunDirectory, place: Node, facts: dict[str, Any], port: int, waits: Mapping[str, float]
) -> tuple[list[RemoteAgent], Meeting]:
    """Wait on the first host for the others; return which hosts connected, and what they found."""
    if place.count == 1:
        return [], {"hosts": [facts]}
    try:
        agents = arrivals(place, port, read_key(run.path), **waits)
    except (WorldsizeError, OSError) as error:
        _write_facts(run, {**facts, "refused": f"port {port} cannot be opened: {error.__cause__ or error}"})
        return [], {"hosts": [facts], "skipped": "the hosts have no port to meet at"}
    others, everyone = [other for other, _ in agents], [facts, *(facts_there for _, facts_there in agents)]
    met: Meeting = {"hosts": everyone, "clocks": {}, "unreached": {}, "unseen": {}}
    with HeartbeatSender([other.connection for other in others], waits["silence"]):
        try:
            _ask(run, others, everyone, met)
        except OSError as error:
            met["skipped"] = f"a host has gone away while it was asked: {error}"
    return others, {"skipped": _obstacle(place, met), **met}


def _ask(run: RunDirectory, others: Sequence[RemoteAgent], everyone: Sequence[Message], met: Meeting) -> None:
    """Ask the hosts for their clocks, for ports that they cannot reach, and for files that they cannot see."""
    probes = [
        {"node": facts["node"], "address": facts["interface"]["address"], "port": facts["interface"]["probe"]}
        for facts in everyone
        if not facts["interface"]["error"]
    ]
    for other in others:
        met["clocks"][other.rank] = _ahead(other.connection)
        other.connection.send(probes=probes, first=dict(everyone[0]))
    met["unreached"][0] = probe_all(probes, 0)
    for other, facts in zip(others, everyone[1:], strict=True):
        answer = other.connection.receive()
        met["unreached"][other.rank] = answer["unreached"]
        if why := answer["unseen"] or _unseen(run, facts):
            met["unseen"][other.rank] = why
    for other in others:
        other.connection.send(probed=True)


def _ahead(connection: AgentConnection) -> float:
    """Measure how many seconds another host's clock is ahead, to within half the round trip (Cristian 1989)."""
    answers = []
    for _ in range(_CLOCK_REQUESTS):
        sent_at = time.time()
        connection.send(clock=None)
        their_clock, now = float(connection.receive()["clock"]), time.time()
        answers.append((now - sent_at, their_clock - (sent_at + now) / 2))
    return min(answers)[1]


def _obstacle(place: Node, met: Meeting) -> str | None:
    """Return why no processes can be started, or None if they can."""
    hosts = met["hosts"]
    if len(hosts) < place.count:
        return f"only {len(hosts)} of {place.count} hosts have met"
    if failing := [facts["host"] for facts in hosts if facts["folder"]["error"]]:
        return f"{', '.join(failing)} cannot write the run's folder"
    if failing := [facts["host"] for facts in hosts if facts["interface"]["error"]]:
        return f"{', '.join(failing)} has no such interface"
    return "some hosts do not reach each other" if any(met["unreached"].values()) else None


def leave_report(settings: Settings, run: RunDirectory) -> None:
    """Leave the report in the run's folder, or in this host's output if that cannot be written."""
    cluster = settings.cluster
    findings = read_findings(run.findings, cluster.nodes)
    report = evaluate(findings, cluster, needed_bytes=2 * checkpoint_bytes(settings.recipe))
    try:
        write_facts(run.findings, REPORT, strict(report.as_json()))
    except OSError:  # which the report says, too
        console = Console(width=_COLUMNS, highlight=False)
        console.print(report.table())
        console.out(report.as_line())


def checkpoint_bytes(recipe: Recipe) -> float:
    """Return the bytes of the weights and of Adam's two moments for each."""
    try:
        with torch.device("meta"):
            model = recipe.model()
    except RuntimeError:  # the constructor computes with values, which meta tensors lack
        model = recipe.model()
    return 3.0 * sum(float(tensor.nbytes) for tensor in model.state_dict().values())


def _measure(lead: Lead, plan: Plan, run: RunDirectory, meeting: Meeting) -> int:
    """Start processes that measure on all hosts, unless an obstacle was found."""
    try:
        write_facts(run.findings, "meeting", meeting)  # written now, since the processes may fail
        if not meeting.get("skipped"):
            outcome = lead.launch(plan).wait()
            write_facts(run.findings, "meeting", {**meeting, "outcome": asdict(outcome)})
    except OSError as error:
        _logger.error("%s cannot be written: %s", run.path, error.strerror)
        return 1
    finally:
        for other in lead.others:
            other.announce_end(0)
    return 0
