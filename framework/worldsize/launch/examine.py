"""Examines the cluster from one host: facts, connections between hosts, and measurements.

Each host both writes its facts to the run's folder and sends them to the first host, so that a blocked port or an
unwritable folder does not hide the other findings.
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

from worldsize.core import Cluster, Plan, Recipe
from worldsize.devices import device_count
from worldsize.errors import WorldsizeError
from worldsize.launch.agents import Follower, Lead
from worldsize.launch.host_check import collect_host_facts
from worldsize.launch.meeting import PortProbe, arrivals, probe_all, reach_first_host
from worldsize.launch.node import NodeLauncher
from worldsize.net.agent_connection import AgentConnection, HeartbeatSender, RemoteAgent
from worldsize.net.credentials import read_key
from worldsize.net.handshake import Message
from worldsize.plan.doctor.evaluate import evaluate
from worldsize.plan.doctor.findings import REPORT, read_facts, read_findings, write_facts
from worldsize.record.run_directory import RunDirectory
from worldsize.strict_json import sanitize_json
from worldsize.world.environments import Node
from worldsize.world.topology import address_towards, find_interface, interfaces

_logger = logging.getLogger(__name__)

_CLOCK_REQUESTS = 5  # number of requests per clock measurement
_VISIBLE = 3.0  # seconds until a file written by one host must be visible on the others
_POLL = 0.05  # seconds between two reads of a file
_COLUMNS = 160  # width of a table in a log


class Meeting(TypedDict, total=False):
    """Findings of all hosts after they have connected.

    Attributes:
        hosts: Facts of each connected host, in rank order.
        clocks: Clock offset of each other host from the first in seconds (positive: ahead), by node rank.
        unreached: Unreachable nodes with the reasons, by the node rank of the host that tried.
        unseen: Reason why a host does not see the first host's file or vice versa, by the host's node rank.
        skipped: Reason why the measuring processes were not started; None if they were.
        outcome: Outcome of the measuring processes.
    """

    hosts: Sequence[Message]
    clocks: dict[int, float]
    unreached: dict[int, Any]
    unseen: dict[int, str]
    skipped: str | None
    outcome: Mapping[str, Any]


def examine_cluster(
    recipe: Recipe, launcher: NodeLauncher, plan: Plan, run: RunDirectory, place: Node, *, port: int = 0
) -> int:
    """Examine this host, and take part in the examination of the cluster; return the exit code."""
    waits = {"patience": plan.cluster.timeout, "silence": launcher.node_timeout}
    facts = _collect_facts(recipe, plan.cluster, run, place, port)
    connection, others, meeting = None, list[RemoteAgent](), Meeting()
    with _port_probe(facts):  # has a thread, so it is closed before forking
        facts["folder"]["error"] = _write_facts(run, facts)
        if place.rank:
            connection = _join_first_host(run, place, facts, port, waits)
        else:
            others, meeting = _meet_hosts(run, place, facts, port, waits)
    if place.rank == 0:
        try:
            return _run_measurements(Lead.from_launcher(launcher, place, others), plan, run, meeting)
        finally:
            leave_report(recipe, plan.cluster, run)
    return Follower(launcher, plan, place, connection).follow_leader() if connection else 1


# ---------------------------------------------------------------- one host


def _collect_facts(recipe: Recipe, cluster: Cluster, run: RunDirectory, place: Node, port: int) -> dict[str, Any]:
    return {
        **collect_host_facts(recipe, place),
        "data": _unreadable(recipe),
        "folder": {"path": str(run.path), "error": None, "free": shutil.disk_usage(run.path).free},
        "cpus": len(os.sched_getaffinity(0)),
        "devices": device_count(cluster.device) if cluster.device != "cpu" else 0,
        "first": _describe_first_host(place, port),
        "interface": _interface(cluster, place),
        "interfaces": interfaces(),
        "nonce": secrets.token_hex(8),
    }


def _unreadable(recipe: Recipe) -> list[str]:
    """List the unreadable data files, each with the cause."""
    unreadable = []
    for name, path in recipe.files().items():
        try:
            path.open("rb").close()
        except OSError as error:
            unreadable.append(f"{name}: {error.strerror} ({path})")
    return unreadable


def _describe_first_host(place: Node, port: int) -> dict[str, Any] | None:
    """Describe the first host: name, port and address; None in a cluster of one host."""
    if place.count == 1:
        return None
    try:
        return {"name": place.first, "port": port, "address": address_towards(place.first or ""), "error": None}
    except OSError as error:
        return {"name": place.first, "port": port, "address": None, "error": str(error)}


def _interface(cluster: Cluster, place: Node) -> dict[str, Any] | None:
    """Describe the interfaces for collectives and to the first host; None with one host."""
    if place.count == 1:
        return None
    try:
        leads = find_interface(address_towards(place.first or ""))
    except OSError:
        leads = None
    name, there = cluster.interface or leads, interfaces()
    known = ", ".join(f"{each} {facts['address']}" for each, facts in there.items())
    error = None if name in there else f"interface {name} not found or without an IPv4 address; available: {known}"
    return {"name": name, "address": there[name]["address"] if name in there else None, "leads": leads, "error": error}


@contextmanager
def _port_probe(facts: Mapping[str, Any]) -> Iterator[None]:
    """Open a port for the other hosts to probe, if this host has the configured interface."""
    interface = facts["interface"]
    if not interface or interface["error"]:
        yield
        return
    with PortProbe(interface["address"], facts["node"]) as probe:
        interface["probe"] = probe.port
        yield


def _write_facts(run: RunDirectory, facts: Mapping[str, Any]) -> str | None:
    """Write this host's facts to the run's folder; return the error, or None if successful."""
    try:
        write_facts(run.findings, f"node_{facts['node']:05d}", {**facts, "written": time.time()})
    except OSError as error:
        _logger.error("failed to write to %s: %s", run.path, error.strerror)
        return str(error.strerror)
    return None


def _wait_for_facts(run: RunDirectory, facts: Message) -> str | None:
    """Wait for a remote host's file; return an error if it is written but stays invisible."""
    deadline = time.monotonic() + _VISIBLE
    while facts["folder"]["error"] is None:
        if read_facts(run.findings, f"node_{facts['node']:05d}").get("nonce") == facts["nonce"]:
            return None
        if time.monotonic() > deadline:
            return f"the file written by {facts['host']} is not visible after {_VISIBLE:g} s"
        time.sleep(_POLL)
    return None


# ---------------------------------------------------------------- all hosts


def _join_first_host(
    run: RunDirectory, place: Node, facts: Mapping[str, Any], port: int, waits: Mapping[str, float]
) -> AgentConnection | None:
    """Connect to the first host and answer its requests; return None if it cannot be reached."""
    try:
        connection = reach_first_host(place, port, read_key(run.path), facts=facts, **waits)
        with HeartbeatSender([connection], waits["silence"]):
            while "probes" not in (question := connection.receive()):
                connection.send(clock=time.time())
            connection.send(
                unreached=probe_all(question["probes"], place.rank), unseen=_wait_for_facts(run, question["first"])
            )
            connection.receive()  # wait until all hosts have probed
        return connection
    except (WorldsizeError, OSError) as error:
        _logger.error("%s", error)
        _write_facts(run, {**facts, "unreached": str(error.__cause__ or error)})
        return None


def _meet_hosts(
    run: RunDirectory, place: Node, facts: dict[str, Any], port: int, waits: Mapping[str, float]
) -> tuple[list[RemoteAgent], Meeting]:
    """On the first host, wait for the others; return those that connected, and the findings."""
    if place.count == 1:
        return [], {"hosts": [facts]}
    try:
        agents = arrivals(place, port, read_key(run.path), **waits)
    except (WorldsizeError, OSError) as error:
        _write_facts(run, {**facts, "refused": f"failed to open port {port}: {error.__cause__ or error}"})
        return [], {"hosts": [facts], "skipped": "the first host failed to open the rendezvous port"}
    others, everyone = [other for other, _ in agents], [facts, *(facts_there for _, facts_there in agents)]
    met: Meeting = {"hosts": everyone, "clocks": {}, "unreached": {}, "unseen": {}}
    with HeartbeatSender([other.connection for other in others], waits["silence"]):
        try:
            _query_hosts(run, others, everyone, met)
        except OSError as error:
            met["skipped"] = f"a host disconnected during the measurements: {error}"
    return others, {"skipped": _obstacle(place, met), **met}


def _query_hosts(run: RunDirectory, others: Sequence[RemoteAgent], everyone: Sequence[Message], met: Meeting) -> None:
    """Add each host's clock offset, unreachable ports and invisible files to ``met``."""
    probes = [
        {"node": facts["node"], "address": facts["interface"]["address"], "port": facts["interface"]["probe"]}
        for facts in everyone
        if not facts["interface"]["error"]
    ]
    for other in others:
        met["clocks"][other.rank] = _measure_clock_offset(other.connection)
        other.connection.send(probes=probes, first=dict(everyone[0]))
    met["unreached"][0] = probe_all(probes, 0)
    for other, facts in zip(others, everyone[1:], strict=True):
        answer = other.connection.receive()
        met["unreached"][other.rank] = answer["unreached"]
        if why := answer["unseen"] or _wait_for_facts(run, facts):
            met["unseen"][other.rank] = why
    for other in others:
        other.connection.send(probed=True)


def _measure_clock_offset(connection: AgentConnection) -> float:
    """Measure a host's clock offset in seconds, to within half the round trip (Cristian 1989)."""
    answers = []
    for _ in range(_CLOCK_REQUESTS):
        sent_at = time.time()
        connection.send(clock=None)
        their_clock, now = float(connection.receive()["clock"]), time.time()
        answers.append((now - sent_at, their_clock - (sent_at + now) / 2))
    return min(answers)[1]


def _obstacle(place: Node, met: Meeting) -> str | None:
    """Return the reason why the measuring processes cannot be started; None if they can."""
    hosts = met["hosts"]
    if len(hosts) < place.count:
        return f"only {len(hosts)} of {place.count} hosts connected"
    if failing := [facts["host"] for facts in hosts if facts["folder"]["error"]]:
        return f"{', '.join(failing)} cannot write to the run folder"
    if failing := [facts["host"] for facts in hosts if facts["interface"]["error"]]:
        return f"interface not found on {', '.join(failing)}"
    return "some hosts cannot reach each other" if any(met["unreached"].values()) else None


def leave_report(recipe: Recipe, cluster: Cluster, run: RunDirectory) -> None:
    """Write the report to the run's folder, or print it if the folder is not writable."""
    findings = read_findings(run.findings, cluster.nodes)
    report = evaluate(findings, cluster, needed_bytes=2 * checkpoint_bytes(recipe))
    try:
        write_facts(run.findings, REPORT, sanitize_json(report.to_json()))
    except OSError:  # the report mentions this error, too
        console = Console(width=_COLUMNS, highlight=False)
        console.print(report.build_table())
        console.out(report.format_log_line())


def checkpoint_bytes(recipe: Recipe) -> float:
    """Estimate the bytes of a checkpoint: three times the model's state, for Adam's two moments."""
    try:
        with torch.device("meta"):
            model = recipe.model()
    except RuntimeError:  # the constructor needs values, which meta tensors lack
        model = recipe.model()
    return 3.0 * sum(float(tensor.nbytes) for tensor in model.state_dict().values())


def _run_measurements(lead: Lead, plan: Plan, run: RunDirectory, meeting: Meeting) -> int:
    """Run the measuring processes unless ``meeting`` skips them; return the exit code."""
    try:
        write_facts(run.findings, "meeting", meeting)  # written before the processes, which may fail
        if not meeting.get("skipped"):
            outcome = lead.launch(plan).wait()
            write_facts(run.findings, "meeting", {**meeting, "outcome": asdict(outcome)})
    except OSError as error:
        _logger.error("failed to write to %s: %s", run.path, error.strerror)
        return 1
    finally:
        for other in lead.others:
            other.announce_end(0)
    return 0
