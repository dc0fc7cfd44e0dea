"""Tables at the end of a run, and of a comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from worldsize.core import format_display_name
from worldsize.messages import printable
from worldsize.observe.wandb import format_upload_command
from worldsize.record.chain_check import AuditReport, Coverage
from worldsize.record.compare import Comparison, Divergence
from worldsize.record.first_difference import FirstDifference
from worldsize.record.operations import OperationRecord


def show_summary(console: Console, result: Mapping[str, Any], folder: Path) -> None:
    """Show a completed run's results, upload command and folder, one per line.

    Lines are not wrapped on narrow consoles, so that the folder can be copied.
    """
    rows = list(_collect_rows(result, folder))
    width = max(cell_len(name) for name, _ in rows)
    for name, value in rows:
        line = f"{name}{' ' * (width - cell_len(name))}  {value}".rstrip()
        console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _collect_rows(result: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    for name, value in result["metrics"].items():
        yield printable(format_display_name(name)), f"{value:.4f}"
    for remark in result["remarks"]:
        yield from (("", printable(line)) for line in remark.split("\n"))
    yield "steps", f"{result['steps']:,} ({result['samples']:,} samples)"
    if reason := result.get("stopped_early"):
        yield "ended early", printable(reason)
    if failed := result.get("failed_saves"):
        yield "failed saves", f"{len(failed)}, last at step {failed[-1]['step']}"
    yield "time", f"{result['seconds']:.1f} s, {result['samples_per_second']:,.0f} samples/s"
    yield "state", result["state_digest"][:16]
    if upload := format_upload_command(folder):
        yield "wandb", printable(f"offline; {upload}")
    yield "run", printable(str(folder))


_COLOURS = {
    **dict.fromkeys(("within tolerance", "not reproduced"), "bold yellow"),
    **dict.fromkeys(("bitwise identical", "nothing found"), "bold green"),
    **dict.fromkeys(("different", "altered"), "bold red"),
}
_WIDTH = 160  # columns of a table outside of a terminal
_SHOWN = 20  # maximum number of tensors shown, the most divergent first


@final
@dataclass(frozen=True, repr=False)
class ShownComparison(Comparison):
    """A comparison that scripts and notebooks show as the table of ``worldsize compare``."""

    def __repr__(self) -> str:
        console = _create_recorder()
        console.print(comparison_table(self))
        return console.export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        console = _create_recorder()
        console.print(comparison_table(self))
        return console.export_html(inline_styles=True, code_format='<pre style="line-height: normal">{code}</pre>')


def _create_recorder() -> Console:
    return Console(record=True, file=StringIO(), width=_WIDTH, force_jupyter=False, _environ={})


def comparison_table(comparison: Comparison) -> RenderableType:
    """Build a table of metrics, differing tensors, missing items, and the verdict."""
    equal = sum(each.is_equal for each in comparison.tensors)
    differing = sorted((each for each in comparison.tensors if not each.is_equal), key=_get_sort_key, reverse=True)
    parts: list[RenderableType] = [_build_table("metric", comparison.metrics)]
    if differing:
        parts.append(_build_table("tensor", differing[:_SHOWN]))
    parts.append(Text(f"{equal} of {len(comparison.tensors)} tensors are bitwise equal"))
    parts += [Text(printable(f"missing: {text}")) for text in comparison.missing]
    return Group(*parts, Text(comparison.verdict, style=_COLOURS[comparison.verdict]))


def _get_sort_key(each: Divergence) -> tuple[float, int]:
    return (each.relative, each.ulp)


def _build_table(kind: str, rows: Sequence[Divergence]) -> Table:
    table = Table(kind, "first differs at step", "max absolute", "max relative", "max ULP", box=None, pad_edge=False)
    for row in rows:
        table.add_row(Text(printable(row.name)), *_format_cells(row))
    return table


def _format_cells(row: Divergence) -> tuple[str, ...]:
    if row.is_equal:
        return ("never", "0", "0", "0")
    step = "end" if row.first_step is None else str(row.first_step)
    return (step, f"{row.absolute:.3g}", f"{row.relative:.3g}", f"{row.ulp:,}")


def operations_table(difference: FirstDifference | None, remarks: Sequence[str], *, verdict: str) -> RenderableType:
    """Build a table of the first operation that differs in two runs, its size, remarks, and the verdict."""
    notes = [*(Text(printable(remark)) for remark in remarks), Text(verdict, style=_COLOURS[verdict])]
    if difference is None:
        return Group(*notes)
    table = Table("", "first run", "second run", box=None, pad_edge=False)
    rows = [_describe_operation(each) for each in (difference.first, difference.second)]
    for name in dict.fromkeys([*rows[0], *rows[1]]):
        table.add_row(name, *(Text(printable(row.get(name, ""))) for row in rows))
    facts = [f"{difference.place}: {difference.explanation}"]
    if (writer := difference.writer) is not None:
        facts.append(f"the input was computed by {writer.name} in {writer.module or 'no module'}, {writer.line}")
    if difference.ulp is not None:
        facts.append(f"largest difference: {difference.ulp:,} ULP")
    return Group(*map(Text, map(printable, facts)), table, *notes)


def audit_table(report: AuditReport) -> RenderableType:
    """Build a table of what an audit covered and found, and the verdict."""
    parts: list[RenderableType] = [Text(printable(each), style="bold red") for each in report.problems]
    if report.differences:
        table = Table("step", "differs", "recorded", "repeated", box=None, pad_edge=False)
        for each in report.differences:
            cells = (each.what, each.recorded or "", each.repeated or "")
            table.add_row(str(each.step), *(Text(printable(cell)) for cell in cells))
        parts.append(table)
    if report.coverage is not None:
        parts += [Text(printable(line)) for line in _describe_coverage(report, report.coverage)]
    parts += [Text(printable(remark)) for remark in report.remarks]
    return Group(*parts, Text(report.verdict, style=_COLOURS[report.verdict]))


def _describe_coverage(report: AuditReport, coverage: Coverage) -> Iterator[str]:
    yield (
        f"trained again: {len(coverage.chosen)} of {len(coverage.intervals)} intervals between saves, "
        f"{coverage.audited_share:.1%} of the steps (--seed {report.seed})"
    )
    if coverage.unreached_share:
        yield (
            f"too far from a kept checkpoint: {coverage.unreached_share:.1%} of the steps. Keep more checkpoints "
            "(checkpoint.keep.every), or allow longer intervals (--longest)."
        )
    if report.verdict == "nothing found":
        for share, probability in report.list_pass_probabilities().items():
            altered = f"if a random {share:.0%} of the intervals are altered"
            yield f"{altered}, an audit passes with probability {probability:.3f}"


def _describe_operation(operation: OperationRecord | None) -> dict[str, str]:
    if operation is None:
        return {"operation": "none: the step has ended"}
    return {
        "operation": operation.name,
        "phase": f"{operation.phase}, operation {operation.number}",
        "module": operation.module,
        "line": operation.line,
        "results": ", ".join(operation.tensors),
        "arguments": operation.arguments,
    }
