"""``worldsize agent RUN``: one host's part of a run; a launcher starts one on every host."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # takes seconds, as the next one does: here, before others wait for this host

import worldsize.worker.process  # noqa: F401
from worldsize.config.recorded import read_settings
from worldsize.config.search_path import make_importable, roots
from worldsize.config.settings import Settings
from worldsize.core import Plan
from worldsize.driver.examine import examine
from worldsize.driver.exit_process import leave
from worldsize.driver.host_check import check_alike, facts_of
from worldsize.driver.restarts import run_attempts
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.agents import Follower, Lead
from worldsize.launch.meeting import Other, gather, reach, read_key
from worldsize.launch.node import NodeLauncher
from worldsize.records.lock import RunLock
from worldsize.records.run_directory import RunDirectory
from worldsize.world.environments import Node, meeting_name, node, port_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize agent", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "--tether",
        action="store_true",
        help="take variables and signals from standard input, a JSON value a line, and end when it ends",
    )
    parser.add_argument("--from", dest="source", type=Path, help="folder of files to begin the run folder with")
    options = parser.parse_args()
    if options.tether:
        _tether()
    try:
        if options.source:
            _begin_with(options.source, options.run)
        code = agent(RunDirectory(options.run.resolve()))
    except WorldsizeError as error:
        print(error, file=sys.stderr)
        code = 2
    leave(code)


def _tether() -> None:
    """Whoever started this process is gone when its standard input ends: so that nothing is left on this host."""
    lines = os.fdopen(os.dup(0), "rb", buffering=0)  # not sys.stdin: a forked child waits for the lock of its reader
    os.environ.update(json.loads(lines.readline() or b"{}"))

    def watch() -> None:
        for line in lines:
            os.kill(os.getpid(), signal.Signals[json.loads(line)])
        os.kill(os.getpid(), signal.SIGKILL)  # the workers die with it

    threading.Thread(target=watch, daemon=True, name="tether").start()


def _begin_with(source: Path, run: Path) -> None:
    """Make the run folder, unless it is there: of several hosts one is the first."""
    if (run / "config.yaml").exists():
        return
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=run.parent, prefix=".begin_"))
    except OSError as error:
        raise ConfigError(
            f"{run.parent} cannot be written: {error}. Is the bucket or volume mounted, and ours?"
        ) from error
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, draft / file.name)
            (draft / file.name).chmod(0o600)
    if (plugins := RunDirectory(source).plugins).is_dir():
        shutil.copytree(plugins, RunDirectory(draft).plugins)
    try:
        draft.rename(run)
    except OSError:
        shutil.rmtree(draft)
        if not (run / "config.yaml").exists():
            raise ConfigError(f"the run folder {run} exists and is no run.") from None


def agent(run: RunDirectory) -> int:
    """Play this host's part until the run ends; the exit code.

    Raises:
        WorldsizeError: the hosts do not find each other, or differ; nothing was started.
    """
    torch.set_num_threads(1)  # this process forks: it must not have an OpenMP pool
    secrets = os.environ.get("WORLDSIZE_SECRETS")
    make_importable([run.plugins, *roots()])  # the copies here come before the paths of the host that launched the run
    if not run.config.exists():
        raise ConfigError(
            f"{socket.gethostname()} does not see the run folder {run.path}. All hosts need it: set run.root to a "
            "folder that they share."
        )
    settings, place = read_settings(run), node(os.environ)
    if place.count != settings.cluster.nodes:
        raise ConfigError(
            f"the run is planned for {settings.cluster.nodes} nodes (cluster.nodes), but started on {place.count}."
        )
    plan = Plan(run.path, settings.cluster, settings.roles, settings.determinism.variables())
    plan = replace(plan, secrets={"WORLDSIZE_SECRETS": secrets}) if secrets else plan
    launcher = settings.launcher if isinstance(settings.launcher, NodeLauncher) else Lead()  # started by hand
    if settings.examines:
        return examine(settings, launcher, plan, run, place, port=_port(settings, run))
    if place.rank == 0:
        return _lead(settings, launcher, plan, run, place)
    waits = _waits(settings, launcher)
    line = reach(place, _port(settings, run), read_key(run.path), facts=facts_of(settings.recipe, place), **waits)
    return Follower(launcher, plan, place, line).follow()


def _lead(settings: Settings, launcher: NodeLauncher, plan: Plan, run: RunDirectory, place: Node) -> int:
    others: list[Other] = []
    with RunLock(run.path):
        if place.count > 1:
            waits = _waits(settings, launcher)
            found = gather(place, _port(settings, run), read_key(run.path), **waits)
            others = [other for other, _ in found]
            check_alike(settings, facts_of(settings.recipe, place), [facts for _, facts in found])
        code = 1
        try:
            code = run_attempts(replace(settings, launcher=Lead.of(launcher, place, others)), plan, run)
        finally:
            for other in others:
                other.say_over(code)
        return code


def _waits(settings: Settings, launcher: NodeLauncher) -> dict[str, float]:
    return {"patience": settings.cluster.timeout, "silence": launcher.node_timeout}


def _port(settings: Settings, run: RunDirectory) -> int:
    return int(settings.config["cluster"]["port"] or port_of(meeting_name(run.id, os.environ)))
