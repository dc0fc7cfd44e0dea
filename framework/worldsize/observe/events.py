"""Log of notable events (``events.jsonl``, one per line), and the alerts sent for them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from worldsize.core import (
    BitMismatch,
    CheckpointFailed,
    DataWorkersChanged,
    Event,
    MembershipChanged,
    NodeAlert,
    SaveIntervalChanged,
    Spike,
    Straggling,
    TransportFellBack,
    UpdateOverflowed,
)
from worldsize.messages import duration
from worldsize.observe.health.rows import describe_alert
from worldsize.record.attempt import FAILURE, failure_text
from worldsize.record.json_lines import JsonRows, Row
from worldsize.strict_json import sanitize_json

_logger = logging.getLogger(__name__)

NODE_ALERT = "node_alert"  # name of a NodeAlert event
MISMATCH = "bit_mismatch"  # name of a BitMismatch event
SPIKE = "spike"  # name of a Spike event
OVERFLOW = "overflow"  # name of an UpdateOverflowed event
_NAMES: Mapping[type, str] = {
    Straggling: "straggling",
    BitMismatch: MISMATCH,
    Spike: SPIKE,
    NodeAlert: NODE_ALERT,
    UpdateOverflowed: OVERFLOW,
    CheckpointFailed: "checkpoint_failed",
    DataWorkersChanged: "data_workers",
    SaveIntervalChanged: "save_interval",
    MembershipChanged: "membership",
    TransportFellBack: "transport",
}
GOOD_NEWS = (OVERFLOW, "data_workers", "save_interval")  # events that do not report a problem
_LOGGED = (OVERFLOW, "transport")  # already logged where they are detected
_OF_FULL_DISKS = (NODE_ALERT, "checkpoint_failed")  # only logged if they cannot be written

# keys with integer values, by event name
_NUMBERS = {
    "straggling": ("step", "rank"),
    MISMATCH: ("step",),
    SPIKE: ("step", "count", "since"),
    OVERFLOW: ("step",),
    "data_workers": ("step", "rank"),
    "checkpoint_failed": ("step", "in_a_row"),
    "save_interval": ("step", "steps"),
    "membership": ("step", "number"),
    NODE_ALERT: ("node",),
    FAILURE: ("attempt", "rank"),
}


def is_event(row: Row) -> bool:
    """Return whether a row has the required fields of a line of ``events.jsonl``."""
    numbers = _NUMBERS.get(str(row.get("event")), ())
    is_timed = type(row.get("time")) in (int, float)
    return isinstance(row.get("event"), str) and is_timed and all(type(row.get(key)) is int for key in numbers)


def event_rows(path: Path) -> JsonRows:
    """Return the valid rows of ``events.jsonl``; an iterable that counts damaged lines."""
    return JsonRows(path, is_valid=is_event)


@final
class EventLog:
    """Listener that logs notable events and appends them to ``path``; ignores other events."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> None:
        if (name := _NAMES.get(type(event))) is None:
            return
        if name not in _LOGGED:
            _logger.log(logging.INFO if name in GOOD_NEWS else logging.WARNING, "%s", _format_event(event))
        line = json.dumps(sanitize_json({"event": name, "time": time.time(), **asdict(event)}))
        try:
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            if name not in _OF_FULL_DISKS:
                raise
            _logger.warning("failed to write %s: %s", self._path, error.strerror)


@final
@dataclass(frozen=True)
class Alert:
    """A notification for a person about an event.

    Attributes:
        key: Subject, such as "slow_rank.3" or "node_alert.0.disk"; a later alert with the same key replaces this one.
        title: The event in a few words.
        text: One line with the event and, if known, its cause.
        step: The step at which the event was noticed. None if it does not belong to a step.
        is_error: Whether something has failed.
    """

    key: str
    title: str
    text: str
    step: int | None = None
    is_error: bool = False


def alert_for(event: Event) -> Alert | None:
    """Return the alert that loggers send for an event; None if it does not need an alert.

    >>> print(alert_for(TransportFellBack("NCCL uses plain sockets.", {"socket": 2}, "eth0")).text)
    NCCL uses plain sockets.
    """
    match event:
        case Straggling(rank=rank, step=step):
            return Alert(f"slow_rank.{rank}", f"rank {rank} is slow", _format_event(event), step)
        case BitMismatch(step=step):
            return Alert("bit_mismatch", "wrong bits detected", _format_event(event), step, is_error=True)
        case Spike(step=step, name=name):
            title = f"spike of the {'gradient norm' if name == 'grad_norm' else name}"
            return Alert("spike", title, _format_event(event), step)
        case NodeAlert(node=node, host=host, what=what):
            return Alert(f"node_alert.{node}.{what}", f"{host}: {what}", _format_event(event))
        case CheckpointFailed(step=step):
            return Alert("failed_save", f"checkpoint of step {step} failed", _format_event(event), step, is_error=True)
        case MembershipChanged(step=step, lost=lost, members=members) if lost:
            return Alert("membership", f"training continues with {len(members)} workers", _format_event(event), step)
        case TransportFellBack():
            return Alert("transport", "transport slower than declared", _format_event(event))
    return None


def _format_event(event: Event) -> str:
    """Describe an event in one line, for logs."""
    if isinstance(event, Straggling):
        return describe_straggler(event)
    if isinstance(event, BitMismatch | Spike):
        return event.describe()
    return describe_event({"event": _NAMES[type(event)], **asdict(event)})


def describe_event(event: Mapping[str, Any]) -> str:
    """Describe a row of ``events.jsonl`` in one line, even if its kind or fields are unknown."""
    if event.get("event") == NODE_ALERT:
        return describe_alert(event)
    if event.get("event") == OVERFLOW:
        return f"step {event.get('step')}: update skipped (float16 gradient overflow)"
    if event.get("event") == "data_workers":
        return f"step {event.get('step')}: rank {event.get('rank')}: {_workers_text(event)}"
    if event.get("event") == "checkpoint_failed":
        return f"step {event.get('step')}: {_failure_text(event)}"
    if event.get("event") == "save_interval":
        return f"step {event.get('step')}: {_interval_text(event)}"
    if event.get("event") == MISMATCH:
        return _mismatch_text(event)
    if event.get("event") == SPIKE:
        return _spike_text(event)
    if event.get("event") == "membership":
        return f"after step {event.get('step')}: {_membership_text(event)}"
    if event.get("event") == "transport":  # no step, since the transport is detected when the ranks connect
        return str(event.get("reason") or "transport slower than declared by the cluster")
    if event.get("event") == FAILURE:
        return f"attempt {event.get('attempt')}: {failure_text(event)}"
    known = {"event", "time", "step", "rank", "host", "device", "cause", "slower", "since", "health"}
    words = [f"step {event.get('step')}: {event.get('event')}"]
    if "rank" in event:
        words.append(f"rank {event['rank']}")
    if "slower" in event:
        slower = event["slower"]  # of any type: other programs may have written the file
        words.append(f"{f'{slower:.3g}' if isinstance(slower, int | float) else slower} × as slow as the others")
    words += [f"{name} {event[name]}" for name in ("host", "device", "cause") if event.get(name) is not None]
    words += [f"since step {event['since']}"] if event.get("since") is not None else []
    words += [str(event["health"])] if event.get("health") else []
    return ", ".join([*words, *(f"{name} {value}" for name, value in event.items() if name not in known)])


_CAUSES = {"data": "slow data loading", "compute": "slow compute"}


def describe_straggler(event: Straggling) -> str:
    """Describe a slow rank or link in one sentence, with its cause."""
    if event.cause == "network":
        return (
            f"the network link of {event.host} (rank {event.rank}) has {1 / event.slower:.0%} of the typical "
            f"bandwidth; all ranks have waited for the network since step {event.since} or "
            f"earlier{_enclose_in_brackets(event.health)}."
        )
    return (
        f"rank {event.rank} on {event.host} ({event.device}) has been {event.slower - 1:.0%} slower than its peers "
        f"since step {event.since}: {_CAUSES[event.cause]}{_enclose_in_brackets(event.health)}."
    )


def _mismatch_text(row: Mapping[str, Any]) -> str:
    """Describe wrong bits in one line, even if fields are damaged."""
    try:
        return BitMismatch(**{each.name: row[each.name] for each in fields(BitMismatch)}).describe()
    except (KeyError, TypeError, ValueError):
        return f"step {row.get('step')}: wrong bits"


def _spike_text(row: Mapping[str, Any]) -> str:
    """Describe a spike in one line, even if fields are damaged."""
    try:
        values = {each.name: row[each.name] for each in fields(Spike)}
        return Spike(**{**values, "value": float(row["value"])}).describe()
    except (KeyError, TypeError, ValueError):
        return f"step {row.get('step')}: spike"


def _enclose_in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _failure_text(row: Mapping[str, Any]) -> str:
    """Describe a failed save in one line, and the step a restart would resume from."""
    newest, in_a_row = row.get("newest"), row.get("in_a_row")
    again = f" {in_a_row} saves in a row have failed." if isinstance(in_a_row, int) and in_a_row > 1 else ""
    back = f"step {newest}" if isinstance(newest, int) else "the beginning"
    return (
        f"failed to write the checkpoint: {row.get('reason')}.{again} A restart would resume from {back}. "
        "Free disk space, or use another folder."
    )


def _workers_text(row: Mapping[str, Any]) -> str:
    """Describe in one line how a process changed its number of data workers."""
    workers, before, waited = row.get("workers"), row.get("before"), row.get("waited")
    if type(workers) is not int or type(before) is not int or not isinstance(waited, int | float):
        return "the number of data workers changed"
    if workers < before:
        return f"back to {workers} data workers: steps were not faster with {before}"
    return f"data workers changed from {before} to {workers}: steps waited for data {waited:.0%} of the time"


def _interval_text(row: Mapping[str, Any]) -> str:
    """Describe in one line the new interval between checkpoints, and the reason."""
    names = ("seconds", "save_seconds", "mtbf")
    values = [value for name in names if isinstance(value := row.get(name), int | float)]
    if len(values) < len(names):
        return "the checkpoint interval changed"
    seconds, save, mtbf = map(duration, values)
    return (
        f"checkpoint interval set to {row.get('steps'):,} steps ({seconds}): a save takes {save}, and a "
        f"failure is expected every {mtbf}"
    )


def _membership_text(row: Mapping[str, Any]) -> str:
    """Describe in one line which processes now train, and why."""
    members, lost, joined, seconds = (row.get(name) for name in ("members", "lost", "joined", "seconds"))
    if not isinstance(members, list | tuple) or not isinstance(lost, Mapping) or not isinstance(joined, list | tuple):
        return "the training processes changed"
    asked = row.get("asked") or {}
    parts = [f"worker {rank} lost ({cause})" for rank, cause in lost.items()]
    parts += [f"worker {rank} joined" for rank in joined]
    parts += [f"worker {rank} is waiting for other workers" for rank in row.get("waiting") or ()]
    parts += [f"requested by {name}" for name in sorted({str(each) for each in asked.values()})]
    took = f" after {duration(seconds)}" if isinstance(seconds, int | float) else ""
    samples = row.get("update_samples")
    stays = f"; batch size ({samples:g} samples) and lr are unchanged" if isinstance(samples, int | float) else ""
    axes = row.get("axes")
    sizes = [f"{axis} {size}" for axis, size in axes.items()] if isinstance(axes, Mapping) else []
    shape = f" ({' × '.join(sizes)})" if sizes else ""
    return f"{'; '.join(parts) or 'workers left'}; training continues with {len(members)} workers{shape}{took}{stays}"
