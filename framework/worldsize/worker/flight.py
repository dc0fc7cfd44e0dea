"""Detects hangs: all processes then write their stacks and pending collectives."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch._C import _distributed_c10d

from worldsize.collectives.group import PEER_WAIT
from worldsize.devices import backend_names
from worldsize.record.flight import collectives_file, flight_file, keep_flight_file

_logger = logging.getLogger(__name__)

_SHARE = 0.6  # fraction of the timeout after which a collective, or a wait for a message, counts as hung
_POLLS = 20  # polls per timeout
_QUICKEST, _SLOWEST = 0.1, 10.0  # minimum and maximum seconds between two polls
_RECORDS = 16  # maximum number of hangs recorded per process, since a server may survive many
_SETTLES = 0.5  # seconds that torch may need to record the completion of a collective


@contextmanager
def hangs_watched(
    log: Path, asked: Path, *, attempt: int, timeout: float, counts: bool = False
) -> Iterator[Callable[[], None]]:
    """Watch for hangs in this block; if the gang hangs, write this process's flight record.

    The record is written next to ``log``. The context yields a function to call when the process joins a different
    gang, to ignore earlier collectives.

    torch's flight recorder stores the last collectives (``TORCH_FR_BUFFER_SIZE``, set in world/). Its own dump is a
    pickle, so this module reads the JSON form.

    Args:
        log: Log of this process.
        asked: File that the first waiting process touches to alert the other processes of its attempt.
        attempt: Number of the attempt.
        timeout: Time limit of a collective, in seconds.
        counts: Whether to write the numbers of this process's collectives next to ``log``, at the end or in a hang.
    """
    with suppress(OSError):  # the folder was deleted, or the disk is full
        keep_flight_file(log)
    with suppress(OSError):
        collectives_file(log).unlink()
    watch = _HangWatch(log, asked, attempt, timeout, counts=counts)
    watch.start()
    try:
        yield watch.ignore_past_collectives
    finally:
        watch.ended.set()
        watch.write_counts(until=time.monotonic() + _SETTLES)


@final
class _HangWatch(threading.Thread):
    def __init__(self, log: Path, asked: Path, attempt: int, timeout: float, *, counts: bool) -> None:
        super().__init__(name="hang watch", daemon=True)
        self.ended = threading.Event()
        self._log, self._asked = log, asked
        self._asked_before = self._read_request_time()  # requests from before the start of this process do not count
        self._attempt, self._timeout = attempt, timeout
        self._since = 0  # time in ns when the process joined its gang
        self._told = 0  # time in ns of the last flight record; earlier waits belong to that hang
        self._counted = collectives_file(log) if counts else None
        self._main = threading.main_thread().ident

    def ignore_past_collectives(self) -> None:
        """Ignore the collectives that this process has started so far, since their gang is gone."""
        self._since = time.time_ns()

    def write_counts(self, *, until: float = 0.0) -> None:
        """Write the numbers of this process's collectives, once, if requested and in a group.

        ``until``: monotonic time until which to wait for torch's threads to record completed collectives.
        """
        path, self._counted = self._counted, None  # only once, since a failed collective would count as completed later
        if path is not None and dist.is_initialized():
            with suppress(OSError, KeyError, ValueError):
                while (
                    any(begun != ended for begun, ended in _count_collectives().values()) and time.monotonic() < until
                ):
                    time.sleep(_SETTLES / 20)
                path.write_text(json.dumps(_count_collectives()))

    def run(self) -> None:
        pause = min(max(self._timeout / _POLLS, _QUICKEST), _SLOWEST)
        records = 0
        with suppress(OSError, KeyError, ValueError):  # full disk, deleted folder, or a torch with a different format
            while records < _RECORDS and not self.ended.wait(pause):
                entries = _collectives()
                waiting = [each for each in entries if not each["retired"] and each["time_created_ns"] > self._since]
                is_asked = self._is_asked()
                if is_asked or self._is_hung(waiting):
                    if not is_asked:
                        self._request_records()
                    keep_flight_file(self._log)
                    flight_file(self._log).write_text(json.dumps(self._build_record(entries, waiting)))
                    self.write_counts()  # now, since it may be killed during the hang
                    self._told, records = time.time_ns(), records + 1

    def _is_asked(self) -> bool:
        """Return whether a new request has arrived; ignore further requests for the same hang."""
        before, self._asked_before = self._asked_before, self._read_request_time()
        return self._asked_before != before and time.time_ns() - self._told > _SHARE / 2 * self._timeout * 1e9

    def _is_hung(self, waiting: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether this process has been waiting too long for a collective or a message.

        Collectives and messages in its last record do not count.
        """
        now, awaited = time.time_ns(), PEER_WAIT.get_open_wait()
        begun = [each["time_created_ns"] for each in waiting]
        begun += [now - int(awaited[1] * 1e9)] if awaited else []
        oldest = min((each for each in begun if each > self._told), default=now)
        return (now - oldest) / 1e9 > _SHARE * self._timeout

    def _request_records(self) -> None:
        """Request a record from all processes; log a wait for a message, which may still end."""
        self._asked.touch()
        if awaited := PEER_WAIT.get_open_wait():
            text = "still waiting for %s after %.3g s; see *.flight.json next to each process's log"
            _logger.warning(text, *awaited)

    def _read_request_time(self) -> int:
        """Return the time of the last request in ns; 0 if there is none."""
        with suppress(OSError):
            return self._asked.stat().st_mtime_ns
        return 0

    def _build_record(
        self, entries: Sequence[Mapping[str, Any]], waiting: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        awaited = PEER_WAIT.get_open_wait()
        frames = sys._current_frames()
        return {
            "attempt": self._attempt,
            "waiting": [_format_entry(each) for each in waiting],
            "awaited": {"what": awaited[0], "seconds": awaited[1]} if awaited else None,
            "last": _format_entry(entries[-1]) if entries else None,
            "stack": _format_stack(frames.get(self._main or 0)),
            "threads": {str(ident): _format_stack(frame) for ident, frame in frames.items()},
        }


def _collectives() -> list[Mapping[str, Any]]:
    """Return the flight recorder's entries, oldest first; empty outside of a process group."""
    try:
        entries: list[Mapping[str, Any]] = _read_flight_recorder().get("entries", []) if dist.is_initialized() else []
    except ValueError:  # the group was destroyed in between, because the membership changed
        return []
    return entries


def _count_collectives() -> dict[str, list[int]]:
    """Return how many collectives this process has started and completed, by group.

    Torch's last completed collective is not used, since its threads may record completions out of order.
    """
    record = _read_flight_recorder()
    pending = {
        str(each["pg_id"]): int(each["collective_seq_id"])
        for each in reversed(record.get("entries", []))  # the dict retains the oldest entry per group
        if not each["retired"] and not each["is_p2p"]
    }
    begun = {group: int(each["last_enqueued_collective"]) for group, each in record.get("pg_status", {}).items()}
    return {group: [last, pending.get(group, last + 1) - 1] for group, last in begun.items()}


def _read_flight_recorder() -> Mapping[str, Any]:
    dump = _distributed_c10d._dump_fr_trace_json
    if "nccl" in backend_names(dist.get_backend()):
        dump = _distributed_c10d._dump_nccl_trace_json  # type: ignore[attr-defined]
    record: Mapping[str, Any] = json.loads(dump(True, False))
    return record


def _format_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": entry["profiling_name"],
        "number": entry["collective_seq_id"] or entry["p2p_seq_id"],
        "group": " ".join(entry["process_group"]),
        "sizes": entry["input_sizes"],
        "seconds": max(time.time_ns() - entry["time_created_ns"], 0) / 1e9,
    }


def _format_stack(frame: Any) -> list[str]:
    stack = traceback.extract_stack(frame) if frame is not None else []
    return [f"{each.filename}, line {each.lineno}, in {each.name}" for each in stack]
