"""Runs one host's agent: it connects to the others, compares hosts, and leads or follows."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import torch._dynamo  # noqa: F401 - takes seconds, like the next import; done before other hosts wait for this one

import worldsize.worker.process  # noqa: F401
from worldsize.config.recorded import read_settings
from worldsize.config.schema import AgentsConfig
from worldsize.config.search_path import list_search_roots, make_importable
from worldsize.config.settings import Settings
from worldsize.core import Plan
from worldsize.data.source import check_paths
from worldsize.errors import ConfigError, FirstHostLostError, WorldsizeError
from worldsize.healing.lost_link import come_back, is_left_behind, is_over
from worldsize.launch.agents import Follower, Lead
from worldsize.launch.examine import examine_cluster
from worldsize.launch.host_check import check_hosts, collect_host_facts
from worldsize.launch.meeting import Door, gather_agents, reach_first_host
from worldsize.launch.node import NodeLauncher
from worldsize.launch.restarts import run_attempts
from worldsize.net.agent_connection import AgentConnection, RemoteAgent
from worldsize.net.credentials import read_key
from worldsize.record.attempt import failure_of_launcher
from worldsize.record.run_directory import RunDirectory, is_locked
from worldsize.record.run_record import open_record
from worldsize.world.environments import Node, derive_port, meeting_name, read_job, read_lost_first, read_node
from worldsize.world.pinning import FEW_CPUS, few_cpus
from worldsize.world.processes import will_fork

_logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds between two checks of the lock


def agent(run: RunDirectory) -> int:
    """Run this host's processes until the run ends; return the exit code.

    Raises:
        WorldsizeError: the hosts cannot connect or do not match; nothing was started.
    """
    will_fork()
    secrets = {"WORLDSIZE_SECRETS": value} if (value := os.environ.get("WORLDSIZE_SECRETS")) else {}
    try:
        settings, place = _read_settings(run)
        plan = replace(settings.create_plan(run.path), secrets=secrets)
    except Exception as error:  # imported plugins and recipes may raise anything
        _record_failed_start(run, _format_cause(error), secrets)
        raise
    launcher = settings.launcher if isinstance(settings.launcher, NodeLauncher) else Lead()  # agent started by hand
    if settings.run.examine:
        return examine_cluster(settings.recipe, launcher, plan, run, place, port=_get_port(settings.agents, run))
    if lack := few_cpus(settings.cluster, len(os.sched_getaffinity(0))):
        _logger.warning("%s: %s. %s", socket.gethostname(), lack, FEW_CPUS)
    if place.rank == 0:
        return _run_leader(settings, launcher, plan, run, place)
    return _run_follower(settings, launcher, plan, run, place)


def _read_settings(run: RunDirectory) -> tuple[Settings, Node]:
    """Return the run's settings, and this host as a node of the run."""
    make_importable([run.plugins, *list_search_roots()])  # local copies take precedence over the launching host's paths
    if not run.config.exists():
        raise ConfigError(
            f"the run folder {run.path} is not visible on {socket.gethostname()}. "
            "Set run.root to a folder shared by all hosts."
        )
    settings = read_settings(run)
    cluster = settings.cluster
    place = read_node(os.environ, settings.agents.switches(), cluster.tiers, spare_nodes=cluster.spare_nodes)
    if place.count != cluster.all_nodes:
        spare = f" and cluster.spare_nodes={cluster.spare_nodes}" if cluster.spare_nodes else ""
        raise ConfigError(
            f"the run has cluster.nodes={cluster.nodes}{spare}, but was started on {place.count} nodes. Start it on "
            f"{cluster.all_nodes} nodes."
        )
    return settings, place


def _record_failed_start(run: RunDirectory, cause: str, secrets: Mapping[str, str]) -> None:
    """Record in the run folder that no process was started; a no-op on all hosts but the first."""
    place = None
    with suppress(ConfigError):
        place = read_node(os.environ)
    if place and place.rank:
        return
    has_rank = place is not None and place.count > 1
    with suppress(WorldsizeError), open_record(run, secrets) as record:
        last = record.attempts[-1].get("failure") if record.attempts else None
        if has_rank or not last or last["cause"] != failure_of_launcher(cause)["cause"]:  # not yet recorded
            record.give_up(cause, unstarted=record.manifest["cluster"]["processes"])


def _format_cause(error: Exception) -> str:
    return str(error) if isinstance(error, WorldsizeError) else f"{type(error).__name__}: {error}"


def _run_follower(settings: Settings, launcher: NodeLauncher, plan: Plan, run: RunDirectory, place: Node) -> int:
    waits = {"patience": plan.cluster.timeout, "silence": launcher.node_timeout}
    if settings.heals:  # this host's processes must exit before the other hosts continue
        waits["silence"] /= 2
    facts, silence = collect_host_facts(settings.recipe, place), launcher.node_timeout
    join = partial(reach_first_host, place, _get_port(settings.agents, run), read_key(run.path), facts=facts, **waits)
    connection: AgentConnection | None = join()
    while connection:
        follower = Follower(launcher, plan, place, connection)
        try:
            return follower.follow_leader()
        except FirstHostLostError as error:
            connection.close()  # a first host that was only suspended then notices the loss
            may_wait = settings.heals and launcher.requeues and not follower.is_asked  # not if about to be killed
            if not (may_wait and is_left_behind(connection, run, silence)):
                if may_wait and is_over(run):  # the first host returned and ended the run in the meantime
                    return 0
                raise
            _logger.error(
                "%s The run continues without this host, which rejoins when the first node is reachable again.", error
            )
        connection = come_back(run, partial(join, patience=0.0), silence)
    return 0


def _run_leader(settings: Settings, launcher: NodeLauncher, plan: Plan, run: RunDirectory, place: Node) -> int:
    others: list[RemoteAgent] = []
    if read_lost_first(os.environ) or (read_job(os.environ) or {}).get("requeues"):
        _wait_for_lock(run, settings.cluster.timeout)
    with open_record(run, plan.secrets) as record, ExitStack() as stack:
        code, door, attempts = 1, None, len(record.attempts)
        try:
            if place.count > 1:
                facts = collect_host_facts(settings.recipe, place)  # slow, so done before others wait
                timeout, silence, port = (
                    settings.cluster.timeout,
                    launcher.node_timeout,
                    _get_port(settings.agents, run),
                )
                agents = gather_agents(place, port, read_key(run.path), patience=timeout, silence=silence)
                others = [other for other, _ in agents]
                others += _create_absent_agents(place, others)
                check = partial(check_hosts, facts, on_mismatch=settings.agents.on_node_mismatch)
                check([facts_there for _, facts_there in agents])
                if settings.heals:
                    door = Door(place, port, read_key(run.path), lambda other: check([other]), silence=silence)
                    stack.enter_context(door)
            check_paths(settings.recipe)  # for this host; check_hosts reports differences between hosts first
            lead, steps = Lead.from_launcher(launcher, place, others, door), settings.training.steps
            code = run_attempts(lead, settings.strategy, plan, record, steps=steps).exit_code
        except Exception as error:  # a recipe may raise anything when it checks its data
            if len(record.attempts) == attempts:  # failed before the first attempt
                record.give_up(_format_cause(error), unstarted=plan.world_size)
            raise
        finally:
            for other in others:
                other.announce_end(code)
        return code


def _create_absent_agents(place: Node, others: Sequence[RemoteAgent]) -> list[RemoteAgent]:
    """Return placeholders for the absent hosts, except those that have connected meanwhile."""
    names = dict(zip(range(place.expected.stop, place.count), place.absent, strict=True))
    return [
        RemoteAgent.create_absent(rank, names[rank]) for rank in sorted(names.keys() - {each.rank for each in others})
    ]


def _wait_for_lock(run: RunDirectory, patience: float) -> None:
    """Wait up to ``patience`` seconds for a lost host's lock; some file systems release it late."""
    deadline = time.monotonic() + patience
    while is_locked(run.path) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _get_port(agents: AgentsConfig, run: RunDirectory) -> int:
    return agents.port or derive_port(meeting_name(run.id, os.environ))
