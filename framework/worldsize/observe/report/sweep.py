"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from worldsize.config.overrides import key_of
from worldsize.errors import WorldsizeError
from worldsize.observe.report.read import Record, read_run
from worldsize.record.damage import reading


@final
@dataclass(frozen=True)
class Sweep:
    """Several runs side by side.

    ``runs`` by label: the options typed for this run and not for all. ``refused``: why folders could not be read.
    """

    runs: Mapping[str, Record]
    keys: Sequence[str]  # what differs
    refused: Mapping[str, str]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that any run has, sorted."""
        return sorted({name for record in self.runs.values() for name in record.metrics})


def read_sweep(folders: Sequence[Path]) -> Sweep:
    """Read the runs in ``folders``; an unreadable one is listed in ``refused`` with its error."""
    records, refused = [], {}
    for folder in folders:
        try:
            record = read_run(folder, has_timing=False, among=len(folders))
            with reading(folder):
                _check_shown(record)
            records.append(record)
        except WorldsizeError as error:
            refused[folder.name] = str(error)
    keys = differing([typed(record) for record in records])
    return Sweep({_label(record, keys, records): record for record in records}, keys, refused)


def _check_shown(record: Record) -> None:
    """Read everything that the page shows of one run, so that an incomplete record only refuses that run."""
    manifest = record.manifest
    _ = (
        typed(record),
        record.metrics,
        record.state,
        record.results,
        manifest["run_id"],
        manifest["cluster"]["processes"],
    )


def typed(record: Record) -> dict[str, str]:
    """Return the options typed for the run, by key."""
    return {key_of(word): word.partition("=")[2] for word in record.manifest["overrides"]}


def differing(all_typed: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between runs, in order of appearance."""
    keys = dict.fromkeys(key for each in all_typed for key in each)
    return [key for key in keys if len({each.get(key) for each in all_typed}) > 1]


def _label(record: Record, keys: Sequence[str], others: Sequence[Record]) -> str:
    """Label a run by the options that differ, and by its folder if those are not unique."""
    mine = typed(record)
    words = " ".join(f"{key}={mine[key]}" for key in keys if key in mine)
    twins = [other for other in others if all(typed(other).get(key) == mine.get(key) for key in keys)]
    return f"{words} {record.folder.name}".strip() if len(twins) > 1 or not words else words
