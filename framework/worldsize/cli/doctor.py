"""``worldsize doctor [OPTION ...]``: will a run work on this cluster, and how fast are its links?

The cluster's own launcher starts the same processes as for a run; they compare their hosts, connect, and measure links.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.console import Console

from worldsize.cli import call_composed, exit_process
from worldsize.config.arguments import number
from worldsize.core.limits import SECONDS
from worldsize.errors import ConfigError
from worldsize.messages import printable

if TYPE_CHECKING:
    from worldsize.config.settings import Settings
    from worldsize.core import BatchLauncher, Job, Plan
    from worldsize.plan.doctor.report import Report
    from worldsize.record.run_directory import RunDirectory

_logger = logging.getLogger(__name__)

_POLL, _LOGS = 0.5, 300.0  # seconds between two looks for a report; seconds in which a job's log is shown


@dataclass(frozen=True)
class Examination:
    """Options: whether to measure all ``pairs`` of nodes, ``patience`` in seconds, and the ``report`` file."""

    pairs: bool = False
    patience: float = 60.0
    report: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize doctor", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as of train, e.g. +cluster=slurm cluster.nodes=4 recipe=digits")
    parser.add_argument("--pairs", action="store_true", help="measure the link between each two nodes")
    parser.add_argument(
        "--patience", type=number(SECONDS), default=60.0, help="seconds that hosts have to answer (%(default)s)"
    )
    parser.add_argument("--json", dest="report", metavar="FILE", help='write what was found; "-": to standard output')
    options = parser.parse_intermixed_args()
    try:
        exit_process(doctor(options.overrides, Examination(options.pairs, options.patience, options.report)))
    except KeyboardInterrupt:
        exit_process(130)


def doctor(arguments: Sequence[str], options: Examination) -> int:
    """Examine the cluster; return 0 if all checks pass, 1 if one fails, 2 if the configuration cannot run."""
    return call_composed(lambda cfg: _examine(cfg, options), arguments)


def _examine(cfg: DictConfig, options: Examination) -> int:
    from worldsize.config.composed import settings_of  # imports torch, which takes seconds

    if options.report and options.report != "-" and not os.access(Path(options.report).absolute().parent, os.W_OK):
        raise ConfigError(
            f"{options.report} cannot be written: its folder is missing or read-only. Name another file after --json."
        )
    # refuses what is typed wrong, also where an examination has its own
    _let_spares_take_part(cfg, settings_of(deepcopy(cfg)))
    _alter(cfg, options)
    settings = settings_of(cfg)
    report, folder = _report(settings, Path(cfg.run.root))
    console = Console(stderr=options.report == "-", width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(report.table())
    if folder and not report.ok:
        console.print(f"logs: {folder}", markup=False, soft_wrap=True)
    if options.report == "-":
        print(json.dumps(report.as_json(), indent=2))
    elif options.report:
        Path(options.report).write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 0 if report.ok else 1


def _let_spares_take_part(cfg: DictConfig, settings: Settings) -> None:
    """Let spare nodes, if there are any, be examined like the others; tiers that then do not divide are left out."""
    cluster = settings.cluster
    if not cluster.spare_nodes:
        return
    count, tiers = cluster.all_nodes, settings.config["cluster"]["tiers"]
    if uneven := [name for name, nodes in tiers.items() if nodes < count and count % nodes]:
        _logger.warning(
            "the %d hosts, with the spare ones, are no whole number of units of %s (cluster.tiers), whose links are "
            "not told apart. Leave out the spare ones to measure these.",
            count,
            " and ".join(uneven),
        )
    cfg.cluster.tiers = {name: given for name, given in cfg.cluster.tiers.items() if name not in uneven}
    cfg.cluster.nodes, cfg.cluster.spare_nodes = count, 0
    cfg.cluster.processes, cfg.cluster.processes_per_node = None, cluster.processes_per_node


def _alter(cfg: DictConfig, options: Examination) -> None:
    """Change the configuration so that a run examines its cluster instead of training."""
    cfg.run.examine = "pairs" if options.pairs else "tiers"
    cfg.cluster.timeout, cfg.cluster.spares = options.patience, 0  # nobody is replaced
    cfg.logger, cfg.listeners, cfg.faults = None, {}, []
    changes: dict[str, float] = {"wait": True, "terminal_logs": False, "agents": True}
    changes |= dict.fromkeys(("max_restarts", "max_requeues", "pod_restarts", "restarts_on_errors"), 0)
    changes["save_grace"] = 2 * options.patience  # if an agent fails, the others still time out on it and report
    for key in changes.keys() & cfg.launcher.keys():
        cfg.launcher[key] = changes[key]


def _report(settings: Settings, root: Path) -> tuple[Report, Path | None]:
    """Examine the cluster; return the report, and the run folder if a check failed."""
    from worldsize.core import AgentLauncher, BatchLauncher
    from worldsize.launch.examine import checkpoint_bytes
    from worldsize.launch.node import NodeLauncher
    from worldsize.plan.doctor.evaluate import evaluate
    from worldsize.plan.doctor.findings import read_findings
    from worldsize.plan.doctor.report import Check, Report
    from worldsize.record.run_directory import planned

    launcher = settings.launcher
    if not isinstance(launcher, NodeLauncher) and not (isinstance(launcher, BatchLauncher) and launcher.agents):
        raise ConfigError(
            f"doctor needs a launcher that starts an agent on each host; {type(launcher).__name__} does not. Name the "
            "same hosts with cluster=ssh or cluster=slurm."
        )
    run = planned(root, "doctor", None)
    plan = settings.plan(run.path)
    try:
        report = _play(settings, plan, run)
    except ConfigError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        fact, _, remedy = str(error).partition(". ")
        return Report([Check("launch", "this machine", False, fact, remedy)]), None
    if report is None:
        cluster = settings.cluster
        hosts = launcher.hosts if isinstance(launcher, AgentLauncher) else ()
        findings = read_findings(run.findings, cluster.nodes, hosts)
        report = evaluate(findings, cluster, needed_bytes=2 * checkpoint_bytes(settings.recipe))
    if report.ok:
        shutil.rmtree(run.path)
    return report, run.path


def _play(settings: Settings, plan: Plan, run: RunDirectory) -> Report | None:
    """Start the examination and wait for it to end; raise ConfigError if the launcher refuses the plan.

    Returns:
        The report that a job has left in its log; None: this machine sees the run folder.
    """

    from worldsize.core import AgentLauncher, BatchLauncher
    from worldsize.launch.examine import examine
    from worldsize.launch.node import NodeLauncher
    from worldsize.launch.record import config_text, with_secrets
    from worldsize.record.redaction import scrubber
    from worldsize.record.run_directory import created
    from worldsize.record.run_record import write_configuration
    from worldsize.world.environments import Node
    from worldsize.world.processes import will_fork

    will_fork()
    launcher = settings.launcher
    launcher.check(settings.cluster)
    clean = scrubber(settings.config, os.environ, Path.home() / ".netrc")
    with created(run, is_private=True):
        write_configuration(run, config=config_text(clean.tree(settings.config)))
    with redirect_stdout(sys.stderr):  # the agents' output
        if isinstance(launcher, BatchLauncher):
            return _submitted(launcher, with_secrets(settings, plan, clean), run, _silence(settings))
        if isinstance(launcher, AgentLauncher):
            _wait_for_agents(launcher.launch_agents(with_secrets(settings, plan, clean)))
        else:
            assert isinstance(launcher, NodeLauncher)
            examine(settings, launcher, plan, run, Node())
    return None


def _silence(settings: Settings) -> float:
    """Return the seconds after which hosts that have told nothing new have ended; pairs are measured in turns."""
    turns = settings.cluster.nodes if settings.run.examine == "pairs" else 1
    return 2 * settings.cluster.timeout * turns


def _submitted(launcher: BatchLauncher, plan: Plan, run: RunDirectory, silence: float) -> Report | None:
    """Submit the examination, or let a person start it, and wait for its end; return a report from outside ``run``."""
    job = launcher.submit(plan)
    if job is None:
        print(launcher.describe(plan))
        print(f"Start these. Their report will be in {run.findings}, and is shown here.", flush=True)
        wait_for_report(run.findings, silence)
        return None
    _wait(launcher, job)
    return None if launcher.shares_run_folder else _logged(launcher.log_command(job, follow=True))


def wait_for_report(findings: Path, silence: float) -> None:
    """Wait for the first host's report, or until hosts that have begun say nothing new for ``silence`` seconds."""
    from worldsize.plan.doctor.findings import REPORT, read_facts

    told: dict[str, int] = {}
    since = time.monotonic()
    while not read_facts(findings, REPORT):
        if told != (now := {path.name: path.stat().st_mtime_ns for path in findings.glob("*.json")}):
            told, since = now, time.monotonic()
        if told and time.monotonic() - since > silence:
            print(f"The first host has left no report, and nothing new for {silence:g} s.", flush=True)
            return
        time.sleep(_POLL)


def _logged(command: Sequence[str]) -> Report:
    """Return the report that is in the log of a job that has ended, which ``command`` shows."""
    from worldsize.plan.doctor.report import Check, Report, report_in

    shown = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LOGS, check=False)
        log, said = done.stdout, done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        log, said = "", str(error)
    if report := report_in(log):
        return report
    last = next(iter((said.strip() or log.strip()).splitlines()[-1:]), "nothing")
    fact = f"it has ended, and its log has no report; it says: {printable(last)}"
    remedy = f"Look at the job's log: {shown}. What its hosts found lies in the run's folder there, below findings."
    return Report([Check("report", "the job", False, fact, remedy)])


def _wait_for_agents(job: Job) -> None:
    try:
        job.wait()
    except BaseException:
        job.cancel()
        raise


def _wait(launcher: BatchLauncher, job: str) -> None:
    """Wait until the job has ended, without a timeout; cancel it if this process is interrupted."""
    from worldsize.launch.scheduled import wait_for

    print(f"job {job} submitted; waiting for it to start and end", flush=True)
    try:
        wait_for(launcher, [job])
    except BaseException:
        launcher.cancel(job)
        raise
