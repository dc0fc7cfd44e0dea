"""Tracks the processes of a gang, and shows their logs on the terminal."""

from __future__ import annotations

import io
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

from worldsize.core import Failure, Role
from worldsize.files import open_regular, read_regular
from worldsize.launch.first_cause import Ending, ProcessError
from worldsize.messages import last_error
from worldsize.strict_json import LARGEST, parse
from worldsize.world.membership import Pipe
from worldsize.world.processes import PREEMPTED, Beat, read_beat

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog


_logger = logging.getLogger(__name__)

_FULL_BYTES = 64 << 10  # bytes; with less free space a process may fail to write its error


class Process(Protocol):
    """A process of a gang, on this host or another."""

    @property
    def sentinel(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    @property
    def pid(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def join(self) -> None: ...


@final
@dataclass(frozen=True)
class Member:
    """One process with its files for output, error and progress."""

    role: str
    rank: int  # in its role
    process: Process
    log: Path
    error: Path
    heartbeat: Path
    pipe: Pipe | None = None  # to a process of a gang that heals
    host: str = ""
    log_start: int = 0  # bytes of the log that earlier attempts wrote

    @property
    def failed(self) -> bool:
        return self.process.exitcode not in (0, PREEMPTED, None)

    @property
    def beat(self) -> Beat | None:
        return read_beat(self.heartbeat)

    def ending(self) -> Ending:
        """Collect the exit code and error of the process, which has ended; its files are read once."""
        return self._ending

    @cached_property
    def _ending(self) -> Ending:
        code = self.process.exitcode
        assert code is not None
        return Ending(self.role, self.rank, code, self._error(), self.beat, self.log, self.host)

    def copy_error_to_log(self, first: Failure | None) -> None:
        """Append the error to the log, in one line if the process only lost the peer that failed ``first``.

        The process does not write it there itself, since the terminal shows the logs and the first cause must come
        first.
        """
        if error := self._error():
            text = error["traceback"]
            if first is not None and (first.role, first.rank) != (self.role, self.rank) and "lost_peer" in error:
                file = self.log.with_suffix(".error.json").name
                text = f"lost its peers after {first.role} {first.rank} failed: {error['lost_peer']} (see {file})\n"
            with suppress(OSError), self.log.open("a") as log:
                log.write(text)

    def _error(self) -> ProcessError | None:
        try:
            error: ProcessError = parse(read_regular(self.error, at_most=LARGEST))
            return error
        except (OSError, ValueError):
            return self._full_disk()

    def _full_disk(self) -> ProcessError | None:
        """Return the likely error if a process failed and the disk is too full for its error file."""
        with suppress(OSError):
            if self.process.exitcode == 1 and shutil.disk_usage(self.error.parent).free < _FULL_BYTES:
                text = f"the disk with {self.error.parent.parent} is full. Make room, then resume the run."
                return {"time_ns": 0, "traceback": text}
        return None


class LostHostError(OSError):
    """The host on which a process was to be started is lost."""


@final
class Members:
    """The processes of a gang.

    ``start(role, rank, starts)`` starts a process that was started ``starts`` times before. If its role restarts
    individually, a failed process is restarted up to ``max_restarts`` times; then the run continues without it as long
    as ``min_processes`` of its role are alive. In a role that heals it continues in the meantime, too. ``node_of``
    returns the number of a process's host, given its role and its rank there.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        start: Callable[[str, int, int], Member],
        *,
        max_restarts: int,
        terminal: Terminal | None,
        node_of: Callable[[str, int], int] = lambda role, rank: 0,
    ) -> None:
        self.roles = roles
        self.current: list[Member] = []  # without the lost ones
        self.ended: list[Member] = []  # of the current ones
        self.lost: list[Member] = []  # they have failed, and the run has continued
        self.leaving: list[Member] = []  # they were asked to leave a gang that heals
        self.terminal = terminal  # shows their output
        self._start, self._max_restarts, self._node_of = start, max_restarts, node_of

    def add(self, role: str, rank: int) -> None:
        """Start a process, and show its output."""
        member = self._start(role, rank, _starts(self.lost, role, rank))
        self.current.append(member)
        if self.terminal and not any((each.role, each.rank) == (role, rank) for each in self.lost):
            self.terminal.show(f"{role} {rank}", member.log, start=member.log_start)

    def alive(self) -> list[Member]:
        return [member for member in self.current if member.process.is_alive()]

    def awaited(self) -> dict[int, Member]:
        """Map the descriptor that becomes readable when a process ends to the process, for all that run."""
        return {member.process.sentinel: member for member in self.current if member not in self.ended}

    def note_end(self, member: Member) -> None:
        """Record that the process has ended; restart it if its role allows that and the run is not about to end."""
        member.process.join()
        if member in self.leaving:
            self.current.remove(member)
            return
        self.ended.append(member)
        is_ending = any(self._is_deciding(each) and not each.failed for each in self.ended)
        if not member.failed:
            return
        if self.roles[member.role].restart == "heal":
            self._heal(member, is_ending=is_ending)
        elif self.roles[member.role].restart == "individual" and not is_ending:
            self._replace(member)

    @property
    def deciding(self) -> Sequence[Member]:
        """List the processes whose end is the run's end."""
        return [member for member in self.current if self._is_deciding(member)]

    @property
    def must_end(self) -> bool:
        """Return whether a process has failed for good, or only processes remain that may come and go."""
        deciding = self.deciding
        is_over = bool(deciding) and all(member in self.ended for member in deciding)
        return is_over or any(member.failed for member in self.ended)

    def terminate(self) -> None:
        """Ask all to save and to end."""
        for member in self.alive():
            member.process.terminate()

    def kill(self) -> list[Member]:
        """Kill all processes that are still alive; return them."""
        alive = self.alive()
        for member in alive:
            member.process.kill()
            member.process.join()
        return alive

    def _is_deciding(self, member: Member) -> bool:
        """Return whether the run needs the process: only those of the last role may come and go."""
        return member.role != list(self.roles)[-1] or self.roles[member.role].restart != "individual"

    def _heal(self, member: Member, *, is_ending: bool) -> None:
        """Go on without a failed process, or restart it too, unless its error is one that met another at that step."""
        ending = member.ending()  # before its files become those of the process that takes its place
        errors = [lost.beat for lost in map(Member.ending, self.lost) if lost.has_failed_itself]
        if is_ending:  # the others have done all steps, or saved
            self.ended.remove(member)
            self.current.remove(member)
            self.lost.append(member)
        elif not ending.has_failed_itself or _step(ending.beat) not in map(_step, errors):
            self._replace(member)

    def _replace(self, member: Member) -> None:
        """Restart a failed process, or continue without it; if neither is allowed, the gang fails."""
        role, starts = self.roles[member.role], _starts(self.lost, member.role, member.rank)
        others = [each for each in self.alive() if each.role == member.role]
        least = 1 if role.restart == "heal" else role.processes
        able = _in_groups([self._node_of(each.role, each.rank) for each in others], role.together)
        is_spare = able >= (least if role.min_processes is None else role.min_processes)
        if role.restart == "heal" and not is_spare:
            return
        if starts < self._max_restarts:
            what = f"starting it again ({starts + 1} of {self._max_restarts})"
        elif is_spare:
            what = "going on without it"
        else:
            return
        cause = last_error(member.ending().cause)
        _logger.error("%s %d failed: %s; %s", member.role, member.rank, cause, what)
        self.ended.remove(member)
        self.current.remove(member)
        self.lost.append(member)
        if starts < self._max_restarts:
            self._start_again(member, is_spare=is_spare)

    def _start_again(self, member: Member, *, is_spare: bool) -> None:
        """Restart a process; if the host cannot, continue without it, or let the gang fail."""
        try:
            self.add(member.role, member.rank)
        except OSError as error:  # no more processes, or a full disk
            _logger.error("%s %d cannot be started again: %s", member.role, member.rank, error)
            if not is_spare:
                self.lost.remove(member)
                self.current.append(member)
                self.ended.append(member)


def _in_groups(nodes: Sequence[int], together: int) -> int:
    """Return how many of the processes on these nodes form groups of ``together``, each on one node."""
    return sum(count // together * together for count in Counter(nodes).values())


def _step(beat: Beat | None) -> int | None:
    return beat.step if beat else None


def _starts(lost: Sequence[Member], role: str, rank: int) -> int:
    """Return how often a process was started and died."""
    return sum((each.role, each.rank) == (role, rank) for each in lost)


_CHUNK = 1 << 20  # bytes


@final
class Terminal:
    """Follows log files and shows each line after the name of its process, as in "[worker 3] ..."."""

    def __init__(self) -> None:
        self._tails: list[TailLog] = []

    def show(self, name: str, log: Path, *, start: int = 0) -> None:
        """Start to follow the log of the process ``name``, from byte ``start`` on."""
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog  # takes seconds, as torch does

        prefix, earlier = f"[{name}] ", iter(range(_lines_before(start, log)))
        try:
            tail = TailLog(
                prefix,
                {0: str(log)},
                sys.stdout,
                {0: prefix},
                log_line_filter=lambda line: next(earlier, None) is None,
            )
            self._tails.append(tail.start())
        except RuntimeError as error:  # a host may allow a process but no thread to follow it
            _logger.warning("%s is not shown here, see %s: %s", name, log, error)

    def close(self) -> None:
        """Show the rest of all logs, and stop."""
        for tail in self._tails:
            tail.stop()


def size_of(log: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    return log.stat().st_size if log.exists() else 0


def _lines_before(start: int, log: Path) -> int:
    """Return how many lines of a log end before byte ``start``, as Python splits a text file."""
    if not start:
        return 0
    decoder, lines = io.IncrementalNewlineDecoder(None, translate=True), 0
    with open_regular(log) as file:
        while start and (chunk := file.read(min(start, _CHUNK))):
            start -= len(chunk)
            lines += decoder.decode(chunk.decode("latin-1"), final=not start).count("\n")
    return lines
