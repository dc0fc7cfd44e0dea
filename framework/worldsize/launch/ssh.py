"""Launches on a list of hosts: copies the code by rsync, starts an agent on each by ssh, and leaves none behind."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, final

from worldsize.config.search_path import bundle
from worldsize.core import AgentLauncher, Cluster, ConfigError, Job, Outcome, Plan, Range
from worldsize.core.launcher import cluster_option
from worldsize.launch.node import NodeLauncher
from worldsize.launch.run_key import write_key
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import look
from worldsize.world.preemption import SIGNALS
from worldsize.world.roles import heals

_logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds until the agent of a lost host is started again
_UNREACHED = 255  # exit code of ssh's own errors
_LEFT_OUT = (".git", ".venv", "__pycache__", "*.egg-info", "wandb", "node_modules")


@final
@dataclass(frozen=True)
class Ssh(NodeLauncher, AgentLauncher):
    """Copies the code to each host and starts an agent there; all hosts must share the run folder.

    The code is the working directory, and worldsize's own clone if that lies elsewhere.
    """

    heals_over_hosts: ClassVar[bool] = True
    orders_hosts: ClassVar[bool] = True

    hosts: Sequence[str] = cluster_option()  # as ssh knows them; the others must reach the first
    gpus_per_node: Annotated[int | None, Range(least=0)] = cluster_option(None)  # each has a process
    folder: str | None = cluster_option(None)  # where the code goes, "%h": the host; None: it is there at the same path
    python: str | None = cluster_option(None)  # interpreter on the hosts; None: made there by uv, from the lock
    ssh: Sequence[str] = cluster_option(("ssh",))  # with its options, e.g. [ssh, -F, my_config]

    def check(self, cluster: Cluster) -> None:
        """Raise ConfigError unless every host answers and accepts our login."""
        for tool in (self.ssh[0], *(["rsync"] if self.folder else [])):
            if shutil.which(tool) is None:
                raise ConfigError(f"{tool} is not found on this machine. Install it, or choose another cluster.")
        if cluster.all_nodes != len(self.hosts):
            raise ConfigError(f"cluster.nodes={cluster.nodes}, but cluster.hosts names {len(self.hosts)}.")
        refusals = [refusal for refusal in self._everywhere(self._refusal) if refusal]
        if refusals:
            raise ConfigError(f"{'; '.join(refusals)}. Try `ssh HOST true` by hand; nothing was started.")

    def _refusal(self, host: str) -> str | None:
        done = subprocess.run([*self._ssh(host), "true"], capture_output=True, text=True, check=False)
        return f"{host}: {done.stderr.strip() or 'no answer'}" if done.returncode else None

    def launch_agents(self, plan: Plan) -> Job:
        write_key(plan.run_dir)
        self._everywhere(self._copy)
        agents = [self._start(plan, node) for node in range(len(self.hosts))]
        revival = _Revival(partial(self._start, plan), RunDirectory(plan.run_dir)) if heals(plan.roles) else None
        return _Agents(agents, self.save_grace, revival)

    def describe(self, plan: Plan) -> str:
        copies = [shlex.join(words) for host in self.hosts for words in self._copies(host)]
        starts = [shlex.join(self._command(plan, node)) for node in range(len(self.hosts))]
        spare = self.hosts[plan.cluster.nodes :]
        waiting = [f"# wait to take the place of a lost host: {', '.join(spare)}"] if spare else []
        return "\n".join([*copies, *starts, *waiting])

    def _everywhere(self, action: Any) -> list[Any]:
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(action, self.hosts))

    def _ssh(self, host: str) -> list[str]:
        alive = max(1, int(self.node_timeout / 3))
        patience = ["-oBatchMode=yes", "-oConnectTimeout=10", f"-oServerAliveInterval={alive}"]
        return [*self.ssh, *patience, "-oServerAliveCountMax=3", host]

    def _place(self, host: str) -> Path:
        return Path(self.folder.replace("%h", host)) if self.folder else Path.cwd().parent

    def _copies(self, host: str) -> list[list[str]]:
        """Return the commands that copy the code to ``host``."""
        if not self.folder:
            return []
        own = [] if bundle().is_relative_to(Path.cwd()) else [(bundle(), "worldsize")]
        options = ["-a", "--delete", "--mkpath", f"--rsh={shlex.join(self.ssh)}", "--filter=:- .gitignore"]
        left_out = [f"--exclude={name}" for name in (*_LEFT_OUT, "runs")]
        return [
            ["rsync", *options, *left_out, f"{source}/", f"{host}:{self._place(host)}/{name}/"]
            for source, name in [(Path.cwd(), "project"), *own]
        ]

    def _copy(self, host: str) -> None:
        for words in self._copies(host):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(f"the code cannot be copied to {host}: {done.stderr.strip()}")

    def _command(self, plan: Plan, node: int) -> list[str]:
        host = self.hosts[node]
        place = {
            "WORLDSIZE_NODE_RANK": str(node),
            "WORLDSIZE_NODES": str(len(self.hosts)),
            "WORLDSIZE_FIRST": self.hosts[0].rpartition("@")[2],
            **plan.environment,
        }
        project = self._place(host) / ("project" if self.folder else Path.cwd().name)
        if self.folder:  # relative to the project
            place["PYTHONPATH"] = "framework" if bundle().is_relative_to(Path.cwd()) else "../worldsize/framework"
        python = [self.python] if self.python else ["uv", "run", "--locked", "python"]
        words = ["env", *(f"{name}={value}" for name, value in place.items()), *python, "-m", "worldsize", "agent"]
        there = f"cd {shlex.quote(str(project))} && exec {shlex.join([*words, '--tether', str(plan.run_dir)])}"
        return [*self._ssh(host), there]

    def _start(self, plan: Plan, node: int) -> _Agent:
        process = subprocess.Popen(
            self._command(plan, node),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # this process forwards Ctrl-C
        )
        agent = _Agent(self.hosts[node], process)
        agent.tell(dict(plan.secrets))
        threading.Thread(target=agent.show, args=(node == 0,), daemon=True, name=agent.host).start()
        return agent


@final
@dataclass
class _Agent:
    """An agent on a remote host, which lives as long as its standard input is open."""

    host: str
    process: subprocess.Popen[str]

    def tell(self, message: Mapping[str, str] | str) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def let_go(self) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def show(self, leads: bool) -> None:
        """Show the output as it arrives: unchanged from the first host, with host names from the others."""
        output: IO[str] | None = self.process.stdout
        assert output is not None
        for line in output:
            sys.stdout.write(line if leads else f"[{self.host}] {line}")
            sys.stdout.flush()


@final
@dataclass
class _Revival:
    """Starts agents again that have ended while a run goes on without their hosts."""

    start: Callable[[int], _Agent]
    run: RunDirectory
    _due: dict[int, float] = field(default_factory=dict)  # by node: when its agent is to be started
    _has_begun: bool = False
    _pauses: dict[int, float] = field(default_factory=dict)  # seconds until then, the last time

    @property
    def has_begun(self) -> bool:
        """Whether the run has begun; before that, each host is needed."""
        self._has_begun = self._has_begun or bool(look(self.run).attempts)
        return self._has_begun

    def revive(self, agents: list[_Agent]) -> None:
        """Start the agents of lost hosts that are due, each time after a longer pause."""
        now = time.monotonic()
        for node, agent in enumerate(agents):
            if node == 0 or agent.process.poll() is None:
                continue
            if node not in self._due:
                self._pauses[node] = min(2 * self._pauses.get(node, _FIRST_PAUSE / 2), _LONGEST_PAUSE)
                self._due[node] = now + self._pauses[node]
            elif now >= self._due[node]:
                del self._due[node]
                agent.let_go()
                agents[node] = self.start(node)


@final
@dataclass
class _Agents(Job):
    """The agents of all hosts; their exit codes tell how the run ended, which they record."""

    agents: list[_Agent]
    grace: float
    revival: _Revival | None = None  # of a gang that heals, which goes on if one ends that is not the first
    _seen: list[int] = field(default_factory=list)

    def wait(self) -> Outcome:
        """Block until all have ended. A first signal asks them to save and end; a second or a failure kills them."""
        before = {number: signal.signal(number, lambda number, _: self._seen.append(number)) for number in SIGNALS}
        try:
            self._join()
        finally:
            for agent in self.agents:
                agent.let_go()
            for number, handler in before.items():
                signal.signal(number, handler)
        codes = [self._code(agent) for agent in self.agents]
        return Outcome("ended", codes[0] if self.revival else codes[0] or max(codes))

    def cancel(self) -> None:
        self.agents[0].tell("SIGTERM")

    def _join(self) -> None:
        asked, deadline = False, float("inf")
        while any(agent.process.poll() is None for agent in self.agents):
            if self._seen and not asked:
                self.cancel()
                asked, deadline = True, time.monotonic() + self.grace
            if len(self._seen) > 1 or time.monotonic() > deadline:
                return
            if deadline == float("inf") and self._must_end():
                deadline = time.monotonic() + self.grace  # the others shut down by themselves
            elif self.revival and not asked and self.agents[0].process.poll() is None:
                self.revival.revive(self.agents)
            time.sleep(_POLL)

    def _must_end(self) -> bool:
        """Return whether an agent has ended without which the run does not go on."""
        codes = [agent.process.poll() for agent in self.agents]
        if self.revival and (codes[0] is not None or (any(codes) and self.revival.has_begun)):
            return codes[0] is not None
        return any(codes)

    def _code(self, agent: _Agent) -> int:
        try:
            code = agent.process.wait(10.0)
        except subprocess.TimeoutExpired:
            agent.process.kill()
            code = agent.process.wait()
        if code == _UNREACHED:
            _logger.error("%s: the connection is lost", agent.host)
        return code if code >= 0 else 128 - code
