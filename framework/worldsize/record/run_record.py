"""The record of a run in its folder, written only by the process that holds its lock.

Only this module accesses ``overrides.yaml`` and ``result.json``, and (with :mod:`worldsize.record.manifest`)
``run_manifest.json``. It also writes ``config.yaml``, which :mod:`worldsize.config.recorded` reads.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

from worldsize.errors import CheckpointError, WorldsizeError
from worldsize.files import is_file, read_regular, replace_file
from worldsize.record.attempt import (
    Attempt,
    compute_end_times,
    compute_goodput,
    create_failure_record,
    failure_of_launcher,
    format_time,
    last_failure,
    new_attempt,
    note_failure,
)
from worldsize.record.manifest import is_own, read_manifest, write_manifest
from worldsize.record.redaction import Scrubber, process_scrubber
from worldsize.record.run_directory import (
    LATEST,
    RunDirectory,
    check_entries,
    find_run,
    is_locked,
    last_written,
    run_lock,
    wrap_write_errors,
)
from worldsize.strict_json import LARGEST, parse_strict_json
from worldsize.world.environments import read_lost_first

if TYPE_CHECKING:  # imports torch, which is too slow for reading records
    from worldsize.core import Outcome

_logger = logging.getLogger(__name__)

Manifest = Mapping[str, Any]

_KILLED = "killed, or its host was lost"
_NO_DIGEST = "The run has no metrics_digest, since an incomplete log cannot match another run."
_RESERVED_BYTES = 64 << 10  # for a new manifest and result, written before the old ones are replaced


@final
@dataclass(frozen=True)
class RunView:
    """Read-only view of a run's record, with properties derived from the manifest."""

    directory: RunDirectory
    manifest: Manifest

    @property
    def attempts(self) -> Sequence[Attempt]:
        """Records of all attempts, oldest first."""
        return list(self.manifest["attempts"])

    @property
    def exit_reason(self) -> str | None:
        """Exit reason of the last attempt, or "running"; None before the first attempt."""
        return str(self.attempts[-1]["exit_reason"]) if self.attempts else None

    @property
    def failure(self) -> str | None:
        """One-line description of the last attempt's failure; None if it did not fail."""
        return last_failure(self.attempts)

    @property
    def results(self) -> Mapping[str, Any]:
        """Results of the last attempt that ended; empty before that."""
        return self.manifest["results"] or {}

    @property
    def is_own(self) -> bool:
        """Whether this user wrote the record."""
        return is_own(self.manifest)

    @property
    def job(self) -> str | None:
        """ID of the run's last scheduler job, if any.

        Raises:
            WorldsizeError: the ID is invalid and might be taken for a command-line option.
        """
        jobs = self.manifest.get("jobs")
        name = str(jobs[-1]["id"]) if jobs else None
        if name is not None and not re.fullmatch(r"\w[\w./-]*", name, re.ASCII):
            raise WorldsizeError(
                f"{self.directory.manifest} has the invalid job name {name!r}. Do not trust this record."
            )
        return name


def read_run(path: Path) -> RunView:
    """Read the run with this folder or manifest; "last": the most recent one in ``runs``.

    Raises:
        WorldsizeError: the manifest is missing, from a newer worldsize, or was edited.
    """
    directory = find_run(path)
    return RunView(directory, read_manifest(directory.manifest))


def refresh_run(directory: RunDirectory) -> RunView:
    """Read a run that may be active; change "running" to "killed" if it is not locked.

    If the manifest cannot be written, it is returned unchanged.
    """
    manifest = read_manifest(directory.manifest)
    if _says_running(manifest) and not is_locked(directory.path):
        with suppress(WorldsizeError, OSError), run_lock(directory.path):
            _mark_killed(directory)
        manifest = read_manifest(directory.manifest)
    return RunView(directory, manifest)


def create_record(directory: RunDirectory, manifest: Manifest, *, config: str, overrides: str) -> None:
    """Create the record in a new run folder; the manifest is written last."""
    _reserve_space(directory)
    write_configuration(directory, config=config, overrides=overrides)
    write_manifest(directory.manifest, {**manifest, "attempts": [], "results": None})


def write_configuration(directory: RunDirectory, *, config: str, overrides: str | None = None) -> None:
    """Write ``config.yaml``, which processes start from, and command-line overrides."""
    replace_file(directory.config, config.encode())
    if overrides is not None:
        replace_file(directory.overrides, overrides.encode())


def write_result(directory: RunDirectory, result: Mapping[str, Any]) -> None:
    """Write rank 0's training results, for the record at the end of the attempt."""
    replace_file(directory.result, f"{json.dumps(result, indent=2)}\n".encode())


def read_result(directory: RunDirectory) -> dict[str, Any]:
    """Read the last attempt's results, with NaN as float (the manifest has a string)."""
    result: dict[str, Any] = parse_strict_json(read_regular(directory.result, at_most=LARGEST), finite=False)
    return result


def note_job(directory: RunDirectory, name: str) -> None:
    """Record the scheduler job ``name``, without the lock, which the job may already hold."""
    manifest = read_manifest(directory.manifest)
    job = {"id": name, "submitted": format_time(time.time())}
    jobs = [*manifest.get("jobs", ()), job]
    write_manifest(directory.manifest, {**manifest, "jobs": jobs}, own=is_own(manifest))


def _reserve_space(directory: RunDirectory) -> None:
    """Reserve disk space with incompressible bytes, unless it is already reserved."""
    if not directory.reserve.exists():
        directory.reserve.write_bytes(os.urandom(_RESERVED_BYTES))


@final
class RunRecord:
    """Write access to the record of a locked run; created by :func:`open_record`."""

    def __init__(self, directory: RunDirectory, manifest: Manifest, lock: ExitStack, scrubber: Scrubber) -> None:
        self.directory, self._scrubber = directory, scrubber
        self._manifest, self._lock, self._own = manifest, lock, is_own(manifest)
        self._version = self._version_on_disk()
        self._attempt: Attempt | None = None  # running attempt of this process
        self._begun = 0.0  # start of that attempt, in monotonic seconds

    @property
    def manifest(self) -> Manifest:
        """The current manifest.

        It is only read again if another process has changed it without the lock, e.g. to record a submitted job.
        """
        if self._version != (version := self._version_on_disk()):
            self._manifest, self._version = read_manifest(self.directory.manifest), version
            self._own = self._own and is_own(self._manifest)  # do not adopt another user's later changes
        return self._manifest

    @property
    def attempts(self) -> Sequence[Attempt]:
        """Records of all attempts, oldest first."""
        return list(self.manifest["attempts"])

    @property
    def is_complete(self) -> bool:
        """Whether the last attempt trained to the end."""
        return bool(self.attempts) and self.attempts[-1]["exit_reason"] == "completed"

    @property
    def is_own(self) -> bool:
        """Whether this user wrote or adopted the record."""
        return self._own

    def adopt(self) -> None:
        """Sign another user's record from the next write on.

        Call this only after the user has agreed to run the code.
        """
        self._own = True

    def record_resume(self, manifest: Manifest, *, config: str, overrides: str, secrets: Mapping[str, str]) -> None:
        """Record a resume with a new configuration; scrub its ``secrets`` from later errors."""
        self._scrubber = process_scrubber(secrets)
        with wrap_write_errors(self.directory):
            write_configuration(self.directory, config=config, overrides=overrides)
            self._write_manifest(manifest)

    def record_rewind(self, manifest: Manifest, *, config: str, overrides: str) -> None:
        """Record that the run has gone back, with the configuration from there on."""
        with wrap_write_errors(self.directory):
            write_configuration(self.directory, config=config, overrides=overrides)
            self._write_manifest(manifest)

    def begin_attempt(self, others: Sequence[str], *, world_size: int, pinning: Manifest | None = None) -> int:
        """Record an attempt's start on this host and ``others``; return its number."""
        from worldsize.record.chain import truncate_to_checkpoint

        earlier = list(self.attempts)
        attempt = new_attempt(len(earlier) + 1, others, world_size)
        if pinning:
            attempt["pinning"] = pinning
        if (lost := read_lost_first(os.environ)) and earlier and earlier[-1]["exit_reason"] == "killed":
            earlier[-1] = {**earlier[-1], "lost_host": lost}
        self._attempt, self._begun = attempt, time.monotonic()
        _reserve_space(self.directory)
        if count := truncate_to_checkpoint(self.directory, self.manifest):  # before anything reads the file
            attempt["lost_metrics"] = count
            _logger.warning(
                "%s is missing %d logged steps of earlier attempts. %s", self.directory.metrics, count, _NO_DIGEST
            )
        self._write_manifest({**self.manifest, "attempts": [*earlier, self._attempt]})
        self.directory.result.unlink(missing_ok=True)
        return len(self.attempts)

    def end_attempt(
        self, outcome: Outcome, claim: Callable[[Manifest], Manifest] = lambda manifest: manifest
    ) -> Outcome:
        """Record the end and results of the attempt; return the outcome without secrets.

        ``claim`` takes the manifest and returns it with its final reproducibility level.
        """
        self.directory.reserve.unlink(missing_ok=True)
        facts = {key: getattr(outcome, key) for key in ("exit_reason", "exit_code", "steps", "first_step_at")}
        if first := outcome.failure:  # may contain a secret
            scrubbed = replace(first, cause=self._scrubber.scrub_text(first.cause))
            outcome, facts["failure"] = replace(outcome, failure=scrubbed), create_failure_record(scrubbed)
        if outcome.memberships:
            facts["memberships"] = list(outcome.memberships)
        if self.directory.transport.exists():
            facts["transport"] = parse_strict_json(read_regular(self.directory.transport, at_most=LARGEST))
            self.directory.transport.unlink()
        manifest = _update_last_attempt(self.manifest, **facts, **compute_end_times(self._attempt, begun=self._begun))
        results = {**_collect_results(self.directory, outcome), "goodput": compute_goodput(manifest["attempts"])}
        if any("lost_metrics" in each for each in manifest["attempts"]) and results.pop("metrics_digest", None):
            results["remarks"] = [*results.get("remarks", ()), f"metrics.jsonl is missing logged steps. {_NO_DIGEST}"]
        self._write_manifest({**claim(manifest), "results": results})
        self._attempt = None
        write_result(self.directory, results)
        if self._own and "chain" in results:
            from worldsize.record.attestation import write_attestation

            write_attestation(self.directory, self.manifest)
        note_failure(self.directory.events, manifest["attempts"][-1])
        return outcome

    def give_up(self, cause: str, *, unstarted: int = 0) -> None:
        """Record, if possible, that the launching process failed because of ``cause``.

        If an attempt has not been recorded yet, one with ``unstarted`` processes is added. A completed run is not
        changed if nothing was started.
        """
        if self._attempt is None and self.is_complete:
            return
        with suppress(OSError, WorldsizeError):
            self.directory.reserve.unlink(missing_ok=True)
            if self._attempt is None and unstarted:
                self._attempt, self._begun = new_attempt(len(self.attempts) + 1, [], unstarted), time.monotonic()
            if self._attempt is not None:
                attempts = [*self.attempts[: self._attempt["number"] - 1], self._attempt]
                manifest = {**self.manifest, "attempts": attempts, "results": {"exit_reason": "failed"}}
                failure = failure_of_launcher(self._scrubber.scrub_text(cause))
                facts = {"failure": failure, "exit_reason": "failed", "exit_code": 1}
                self._write_manifest(
                    _update_last_attempt(manifest, **facts, **compute_end_times(self._attempt, begun=self._begun))
                )
                self._attempt = None
                note_failure(self.directory.events, self.attempts[-1])

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def _write_manifest(self, manifest: Manifest) -> None:
        self._manifest = write_manifest(self.directory.manifest, manifest, own=self._own)
        self._version = self._version_on_disk()

    def _version_on_disk(self) -> tuple[int, int]:
        facts = self.directory.manifest.stat()
        return facts.st_ino, facts.st_mtime_ns


@contextmanager
def open_record(directory: RunDirectory, secrets: Mapping[str, str] = MappingProxyType({})) -> Iterator[RunRecord]:
    """Open a run's record for writing, and mark a killed attempt as such.

    ``secrets`` are the plan's secrets, which are scrubbed from recorded errors.

    Raises:
        WorldsizeError: the run does not exist, or a process already holds its lock.
    """
    with ExitStack() as lock:
        is_run = is_file(directory.manifest)
        with wrap_write_errors(directory) if is_run else nullcontext():
            if is_run:  # otherwise, the lock file would be left in a folder that is not a run
                lock.enter_context(run_lock(directory.path))
                check_entries(directory)
            record = RunRecord(directory, _mark_killed(directory), lock, process_scrubber(secrets))
        yield record


def _mark_killed(directory: RunDirectory) -> Manifest:
    """Read the manifest; change "running" to "killed", since the caller holds the lock."""
    manifest: Manifest = read_manifest(directory.manifest)
    if _says_running(manifest):
        last = min(max(last_written(directory), manifest["attempts"][-1]["start_at"]), LATEST)
        facts = {"end": format_time(last), "end_at": last, "exit_reason": "killed", "exit_code": None}
        host = next(iter(manifest["attempts"][-1]["hosts"]), "")
        ended = _update_last_attempt(manifest, **facts, failure=failure_of_launcher(_KILLED, host))
        directory.reserve.unlink(missing_ok=True)
        manifest = write_manifest(directory.manifest, ended, own=is_own(manifest))
        note_failure(directory.events, manifest["attempts"][-1])
    return manifest


def _says_running(manifest: Manifest) -> bool:
    return bool(manifest["attempts"]) and manifest["attempts"][-1]["exit_reason"] == "running"


def _update_last_attempt(manifest: Manifest, **facts: Any) -> dict[str, Any]:
    *earlier, last = manifest["attempts"]
    return {**manifest, "attempts": [*earlier, {**last, **facts}]}


def _collect_results(directory: RunDirectory, outcome: Outcome) -> dict[str, Any]:
    """Return rank 0's results and the digests of the checkpoints.

    Unless the exit code is 0, the exit reason replaces rank 0's results.
    """
    from worldsize.checkpoint.format import complete, read_digest
    from worldsize.record.chain import seal_chain

    digests = {}
    for path in complete(directory.checkpoints):
        try:
            digests[path.name] = read_digest(path)
        except CheckpointError as error:  # a damaged checkpoint must not cost the run its results
            _logger.warning("%s The record omits this checkpoint.", error)
    computed = {"checkpoints": digests, **({"chain": head} if (head := seal_chain(directory)) else {})}
    if outcome.exit_code != 0 or not directory.result.exists():
        return {"exit_reason": outcome.exit_reason, **computed}
    return {**read_result(directory), **computed}
