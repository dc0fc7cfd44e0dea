"""Predicted efficiency over cluster sizes, and over bytes of parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, final

from rich.table import Table

from worldsize.errors import ConfigError
from worldsize.plan.advice import WANTED, size_text, time_text
from worldsize.plan.scaling import Point, boundary_text, find_knees, marginal_text, marginals

if TYPE_CHECKING:
    from worldsize.config.settings import Settings
    from worldsize.core import Cluster
    from worldsize.plan.predictor import Forecast, Predictor


_RANGED = ("cluster.nodes", "cluster.processes", "cluster.processes_per_node", "cluster.gpus_per_node")
_BAR = 20  # width of the bar for an efficiency of 1, in characters


def sizes_in(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Expand a range of sizes in the overrides, such as cluster.nodes=1..64.

    Returns:
        The overrides with the range replaced by its first size, and one override per size: the first, its doublings and
            the last (None without a range).

    Raises:
        ConfigError: there are several ranges, or an invalid one.
    """
    ranges = [word for word in words if word.partition("=")[0] in _RANGED and ".." in word]
    if not ranges:
        return [*words], None
    key, _, text = ranges[0].partition("=")
    first, _, last = text.partition("..")
    if len(ranges) > 1 or not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"expected one range of sizes, e.g. cluster.nodes=1..64, got {' '.join(ranges)}.")
    sizes = [int(first)]
    while 2 * sizes[-1] < int(last):
        sizes.append(2 * sizes[-1])
    sized = [f"{key}={size}" for size in dict.fromkeys([*sizes, int(last)])]
    return [sized[0] if word == ranges[0] else word for word in words], sized


@final
class Curve:
    """Predicted steps of strategies at several cluster sizes.

    Attributes:
        points: One per strategy and size.
    """

    def __init__(self, recipe: str, *, is_weak: bool) -> None:
        self._recipe, self._mode = recipe, "weak" if is_weak else "strong"
        self._forecasts: list[Forecast] = []
        self._refused: dict[str, str] = {}
        self.points: list[Point] = []

    def add_size(
        self, word: str, strategies: Iterable[tuple[str, Settings]], predictor: Predictor, reasons: dict[str, str]
    ) -> None:
        """Predict strategies at the size in override ``word``; add failures to ``reasons`` by strategy."""
        for name, settings in strategies:
            try:
                forecast = predictor.forecast(settings)
            except ConfigError as error:
                reasons[name] = str(error)
                continue
            self._forecasts.append(forecast)
            self.points.append(_create_point(name, settings.cluster, settings.training.batch_size, forecast))
        self._refused |= {f"{name}, {word}": why for name, why in reasons.items()}

    def render_curve(self, least: float) -> Iterator[Table | str]:
        """Yield the table, the knees at the marginal efficiency ``least``, and failed predictions."""
        if self.points:
            yield self._build_table(least)
            for strategy, size in find_knees(self.points, least=least).items():
                yield f"{strategy}: {_knee_text(size, self._find_largest_size(strategy), least)}"
            yield from boundary_text(self.points, [each.efficiency for each in self._forecasts])
        for name, why in self._refused.items():
            yield f"{name}: {why}"

    def _find_largest_size(self, strategy: str) -> int:
        return max(point.world_size for point in self.points if point.strategy == strategy)

    def _build_table(self, least: float) -> Table:
        knee = find_knees(self.points, least=least)
        columns = ["nodes", "processes", "communication", "exposed", "step", "efficiency", "", "marginal"]
        table = Table("strategy", *columns, f"compute for {WANTED:.0%}", title=f"predicted, {self._mode} scaling")
        rows = list(zip(self.points, self._forecasts, marginals(self.points), strict=True))
        for point, each, further in sorted(rows, key=lambda row: row[0].strategy):
            bends = point.world_size == knee[point.strategy] < self._find_largest_size(point.strategy)
            times = map(time_text, (each.cost.communication_seconds, each.exposed_seconds, each.step_seconds))
            cells = [str(point.nodes), f"{point.world_size}{' (knee)' if bends else ''}", *times]
            cells += [f"{each.efficiency:.1%}", "█" * round(_BAR * each.efficiency)]
            cells += [marginal_text(further)]
            needed = time_text(each.compute_seconds_for(WANTED))
            table.add_row(point.strategy, *cells, needed, style="bold" if bends else None)
        return table

    def write_study(self, folder: Path, *, command: str, least: float) -> Path:
        """Write the study to ``folder`` for ``worldsize report``; return the file.

        Raises:
            ConfigError: it cannot be written.
        """
        rows = [
            {**asdict(point), "efficiency": each.efficiency, "marginal": further}
            for point, each, further in zip(self.points, self._forecasts, marginals(self.points), strict=True)
        ]
        study = {"schema": 1, "recipe": self._recipe, "mode": self._mode, "predicted": True, "command": command}
        outcome = {"points": rows, "knee": find_knees(self.points, least=least), "least": least}
        file = folder / "scaling.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**study, **outcome}, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"failed to write {file}: {error.strerror}. Pass a different folder with --study."
            ) from None
        return file


def _knee_text(size: int, largest: int, least: float) -> str:
    share = f"{least:.0%} of the throughput of a single process"
    processes = "1 process" if size == 1 else f"{size} processes"
    if size == largest:
        return f"no knee up to {processes}: each additional process adds at least {share}."
    return f"the knee is at {processes}: each additional process adds less than {share}."


def _create_point(name: str, cluster: Cluster, batch_size: int, forecast: Forecast) -> Point:
    return Point(
        strategy=name,
        world_size=cluster.processes,
        accumulation=1,
        step_seconds=forecast.step_seconds,
        spread_seconds=0.0,
        phases={},
        samples_per_second=batch_size / forecast.step_seconds,
        predicted_seconds=None,
        run="",
        nodes=cluster.nodes,
    )


_SWEPT = [10.0 ** (place / 2) for place in range(8, 25)]  # bytes: 10 kB to 1 TB, two points per decade
_LEAST, _MOST = 1.0, 1e13  # bytes
_PRECISION = 1e-4  # relative precision of the limit


@final
class PayloadSweep:
    """Efficiency of strategies over payloads, and the payload at which it falls to ``wanted``.

    The payload is the bytes of all parameters, which equals the bytes of all gradients.
    """

    def __init__(self, wanted: float) -> None:
        self._wanted = wanted
        self._swept: dict[str, list[float]] = {}  # efficiencies by strategy
        self.limits: dict[str, float] = {}

    def add_strategies(
        self, strategies: Iterable[tuple[str, Settings]], predictor: Predictor, refused: dict[str, str]
    ) -> None:
        """Sweep each strategy; those without a cost model are added to ``refused``, with the reason."""
        for name, settings in strategies:

            def predict_efficiency(payload: float, settings: Settings = settings) -> float:
                return predictor.copy_with_parameters(payload).forecast(settings).efficiency

            try:
                self._swept[name] = [predict_efficiency(payload) for payload in _SWEPT]
                self.limits[name] = payload_limit(predict_efficiency, self._wanted)
            except ConfigError as error:
                refused[name] = str(error)

    def render_sweep(self) -> Iterator[Table | str]:
        """Yield a table of efficiencies by payload, and a sentence with each strategy's limit."""
        if not self.limits:
            return
        table = Table("payload", *self._swept, title="efficiency by parameter size")
        for place, payload in enumerate(_SWEPT):
            table.add_row(size_text(payload), *(f"{shares[place]:.1%}" for shares in self._swept.values()))
        yield table
        for name, limit in self.limits.items():
            yield f"{name}: {_limit_text(limit, self._wanted)}"


def payload_limit(efficiency_at: Callable[[float], float], wanted: float) -> float:
    """Return the payload, in bytes, at which a falling efficiency equals ``wanted``.

    0 if the efficiency is lower even at the smallest payload; infinite if it is not lower at the largest.
    """
    low, high = _LEAST, _MOST
    if efficiency_at(low) < wanted:
        return 0.0
    if efficiency_at(high) >= wanted:
        return math.inf
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if efficiency_at(middle) >= wanted else (low, middle)
    return low


def _limit_text(limit: float, wanted: float) -> str:
    if limit == 0:
        return f"efficiency is below {wanted:.0%} at any parameter size because of link latency."
    if math.isinf(limit):
        return f"for up to {size_text(_MOST)} of parameters, efficiency is at least {wanted:.0%}."
    return f"efficiency is at least {wanted:.0%} up to {size_text(limit)} of parameters."
