"""One host's agent: the hosts connect, check that they match, and train under the lead of the first."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import torch._dynamo  # noqa: F401 - takes seconds, like the next import: done here, before others wait for this host

import worldsize.worker.process  # noqa: F401
from worldsize.config.recorded import read_settings
from worldsize.config.search_path import make_importable, roots
from worldsize.config.settings import Settings
from worldsize.core import Plan
from worldsize.data.source import check_paths
from worldsize.errors import ConfigError, FirstHostLostError, WorldsizeError
from worldsize.launch.agents import Follower, Lead
from worldsize.launch.examine import examine
from worldsize.launch.host_check import check_hosts, facts_of
from worldsize.launch.lost_link import come_back, is_left_behind, is_over
from worldsize.launch.meeting import Door, gather, reach
from worldsize.launch.node import NodeLauncher
from worldsize.launch.restarts import run_attempts
from worldsize.net.agent_connection import AgentConnection, RemoteAgent
from worldsize.net.credentials import read_key
from worldsize.net.handshake import Message
from worldsize.record.attempt import failure_of_launcher
from worldsize.record.run_directory import RunDirectory, is_locked
from worldsize.record.run_record import opened
from worldsize.world.environments import Node, job_of, lost_first, meeting_name, node, port_of
from worldsize.world.pinning import FEW_CPUS, few_cpus
from worldsize.world.processes import will_fork

_logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds


def agent(run: RunDirectory) -> int:
    """Run this host's processes until the run ends; return the exit code.

    Raises:
        WorldsizeError: the hosts cannot connect, or differ; nothing was started.
    """
    will_fork()
    secrets = {"WORLDSIZE_SECRETS": value} if (value := os.environ.get("WORLDSIZE_SECRETS")) else {}
    try:
        settings, place = _read(run)
        plan = replace(settings.plan(run.path), secrets=secrets)
    except Exception as error:  # of any kind: plugins and recipes are imported
        _record_failed_start(run, _cause(error), secrets)
        raise
    launcher = settings.launcher if isinstance(settings.launcher, NodeLauncher) else Lead()  # started by hand
    if settings.run.examine:
        return examine(settings, launcher, plan, run, place, port=_port(settings, run))
    if lack := few_cpus(settings.cluster, len(os.sched_getaffinity(0))):
        _logger.warning("%s: %s. %s", socket.gethostname(), lack, FEW_CPUS)
    if place.rank == 0:
        return _lead(settings, launcher, plan, run, place)
    return _follow(settings, launcher, plan, run, place)


def _read(run: RunDirectory) -> tuple[Settings, Node]:
    """Return the run's settings, and this host's place in the run."""
    make_importable([run.plugins, *roots()])  # local copies come before the paths of the host that launched the run
    if not run.config.exists():
        raise ConfigError(
            f"{socket.gethostname()} does not see the run folder {run.path}. All hosts need it: set run.root to a "
            "folder that they share."
        )
    settings = read_settings(run)
    cluster = settings.cluster
    place = node(os.environ, settings.agents.switches(), cluster.tiers, spare_nodes=cluster.spare_nodes)
    if place.count != cluster.all_nodes:
        spare = f" and {cluster.spare_nodes} that wait (cluster.spare_nodes)" if cluster.spare_nodes else ""
        raise ConfigError(
            f"the run is planned for {cluster.nodes} nodes (cluster.nodes){spare}, but started on {place.count}."
        )
    return settings, place


def _record_failed_start(run: RunDirectory, cause: str, secrets: Mapping[str, str]) -> None:
    """Record that the first host has started nothing; it misses the others itself."""
    place = None
    with suppress(ConfigError):
        place = node(os.environ)
    if place and place.rank:
        return
    has_rank = place is not None and place.count > 1
    with suppress(WorldsizeError), opened(run, secrets) as record:
        last = record.attempts[-1].get("failure") if record.attempts else None
        if has_rank or not last or last["cause"] != failure_of_launcher(cause)["cause"]:  # others have the same cause
            record.give_up(cause, unstarted=record.manifest["cluster"]["processes"])


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, WorldsizeError) else f"{type(error).__name__}: {error}"


def _follow(settings: Settings, launcher: NodeLauncher, plan: Plan, run: RunDirectory, place: Node) -> int:
    waits = _waits(settings, launcher)
    if settings.heals:  # its processes must have ended before the others go on without them
        waits["silence"] /= 2
    facts, silence = facts_of(settings.recipe, place), launcher.node_timeout
    join = partial(reach, place, _port(settings, run), read_key(run.path), facts=facts, **waits)
    connection: AgentConnection | None = join()
    while connection:
        follower = Follower(launcher, plan, place, connection)
        try:
            return follower.follow()
        except FirstHostLostError as error:
            connection.close()  # a first host that only slept must notice it
            may_wait = settings.heals and launcher.requeues and not follower.is_asked  # else it is killed soon
            if not (may_wait and is_left_behind(connection, run, silence)):
                if may_wait and is_over(run):  # it had come back when the run ended, and was not told
                    return 0
                raise
            _logger.error("%s It goes on without this one, which joins again once it reaches it.", error)
        connection = come_back(run, partial(join, patience=0.0), silence)
    return 0


def _lead(settings: Settings, launcher: NodeLauncher, plan: Plan, run: RunDirectory, place: Node) -> int:
    others: list[RemoteAgent] = []
    if lost_first(os.environ) or (job_of(os.environ) or {}).get("requeues"):
        _wait_for_lock(run, settings.cluster.timeout)
    with opened(run, plan.secrets) as record, ExitStack() as stack:
        code, door, attempts = 1, None, len(record.attempts)
        try:
            if place.count > 1:
                facts = facts_of(settings.recipe, place)  # takes seconds, so before other hosts connect and wait
                agents = gather(place, _port(settings, run), read_key(run.path), **_waits(settings, launcher))
                others = [other for other, _ in agents]
                others += _absent(place, others)
                check_hosts(settings, facts, [facts_there for _, facts_there in agents])
                if settings.heals:
                    check = partial(_check_host, settings, facts)
                    silence, port = launcher.node_timeout, _port(settings, run)
                    door = stack.enter_context(Door(place, port, read_key(run.path), check, silence=silence))
            check_paths(settings.recipe)  # on this host, after what the others lack was compared with it
            code = run_attempts(settings, Lead.of(launcher, place, others, door), plan, record).exit_code
        except Exception as error:  # of any kind: recipes look for their data
            if len(record.attempts) == attempts:  # the hosts did not meet, or differ
                record.give_up(_cause(error), unstarted=plan.world_size)
            raise
        finally:
            for other in others:
                other.announce_end(code)
        return code


def _absent(place: Node, others: Sequence[RemoteAgent]) -> list[RemoteAgent]:
    """Return what stands for the hosts that are not there: the last ones, without those that have come meanwhile."""
    names = dict(zip(range(place.expected.stop, place.count), place.absent, strict=True))
    return [RemoteAgent.absent(rank, names[rank]) for rank in sorted(names.keys() - {each.rank for each in others})]


def _wait_for_lock(run: RunDirectory, patience: float) -> None:
    """Wait until the lock of a lost host is released, which some file systems do after a while."""
    deadline = time.monotonic() + patience
    while is_locked(run.path) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _check_host(settings: Settings, first: Message, other: Message) -> None:
    check_hosts(settings, first, [other])


def _waits(settings: Settings, launcher: NodeLauncher) -> dict[str, float]:
    return {"patience": settings.cluster.timeout, "silence": launcher.node_timeout}


def _port(settings: Settings, run: RunDirectory) -> int:
    return settings.agents.port or port_of(meeting_name(run.id, os.environ))
