"""``worldsize doctor [OPTION ...]``: check whether a run would work on this cluster, and measure its links.

The cluster's launcher starts the same processes as for a run; they compare their hosts, connect, and measure links.
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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.console import Console

from worldsize.cli import call_composed, exit_process
from worldsize.config.arguments import build_number_parser
from worldsize.config.purpose import Examine
from worldsize.core.limits import SECONDS
from worldsize.errors import ConfigError
from worldsize.messages import printable

if TYPE_CHECKING:
    from worldsize.config.settings import Settings
    from worldsize.core import BatchLauncher, Plan
    from worldsize.plan.doctor.report import Report
    from worldsize.record.run_directory import RunDirectory

_logger = logging.getLogger(__name__)

_POLL, _LOGS = 0.5, 300.0  # seconds between checks for a report; maximum seconds for reading a job's log


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize doctor", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", help="overrides as for train, e.g. +cluster=slurm cluster.nodes=4 recipe=digits"
    )
    parser.add_argument("--pairs", action="store_true", help="measure the link between each pair of nodes")
    parser.add_argument(
        "--patience",
        type=build_number_parser(SECONDS),
        default=60.0,
        help="seconds to wait for a response from a host (%(default)s)",
    )
    parser.add_argument(
        "--json", dest="report", metavar="FILE", help='write the findings to FILE, or "-" for standard output'
    )
    options = parser.parse_intermixed_args()
    try:
        exit_process(doctor(options.overrides, Examine(options.pairs, options.patience), options.report))
    except KeyboardInterrupt:
        exit_process(130)


def doctor(arguments: Sequence[str], purpose: Examine, file: str | None) -> int:
    """Examine the cluster; return 0 if all checks pass, 1 if one fails, 2 if the configuration cannot run."""
    return call_composed(lambda cfg: _examine_cluster(cfg, purpose, file), arguments)


def _examine_cluster(cfg: DictConfig, purpose: Examine, file: str | None) -> int:
    from worldsize.config.composed import build_settings  # importing torch takes seconds

    if file and file != "-" and not os.access(Path(file).absolute().parent, os.W_OK):
        raise ConfigError(
            f"failed to write {file}: its folder is missing or read-only. Pass a different file to --json."
        )
    trained = build_settings(cfg)  # also rejects invalid values that the examination overrides
    settings = build_settings(cfg, add_spare_nodes(purpose, cfg, trained))
    report, folder = _collect_report(settings, Path(cfg.run.root))
    console = Console(stderr=file == "-", width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(report.build_table())
    if folder and not report.ok:
        console.print(f"logs: {folder}", markup=False, soft_wrap=True)
    if file == "-":
        print(json.dumps(report.to_json(), indent=2))
    elif file:
        Path(file).write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return 0 if report.ok else 1


def add_spare_nodes(purpose: Examine, cfg: DictConfig, trained: Settings) -> Examine:
    """Include spare nodes, if any, in the examination; omit tiers that no longer divide the nodes evenly."""
    cluster = trained.cluster
    if not cluster.spare_nodes:
        return purpose
    count, tiers = cluster.all_nodes, trained.config["cluster"]["tiers"]
    if uneven := [name for name, nodes in tiers.items() if nodes < count and count % nodes]:
        _logger.warning(
            "the %d hosts, including spare hosts, are not divisible by the size of %s (cluster.tiers), so the links "
            "of these tiers are not measured separately. Remove the spare hosts to measure them.",
            count,
            " and ".join(uneven),
        )
    nodes: dict[str, object] = {
        "cluster.tiers": {name: given for name, given in cfg.cluster.tiers.items() if name not in uneven},
        "cluster.nodes": count,
        "cluster.processes": None,
        "cluster.processes_per_node": cluster.processes_per_node,
    }
    return replace(purpose, nodes=nodes)


def _collect_report(settings: Settings, root: Path) -> tuple[Report, Path | None]:
    """Examine the cluster; return the report and the run folder, or None for the folder if the launch failed.

    The folder is deleted if all checks pass.
    """
    from worldsize.core import AgentLauncher, BatchLauncher
    from worldsize.launch.examine import checkpoint_bytes
    from worldsize.launch.node import NodeLauncher
    from worldsize.plan.doctor.evaluate import evaluate
    from worldsize.plan.doctor.findings import read_findings
    from worldsize.plan.doctor.report import Check, Report
    from worldsize.record.run_directory import plan_run_directory

    launcher = settings.launcher
    if not isinstance(launcher, NodeLauncher) and not (isinstance(launcher, BatchLauncher) and launcher.agents):
        raise ConfigError(
            f"doctor requires a launcher with an agent on each host, got {type(launcher).__name__}. Use cluster=ssh or "
            "cluster=slurm with the same hosts."
        )
    run = plan_run_directory(root, "doctor", None)
    plan = settings.create_plan(run.path)
    try:
        report = _run_examination(settings, plan, run)
    except ConfigError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        fact, _, remedy = "; ".join(str(error).splitlines()).partition(". ")
        return Report([Check("launch", "this machine", False, fact, remedy)]), None
    if report is None:
        cluster = settings.cluster
        hosts = launcher.hosts if isinstance(launcher, AgentLauncher) else ()
        findings = read_findings(run.findings, cluster.nodes, hosts)
        report = evaluate(findings, cluster, needed_bytes=2 * checkpoint_bytes(settings.recipe))
    if report.ok:
        shutil.rmtree(run.path)
    return report, run.path


def _run_examination(settings: Settings, plan: Plan, run: RunDirectory) -> Report | None:
    """Start the examination and wait for it to end; raise ConfigError if the launcher refuses the plan.

    Returns:
        The report from the job's log; None if this machine can access the run folder.
    """

    from worldsize.config.recorded import format_config
    from worldsize.core import AgentLauncher, BatchLauncher
    from worldsize.launch.examine import examine_cluster
    from worldsize.launch.node import NodeLauncher
    from worldsize.launch.record import add_secrets
    from worldsize.record.redaction import scrubber
    from worldsize.record.run_directory import create_run_folder
    from worldsize.record.run_record import write_configuration
    from worldsize.world.environments import Node
    from worldsize.world.processes import will_fork

    will_fork()
    launcher = settings.launcher
    launcher.check(settings.cluster)
    clean = scrubber(settings.config, os.environ, Path.home() / ".netrc")
    with create_run_folder(run, is_private=True):
        write_configuration(run, config=format_config(clean.scrub_tree(settings.config)))
    with redirect_stdout(sys.stderr):  # the agents' output
        if isinstance(launcher, BatchLauncher):
            turns = settings.cluster.nodes if settings.run.examine == "pairs" else 1  # pairs take turns
            silence = 2 * settings.cluster.timeout * turns
            return _submit_examination(launcher, add_secrets(settings.config, plan, clean), run, silence)
        if isinstance(launcher, AgentLauncher):
            job = launcher.launch_agents(add_secrets(settings.config, plan, clean))
            try:
                job.wait()
            except BaseException:
                job.cancel()
                raise
        else:
            assert isinstance(launcher, NodeLauncher)
            examine_cluster(settings.recipe, launcher, plan, run, Node())
    return None


def _submit_examination(launcher: BatchLauncher, plan: Plan, run: RunDirectory, silence: float) -> Report | None:
    """Submit the examination, or let the user start it, and wait; return the report if only the job's log has it."""
    job = launcher.submit(plan)
    if job is None:
        print(launcher.describe(plan))
        print(f"Run these commands. The report is written to {run.findings} and shown here.", flush=True)
        wait_for_report(run.findings, silence)
        return None
    _wait_for_job(launcher, job)
    return None if launcher.shares_run_folder else _read_log_report(launcher.log_command(job, follow=True))


def wait_for_report(findings: Path, silence: float) -> None:
    """Wait for the first host's report, up to ``silence`` seconds after the last update from any host."""
    from worldsize.plan.doctor.findings import REPORT, read_facts

    told: dict[str, int] = {}
    since = time.monotonic()
    while not read_facts(findings, REPORT):
        if told != (now := {path.name: path.stat().st_mtime_ns for path in findings.glob("*.json")}):
            told, since = now, time.monotonic()
        if told and time.monotonic() - since > silence:
            print(f"No report from the first host: timed out after {silence:g} s without new findings.", flush=True)
            return
        time.sleep(_POLL)


def _read_log_report(command: Sequence[str]) -> Report:
    """Return the report in the log of a finished job; ``command`` prints that log."""
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
    fact = f"no report in the log of the job; its last line: {printable(last)}"
    remedy = f"See the job's log: {shown}. The hosts' findings are in the subfolder findings of the run folder there."
    return Report([Check("report", "the job", False, fact, remedy)])


def _wait_for_job(launcher: BatchLauncher, job: str) -> None:
    """Wait without a timeout until the job has ended; cancel the job if this process is interrupted."""
    from worldsize.launch.scheduled import wait_for

    print(f"job {job} submitted; waiting for it to start and end", flush=True)
    try:
        wait_for(launcher, [job])
    except BaseException:
        launcher.cancel(job)
        raise
