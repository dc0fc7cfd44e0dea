"""Flight records of hung processes: JSON files with their collectives and thread stacks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, final

from worldsize.files import read_regular
from worldsize.messages import printable
from worldsize.strict_json import parse_strict_json

_AT_MOST = 1 << 20  # maximum bytes per file
_RANKS = 16  # maximum number of ranks in a message
_FRAMES = 4  # maximum number of stack frames per rank in a message
_MOST_FRAMES = 16  # maximum number of stack frames on a page
_FILES = 1024  # maximum number of files to read
_NAME = re.compile(r"(?P<role>[a-z_]+)_(?P<rank>\d{5,7})\.flight(?:_before_\d+)?\.json", re.ASCII)


def flight_file(log: Path) -> Path:
    """Return the path of a process's flight record, next to its ``log``."""
    return log.with_suffix(".flight.json")


def collectives_file(log: Path) -> Path:
    """Return the path of a process's collective counts (``cluster.debug``), next to its ``log``."""
    return log.with_suffix(".collectives.json")


def read_collectives(log: Path) -> dict[str, tuple[int, int]]:
    """Return a process's numbers of started and completed collectives per process group."""
    counts = _read_record(collectives_file(log)) or {}
    pairs = {group: pair for group, pair in counts.items() if isinstance(pair, list) and len(pair) == 2}
    return {group: (int(begun), int(ended)) for group, (begun, ended) in pairs.items() if _are_counts(begun, ended)}


def _are_counts(*values: Any) -> bool:
    return all(isinstance(each, int) for each in values)


def keep_flight_file(log: Path) -> None:
    """Rename an earlier process's flight record for the same ``log``, if any, to a unique name.

    The earlier process may belong to the same attempt, if it was restarted individually or replaced.

    Raises:
        OSError: the folder is gone or cannot be written.
    """
    if (path := flight_file(log)).exists():
        kept = (log.with_suffix(f".flight_before_{number}.json") for number in count(1))
        path.rename(next(each for each in kept if not each.exists()))


def hang_report(logs: Sequence[Path]) -> str:
    """Describe what each process was doing when the gang hung; "" without flight records.

    With too many processes, list those first that were not waiting, since the others waited for them.
    """
    written = [(log.stem, record) for log in logs[:_FILES] if (record := _read_record(flight_file(log))) is not None]
    told = sorted(written, key=lambda each: _is_waiting(each[1]))[:_RANKS] if len(written) > _RANKS else written
    lines = [line for name, record in told for line in _format_record(name, record)]
    lines += [f"  and {len(written) - len(told)} more"] if len(written) > len(told) else []
    return "\n".join(["when the run hung:", *lines]) if lines else ""


@final
@dataclass(frozen=True)
class HungProcess:
    """A process of a hung gang, from its flight record."""

    attempt: int
    role: str
    rank: int
    doing: str
    """Description of the awaited collective or message, or else of the last collective."""
    waits: bool
    """Whether the process waits for others."""
    stack: tuple[str, ...]
    """Stack frames of the main thread, innermost last."""


def hung_processes(folder: Path) -> list[HungProcess]:
    """Read all flight records in a ``folder`` of logs, sorted by attempt, role and rank."""
    paths = ((path, _NAME.fullmatch(path.name)) for path in sorted(folder.rglob("*.flight*.json"))[:_FILES])
    processes = []
    for path, name in paths:
        if name and (record := _read_record(path)) is not None:
            attempt = record.get("attempt")
            number = attempt if isinstance(attempt, int) else 0
            stack = tuple(printable(str(frame)) for frame in _ensure_list(record.get("stack"))[-_MOST_FRAMES:])
            doing, waits = _describe_activity(record), _is_waiting(record)
            processes.append(HungProcess(number, name["role"], int(name["rank"]), doing, waits, stack))
    return sorted(processes, key=lambda each: (each.attempt, each.role, each.rank))


def _read_record(path: Path) -> Mapping[str, Any] | None:
    try:
        record = parse_strict_json(read_regular(path, at_most=_AT_MOST), at_most=_AT_MOST)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _format_record(name: str, record: Mapping[str, Any]) -> list[str]:
    frames = _ensure_list(record.get("stack"))[-_FRAMES:]
    return [f"  {name} {_describe_activity(record)}", *(f"    {printable(str(frame))}" for frame in frames)]


def _describe_activity(record: Mapping[str, Any]) -> str:
    """Describe the collective or message that a process awaits, or its last collective."""
    if waiting := _ensure_list(record.get("waiting")):
        return f"waits in {_describe_collective(waiting[0])}"
    if awaited := _get_awaited(record):
        return f"waits for {awaited}"
    last = record.get("last")
    return f"is not in a collective; last: {_describe_collective(last)}" if last else "has not started a collective"


def _is_waiting(record: Mapping[str, Any]) -> bool:
    """Return whether a process waits for others, from its flight ``record``."""
    return bool(_ensure_list(record.get("waiting")) or _get_awaited(record))


def _get_awaited(record: Mapping[str, Any]) -> str:
    """Return the message that a process awaits outside of collectives, or ""."""
    awaited = record.get("awaited")
    return printable(str(awaited.get("what"))) if isinstance(awaited, dict) else ""


def _ensure_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _describe_collective(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "an unknown collective"
    return printable(f"{entry.get('name')} number {entry.get('number')} of {entry.get('group')}, {entry.get('sizes')}")
