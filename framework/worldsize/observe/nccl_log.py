"""Parses and summarizes the logs of NCCL and torch: networks, connections and warnings.

The format is that of NCCL 2.10 and later; see "Logging" in its documentation,
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from worldsize.files import open_regular
from worldsize.messages import format_ranks, printable
from worldsize.record.flight import collectives_file, read_collectives
from worldsize.record.run_directory import RunDirectory

# newer versions prefix warnings with the time in brackets and the location in NCCL's source; since 2.30, a name in
# parentheses follows the location
_LINE = re.compile(
    r"(?:\[[^\]]*\] )?(?P<host>[^\s:\[\]]+):\d+:\d+ \[-?\d+\] "
    r"(?:(?P<place>\S+:\d+) (?:\([^)]*\) )?)?NCCL (?P<text>.*)"
)
_VERSION = re.compile(r"NCCL version (\S+)")
_COMMUNICATOR = re.compile(r"\brank (\d+) nranks (\d+)\b.* - Init (START|COMPLETE)")
_NETWORK = re.compile(r"NET/(?P<kind>IB|Socket) ?: Using (?P<devices>\[.*)")
_DEVICE = re.compile(r"\[\d+\](?P<name>[^\s:]+)(?P<port>:\d+/\w+)?")
_CONNECTION = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (?P<way>\S+)")


@final
@dataclass
class NcclLog:
    """Facts from the log of one process."""

    host: str = ""
    version: str | None = None
    rank: int | None = None
    """Rank in the largest communicator that the process started to connect."""
    size: int = 0
    """Number of ranks in that communicator."""
    is_connected: bool = False
    """Whether that communicator was connected."""
    network: str | None = None
    """Name of the network: "IB", "Socket" or a plugin."""
    devices: tuple[str, ...] = ()
    """Network devices in NCCL's order, such as "mlx5_0:1/IB" or "eth0"."""
    bootstrap: str | None = None
    """Interface used by NCCL to set up connections."""
    connections: Counter[str] = field(default_factory=Counter)
    """Number of connections by NCCL's name, such as "P2P/CUMEM" or "NET/IB/0/GDRDMA"."""
    warnings: list[str] = field(default_factory=list)


def parse_nccl(text: str) -> NcclLog:
    """Parse NCCL's lines in the log of one process; other lines are skipped."""
    log = NcclLog()
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            if version := _VERSION.match(line):
                log.version = version[1]
            continue
        log.host, said = match["host"], match["text"]
        if said.startswith("WARN "):
            log.warnings.append(" ".join(filter(None, (match["place"], said.removeprefix("WARN ").strip()))))
        else:
            _parse_message(log, said)
    return log


def _parse_message(log: NcclLog, text: str) -> None:
    if match := _CONNECTION.search(text):
        log.connections[re.sub(r"\(\d+\)", "", match["way"])] += 1
    elif match := _COMMUNICATOR.search(text):
        if int(match[2]) >= log.size:
            log.rank, log.size, log.is_connected = int(match[1]), int(match[2]), match[3] == "COMPLETE"
    elif match := _NETWORK.search(text):
        named = match["devices"].partition("; OOB")[0]
        log.devices = tuple(each["name"] + (each["port"] or "") for each in _DEVICE.finditer(named))
    elif match := re.search(r"Bootstrap ?: Using (?:\[0\])?([^\s:]+)", text):
        log.bootstrap = match[1]
    elif match := re.search(r"Using network (\S+)", text):
        log.network = match[1]
    elif match := _VERSION.search(text):
        log.version = match[1]


_FILES = 1024  # maximum number of files of one kind to read
_AT_MOST = 1 << 19  # maximum bytes to read from each end of a file
_SHOWN = 12  # maximum number of networks, groups or warnings to report
_LENGTH = 200  # maximum reported length of a warning, in characters
_ATTEMPT = re.compile(r"\.attempt_(\d+)\.log$", re.ASCII)  # suffix of the name of an NCCL log
_TORCH = re.compile(r"(?:\[rank\d+\]:)?\[[WE]\d* ?[\d:.]* (?P<place>[\w.]+:\d+)\] (?P<text>.*)")


def debug_summary(run: RunDirectory, attempt: Mapping[str, Any] | None = None) -> str:
    """Summarize the logs of a run's processes in its last attempt, in a few lines.

    Args:
        run: The run.
        attempt: Its last attempt in the manifest. NCCL logs of other attempts are skipped.
    """
    begun, transport = (attempt or {}).get("start_at"), (attempt or {}).get("transport")
    since = begun if isinstance(begun, int | float) else 0.0
    every_output = [
        path for path in _list_files(run.path / "logs", "*_[0-9]*.log") if not path.name.startswith("nccl_")
    ]
    number = (attempt or {}).get("number")
    every_log = [
        path for path in _list_files(run.nccl_logs("any").parent, "nccl_*.log") if _is_from_attempt(path, number, since)
    ]
    outputs, logs = every_output[:_FILES], [parse_nccl(_read_ends(path)) for path in every_log[:_FILES]]
    warnings = [(_format_process(log), text) for log in logs for text in log.warnings]
    warnings += [(path.stem, text) for path in outputs for text in _warnings(_read_ends(path))]
    networks = _networks(logs, len(every_log)) if logs else _describe_gloo(transport or {})
    counted = [path for path in outputs if _is_since(collectives_file(path), since)]
    lines = [*networks, *_collectives(counted), *_summarize_warnings(warnings)]
    if (left_out := len(every_output) - len(outputs)) > 0:
        lines.append(f"the output of {left_out:,} more processes was not read")
    return "\n".join(["NCCL and torch logs (cluster.debug):", *(f"  {printable(line)}" for line in lines)])


def _list_files(folder: Path, pattern: str) -> list[Path]:
    """Return the matching files below ``folder``, sorted by name."""
    return sorted(folder.rglob(pattern), key=lambda path: path.name)


def _is_from_attempt(log: Path, number: int | None, since: float) -> bool:
    """Return whether ``log`` is of attempt ``number``, by its name or else modification time."""
    named = _ATTEMPT.search(log.name)
    return int(named[1]) == number if named and number is not None else _is_since(log, since)


def _is_since(path: Path, since: float) -> bool:
    """Return whether a file was last modified at Unix time ``since`` or later."""
    with suppress(OSError):
        return path.stat().st_mtime >= since
    return False


def _read_ends(path: Path) -> str:
    """Return the start and end of a log, which may be large, or "" if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        begun = file.read(_AT_MOST)
        file.seek(max(len(begun), file.seek(0, 2) - _AT_MOST))
        return (begun + file.read(_AT_MOST)).decode(errors="replace")
    return ""


def _format_process(log: NcclLog) -> str:
    return f"a process on {log.host}" if log.rank is None else f"rank {log.rank}"


def _warnings(text: str) -> Iterator[str]:
    """Yield torch's warnings in a process's output, and NCCL's unless it logs elsewhere."""
    for line in text.splitlines():
        if match := _TORCH.match(line):
            yield f"{match['place']} {match['text']}"
    yield from parse_nccl(text).warnings


def _describe_gloo(transport: Mapping[str, Any]) -> Iterator[str]:
    if backend := transport.get("backend"):
        yield f"{backend} on {transport.get('interface') or 'the interface with the route to the first host'}"


def _networks(logs: Sequence[NcclLog], written: int) -> Iterator[str]:
    """Yield a summary of NCCL's ranks and networks.

    ``written``: number of log files, including unread ones.
    """
    size = max(log.size for log in logs)
    connected = {log.rank for log in logs if log.is_connected and log.rank is not None}
    versions = sorted({log.version for log in logs if log.version})
    of_all = f"{size} ranks connected"
    if written > len(logs):
        of_all = f"{len(logs)} processes connected (logs read from {len(logs)} of {written})"
    yield f"NCCL {', '.join(versions) or 'of an unknown version'}: {len(connected)} of {of_all}"
    if began := {log.rank for log in logs if log.rank is not None} - connected:
        yield f"started to connect but did not finish: {format_ranks(sorted(began))}"
    by_network: defaultdict[str, set[int]] = defaultdict(set)
    for log in logs:
        if log.network is not None and log.rank is not None:
            bootstrap = f", bootstrap on {log.bootstrap}" if log.bootstrap else ""
            by_network[f"network {log.network}: {', '.join(log.devices) or 'no device'}{bootstrap}"].add(log.rank)
    yield from _limit_lines(
        [f"{text} ({format_ranks(sorted(ranks))})" for text, ranks in by_network.items()], "networks"
    )
    connections = sum((log.connections for log in logs), Counter[str]())
    yield from (f"{count:,} connections via {way}" for way, count in connections.most_common(_SHOWN))


def _collectives(outputs: Sequence[Path]) -> Iterator[str]:
    """Yield the numbers of started and completed collectives of each group, by process."""
    by_group: defaultdict[str, defaultdict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in outputs:
        for group, counts in read_collectives(path).items():
            by_group[group][counts].append(path.stem)
    lines = []
    for group, processes in by_group.items():
        parts = [
            f"{begun:,} started, {ended:,} completed by {_format_names(who)}"
            for (begun, ended), who in processes.items()
        ]
        lines.append(f"collectives of group {group}: {'; '.join(parts[:_SHOWN])}")
    yield from _limit_lines(lines, "groups")


def _summarize_warnings(warnings: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each warning with its processes, most frequent first.

    Warnings that differ only in numbers are merged.
    """
    texts: dict[str, str] = {}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for process, text in warnings:
        key = re.sub(r"0x[0-9a-f]+|\d+", "#", text)
        texts.setdefault(key, text[:_LENGTH])
        counts[key][process] += 1
    ordered = sorted(counts.items(), key=lambda each: -each[1].total())
    lines = [
        "warning from "
        f"{_format_names([f'{name} ({count})' for name, count in sorted(by_process.items())])}: "
        f"{texts[key]}"
        for key, by_process in ordered
    ]
    yield from _limit_lines(lines, "warnings") if lines else ("no warnings",)


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _limit_lines(lines: Sequence[str], what: str) -> list[str]:
    return [*lines[:_SHOWN], *([f"and {len(lines) - _SHOWN} more {what}"] if len(lines) > _SHOWN else [])]
