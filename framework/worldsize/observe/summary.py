"""Builds the summary shown at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from worldsize.core import spoken_name
from worldsize.messages import printable


def show_summary(console: Console, result: Mapping[str, Any], folder: Path) -> None:
    """Show final metrics, the recipe's notes, size, speed, digest and folder of a completed run, a line each.

    No line is divided, however narrow the console is, so that the folder can be copied.
    """
    rows = list(_rows(result, folder))
    width = max(cell_len(name) for name, _ in rows)
    for name, value in rows:
        line = f"{name}{' ' * (width - cell_len(name))}  {value}".rstrip()
        console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _rows(result: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    for name, value in result["metrics"].items():
        yield printable(spoken_name(name)), f"{value:.4f}"
    for remark in result["remarks"]:
        yield from (("", printable(line)) for line in remark.split("\n"))
    yield "steps", f"{result['steps']:,} ({result['samples']:,} samples)"
    if reason := result.get("stopped_early"):
        yield "ended early", printable(reason)
    if failed := result.get("failed_saves"):
        yield "failed saves", f"{len(failed)}, the last one at step {failed[-1]['step']}"
    yield "time", f"{result['seconds']:.1f} s, {result['samples_per_second']:,.0f} samples/s"
    yield "state", result["state_digest"][:16]
    yield "run", printable(str(folder))
