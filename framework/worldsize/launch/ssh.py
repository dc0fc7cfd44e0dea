"""Launches runs on a list of hosts: copies code with rsync, starts agents with ssh."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

from worldsize.config.search_path import get_bundle_folder
from worldsize.core import AgentLauncher, Cluster, ConfigError, Job, Plan, Range
from worldsize.core.launcher import cluster_option
from worldsize.launch.node import NodeLauncher
from worldsize.launch.ssh_job import HostSuccession, Lineup, Revival, SshAgent, SshJob
from worldsize.net.credentials import write_key
from worldsize.record.run_directory import RunDirectory
from worldsize.world.roles import can_heal, get_min_processes

_VANISHED = 24  # rsync's exit code if a file vanished before it was copied, such as an editor's temporary file
_LEFT_OUT = (".git", ".venv", "__pycache__", "*.egg-info", "wandb", "node_modules")


@final
@dataclass(frozen=True)
class Ssh(NodeLauncher, AgentLauncher):
    """Copies the code to each host and starts an agent; all hosts must share the run folder.

    The code is the working directory, and worldsize's clone if it is outside the working directory.
    """

    heals_over_hosts: ClassVar[bool] = True
    orders_hosts: ClassVar[bool] = True

    hosts: Sequence[str] = cluster_option()  # names for ssh; all hosts must be able to reach the first
    gpus_per_node: Annotated[int | None, Range(least=0)] = cluster_option(None)  # one process per GPU
    folder: str | None = cluster_option(None)  # destination of the code (%h: host name); None: no copy, same path
    python: str | None = cluster_option(None)  # interpreter on the hosts; None: created by uv from the lock file
    ssh: Sequence[str] = cluster_option(("ssh",))  # command and its options, e.g. [ssh, -F, my_config]

    def check(self, cluster: Cluster) -> None:
        """Raise ConfigError unless the tools are installed and every host accepts an ssh login."""
        for tool in (self.ssh[0], *(["rsync"] if self.folder else [])):
            if shutil.which(tool) is None:
                raise ConfigError(f"{tool} not found on this machine. Install it, or choose a different cluster.")
        if cluster.all_nodes != len(self.hosts):
            raise ConfigError(
                f"cluster.nodes={cluster.nodes} requires {cluster.all_nodes} hosts including spare nodes, but "
                f"cluster.hosts lists {len(self.hosts)}. Set cluster.nodes or cluster.hosts."
            )
        refusals = [refusal for refusal in self._everywhere(self._find_login_error) if refusal]
        if refusals:
            raise ConfigError(f"{'; '.join(refusals)}. Check that `ssh HOST true` succeeds; nothing was started.")

    def _find_login_error(self, host: str) -> str | None:
        done = subprocess.run([*self._build_ssh_command(host), "true"], capture_output=True, text=True, check=False)
        return f"{host}: {done.stderr.strip().rstrip('.') or 'no response'}" if done.returncode else None

    def launch_agents(self, plan: Plan) -> Job:
        write_key(plan.run_dir)
        self._everywhere(self._copy_code)
        run, start, lineup = RunDirectory(plan.run_dir), partial(self._start_agent, plan), Lineup(tuple(self.hosts))
        if not can_heal(plan.roles):
            return SshJob(start, lineup, self.save_grace)
        succession = HostSuccession(
            run,
            self.answering,
            lambda hosts: (
                min(hosts, plan.cluster.nodes) * plan.cluster.processes_per_node >= get_min_processes(plan.roles)
            ),
            self.node_timeout,
            plan.cluster.timeout,
            self.max_restarts,
        )
        return SshJob(start, lineup, self.save_grace, Revival(run), succession)

    def answering(self) -> set[str]:
        """Return the hosts that are reachable."""
        refusals = zip(self.hosts, self._everywhere(self._find_login_error), strict=True)
        return {host for host, refusal in refusals if refusal is None}

    def describe(self, plan: Plan) -> str:
        copies = [shlex.join(words) for host in self.hosts for words in self._build_copy_commands(host)]
        starts = [
            shlex.join(self._build_agent_command(plan, Lineup(tuple(self.hosts)), node))
            for node in range(len(self.hosts))
        ]
        spare = self.hosts[plan.cluster.nodes :]
        waiting = [f"# spare hosts, which replace lost hosts: {', '.join(spare)}"] if spare else []
        return "\n".join([*copies, *starts, *waiting])

    def _everywhere(self, action: Any) -> list[Any]:
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(action, self.hosts))

    def _build_ssh_command(self, host: str) -> list[str]:
        alive = max(1, int(self.node_timeout / 3))
        patience = ["-oBatchMode=yes", "-oConnectTimeout=10", f"-oServerAliveInterval={alive}"]
        return [*self.ssh, *patience, "-oServerAliveCountMax=3", host]

    def _get_code_folder(self, host: str) -> Path:
        return Path(self.folder.replace("%h", host)) if self.folder else Path.cwd().parent

    def _build_copy_commands(self, host: str) -> list[list[str]]:
        """Return the rsync commands that copy the code to ``host``."""
        if not self.folder:
            return []
        own = [] if get_bundle_folder().is_relative_to(Path.cwd()) else [(get_bundle_folder(), "worldsize")]
        options = ["-a", "--delete", "--mkpath", f"--rsh={shlex.join(self.ssh)}", "--filter=:- .gitignore"]
        left_out = [f"--exclude={name}" for name in (*_LEFT_OUT, "runs")]
        return [
            ["rsync", *options, *left_out, f"{source}/", f"{host}:{self._get_code_folder(host)}/{name}/"]
            for source, name in [(Path.cwd(), "project"), *own]
        ]

    def _copy_code(self, host: str) -> None:
        for words in self._build_copy_commands(host):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode not in (0, _VANISHED):
                raise ConfigError(f"failed to copy the code to {host}: {done.stderr.strip()}")

    def _build_agent_command(self, plan: Plan, lineup: Lineup, node: int) -> list[str]:
        host = lineup.hosts[node]
        place = {
            "WORLDSIZE_NODE_RANK": str(node),
            "WORLDSIZE_NODES": str(len(lineup.hosts)),
            "WORLDSIZE_FIRST": lineup.hosts[0].rpartition("@")[2],
            **plan.environment,
        }
        if lineup.lost:
            place["WORLDSIZE_ABSENT"] = ",".join(lineup.hosts[lineup.there :])
            place["WORLDSIZE_LOST_FIRST"] = lineup.lost
        project = self._get_code_folder(host) / ("project" if self.folder else Path.cwd().name)
        if self.folder:  # paths relative to the project
            place["PYTHONPATH"] = (
                "framework" if get_bundle_folder().is_relative_to(Path.cwd()) else "../worldsize/framework"
            )
        python = [self.python] if self.python else ["uv", "run", "--locked", "python"]
        words = ["env", *(f"{name}={value}" for name, value in place.items()), *python, "-m", "worldsize", "agent"]
        there = f"cd {shlex.quote(str(project))} && exec {shlex.join([*words, '--tether', str(plan.run_dir)])}"
        return [*self._build_ssh_command(host), there]

    def _start_agent(self, plan: Plan, lineup: Lineup, node: int) -> SshAgent:
        process = subprocess.Popen(
            self._build_agent_command(plan, lineup, node),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # this process handles Ctrl-C and forwards it
        )
        agent = SshAgent(lineup.hosts[node], process)
        agent.send_message(dict(plan.secrets))
        threading.Thread(target=agent.print_output, args=(node == 0,), daemon=True, name=agent.host).start()
        return agent
