"""What a process wrote of itself when its gang hung: its collectives and the stacks of its threads, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.messages import printable
from worldsize.strict_json import parse

_AT_MOST = 1 << 20  # bytes of one file
_RANKS = 16  # most ranks that a message names
_FRAMES = 4  # most frames of a stack that a message shows


def flight_file(log: Path) -> Path:
    """Return the file beside the ``log`` of a process."""
    return log.with_suffix(".flight.json")


def collectives_file(log: Path) -> Path:
    """Return the file beside the ``log`` of a process that counts its collectives, with ``cluster.debug``."""
    return log.with_suffix(".collectives.json")


def collectives_of(log: Path) -> dict[str, tuple[int, int]]:
    """Return how many collectives the process with this ``log`` has begun and completed, by process group."""
    counts = _read(collectives_file(log)) or {}
    pairs = {group: pair for group, pair in counts.items() if isinstance(pair, list) and len(pair) == 2}
    return {group: (int(begun), int(ended)) for group, (begun, ended) in pairs.items() if _are_counts(begun, ended)}


def _are_counts(*values: Any) -> bool:
    return all(isinstance(each, int) for each in values)


def hang_report(logs: Sequence[Path]) -> str:
    """Return what the processes with these ``logs`` did when their gang hung, some lines each; "" if none wrote it."""
    records = [(log.stem, record) for log in logs if (record := _read(flight_file(log))) is not None]
    lines = [line for name, record in records[:_RANKS] for line in _lines(name, record)]
    return "\n".join(["when the gang hung:", *lines]) if lines else ""


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        with path.open("rb") as file:
            record = parse(file.read(_AT_MOST + 1), at_most=_AT_MOST)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _lines(name: str, record: Mapping[str, Any]) -> list[str]:
    waiting, last, stack = (record.get(key) for key in ("waiting", "last", "stack"))
    if isinstance(waiting, list) and waiting:
        what = f"waits in {_told(waiting[0])}"
    else:
        what = f"waits in no collective; it began {_told(last)} last" if last else "began no collective"
    frames = stack[-_FRAMES:] if isinstance(stack, list) else []
    return [f"  {name} {what}", *(f"    {printable(str(frame))}" for frame in frames)]


def _told(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "an unknown one"
    return printable(f"{entry.get('name')} number {entry.get('number')} of {entry.get('group')}, {entry.get('sizes')}")
