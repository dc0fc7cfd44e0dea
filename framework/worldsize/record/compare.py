"""Comparison of two runs: first difference of metrics and tensors, its size, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from worldsize.checkpoint.format import complete, parse_step, read_checkpoint
from worldsize.checkpoint.load import has_same_bits, read_tensors
from worldsize.core import format_display_name
from worldsize.record.json_lines import Row, is_number, wrap_read_errors
from worldsize.record.metrics import metric_rows
from worldsize.record.run_record import read_run

Verdict = Literal["bitwise identical", "within tolerance", "different"]
Series = dict[int, float]  # step -> value
_FIGURES = ("loss", "lr", "grad_norm")


@dataclass(frozen=True)
class Divergence:
    """The difference of one metric or tensor; zeros and ``first_step=None`` if equal.

    Tensors are compared in all checkpoints that both runs have; the reported size of the difference is from the last
    one. ``ulp`` is the largest distance in units in the last place, of float64 for metrics and of a tensor's own dtype.
    """

    name: str
    first_step: int | None = None
    absolute: float = 0.0
    relative: float = 0.0
    ulp: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether the values are bitwise equal (0 equals -0)."""
        return self.absolute == 0.0 and self.ulp == 0


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs; ``missing`` describes items that only one of them has."""

    verdict: Verdict
    metrics: tuple[Divergence, ...]
    tensors: tuple[Divergence, ...]
    missing: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Return the comparison as plain values, for JSON."""
        return asdict(self)


def compare_runs(first: Path, second: Path, *, tolerance: float) -> Comparison:
    """Compare two run folders; ``tolerance``: maximum relative difference of logged metrics.

    Raises:
        WorldsizeError: a folder is not a run, or its record is damaged.
    """
    results, series = [], []
    for run in (first, second):
        with wrap_read_errors(run):
            results.append(_read_results(run))
            series.append(_read_series(run))
    missing = [*_report_unfinished(first, results[0]), *_report_unfinished(second, results[1])]
    names = sorted(series[0].keys() & series[1].keys())
    missing += [f"{name} was logged in only one of the runs" for name in sorted(series[0].keys() ^ series[1].keys())]
    metrics = [_divergence(name, series[0][name], series[1][name]) for name in names]
    metrics += _compare_final_metrics(results[0].get("metrics", {}), results[1].get("metrics", {}))
    tensors = tuple(_compare_tensors(first, second, *(run.get("tensors", {}) for run in results)))
    return Comparison(_decide_verdict(results, metrics, missing, tolerance), tuple(metrics), tensors, tuple(missing))


def _read_results(run: Path) -> dict[str, Any]:
    return dict(read_run(run).results)


def _report_unfinished(run: Path, results: Mapping[str, Any]) -> Iterator[str]:
    if "state_digest" not in results:
        yield f"{run.name} has no final state (exit reason: {results.get('exit_reason', 'killed or running')})"


def _read_series(run: Path) -> dict[str, Series]:
    """Return logged values by name and step; the last value counts if a step was logged twice."""
    series: dict[str, Series] = {}
    for row in metric_rows(run / "metrics.jsonl"):
        for label, value in _extract_figures(row):
            if value is not None:
                if not is_number(value):
                    raise ValueError(
                        f"{label} is not a number at step {row['step']} of metrics.jsonl: {str(value)[:40]!r}"
                    )
                series.setdefault(label, {})[row["step"]] = float(value)
    return series


def _extract_figures(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each compared metric in a row."""
    if row["event"] == "evaluation":
        yield from ((format_display_name(name), value) for name, value in row["metrics"].items())
    else:
        yield from ((name, row.get(name)) for name in _FIGURES)
        yield from ((f"train {name}", value) for name, value in row.get("metrics", {}).items())


def _compare_tensors(first: Path, second: Path, then: Mapping[str, str], now: Mapping[str, str]) -> list[Divergence]:
    """Compare model tensors at steps that both runs saved.

    Without such steps, compare the digests of the final weights.
    """
    runs = [_find_checkpoints(first / "checkpoints"), _find_checkpoints(second / "checkpoints")]
    steps = sorted(runs[0].keys() & runs[1].keys())
    if not steps:
        return [_compare_digests(name, then, now) for name in sorted(then.keys() | now.keys())]
    states = {step: [read_tensors(read_checkpoint(run[step]), "model") for run in runs] for step in steps}
    names = sorted({name for one, other in states.values() for name in one.keys() & other.keys()})
    return [
        _measure_drift(name, {step: (one[name], other[name]) for step, (one, other) in states.items()})
        for name in names
    ]


def _find_checkpoints(root: Path) -> dict[int, Path]:
    return {parse_step(path): path for path in complete(root)}


def _compare_digests(name: str, then: Mapping[str, str], now: Mapping[str, str]) -> Divergence:
    return Divergence(name) if then.get(name) == now.get(name) else Divergence(name, absolute=math.nan)


def _measure_drift(name: str, by_step: Mapping[int, tuple[Tensor, Tensor]]) -> Divergence:
    differing = [
        step for step, (one, other) in by_step.items() if one.shape != other.shape or not has_same_bits(one, other)
    ]
    if not differing:
        return Divergence(name)
    one, other = by_step[max(by_step)]
    if one.shape != other.shape:
        return Divergence(name, differing[0], math.inf, math.inf)
    apart = (one.double() - other.double()).abs()
    scale = torch.maximum(one.double().abs(), other.double().abs())
    relative = torch.where(apart == 0, 0.0, apart / scale)
    return Divergence(name, differing[0], _find_largest(apart), _find_largest(relative), tensor_ulps(one, other))


def _find_largest(tensor: Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def tensor_ulps(one: Tensor, other: Tensor) -> int:
    """Return the largest elementwise distance of two tensors, in units in the last place.

    For integer tensors, this is the largest difference.
    """
    if not one.numel():
        return 0
    if not one.is_floating_point():
        return int((one.long() - other.long()).abs().max())
    first, second = (_map_tensor_to_int(tensor) for tensor in (one, other))
    return int((first - second).abs().max())


def _map_tensor_to_int(tensor: Tensor) -> Tensor:
    """Map floats of any shape to int64 in the same order, like :func:`_map_float_to_int`."""
    integers = _INTEGERS[tensor.dtype.itemsize]
    bits = tensor.contiguous().view(integers).long()
    return torch.where(bits >= 0, bits, -(bits & torch.iinfo(integers).max))


def _compare_final_metrics(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Divergence]:
    names = sorted(then.keys() & now.keys())
    return [_divergence(f"final {name}", {0: float(then[name])}, {0: float(now[name])}) for name in names]


def _divergence(name: str, first: Series, second: Series) -> Divergence:
    steps = sorted(first.keys() & second.keys())
    differing = [step for step in steps if not _is_equal(first[step], second[step])]
    if not differing:
        return Divergence(name)
    pairs = [(first[step], second[step]) for step in differing]
    return Divergence(
        name,
        first_step=differing[0],
        absolute=max(abs(one - other) for one, other in pairs),
        relative=max(_relative(one, other) for one, other in pairs),
        ulp=max(count_ulps(one, other) for one, other in pairs),
    )


def _is_equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other))


def count_ulps(one: float, other: float) -> int:
    """Return the distance in units in the last place of float64 (Goldberg 1991, section 1.2)."""
    return abs(_map_float_to_int(one) - _map_float_to_int(other))


def _map_float_to_int(value: float) -> int:
    """Map floats to integers in order: adjacent floats differ by 1, and both zeros map to 0."""
    bits = int(numpy.float64(value).view(numpy.int64))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFFFFFFFFFF)


def _decide_verdict(
    results: list[dict[str, Any]], metrics: list[Divergence], missing: list[str], tolerance: float
) -> Verdict:
    first, second = ((run.get("state_digest"), run.get("metrics_digest")) for run in results)
    if first == second and None not in first:
        return "bitwise identical"
    close = all(each.relative <= tolerance for each in metrics)  # NaN is not close
    return "within tolerance" if metrics and close and not missing else "different"
