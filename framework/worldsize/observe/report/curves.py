"""Line charts over steps, for one run or several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final
from warnings import catch_warnings, simplefilter

import numpy as np

from worldsize.config.arguments import parse_override_key
from worldsize.core import format_display_name, is_loss, metric_key, parse_metric_key
from worldsize.errors import WorldsizeError
from worldsize.observe.report.read import Line, Record, extract_column, parse_number, read_run
from worldsize.observe.report.svg import SERIES, Axis, Chart, Numbers, Plot, series_colour, shorten_text
from worldsize.record.json_lines import wrap_read_errors

_POINTS = 300  # maximum points of a line; more cannot be distinguished
_DASHES = ("", "6 3", "1.5 2.5", "7 3 1.5 3")
_DECADES = 2.0  # range of positive values, in decades, above which a loss axis is logarithmic


@final
class StepCurve:
    """Values over steps. Long series are averaged over neighboring steps, ignoring NaN."""

    def __init__(self, label: str, steps: Sequence[float], values: Sequence[float]) -> None:
        self.label = label
        self.steps, self.values = thin_values(steps), thin_values(values)

    @property
    def is_point(self) -> bool:
        """Whether there are fewer than two finite values, too few for a line."""
        return int(np.isfinite(self.values).sum()) < 2


def create_curve(label: str, lines: Sequence[Line], key: str) -> StepCurve:
    """Return the curve of the values under ``key``, with NaN for lines without the key."""
    return StepCurve(label, extract_column(lines, "step"), extract_column(lines, key))


def create_metric_curve(label: str, lines: Sequence[Line], name: str) -> StepCurve:
    """Return the curve of a metric from evaluations or logged steps."""
    rows = [{"step": row["step"], name: row.get("metrics", {}).get(name)} for row in lines]
    return create_curve(label, rows, name)


def metric_names(lines: Iterable[Line]) -> list[str]:
    """Return the sorted names of metrics in any of the lines."""
    return sorted({name for row in lines for name in row.get("metrics", {})})


def thin_values(values: Sequence[float]) -> Numbers:
    """Average neighboring values so that at most ``_POINTS`` remain."""
    array = np.asarray(values, dtype=np.float64)
    return average_rows(array[:, None], at_most=_POINTS)[:, 0] if array.size else array


def average_rows(values_nk: Numbers, *, at_most: int) -> Numbers:
    """Average groups of consecutive rows, so that at most ``at_most`` remain; ignore NaN."""
    group = -(-len(values_nk) // at_most)
    missing = -len(values_nk) % group
    padded = np.pad(values_nk, ((0, missing), (0, 0)), constant_values=np.nan)
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # a group with only NaN
        reduced_mk: Numbers = np.nanmean(padded.reshape(-1, group, values_nk.shape[1]), axis=1)
    return reduced_mk


def draw_lines(title: str, curves: Sequence[StepCurve], *, unit: str = "", has_loss_axis: bool = False) -> list[Chart]:
    """Draw the curves in one chart, or none if no curve has two points.

    An axis with a unit starts at zero. A loss axis is logarithmic if its values span more than two decades.
    """
    shown = [each for each in curves if not each.is_point]
    if not shown:
        return []
    is_log = has_loss_axis and is_wide(np.concatenate([each.values for each in shown]))
    y = Axis(unit.strip(), is_log=is_log, low=0.0 if unit else None)
    plot = Plot(Axis("step"), y)
    for index, each in enumerate(shown):
        shade = series_colour(index)
        plot.add_line(each.steps, each.values, shade, dash=_DASHES[index // SERIES % len(_DASHES)])
        if len(each.steps) <= 12:
            plot.add_points(each.steps, each.values, shade)
        plot.add_values(each.label, each.steps, each.values)
    key = tuple((shorten_text(each.label), f"c{index % SERIES + 1}") for index, each in enumerate(shown))
    note = "Log scale: the values span more than two decades." if is_log else ""
    return [Chart(title, plot.draw(title), note, key=key if len(key) > 1 else ())]


def is_wide(values: Numbers) -> bool:
    """Return whether all finite values are positive and span more than two decades."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and np.log10(known.max() / known.min()) > _DECADES)


def run_curves(record: Record) -> list[Chart]:
    """Draw a run's charts of loss, metrics, throughput, learning rate, MFU and gradient norm."""
    return [
        *common_curves({"": record}),
        *draw_lines("Learning rate", [create_curve("", record.steps, "lr")]),
        *draw_lines("Model FLOP utilisation", [_create_percent_curve(record.steps, "mfu")], unit=" %"),
        *draw_lines("Gradient norm", [create_curve("", record.steps, "grad_norm")], has_loss_axis=True),
    ]


def _create_percent_curve(rows: Sequence[Line], key: str) -> StepCurve:
    return StepCurve("", extract_column(rows, "step"), [100 * share for share in extract_column(rows, key)])


def common_curves(records: Mapping[str, Record]) -> list[Chart]:
    """Draw a chart for each loss, metric and throughput, with one line per run, by label."""
    rates = [create_curve(label, each.steps, "samples_per_second") for label, each in records.items()]
    losses = [create_curve(label, each.steps, "loss") for label, each in records.items()]
    charts = draw_lines("Training loss", losses, has_loss_axis=True)
    for name in metric_names(row for record in records.values() for row in record.steps):
        charts += draw_lines(
            f"Training {shorten_text(name)}",
            [create_metric_curve(label, each.steps, name) for label, each in records.items()],
        )
    for name in metric_names(row for record in records.values() for row in record.evaluations):
        curves = [create_metric_curve(label, each.evaluations, name) for label, each in records.items()]
        title = shorten_text(format_display_name(name))
        charts += draw_lines(title[:1].upper() + title[1:], curves, has_loss_axis=is_loss(name))
    tokens = [create_curve(label, each.steps, "tokens_per_second") for label, each in records.items()]
    return [
        *charts,
        *draw_lines("Throughput", rates, unit=" samples/s"),
        *draw_lines("Throughput in tokens", tokens, unit=" tokens/s"),
    ]


def search_charts(sweep: Sweep) -> list[Chart]:
    """Draw the metrics that the sweep optimizes, or else all metrics, over its options.

    Only options with at least three distinct numeric values are drawn.
    """
    goals = {each.manifest["config"].get("sweep", {}).get("metric") for each in sweep.runs.values()}
    named = {metric_key(*parse_metric_key(goal)) for goal in goals if goal}
    charts = []
    for key in sweep.keys:
        values = np.array([parse_number(get_typed_options(each).get(key)) for each in sweep.runs.values()])
        if len(np.unique(values[np.isfinite(values)])) < 3:
            continue
        for name in sorted(named & {*sweep.metrics}) or sweep.metrics:
            heights = np.array([parse_number(each.metrics.get(name)) for each in sweep.runs.values()])
            if np.isfinite(values + heights).sum() < 3:
                continue
            y = Axis(is_log=is_loss(name) and is_wide(heights), margin=0.06)
            plot = Plot(Axis(shorten_text(key), is_log=is_wide(values), margin=0.06), y)
            tips = [f"{label}: {height:.6g}" for label, height in zip(sweep.runs, heights, strict=True)]
            plot.add_points(values, heights, series_colour(0), tips=tips)
            title = f"{shorten_text(format_display_name(name))} by {shorten_text(key)}"
            charts.append(Chart(title, plot.draw(title)))
    return charts


@final
@dataclass(frozen=True)
class Sweep:
    """Several runs side by side.

    ``runs`` is keyed by the options that differ between the runs. ``refused`` maps each unreadable folder to its error.
    """

    runs: Mapping[str, Record]
    keys: Sequence[str]  # keys that differ between the runs
    refused: Mapping[str, str]

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics that occur in any run, sorted."""
        return sorted({name for record in self.runs.values() for name in record.metrics})


def read_sweep(folders: Sequence[Path]) -> Sweep:
    """Read the runs in ``folders``; unreadable ones are listed in ``refused`` with the error."""
    records, refused = [], {}
    for folder in folders:
        try:
            record = read_run(folder, has_timing=False, among=len(folders))
            with wrap_read_errors(folder):
                _check_shown(record)
            records.append(record)
        except WorldsizeError as error:
            refused[folder.name] = str(error)
    keys = differing([get_typed_options(record) for record in records])
    return Sweep({_format_label(record, keys, records): record for record in records}, keys, refused)


def _check_shown(record: Record) -> None:
    """Read all values that a report shows, so that an incomplete record excludes only its run."""
    manifest = record.manifest
    _ = (
        get_typed_options(record),
        record.metrics,
        record.state,
        record.results,
        manifest["run_id"],
        manifest["cluster"]["processes"],
    )


def get_typed_options(record: Record) -> dict[str, str]:
    """Return the run's command-line options by key, and its group."""
    group = (record.manifest["config"].get("run") or {}).get("group")
    words = {parse_override_key(word): word.partition("=")[2] for word in record.manifest["overrides"]}
    return {**words, "run.group": Path(group).name} if group else words


def differing(all_typed: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between runs, in order of appearance."""
    keys = dict.fromkeys(key for each in all_typed for key in each)
    return [key for key in keys if len({each.get(key) for each in all_typed}) > 1]


def _format_label(record: Record, keys: Sequence[str], others: Sequence[Record]) -> str:
    """Label a run with the options that differ; add its folder if they are not unique."""
    mine = get_typed_options(record)
    words = " ".join(f"{key}={mine[key]}" for key in keys if key in mine)
    twins = [other for other in others if all(get_typed_options(other).get(key) == mine.get(key) for key in keys)]
    return f"{words} {record.folder.name}".strip() if len(twins) > 1 or not words else words
