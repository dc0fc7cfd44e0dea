"""``chain.jsonl``: a hash chain of what a run computed, which ``worldsize audit`` compares with a repetition.

Every line is a JSON object. ``previous`` is the SHA-256 of the previous line, without its newline; the first line only
has the name of the run. Each other line has a ``step`` and one of these:

- ``logged``: computed values of a logged step; with ``losses``, the SHA-256 of the losses of all logical ranks, and
  ``indices``, the SHA-256 of the sample indices since the previous logged step (null for streams);
- ``evaluated``: the metrics of an evaluation;
- ``audited``: a digest of the gradients, losses and buffers that processes compared (``integrity.audit``);
- ``checkpoint``: the SHA-256 of a checkpoint's manifest, which contains those of its files.

The signed manifest contains the SHA-256 of the last line, and thus determines all lines.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, final

from worldsize.checkpoint.format import complete, parse_step, read_digest
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
from worldsize.record.json_lines import complete_lines, parse_row
from worldsize.record.metrics import collect_computed_values
from worldsize.record.run_directory import RunDirectory
from worldsize.strict_json import sanitize_json

Kind = Literal["logged", "evaluated", "audited", "checkpoint"]
_KINDS: tuple[Kind, ...] = ("logged", "evaluated", "audited", "checkpoint")
_logger = logging.getLogger(__name__)


class BrokenChainError(ValueError):
    """A line of a chain is damaged, or does not contain the digest of the previous line."""


@final
@dataclass(frozen=True)
class Link:
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


def read_chain(path: Path) -> Iterator[Link]:
    """Yield the lines of a chain, and check that each contains the digest of the previous one.

    Raises:
        BrokenChainError: a line is damaged or was changed.
        OSError: the file cannot be read.
    """
    previous = ""
    for number, (line, end) in enumerate(complete_lines(path), 1):
        row = parse_row(line)
        if row is None or type(row.get("step", 0)) is not int:
            raise BrokenChainError(f"line {number} of {path} is damaged")
        if row.get("previous") != previous:
            raise BrokenChainError(f"line {number} of {path} does not contain the digest of the previous line")
        previous = _hash_line(line)
        yield Link(row, previous, end)


def compute_head(path: Path) -> dict[str, Any] | None:
    """Return the SHA-256 of the chain's last line and the number of lines; None without a chain."""
    last, count = b"", 0
    for line, _ in complete_lines(path):
        last, count = line, count + 1
    return {"head": _hash_line(last), "lines": count} if count else None


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
                self._rewind(first, evaluated=evaluated)
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

    def _rewind(self, first: int, *, evaluated: bool) -> None:
        """Remove the lines after step ``first``; add its checkpoint, whose line may have been one of them."""
        self._previous, self._last, end = "", {}, 0
        try:
            for link in read_chain(self._run.chain):
                if link.step > first or (link.step == first and link.kind == "evaluated" and not evaluated):
                    break
                self._previous, self._last[link.kind], end = link.digest, link.step, link.end
            is_broken = False
        except BrokenChainError as error:
            _logger.warning("%s. `worldsize audit` will report this.", error)
            head, is_broken = compute_head(self._run.chain), True
            self._previous = head["head"] if head else ""
        self._file = self._run.chain.open("ab", buffering=0)
        if not is_broken:
            os.truncate(self._run.chain, end)
        if not self._previous:
            self._write_line({"run": self._run.id})
        for path in complete(self._run.checkpoints):
            if parse_step(path) == first:
                self._append_checkpoint(first, path)

    def _append_checkpoint(self, step: int, path: Path) -> None:
        with suppress(CheckpointError):  # damaged or deleted meanwhile
            self._append("checkpoint", step, read_digest(path))

    def _append(self, kind: Kind, step: int, value: Any, **more: Any) -> None:
        if step > self._last.get(kind, 0):  # otherwise another process has written it before it failed
            self._last[kind] = step
            self._write_line({"step": step, kind: value, **more})

    def _write_line(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(sanitize_json({"previous": self._previous, **values})).encode()
        self._previous = _hash_line(line)
        if self._file is not None:
            self._file.write(line + b"\n")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
