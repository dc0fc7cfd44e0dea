"""Waits for agents started with ssh, restarts them, and replaces a lost first host."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, final

from worldsize.core import Failure, Job, Outcome
from worldsize.launch.interruption import Signals
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import refresh_run

_logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds between two polls
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before a lost host's agent is restarted: initial and maximum
_LAST = 10.0  # seconds for dismissed agents to exit
_UNREACHED = 255  # ssh's exit code for its own errors, and for commands killed by a signal


@final
@dataclass(frozen=True)
class Lineup:
    """A run's hosts in the order of their node ranks.

    Attributes:
        hosts: Host names for ssh; the first host leads.
        absent: Number of hosts, at the end of ``hosts``, that are absent when the run starts or resumes.
        lost: The former first host, if it was lost and this lineup replaces it.
    """

    hosts: tuple[str, ...]
    absent: int = 0
    lost: str | None = None

    def replace_first(self, answering: set[str]) -> Lineup:
        """Return the lineup with the ``answering`` hosts first, then the absent ones.

        The lost first host is the last host of its group.
        """
        first, *others = self.hosts
        there = [host for host in (*others, first) if host in answering]
        absent = [host for host in (*others, first) if host not in answering]
        return Lineup((*there, *absent), len(absent), first)

    @property
    def there(self) -> int:
        """Number of hosts that are present at the start."""
        return len(self.hosts) - self.absent


@final
@dataclass
class SshAgent:
    """An agent on a remote host; it runs as long as its standard input is open."""

    host: str
    process: subprocess.Popen[str]
    last: str = ""  # last non-empty line of its output

    def send_message(self, message: Mapping[str, object] | str) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def let_go(self) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def print_output(self, leads: bool) -> None:
        """Print the agent's output as it arrives; prefix the host name unless the agent ``leads``."""
        output: IO[str] | None = self.process.stdout
        assert output is not None
        for line in output:
            sys.stdout.write(line if leads else f"[{self.host}] {line}")
            sys.stdout.flush()
            self.last = line.strip() or self.last

    def wait_for_exit(self, deadline: float) -> int:
        """Return the agent's exit code; kill it if it runs at ``deadline`` (monotonic seconds)."""
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code == _UNREACHED:
            _logger.error("%s: connection lost", self.host)
        return code if code >= 0 else 128 - code


@final
@dataclass
class Revival:
    """Restarts exited agents while a healing run continues without their hosts."""

    run: RunDirectory
    _due: dict[int, float] = field(default_factory=dict)  # monotonic time of the agent's next start, by node
    _has_begun: bool = False
    _pauses: dict[int, float] = field(default_factory=dict)  # seconds of the last pause, by node

    @property
    def has_begun(self) -> bool:
        """Whether the run has started; until then, all hosts are needed."""
        self._has_begun = self._has_begun or bool(refresh_run(self.run).attempts)
        return self._has_begun

    def restart_agents(self, agents: list[SshAgent], start: Callable[[int], SshAgent]) -> None:
        """Restart lost hosts' agents that are due, with exponential backoff."""
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
                agents[node] = start(node)


@final
@dataclass
class HostSuccession:
    """Resumes the run from its newest checkpoint on other hosts when the first host is lost.

    It sends heartbeats to the first host. A first host that does not receive them kills its processes after half of
    ``silence``, so that it no longer writes to the run folder when a different host leads.

    Args:
        run: The run folder.
        answering: Returns the reachable hosts.
        suffices: Returns whether a number of hosts is enough to continue.
        silence: Seconds without a heartbeat after which a host is lost.
        patience: Maximum seconds to wait for enough hosts.
        most: Maximum number of replacements of the first host.
    """

    run: RunDirectory
    answering: Callable[[], set[str]]
    suffices: Callable[[int], bool]
    silence: float
    patience: float
    most: int
    _count: int = 0  # replacements so far
    _told_at: float = float("-inf")

    def send_heartbeat(self, first: SshAgent) -> None:
        """Send the first host a heartbeat if one is due."""
        if self._count < self.most and time.monotonic() - self._told_at > self.silence / 8:
            self._told_at = time.monotonic()
            first.send_message({"within": self.silence / 2})

    def choose_next_lineup(self, lineup: Lineup, code: int, seen: Sequence[int]) -> Lineup | None:
        """Return the hosts to continue on after the first host's agent exited with ``code``.

        Returns None if the run has ended or cannot continue: no restart is left, too few hosts respond, or a signal
        was received. ``seen`` collects received signals; the first one ends the search.
        """
        if seen or code != _UNREACHED or refresh_run(self.run).exit_reason not in ("running", "killed"):
            return None
        lost, remedy = lineup.hosts[0], f"Run `worldsize resume {self.run.path}` to resume from the newest checkpoint."
        if self._count == self.most:
            _logger.error(
                "the first host, %s, is lost after launcher.max_restarts=%d restarts. %s", lost, self.most, remedy
            )
            return None
        self._count += 1
        _logger.error("the first host, %s, is lost", lost)
        ended = time.monotonic() + self.silence  # a disconnected host has killed its processes by then
        answering = self.answering()  # takes seconds for a lost host
        while time.monotonic() < ended and not seen:
            time.sleep(_POLL)
        deadline = time.monotonic() + self.patience
        while not self.suffices((after := lineup.replace_first(answering)).there):
            if time.monotonic() > deadline or seen:
                there = ", ".join(after.hosts[: after.there]) or "none"
                _logger.error("too few hosts respond to continue without %s (responding: %s). %s", lost, there, remedy)
                return None
            time.sleep(_FIRST_PAUSE)
            answering = self.answering()
        if seen:
            return None
        there, count = ", ".join(after.hosts[: after.there]), f"{self._count} of {self.most}"
        _logger.error("restarting without %s, on %s (%s)", lost, there, count)
        return after


@final
@dataclass
class SshJob(Job):
    """A job with an agent per host; agents record the outcome and exit with the run's exit code.

    Args:
        start: Starts a node's agent.
        lineup: The hosts.
        grace: Seconds for the run to save and exit.
        revival: Restarts agents of a healing gang, which survives the exit of any agent but the first.
        succession: Replaces a lost first host; None ends the run instead.
    """

    start: Callable[[Lineup, int], SshAgent]
    lineup: Lineup
    grace: float
    revival: Revival | None = None
    succession: HostSuccession | None = None
    _agents: list[SshAgent] = field(default_factory=list)
    _seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start_agents(self.lineup)

    def wait(self) -> Outcome:
        """Wait until all agents exit; a first signal makes them save, a second kills them."""
        with Signals() as signals:
            self._seen = signals.seen
            try:
                while True:
                    self._wait_for_agents()
                    codes = self._dismiss_agents()
                    after = (
                        self.succession.choose_next_lineup(self.lineup, codes[0], self._seen)
                        if self.succession
                        else None
                    )
                    if after is None:
                        break
                    self._start_agents(after)
            finally:
                for agent in self._agents:
                    agent.let_go()
        failed = [node for node, code in enumerate(codes) if code and not self._seen]
        failure = self._create_failure(failed[0], codes[failed[0]]) if failed else None
        return Outcome("ended", codes[0] if self.revival else codes[0] or max(codes), failure)

    def cancel(self) -> None:
        self._agents[0].send_message("SIGTERM")

    def _start_agents(self, lineup: Lineup) -> None:
        self.lineup = lineup
        self.revival = self.revival and Revival(self.revival.run)
        self._agents = [self.start(lineup, node) for node in range(len(lineup.hosts))]

    def _create_failure(self, node: int, code: int) -> Failure:
        agent = self._agents[node]
        return Failure("node", node, agent.last or f"the agent exited with code {code}", code, host=agent.host)

    def _dismiss_agents(self) -> list[int]:
        """Dismiss all agents and wait until they exit; return their exit codes."""
        for agent in self._agents:
            agent.let_go()
        deadline = time.monotonic() + _LAST
        return [agent.wait_for_exit(deadline) for agent in self._agents]

    def _wait_for_agents(self) -> None:
        asked, deadline = False, float("inf")
        while any(agent.process.poll() is None for agent in self._agents):
            if self._seen and not asked:
                self.cancel()
                asked, deadline = True, time.monotonic() + self.grace
            if len(self._seen) > 1 or time.monotonic() > deadline:
                return
            if self.succession and self._agents[0].process.poll() == _UNREACHED:
                return  # the other hosts might wait for the first one for a long time
            if deadline == float("inf") and self._must_end():
                deadline = time.monotonic() + self.grace  # the other agents exit by themselves
            elif self._agents[0].process.poll() is None:
                if self.succession:
                    self.succession.send_heartbeat(self._agents[0])
                if self.revival and not asked:
                    self.revival.restart_agents(self._agents, partial(self.start, self.lineup))
            time.sleep(_POLL)

    def _must_end(self) -> bool:
        """Return whether a required agent has exited."""
        codes = [agent.process.poll() for agent in self._agents]
        if self.revival and (codes[0] is not None or (any(codes) and self.revival.has_begun)):
            return codes[0] is not None
        return any(codes)
