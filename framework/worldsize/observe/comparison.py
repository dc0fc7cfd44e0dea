"""Builds the table that compares two runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worldsize.messages import printable
from worldsize.record.compare import Comparison, Divergence

_COLOURS = {"bitwise identical": "bold green", "within tolerance": "bold yellow", "different": "bold red"}
_SHOWN = 20  # number of tensors shown, the most divergent first


def comparison_table(comparison: Comparison) -> RenderableType:
    """Build a table of metrics, tensors that differ, missing items, and the verdict."""
    equal = sum(each.is_equal for each in comparison.tensors)
    differing = sorted((each for each in comparison.tensors if not each.is_equal), key=_order, reverse=True)
    parts: list[RenderableType] = [_table("metric", comparison.metrics)]
    if differing:
        parts.append(_table("tensor", differing[:_SHOWN]))
    parts.append(Text(f"{equal} of {len(comparison.tensors)} tensors are equal bit for bit"))
    parts += [Text(printable(f"missing: {text}")) for text in comparison.missing]
    return Group(*parts, Text(comparison.verdict, style=_COLOURS[comparison.verdict]))


def _order(each: Divergence) -> tuple[float, int]:
    return (each.relative, each.ulp)


def _table(kind: str, rows: Sequence[Divergence]) -> Table:
    table = Table(kind, "first differs at step", "max absolute", "max relative", "max ULP", box=None, pad_edge=False)
    for row in rows:
        table.add_row(Text(printable(row.name)), *_cells(row))
    return table


def _cells(row: Divergence) -> tuple[str, ...]:
    if row.is_equal:
        return ("never", "0", "0", "0")
    step = "end" if row.first_step is None else str(row.first_step)
    return (step, f"{row.absolute:.3g}", f"{row.relative:.3g}", f"{row.ulp:,}")
