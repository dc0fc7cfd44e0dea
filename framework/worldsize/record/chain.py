"""``chain.jsonl``: a hash chain of a run's computed values. ``worldsize audit`` compares it with a repetition.

The first line has the name of the run (``run``) and an empty ``previous``. Every later line has the previous line's
SHA-256, without its newline, a ``step`` and one of:

- ``logged``: computed values of a logged step; with ``losses``, the SHA-256 of all logical ranks' sorted losses, and
  ``indices``, the SHA-256 of the sample indices since the previous scheduled log (null for streams, and with parameter
  servers);
- ``evaluated``: the metrics of an evaluation;
- ``audited``: a digest of the gradients, losses and buffers that processes compared (``integrity.audit``);
- ``checkpoint``: the SHA-256 of a checkpoint's manifest, which lists the SHA-256 of each file.

The signed manifest contains the SHA-256 of the last line, and thus determines all lines.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, final

from worldsize.checkpoint.format import COMPLETE, complete, parse_step, read_checkpoint
from worldsize.core import (
    CheckpointSaved,
    Evaluated,
    Event,
    GradientsAudited,
    RunEnded,
    RunFailed,
    RunStarted,
    StepDone,
)
from worldsize.errors import CheckpointError
from worldsize.files import read_regular
from worldsize.record.json_lines import Row, complete_lines, last_line, parse_row
from worldsize.record.metrics import collect_computed_values, truncate_metrics
from worldsize.record.run_directory import RunDirectory
from worldsize.strict_json import sanitize_json

Kind = Literal["logged", "evaluated", "audited", "checkpoint"]
_KINDS: tuple[Kind, ...] = ("logged", "evaluated", "audited", "checkpoint")
_MORE: Mapping[Kind, tuple[str, ...]] = {"logged": ("losses", "indices")}  # further keys of a line, by kind
_LONGEST_SEAL = 1 << 8  # maximum bytes of a checkpoint's last file
_END = 1 << 20  # bytes to read from the end of a file for its last line
_logger = logging.getLogger(__name__)


class BrokenChainError(ValueError):
    """A line of a chain is damaged, or does not contain the digest of the previous line."""


@final
@dataclass(frozen=True)
class ChainLink:
    """A line of a chain.

    Attributes:
        row: Content of the line.
        digest: SHA-256 of the line.
        end: Byte offset of the next line.
    """

    row: Mapping[str, Any]
    digest: str
    end: int

    @property
    def step(self) -> int:
        """The step; 0 for the first line."""
        return int(self.row.get("step", 0))

    @property
    def kind(self) -> Kind | None:
        """The kind of the line; None for the first line."""
        return next((kind for kind in _KINDS if kind in self.row), None)

    @property
    def values(self) -> dict[str, Any]:
        """The recorded values, without the digest of the previous line."""
        return {key: value for key, value in self.row.items() if key != "previous"}


def read_chain(path: Path) -> Iterator[ChainLink]:
    """Yield the lines of a chain, and check that each contains the digest of the previous one.

    Raises:
        BrokenChainError: a line is damaged or was changed.
        OSError: the file cannot be read.
    """
    previous = ""
    for number, (line, end) in enumerate(complete_lines(path), 1):
        row = parse_row(line)
        if row is None or not _is_valid(row, is_first=number == 1):
            raise BrokenChainError(f"line {number} of {path} is damaged")
        if row["previous"] != previous:
            raise BrokenChainError(f"line {number} of {path} does not contain the digest of the previous line")
        previous = _hash_line(line)
        yield ChainLink(row, previous, end)


def _is_valid(row: Row, *, is_first: bool) -> bool:
    if is_first:
        return row.keys() == {"previous", "run"}
    kinds = [kind for kind in _KINDS if kind in row]
    step = row.get("step")
    is_numbered = type(step) is int and step >= 0
    return is_numbered and len(kinds) == 1 and row.keys() == {"previous", "step", *kinds, *_MORE.get(kinds[0], ())}


def truncate_chain(run: RunDirectory, first: int, *, evaluated: bool) -> Iterator[ChainLink]:
    """Remove the lines after step ``first`` from a run's chain, and yield the others.

    With ``evaluated=False``, the evaluation after this step is removed, too.

    Raises:
        BrokenChainError: a line is damaged or was changed; nothing is removed.
    """
    end = 0
    for link in read_chain(run.chain):
        if link.step > first or (link.step == first and link.kind == "evaluated" and not evaluated):
            break
        yield link
        end = link.end
    if run.chain.exists():
        os.truncate(run.chain, end)


def truncate_to_checkpoint(run: RunDirectory, manifest: Mapping[str, Any]) -> int:
    """Remove logged values and the chain's lines of steps after the newest checkpoint; the steps will be repeated.

    Returns the number of logged steps up to the checkpoint that are missing from the file, although they should have
    been written before the checkpoint.
    """
    saved, evaluated = complete(run.checkpoints), True
    if saved:
        with suppress(CheckpointError):  # loading it raises the error later
            evaluated = read_checkpoint(saved[-1]).facts.get("evaluated", True)
    step = parse_step(saved[-1]) if saved else 0
    left = truncate_metrics(run.metrics, step, evaluated=evaluated)
    with suppress(BrokenChainError):  # an audit reports it
        for _ in truncate_chain(run, step, evaluated=evaluated):
            pass
    if not step:
        return 0
    changes = [change for resumed in manifest.get("resumed", ()) for change in resumed["changes"]]
    log_every: int = max([manifest["config"]["log_every"], *(then for key, then, _ in changes if key == "log_every")])
    logged = step // log_every + (log_every > 1)  # the first step is always logged
    return max(0, logged - left)


def seal_chain(run: RunDirectory) -> dict[str, Any] | None:
    """Return the SHA-256 of the chain's last line and the number of lines, for the manifest; None without a chain.

    A complete checkpoint without a line is first added: its process ended before it could do so.
    """
    last, count, end, saved = b"", 0, 0, set[int]()
    for line, following in complete_lines(run.chain):
        last, count, end = line, count + 1, following
        if b'"checkpoint": "' in line and (row := parse_row(line)) is not None:
            saved.add(row.get("step", 0))
    if not count:
        return None
    head = _hash_line(last)
    if run.chain.stat().st_size > end:
        os.truncate(run.chain, end)  # its process was killed while it wrote the last line
    for path in complete(run.checkpoints):
        if parse_step(path) not in saved and (digest := _read_seal(path)):
            line = _encode_line({"step": parse_step(path), "checkpoint": digest}, previous=head)
            with run.chain.open("ab") as file:
                file.write(line)
            head, count = _hash_line(line), count + 1
    return {"head": head, "lines": count}


def _read_seal(path: Path) -> str | None:
    """Return the SHA-256 of a checkpoint's manifest, as in its last file; None if this is damaged or was removed."""
    with suppress(OSError, ValueError):
        seal = read_regular(path / COMPLETE, at_most=_LONGEST_SEAL).decode().strip()
        return seal if re.fullmatch(r"[0-9a-f]{64}", seal) else None
    return None


def _encode_line(values: Mapping[str, Any], *, previous: str) -> bytes:
    return json.dumps(sanitize_json({"previous": previous, **values})).encode() + b"\n"


def _hash_line(line: bytes) -> str:
    return hashlib.sha256(line.removesuffix(b"\n")).hexdigest()


@final
class ChainFile:
    """Listener that appends lines to a run's chain, and flushes each line.

    When a run starts, lines for steps that will be repeated are removed. If another program has changed the chain, it
    is only appended to, so that ``worldsize audit`` finds the change.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._file: IO[bytes] | None = None
        self._previous = ""  # digest of the last line
        self._last: dict[Kind | None, int] = {}  # last step of each kind

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first, evaluated=evaluated):
                self._close()
                self._truncate(first, evaluated=evaluated)
            case StepDone(step=step):
                digests = {"losses": event.losses_sha256, "indices": event.indices_sha256}
                self._append("logged", step, collect_computed_values(event), **digests)
            case Evaluated(step=step, metrics=metrics):
                self._append("evaluated", step, dict(metrics))
            case GradientsAudited(step=step, digest=digest):
                self._append("audited", step, digest)
            case CheckpointSaved(step=step, path=path):
                self._append_checkpoint(step, path)
            case RunEnded() | RunFailed():
                self._close()

    def _truncate(self, first: int, *, evaluated: bool) -> None:
        """Remove the lines after step ``first``; add lost lines of checkpoints up to this step."""
        self._previous, self._last = "", {}
        saved = set[int]()
        try:
            for link in truncate_chain(self._run, first, evaluated=evaluated):
                self._previous, self._last[link.kind] = link.digest, link.step
                if link.kind == "checkpoint":
                    saved.add(link.step)
        except BrokenChainError as error:
            _logger.warning("%s. `worldsize audit` will report this.", error)
            self._previous = _hash_line(last_line(self._run.chain, within=_END))
        self._file = self._run.chain.open("ab")
        if not self._previous:
            self._write_line({"run": self._run.id})
        self._last.pop("checkpoint", None)
        for path in complete(self._run.checkpoints):
            if parse_step(path) <= first and parse_step(path) not in saved:
                self._append_checkpoint(parse_step(path), path)
        self._last["checkpoint"] = first

    def _append_checkpoint(self, step: int, path: Path) -> None:
        if digest := _read_seal(path):
            self._append("checkpoint", step, digest)

    def _append(self, kind: Kind, step: int, value: Any, **more: Any) -> None:
        if step > self._last.get(kind, 0):  # otherwise another process has written it before it failed
            self._last[kind] = step
            self._write_line({"step": step, kind: value, **more})

    def _write_line(self, values: Mapping[str, Any]) -> None:
        line = _encode_line(values, previous=self._previous)
        self._previous = _hash_line(line)
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
