"""Tracks a gang's processes, and shows their logs on the terminal."""

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
from worldsize.healing.membership import Pipe
from worldsize.launch.first_cause import Ending, ProcessError
from worldsize.messages import last_error
from worldsize.strict_json import LARGEST, parse_strict_json
from worldsize.world.processes import PREEMPTED, Beat, read_beat

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog


_logger = logging.getLogger(__name__)

_FULL_BYTES = 64 << 10  # free space below which a process may fail to write its error


class Process(Protocol):
    """Interface of a process in a gang, which may be local or remote."""

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
    """A gang's process with its files for output, errors and progress."""

    role: str
    rank: int  # within the role
    process: Process
    log: Path
    error: Path
    heartbeat: Path
    pipe: Pipe | None = None  # only in a healing gang
    host: str = ""
    log_start: int = 0  # size of the log in bytes before this start

    @property
    def failed(self) -> bool:
        return self.process.exitcode not in (0, PREEMPTED, None)

    @property
    def beat(self) -> Beat | None:
        return read_beat(self.heartbeat)

    def read_ending(self) -> Ending:
        """Return exit code, error and progress of the exited process; its files are read only once."""
        return self._ending

    @cached_property
    def _ending(self) -> Ending:
        code = self.process.exitcode
        assert code is not None
        return Ending(self.role, self.rank, code, self._read_error(), self.beat, self.log, self.host)

    def copy_error_to_log(self, first: Failure | None) -> None:
        """Append the error to the log, shortened to one line if the process only lost a peer.

        ``first`` is the gang's first failure. The process does not log its own error, since the terminal shows the logs
        and must show the first cause first.
        """
        if error := self._read_error():
            text = error["traceback"]
            if first is not None and (first.role, first.rank) != (self.role, self.rank) and "lost_peer" in error:
                file = self.log.with_suffix(".error.json").name
                text = f"lost its peers after {first.role} {first.rank} failed: {error['lost_peer']} (see {file})\n"
            with suppress(OSError), self.log.open("a") as log:
                log.write(text)

    def _read_error(self) -> ProcessError | None:
        try:
            error: ProcessError = parse_strict_json(read_regular(self.error, at_most=LARGEST))
            return error
        except (OSError, ValueError):
            return self._full_disk()

    def _full_disk(self) -> ProcessError | None:
        """Return a "disk full" error if the process failed and could not write an error file."""
        with suppress(OSError):
            if self.process.exitcode == 1 and shutil.disk_usage(self.error.parent).free < _FULL_BYTES:
                text = f"the disk with {self.error.parent.parent} is full. Free disk space, then resume the run."
                return {"time_ns": 0, "traceback": text}
        return None


class LostHostError(OSError):
    """The host that should start a process is lost."""


@final
class Members:
    """The processes of a gang.

    ``start(role, rank, starts)`` starts a process that was started ``starts`` times before. In a role with individual
    restarts, a failed process is restarted up to ``max_restarts`` times; then the run continues without it while
    ``min_processes`` processes of its role are alive. In a healing role, the run also continues during the restart.
    ``node_of(role, rank)`` returns the node rank of a process.
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
        self.current: list[Member] = []  # started members, without lost ones and those that left
        self.ended: list[Member] = []  # exited members of self.current
        self.lost: list[Member] = []  # failed members that were restarted or given up
        self.leaving: list[Member] = []  # members that were asked to leave a healing gang
        self.terminal = terminal  # shows the members' output
        self._start, self._max_restarts, self._node_of = start, max_restarts, node_of

    def add_process(self, role: str, rank: int) -> None:
        """Start a process and show its output."""
        member = self._start(role, rank, _count_starts(self.lost, role, rank))
        self.current.append(member)
        if self.terminal and not any((each.role, each.rank) == (role, rank) for each in self.lost):
            self.terminal.follow_log(f"{role} {rank}", member.log, start=member.log_start)

    def list_alive(self) -> list[Member]:
        return [member for member in self.current if member.process.is_alive()]

    def map_sentinels(self) -> dict[int, Member]:
        """Map sentinels, which become readable on exit, to the running processes."""
        return {member.process.sentinel: member for member in self.current if member not in self.ended}

    def note_end(self, member: Member) -> None:
        """Record that a process exited; if it failed, restart it where its role allows that."""
        member.process.join()
        if member in self.leaving:
            self.current.remove(member)
            return
        self.ended.append(member)
        is_ending = any(self._is_deciding(each) and not each.failed for each in self.ended)
        if not member.failed:
            return
        if self.roles[member.role].restart == "heal":
            self._heal_process(member, is_ending=is_ending)
        elif self.roles[member.role].restart == "individual" and not is_ending:
            self._replace_process(member)

    @property
    def deciding(self) -> Sequence[Member]:
        """The processes that must complete for the run to count as completed."""
        return [member for member in self.current if self._is_deciding(member)]

    @property
    def must_end(self) -> bool:
        """Whether the gang must end: a failure is final, or all deciding processes have exited."""
        deciding = self.deciding
        is_over = bool(deciding) and all(member in self.ended for member in deciding)
        return is_over or any(member.failed for member in self.ended)

    def terminate(self) -> None:
        """Ask all live processes to save and exit."""
        for member in self.list_alive():
            member.process.terminate()

    def kill_processes(self) -> list[Member]:
        """Kill all live processes, and return the killed ones."""
        alive = self.list_alive()
        for member in alive:
            member.process.kill()
            member.process.join()
        return alive

    def _is_deciding(self, member: Member) -> bool:
        """Return whether the run needs the process: any but a last role with individual restarts."""
        return member.role != list(self.roles)[-1] or self.roles[member.role].restart != "individual"

    def _heal_process(self, member: Member, *, is_ending: bool) -> None:
        """Restart or drop a failed process.

        Instead, the gang fails if its error ends the run, or if the process wrote an error, and a lost process wrote
        one at the same step. Processes with wrong bits do not count as such: several may share a host.
        """
        ending = member.read_ending()  # before its replacement overwrites its files
        lost = [each.read_ending() for each in self.lost]
        repeated = [_get_step(each.beat) for each in lost if each.has_failed_itself and not each.has_wrong_bits]
        if is_ending:  # the other processes have completed all steps or saved
            self.ended.remove(member)
            self.current.remove(member)
            self.lost.append(member)
        elif ending.ends_run:
            return
        elif ending.has_wrong_bits or not ending.has_failed_itself or _get_step(ending.beat) not in repeated:
            self._replace_process(member)

    def _replace_process(self, member: Member) -> None:
        """Restart a failed process or continue without it; otherwise, let the gang fail."""
        role, starts = self.roles[member.role], _count_starts(self.lost, member.role, member.rank)
        others = [each for each in self.list_alive() if each.role == member.role]
        least = 1 if role.restart == "heal" else role.processes
        nodes = [self._node_of(each.role, each.rank) for each in others]
        able = max(_count_grouped(nodes, block.together) for block in role.blocks)
        is_spare = able >= (least if role.min_processes is None else role.min_processes)
        if role.restart == "heal" and not is_spare:
            return
        restarts = starts < self._max_restarts and not member.read_ending().has_wrong_bits
        if restarts:
            what = f"restarting ({starts + 1} of {self._max_restarts})"
        elif is_spare:
            what = "continuing without it"
        else:
            return
        cause = last_error(member.read_ending().cause).rstrip(".")
        _logger.error("%s %d failed: %s; %s", member.role, member.rank, cause, what)
        self.ended.remove(member)
        self.current.remove(member)
        self.lost.append(member)
        if restarts:
            self._start_again(member, is_spare=is_spare)

    def _start_again(self, member: Member, *, is_spare: bool) -> None:
        """Restart a process; if its host cannot start it, continue without it or let the gang fail."""
        try:
            self.add_process(member.role, member.rank)
        except OSError as error:  # process limit reached, or disk full
            _logger.error("failed to restart %s %d: %s", member.role, member.rank, error)
            if not is_spare:
                self.lost.remove(member)
                self.current.append(member)
                self.ended.append(member)


def _count_grouped(nodes: Sequence[int], together: int) -> int:
    """Return the number of processes in complete groups of ``together`` on one node.

    ``nodes``: the node of each process.
    """
    return sum(count // together * together for count in Counter(nodes).values())


def _get_step(beat: Beat | None) -> int | None:
    return beat.step if beat else None


def _count_starts(lost: Sequence[Member], role: str, rank: int) -> int:
    """Return how often the process with this role and rank has been lost."""
    return sum((each.role, each.rank) == (role, rank) for each in lost)


_CHUNK = 1 << 20  # bytes per read


@final
class Terminal:
    """Follows log files; prints each line with its process's name, such as "[worker 3] "."""

    def __init__(self) -> None:
        self._tails: list[TailLog] = []

    def follow_log(self, name: str, log: Path, *, start: int = 0) -> None:
        """Start following the log of the process ``name`` at byte ``start``."""
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog  # takes seconds, since it imports torch

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
        except RuntimeError as error:  # the host's process limit may prevent one more thread
            _logger.warning("the output of %s is only in %s: %s", name, log, error)

    def close(self) -> None:
        """Print the rest of all logs, and stop."""
        for tail in self._tails:
            tail.stop()


def read_log_size(log: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    return log.stat().st_size if log.exists() else 0


def _lines_before(start: int, log: Path) -> int:
    """Count the lines before byte ``start`` of a log, with Python's universal newlines."""
    if not start:
        return 0
    decoder, lines = io.IncrementalNewlineDecoder(None, translate=True), 0
    with open_regular(log) as file:
        while start and (chunk := file.read(min(start, _CHUNK))):
            start -= len(chunk)
            lines += decoder.decode(chunk.decode("latin-1"), final=not start).count("\n")
    return lines
