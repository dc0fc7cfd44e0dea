"""Monitors the health of one node in a separate process, and raises its alerts."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

from worldsize.core import HealthLimits, NodeAlert
from worldsize.observe.events import EventLog
from worldsize.observe.health.files import AlertFiles, HealthFile
from worldsize.observe.health.rows import HealthRow, health_row
from worldsize.record.run_directory import RunDirectory
from worldsize.world.environments import host_name
from worldsize.world.processes import SIGNALS, die_with_parent

if TYPE_CHECKING:
    from worldsize.observe.health.counters import Counters


_logger = logging.getLogger(__name__)

_FIRST = 5.0  # seconds before the sampler starts, and again before its first sample; spares short runs the overhead
_COLLECT = 5.0  # seconds between checks for other nodes' alerts
_NICENESS = 5  # lower priority than ranks; with 19, a run on a busy machine would wait seconds for this process to exit
_LAST = 5.0  # seconds for this process to end


@final
class HealthProcess:
    """Context manager that samples this node's health in a separate process.

    The first node's process also forwards the alerts of all nodes to ``events.jsonl``.

    Args:
        folder: The run folder.
        limits: The sampling interval, and the limits for alerts.
        node: Index of this node.
        root: Id of the common ancestor of the run's processes on this node; by default, this process.
    """

    def __init__(self, folder: Path, limits: HealthLimits, *, node: int, root: int | None = None) -> None:
        run, own = RunDirectory(folder), os.getpid()
        arguments = (run, limits, node, own if root is None else root, own)
        self._process: BaseProcess = get_context("fork").Process(target=_run_sampler, args=arguments, daemon=True)

    def __enter__(self) -> Self:
        # the process must not inherit our handlers for signals that end a run
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # pending alerts are still forwarded
        self._process.join(_LAST)
        self._process.kill()
        self._process.join()


def _run_sampler(run: RunDirectory, limits: HealthLimits, node: int, root: int, parent: int) -> None:
    """Sample this node's health, and on the first node forward alerts, until SIGTERM."""
    die_with_parent(parent)
    gc.freeze()  # otherwise garbage collection would copy the memory shared with the parent
    for number in SIGNALS:  # the launching process ends this process by SIGTERM
        signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else _exit_process)
    alerts, events, sampler = AlertFiles(run), EventLog(run.events), None
    os.nice(_NICENESS)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for is_sample in _yield_ticks(limits.every):
            if is_sample and sampler is None:  # the first sample covers the time from now on
                sampler = Sampler(run, limits, node, root)
            elif is_sample and sampler is not None:
                with _full_disk_passed_over():
                    sampler.sample()
            if node == 0:
                _pass_on(alerts, events)
    except FileNotFoundError:  # the run folder was deleted, so the run ends
        return
    except Exception as error:  # of any type: a failure of the monitor must not end the run
        _logger.warning("health monitoring of node %d stopped: %s: %s", node, type(error).__name__, error)
    finally:
        if node == 0:
            with suppress(OSError):
                _pass_on(alerts, events)


def _exit_process(*_: object) -> None:
    sys.exit(0)


def _yield_ticks(every: float) -> Iterator[bool]:
    """Yield at least every ``_COLLECT`` seconds: True if a sample is due, else False."""
    due, is_first = time.monotonic() + min(every, _FIRST), True
    while True:
        time.sleep(max(0.0, min(due - time.monotonic(), _COLLECT)))
        if is_sample := time.monotonic() >= due:
            due, is_first = time.monotonic() + (min(every, _FIRST) if is_first else every), False
        yield is_sample


@contextmanager
def _full_disk_passed_over() -> Iterator[None]:
    """Skip the sample if the disk is full; the next one may find space."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _pass_on(alerts: AlertFiles, events: EventLog) -> None:
    for alert in alerts.read_new_alerts():
        events(alert)


@final
class Sampler:
    """Samples the health of this node, and appends samples and alerts to the node's files."""

    def __init__(self, run: RunDirectory, limits: HealthLimits, node: int, root: int) -> None:
        from worldsize.observe.health.counters import (
            Gpus,  # imported only in this process
        )

        self._run, self._root, self._host = run, root, host_name(os.environ)
        self._file, self._alerts, self._gpus = HealthFile(run, node), HealthAlerts(limits, node), Gpus()
        self._before = self._read_counters()

    def sample(self) -> None:
        """Append a sample for the time since the previous one."""
        now = self._read_counters()
        row = health_row(self._before, now, host=self._host, time=time.time())
        self._before = now
        self._file.add_row(row, self._alerts.find_new_alerts(row))

    def _read_counters(self) -> Counters:
        from worldsize.observe.health.counters import read_counters

        return read_counters(self._root, self._run.path, self._gpus)


_BACK = 0.95  # a value below this fraction of its limit has recovered
_LASTING = ("swap", "temperature", "throttled")  # may be transient, so two consecutive samples must exceed the limit
_Key = tuple[str, int | None]


@final
class HealthAlerts:
    """Raises an alert when a value exceeds its limit, and again only after it has recovered.

    Swapping, temperature and throttling must last for two samples. Each new memory error raises an alert.

    Args:
        limits: The limits.
        node: Index of the node.
    """

    def __init__(self, limits: HealthLimits, node: int) -> None:
        self._limits, self._node = limits, node
        self._seen: set[_Key] = set()  # values beyond their limits in the previous sample
        self._raised: set[_Key] = set()

    def find_new_alerts(self, row: HealthRow) -> list[NodeAlert]:
        """Return the alerts that are newly raised by the node's next sample, ``row``."""
        beyond = {
            (each.what, each.gpu if each.rank is None else each.rank): each for each in self._check_limits(row, 1.0)
        }
        still = {(each.what, each.gpu if each.rank is None else each.rank) for each in self._check_limits(row, _BACK)}
        lasting = {key for key in beyond if key[0] not in _LASTING or key in self._seen}
        self._seen = set(beyond)
        new = lasting - {key for key in self._raised if key[0] != "ecc"}  # each new memory error is reported
        self._raised = (self._raised & still) | lasting
        return [beyond[key] for key in sorted(new, key=str)]

    def _check_limits(self, row: HealthRow, share: float) -> Iterator[NodeAlert]:
        """Yield an alert for each value above ``share`` (a fraction) of its limit."""
        limits, largest = self._limits, _describe_largest(row)
        for what, value, limit, detail in (
            ("memory", row["memory"], limits.memory, largest),
            ("swap", row["swap"], limits.swap, ""),
            ("disk", row["disk"], limits.disk, f"{row['disk_free'] / 1e9:,.1f} GB free"),
            ("network", row["network_errors"], limits.network_errors, ""),
        ):
            if limit is not None and value > share * limit:
                yield NodeAlert(self._node, row["host"], what, value, limit, detail=detail)
        usable, needed = row.get("cpus"), limits.cpus
        # oversubscribing all CPUs of the machine is deliberate, but a narrower CPU affinity may be a mistake
        if usable and needed is not None and usable < min(needed, os.cpu_count() or needed):
            yield NodeAlert(self._node, row["host"], "cpus", usable, needed)
        bound = limits.process_memory
        for rank, size in row["resident"].items():
            if bound is not None and size > share * bound:
                yield NodeAlert(self._node, row["host"], "process_memory", size, bound, rank=int(rank))
        for gpu in row["gpus"]:
            index, heat = gpu["index"], gpu.get("temperature", 0.0)
            if limits.temperature is not None and heat > share * limits.temperature:
                yield NodeAlert(self._node, row["host"], "temperature", heat, limits.temperature, gpu=index)
            if gpu["slowed_by"]:
                yield NodeAlert(
                    self._node, row["host"], "throttled", 1, 0, gpu=index, detail=", ".join(gpu["slowed_by"])
                )
            if errors := gpu.get("ecc_errors", 0):
                yield NodeAlert(self._node, row["host"], "ecc", errors, 0, gpu=index)


def _describe_largest(row: HealthRow) -> str:
    """Describe the rank with the most memory; empty if unknown."""
    if not row["resident"]:
        return ""
    rank, size = max(row["resident"].items(), key=lambda each: each[1])
    return f"largest: rank {rank}, {size / 1e9:.2f} GB"
