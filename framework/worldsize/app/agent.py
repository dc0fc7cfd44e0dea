"""``worldsize agent RUN``: one host's part of a run; a launcher starts one on every host."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import worldsize.worker
from worldsize.app.attempts import run_attempts
from worldsize.app.leave import leave
from worldsize.config.places import make_importable, roots
from worldsize.config.settings import Settings
from worldsize.core import Plan, Recipe
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.agents import Follower, Lead
from worldsize.launch.meeting import Other, gather, reach, read_key
from worldsize.launch.node import NodeLauncher
from worldsize.reproducibility.environment import capture_environment
from worldsize.reproducibility.lock import RunLock
from worldsize.run_directory import RunDirectory
from worldsize.worker import read_settings
from worldsize.world.environments import Node, node, port_of


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
    make_importable(roots())  # the copies on this host come before the paths of the one that launched the run
    settings, place = read_settings(run), node(os.environ)
    if place.count != settings.cluster.nodes:
        raise ConfigError(
            f"the run is planned for {settings.cluster.nodes} nodes (cluster.nodes), but started on {place.count}."
        )
    plan = Plan(run.path, settings.cluster, settings.roles, settings.determinism.variables())
    plan = replace(plan, secrets={"WORLDSIZE_SECRETS": secrets}) if secrets else plan
    launcher = settings.launcher if isinstance(settings.launcher, NodeLauncher) else Lead()  # started by hand
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
        own = {each.name: getattr(launcher, each.name) for each in fields(NodeLauncher)}
        lead = Lead(**own, node=place, others=others)
        code = 1
        try:
            code = run_attempts(replace(settings, launcher=lead), plan, run)
        finally:
            for other in others:
                other.say_over(code)
        return code


def _waits(settings: Settings, launcher: NodeLauncher) -> dict[str, float]:
    return {"patience": settings.cluster.timeout, "silence": launcher.node_timeout}


def _port(settings: Settings, run: RunDirectory) -> int:
    return int(settings.config["cluster"]["port"] or port_of(run.id + os.environ.get("SLURM_RESTART_COUNT", "")))


def facts_of(recipe: Recipe, place: Node) -> dict[str, Any]:
    """What must be alike on all hosts, by name, and which host this is."""
    environment = capture_environment()
    return {
        "node": place.rank,
        "host": socket.gethostname(),
        "alike": {
            "Python": platform.python_version(),
            "torch": environment["torch"]["version"],
            "NCCL": environment["torch"]["nccl"],
            "packages": _digest(f"{name}=={version}" for name, version in environment["packages"].items()),
            "code": code_digest(roots()),
            "data": data_digest(recipe.files()),
        },
    }


def _digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def code_digest(roots: Sequence[Path]) -> str:
    """Of the Python files of worldsize, and of recipes and plugins below ``roots``."""
    own = Path(worldsize.worker.__file__).parent
    folders = [own, *(root / kind for root in roots for kind in ("recipes", "plugins"))]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    return _digest(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)


def data_digest(files: Mapping[str, Path]) -> str:
    """Of names and sizes, or what is missing; the contents were hashed where the run was launched."""
    if lost := [name for name in sorted(files) if not files[name].exists()]:
        return f"without {lost[0]}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
    return _digest(f"{name} {files[name].stat().st_size}" for name in sorted(files))


def check_alike(settings: Settings, first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Raise WorldsizeError (or warn, by ``cluster.nodes_differ``) where a host differs from the first."""
    found = [
        f"{other['host']} (node {other['node']}) has {name} {other['alike'].get(name)}, {first['host']} has {value}"
        for other in others
        for name, value in first["alike"].items()
        if other["alike"].get(name) != value
    ]
    if not found:
        return
    if settings.config["cluster"]["nodes_differ"] == "warn":
        print("warning: " + "; ".join(found), file=sys.stderr, flush=True)
        return
    raise WorldsizeError(
        "the hosts differ: " + "; ".join(found) + ". Make them alike, or accept it with cluster.nodes_differ=warn."
    )
