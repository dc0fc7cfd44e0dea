"""Builds the table shown at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from worldsize.core import spoken_name
from worldsize.messages import printable, printable_lines


def summary_table(result: Mapping[str, Any], folder: Path) -> Table:
    """Build a table of final metrics, the recipe's notes, size, speed, digest and folder of a completed run."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")  # the folder must not be cut off: users open it
    for name, value in result["metrics"].items():
        table.add_row(Text(printable(spoken_name(name))), f"{value:.4f}")
    for line in result["remarks"]:
        table.add_row("", Text(printable_lines(line)))
    table.add_row("steps", f"{result['steps']:,} ({result['samples']:,} samples)")
    if reason := result.get("stopped_early"):
        table.add_row("ended early", Text(printable(reason)))
    if failed := result.get("failed_saves"):
        table.add_row("failed saves", Text(f"{len(failed)}, the last one at step {failed[-1]['step']}"))
    table.add_row("time", f"{result['seconds']:.1f} s, {result['samples_per_second']:,.0f} samples/s")
    table.add_row("state", result["state_digest"][:16])
    table.add_row("run", Text(printable(str(folder))))
    return table
