"""Line charts over steps, of one run or several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from worldsize.config.arguments import key_of
from worldsize.core import spoken_name
from worldsize.errors import WorldsizeError
from worldsize.observe.report.read import Line, Record, column, read_run
from worldsize.observe.report.svg import SERIES, Chart, draw, plain, series_colour, tip
from worldsize.record.json_lines import reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Numbers = NDArray[np.float64]
_POINTS = 300  # points of a line; more cannot be distinguished
_STYLES = ("-", "--", ":", "-.")


@final
class StepCurve:
    """Values over steps; if there are many, means of neighbours without NaN."""

    def __init__(self, label: str, steps: Sequence[float], values: Sequence[float]) -> None:
        self.label = label
        self.last = next((value for value in reversed(values) if value == value), np.nan)
        self.steps, self.values = thinned(steps), thinned(values)

    @property
    def is_point(self) -> bool:
        """Return whether there is at most one finite value, which makes no line."""
        return int(np.isfinite(self.values).sum()) < 2


def curve(label: str, lines: Sequence[Line], key: str) -> StepCurve:
    """Build the curve of the number under ``key`` in each line; NaN where a line has none."""
    return StepCurve(label, column(lines, "step"), column(lines, key))


def metric(label: str, lines: Sequence[Line], name: str) -> StepCurve:
    """Build the curve of a metric of evaluations or of logged steps."""
    rows = [{"step": row["step"], name: row.get("metrics", {}).get(name)} for row in lines]
    return curve(label, rows, name)


def metric_names(lines: Iterable[Line]) -> list[str]:
    """List the names of the metrics that any of the lines has."""
    return sorted({name for row in lines for name in row.get("metrics", {})})


def thinned(values: Sequence[float]) -> Numbers:
    """Reduce values, of one loss or metric, to at most ``_POINTS`` means of neighbours."""
    array = np.asarray(values, dtype=np.float64)
    return means(array[:, None], at_most=_POINTS)[:, 0] if array.size else array


def means(values_nk: Numbers, *, at_most: int) -> Numbers:
    """Average equal groups of rows, the last one perhaps shorter: [n, k] → [m, k], m ≤ ``at_most``, without NaN."""
    group = -(-len(values_nk) // at_most)
    missing = -len(values_nk) % group
    padded = np.pad(values_nk, ((0, missing), (0, 0)), constant_values=np.nan)
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # a group of only NaN
        reduced_mk: Numbers = np.nanmean(padded.reshape(-1, group, values_nk.shape[1]), axis=1)
    return reduced_mk


def lines(title: str, curves: Sequence[StepCurve], *, unit: str = "") -> list[Chart]:
    """Draw the curves in one chart; return none if nothing was logged twice. An axis with a unit begins at zero."""
    shown = [each for each in curves if not each.is_point]
    if not shown:
        return []

    def paint(axes: Axes) -> None:
        for index, each in enumerate(shown):
            style = _STYLES[index // SERIES % len(_STYLES)]
            marker = "o" if len(each.steps) <= 12 else None
            (line,) = axes.plot(
                each.steps, each.values, style, color=series_colour(index), marker=marker, markersize=3.5
            )
            tip(line, f"{each.label}: {each.last:.6g}{unit}")
        axes.set_xlabel("step")
        axes.set_ylabel(unit.strip())
        axes.margins(x=0.02)
        if unit:
            axes.set_ylim(bottom=0)

    key = tuple((plain(each.label), f"c{index % SERIES + 1}") for index, each in enumerate(shown))
    return [Chart(title, draw(title, paint), key=key if len(key) > 1 else ())]


def run_curves(record: Record) -> list[Chart]:
    """Draw a run's charts of learning and speed."""
    return [
        *common_curves({"last": record}),
        *lines("Learning rate", [curve("last", record.steps, "lr")]),
        *lines("Model FLOP utilisation", [_percent(record.steps, "mfu")], unit=" %"),
        *lines("Gradient norm", [curve("last", record.steps, "grad_norm")]),
    ]


def _percent(rows: Sequence[Line], key: str) -> StepCurve:
    return StepCurve("last", column(rows, "step"), [100 * share for share in column(rows, key)])


def common_curves(records: Mapping[str, Record]) -> list[Chart]:
    """Draw the quantities that runs have in common, one chart each with all runs."""
    rates = [curve(label, each.steps, "samples_per_second") for label, each in records.items()]
    charts = lines("Training loss", [curve(label, each.steps, "loss") for label, each in records.items()])
    for name in metric_names(row for record in records.values() for row in record.steps):
        charts += lines(f"Training {plain(name)}", [metric(label, each.steps, name) for label, each in records.items()])
    for name in metric_names(row for record in records.values() for row in record.evaluations):
        curves = [metric(label, each.evaluations, name) for label, each in records.items()]
        title = plain(spoken_name(name))
        charts += lines(title[:1].upper() + title[1:], curves)
    tokens = [curve(label, each.steps, "tokens_per_second") for label, each in records.items()]
    return [
        *charts,
        *lines("Throughput", rates, unit=" samples/s"),
        *lines("Throughput in tokens", tokens, unit=" tokens/s"),
    ]


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
