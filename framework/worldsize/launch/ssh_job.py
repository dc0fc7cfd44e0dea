"""Waits for the agents that were started by ssh; starts some again, and another first one if that is lost."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, final

from worldsize.core import Failure, Job, Outcome
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import look
from worldsize.world.processes import SIGNALS, handled, note

_logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds until the agent of a lost host is started again
_LAST = 10.0  # seconds that agents may take to end once they are let go
_UNREACHED = 255  # exit code of ssh's own errors, and of commands that a signal has ended


@final
@dataclass(frozen=True)
class Lineup:
    """The hosts of a run by node rank.

    Attributes:
        hosts: Their names, as ssh knows them; the first leads.
        absent: How many of them, the last ones, are not there when the run begins or goes on.
        lost: The first host before, if this lineup replaces one that had lost it.
    """

    hosts: tuple[str, ...]
    absent: int = 0
    lost: str | None = None

    def without_first(self, answering: set[str]) -> Lineup:
        """Return the hosts in another order: those of ``answering`` before the others, the lost one last of either."""
        first, *others = self.hosts
        there = [host for host in (*others, first) if host in answering]
        absent = [host for host in (*others, first) if host not in answering]
        return Lineup((*there, *absent), len(absent), first)

    @property
    def there(self) -> int:
        """Number of hosts that are there at first."""
        return len(self.hosts) - self.absent


@final
@dataclass
class SshAgent:
    """An agent on a remote host, which lives as long as its standard input is open."""

    host: str
    process: subprocess.Popen[str]
    last: str = ""  # line of its output

    def tell(self, message: Mapping[str, object] | str) -> None:
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
            self.last = line.strip() or self.last

    def code(self, deadline: float) -> int:
        """Wait for the end until ``deadline``, in monotonic seconds, and kill it then; return the exit code."""
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code == _UNREACHED:
            _logger.error("%s: the connection is lost", self.host)
        return code if code >= 0 else 128 - code


@final
@dataclass
class Revival:
    """Starts agents again that have ended while a run goes on without their hosts."""

    run: RunDirectory
    _due: dict[int, float] = field(default_factory=dict)  # by node: when its agent is to be started
    _has_begun: bool = False
    _pauses: dict[int, float] = field(default_factory=dict)  # seconds until then, the last time

    @property
    def has_begun(self) -> bool:
        """Whether the run has begun; before that, each host is needed."""
        self._has_begun = self._has_begun or bool(look(self.run).attempts)
        return self._has_begun

    def revive(self, agents: list[SshAgent], start: Callable[[int], SshAgent]) -> None:
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
                agents[node] = start(node)


@final
@dataclass
class HostSuccession:
    """Lets the run go on from its newest checkpoint on other hosts when the first one is lost.

    The first host is told again and again that it is heard; without that, it ends its processes after half of
    ``silence``, so that it writes nothing any more when another one leads.

    Args:
        run: The run folder.
        answering: Returns the hosts that can be reached.
        suffices: Whether so many hosts are enough.
        silence: Seconds without a heartbeat after which a host is lost.
        patience: Seconds within which enough hosts must be reached.
        most: How often the first host may be replaced.
    """

    run: RunDirectory
    answering: Callable[[], set[str]]
    suffices: Callable[[int], bool]
    silence: float
    patience: float
    most: int
    _count: int = 0  # times that it was
    _told_at: float = float("-inf")

    def tell(self, first: SshAgent) -> None:
        """Tell the first host that it is heard, if it is time to."""
        if self._count < self.most and time.monotonic() - self._told_at > self.silence / 8:
            self._told_at = time.monotonic()
            first.tell({"within": self.silence / 2})

    def next(self, lineup: Lineup, code: int, seen: Sequence[int]) -> Lineup | None:
        """Return the hosts that go on after the first one's agent has ended with ``code``; None: the run has ended.

        ``seen``: signals that have come; the first ends the search.
        """
        if seen or code != _UNREACHED or look(self.run).exit_reason not in ("running", "killed"):
            return None
        lost, remedy = lineup.hosts[0], f"`worldsize resume {self.run.path}` goes on from the newest checkpoint."
        if self._count == self.most:
            _logger.error("the first host, %s, is lost, and launcher.max_restarts=%d; %s", lost, self.most, remedy)
            return None
        self._count += 1
        _logger.error("the first host, %s, is lost", lost)
        ended = time.monotonic() + self.silence  # it may be cut off, and has ended its processes by then
        answering = self.answering()  # a lost host takes seconds to refuse
        while time.monotonic() < ended and not seen:
            time.sleep(_POLL)
        deadline = time.monotonic() + self.patience
        while not self.suffices((after := lineup.without_first(answering)).there):
            if time.monotonic() > deadline or seen:
                there = ", ".join(after.hosts[: after.there]) or "none"
                _logger.error("too few hosts answer to go on without %s: %s; %s", lost, there, remedy)
                return None
            time.sleep(_FIRST_PAUSE)
            answering = self.answering()
        if seen:
            return None
        there, count = ", ".join(after.hosts[: after.there]), f"{self._count} of {self.most}"
        _logger.error("starting again without %s, on %s (%s)", lost, there, count)
        return after


@final
@dataclass
class SshJob(Job):
    """The agents of all hosts; their exit codes tell how the run ended, which they record.

    Args:
        start: Starts the agent of a node.
        lineup: The hosts.
        grace: Seconds that a run has to save and to end.
        revival: Of a gang that heals, which goes on if an agent ends that is not the first.
        succession: What is done if that ends; None: the run ends.
    """

    start: Callable[[Lineup, int], SshAgent]
    lineup: Lineup
    grace: float
    revival: Revival | None = None
    succession: HostSuccession | None = None
    _agents: list[SshAgent] = field(default_factory=list)
    _seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin(self.lineup)

    def wait(self) -> Outcome:
        """Block until all have ended. A first signal asks them to save and end; a second or a failure kills them."""
        before = {each: signal.signal(each, lambda number, _: note(self._seen, number)) for each in handled(SIGNALS)}
        try:
            while True:
                self._join()
                codes = self._ended()
                after = self.succession.next(self.lineup, codes[0], self._seen) if self.succession else None
                if after is None:
                    break
                self._begin(after)
        finally:
            for agent in self._agents:
                agent.let_go()
            for number, handler in before.items():
                signal.signal(number, handler)
        failed = [node for node, code in enumerate(codes) if code and not self._seen]
        failure = self._failure(failed[0], codes[failed[0]]) if failed else None
        return Outcome("ended", codes[0] if self.revival else codes[0] or max(codes), failure)

    def cancel(self) -> None:
        self._agents[0].tell("SIGTERM")

    def _begin(self, lineup: Lineup) -> None:
        self.lineup = lineup
        self.revival = self.revival and Revival(self.revival.run)
        self._agents = [self.start(lineup, node) for node in range(len(lineup.hosts))]

    def _failure(self, node: int, code: int) -> Failure:
        agent = self._agents[node]
        return Failure("node", node, agent.last or f"its agent ended with exit code {code}", code, host=agent.host)

    def _ended(self) -> list[int]:
        """Let all agents go; return their exit codes."""
        for agent in self._agents:
            agent.let_go()
        deadline = time.monotonic() + _LAST
        return [agent.code(deadline) for agent in self._agents]

    def _join(self) -> None:
        asked, deadline = False, float("inf")
        while any(agent.process.poll() is None for agent in self._agents):
            if self._seen and not asked:
                self.cancel()
                asked, deadline = True, time.monotonic() + self.grace
            if len(self._seen) > 1 or time.monotonic() > deadline:
                return
            if self.succession and self._agents[0].process.poll() == _UNREACHED:
                return  # no other goes on without the first, and one that still waits for it would do so for long
            if deadline == float("inf") and self._must_end():
                deadline = time.monotonic() + self.grace  # the others shut down by themselves
            elif self._agents[0].process.poll() is None:
                if self.succession:
                    self.succession.tell(self._agents[0])
                if self.revival and not asked:
                    self.revival.revive(self._agents, partial(self.start, self.lineup))
            time.sleep(_POLL)

    def _must_end(self) -> bool:
        """Return whether an agent has ended without which the run does not go on."""
        codes = [agent.process.poll() for agent in self._agents]
        if self.revival and (codes[0] is not None or (any(codes) and self.revival.has_begun)):
            return codes[0] is not None
        return any(codes)
