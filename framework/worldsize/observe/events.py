"""Writes ``events.jsonl``, the events of a run other than steps, one per line; and tells which of them are alerts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from worldsize.core import (
    CheckpointFailed,
    DataWorkersChanged,
    Event,
    MembershipChanged,
    NodeAlert,
    SaveIntervalChanged,
    Straggling,
    TransportFellBack,
)
from worldsize.messages import duration
from worldsize.observe.health.rows import described_alert
from worldsize.records.json_lines import Row

_logger = logging.getLogger(__name__)

NODE_ALERT = "node_alert"  # the name of the event of a NodeAlert

# keys that an event of each name has for whole numbers
_NUMBERS = {
    "straggling": ("step", "rank"),
    "data_workers": ("step", "rank"),
    "checkpoint_failed": ("step", "in_a_row"),
    "save_interval": ("step", "steps"),
    "membership": ("step", "number"),
    NODE_ALERT: ("node",),
}


def is_event(row: Row) -> bool:
    """Return whether a row has the fields of each line of ``events.jsonl``: event, time and rank."""
    numbers = _NUMBERS.get(str(row.get("event")), ())
    is_timed = type(row.get("time")) in (int, float)
    return isinstance(row.get("event"), str) and is_timed and all(type(row.get(key)) is int for key in numbers)


@final
class EventLog:
    """Appends notable events to ``path``, and logs them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> None:
        match event:
            case Straggling():
                _logger.warning("%s", described(event))
                self._write("straggling", asdict(event))
            case NodeAlert():
                _logger.warning("%s", described_alert(asdict(event)))
                self._write_if_possible(NODE_ALERT, asdict(event))
            case CheckpointFailed():
                _logger.warning("step %s: %s", event.step, described_failure(asdict(event)))
                self._write_if_possible("checkpoint_failed", asdict(event))
            case DataWorkersChanged():
                _logger.info("step %s: rank %s: %s", event.step, event.rank, described_workers(asdict(event)))
                self._write("data_workers", asdict(event))
            case SaveIntervalChanged():
                _logger.info("step %s: %s", event.step, described_interval(asdict(event)))
                self._write("save_interval", asdict(event))
            case MembershipChanged():
                _logger.warning("after step %s: %s", event.step, described_membership(asdict(event)))
                self._write("membership", asdict(event))
            case TransportFellBack():
                self._write("transport", asdict(event))  # logged where it was found

    def _write_if_possible(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write an event of a disk that may take nothing: what it said is in the process's log, too, if that is so."""
        try:
            self._write(name, facts)
        except OSError as error:
            _logger.warning("%s could not be written: %s", self._path, error.strerror)

    def _write(self, name: str, facts: Mapping[str, Any]) -> None:
        line = {"event": name, "time": time.time(), **facts}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@final
@dataclass(frozen=True)
class Alert:
    """An event that a person should see soon, in words.

    Attributes:
        key: What it is about, such as "slow_rank.3" or "node_alert.0.disk": later alerts with the same key replace it.
        title: The same in a few words.
        text: What has happened, and if it is known why, in one line.
        step: The step at which it was noticed; None: it is of no step.
        is_error: Whether something has failed.
    """

    key: str
    title: str
    text: str
    step: int | None = None
    is_error: bool = False


def alert_for(event: Event) -> Alert | None:
    """Return the alert that loggers send for an event; None: the event is none.

    >>> print(alert_for(TransportFellBack("NCCL uses plain sockets.", {"socket": 2}, "eth0")).text)
    NCCL uses plain sockets.
    """
    match event:
        case Straggling(rank=rank, step=step):
            return Alert(f"slow_rank.{rank}", f"rank {rank} is slow", described(event), step)
        case NodeAlert(node=node, host=host, what=what):
            return Alert(f"node_alert.{node}.{what}", f"{host}: {what}", described_alert(asdict(event)))
        case CheckpointFailed(step=step):
            text = f"step {step}: {described_failure(asdict(event))}"
            return Alert("failed_save", f"no checkpoint of step {step}", text, step, is_error=True)
        case MembershipChanged(step=step, lost=lost, members=members) if lost:
            text = f"after step {step}: {described_membership(asdict(event))}"
            return Alert("membership", f"{len(members)} workers go on", text, step)
        case TransportFellBack(reason=reason):
            return Alert("transport", "a slower transport than declared", reason)
    return None


_CAUSES = {"data": "it waits for its data", "compute": "it takes longer to compute"}


def described(event: Straggling) -> str:
    """Describe the event in one line for people."""
    if event.cause == "network":
        return (
            f"the link of {event.host}, where rank {event.rank} is, carries {1 / event.slower:.0%} of what most do; "
            f"all have waited for the network since step {event.since} or before{_in_brackets(event.health)}."
        )
    return (
        f"rank {event.rank} on {event.host} ({event.device}) has been {event.slower - 1:.0%} slower than its peers "
        f"since step {event.since}: {_CAUSES[event.cause]}{_in_brackets(event.health)}."
    )


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def described_failure(row: Mapping[str, Any]) -> str:
    """Describe in one line for people a save that failed, and how far back a restart would go."""
    newest, in_a_row = row.get("newest"), row.get("in_a_row")
    again = f" {in_a_row} saves in a row have failed." if isinstance(in_a_row, int) and in_a_row > 1 else ""
    back = f"to step {newest}" if isinstance(newest, int) else "to the beginning"
    return (
        f"the checkpoint could not be written: {row.get('reason')}.{again} A restart would go back {back}. "
        "Make room, or choose another folder."
    )


def described_workers(row: Mapping[str, Any]) -> str:
    """Describe in one line for people how a process changed the number of its data workers."""
    workers, before, waited = row.get("workers"), row.get("before"), row.get("waited")
    if type(workers) is not int or type(before) is not int or not isinstance(waited, int | float):
        return "the number of its data workers changed"
    if workers < before:
        return f"back to {workers} data workers: steps were not shorter with {before}"
    return f"{workers} data workers instead of {before}: steps waited for data for {waited:.0%} of their time"


def described_interval(row: Mapping[str, Any]) -> str:
    """Describe in one line for people how often a run saves from now on, and why."""
    names = ("seconds", "save_seconds", "mtbf")
    values = [value for name in names if isinstance(value := row.get(name), int | float)]
    if len(values) < len(names):
        return "the number of steps between checkpoints changed"
    seconds, save, mtbf = map(duration, values)
    return (
        f"a checkpoint every {row.get('steps'):,} steps ({seconds}), since a save costs {save} and a failure is "
        f"expected every {mtbf}"
    )


def described_membership(row: Mapping[str, Any]) -> str:
    """Describe in one line for people who trains from now on, and why."""
    members, lost, joined, seconds = (row.get(name) for name in ("members", "lost", "joined", "seconds"))
    if not isinstance(members, list | tuple) or not isinstance(lost, Mapping) or not isinstance(joined, list | tuple):
        return "other processes train from now on"
    asked = row.get("asked") or {}
    parts = [f"worker {rank} is lost ({cause})" for rank, cause in lost.items()]
    parts += [f"worker {rank} has joined" for rank in joined]
    parts += [f"worker {rank} waits for others" for rank in row.get("waiting") or ()]
    parts += [f"asked by {name}" for name in sorted({str(each) for each in asked.values()})]
    took = f" after {duration(seconds)}" if isinstance(seconds, int | float) else ""
    samples = row.get("update_samples")
    stays = f"; an update still has {samples:g} samples, and lr stays" if isinstance(samples, int | float) else ""
    return f"{'; '.join(parts) or 'workers have left'}; {len(members)} train on{took}{stays}"
