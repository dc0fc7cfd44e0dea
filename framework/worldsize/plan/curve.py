"""The curve of predicted steps over sizes of a cluster: efficiency, and where more processes no longer pay off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, final

from rich.table import Table

from worldsize.errors import ConfigError
from worldsize.plan.advice import WANTED, time_text
from worldsize.plan.scaling import Point, boundary_text, knees, marginal_text, marginals

if TYPE_CHECKING:  # torch takes seconds
    from worldsize.config.settings import Settings
    from worldsize.plan.forecast import Forecast
    from worldsize.plan.predictor import Predictor

_RANGED = ("cluster.nodes", "cluster.processes", "cluster.processes_per_node", "cluster.gpus_per_node")
_BAR = 20  # characters of an efficiency of 1


def sizes_in(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Find the range of sizes among overrides, such as cluster.nodes=1..64.

    Returns:
        The overrides with the first size in its place, and an override for each size: the first, its doubles and the
        last. None: there is no range.

    Raises:
        ConfigError: there are several, or one is no range.
    """
    ranges = [word for word in words if word.partition("=")[0] in _RANGED and ".." in word]
    if not ranges:
        return [*words], None
    key, _, text = ranges[0].partition("=")
    first, _, last = text.partition("..")
    if len(ranges) > 1 or not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"{' '.join(ranges)} is no range of sizes. Give one, e.g. cluster.nodes=1..64.")
    sizes = [int(first)]
    while 2 * sizes[-1] < int(last):
        sizes.append(2 * sizes[-1])
    sized = [f"{key}={size}" for size in dict.fromkeys([*sizes, int(last)])]
    return [sized[0] if word == ranges[0] else word for word in words], sized


@final
class Curve:
    """Predicted steps of strategies at several sizes of a cluster.

    Attributes:
        points: One for each strategy and size.
    """

    def __init__(self, recipe: str, *, is_weak: bool) -> None:
        self._recipe, self._mode = recipe, "weak" if is_weak else "strong"
        self._forecasts: list[Forecast] = []
        self._refused: dict[str, str] = {}
        self.points: list[Point] = []

    def add(
        self, word: str, strategies: Iterable[tuple[str, Settings]], predictor: Predictor, reasons: dict[str, str]
    ) -> None:
        """Predict the strategies at the size of the override ``word``; ``reasons``: why others cannot run at it."""
        for name, settings in strategies:
            try:
                forecast = predictor.forecast(settings)
            except ConfigError as error:
                reasons[name] = str(error)
                continue
            self._forecasts.append(forecast)
            self.points.append(_point(name, settings, forecast))
        self._refused |= {f"{name}, {word}": why for name, why in reasons.items()}

    def shown(self, least: float) -> Iterator[Table | str]:
        """Yield the table, the knees by the marginal efficiency ``least``, and what cannot be predicted."""
        if self.points:
            yield self._table(least)
            for strategy, size in knees(self.points, least=least).items():
                yield f"{strategy}: {_knee_text(size, self._largest(strategy), least)}"
            yield from boundary_text(self.points, [each.efficiency for each in self._forecasts])
        for name, why in self._refused.items():
            yield f"{name}: {why}"

    def _largest(self, strategy: str) -> int:
        return max(point.world_size for point in self.points if point.strategy == strategy)

    def _table(self, least: float) -> Table:
        knee = knees(self.points, least=least)
        columns = ["nodes", "processes", "communication", "exposed", "step", "efficiency", "", "marginal"]
        table = Table("strategy", *columns, f"compute for {WANTED:.0%}", title=f"predicted, {self._mode} scaling")
        rows = list(zip(self.points, self._forecasts, marginals(self.points), strict=True))
        for point, each, further in sorted(rows, key=lambda row: row[0].strategy):
            bends = point.world_size == knee[point.strategy] < self._largest(point.strategy)
            times = map(time_text, (each.cost.communication_seconds, each.exposed_seconds, each.step_seconds))
            cells = [str(point.nodes), f"{point.world_size}{' (knee)' if bends else ''}", *times]
            cells += [f"{each.efficiency:.1%}", "█" * round(_BAR * each.efficiency)]
            cells += [marginal_text(further)]
            needed = time_text(each.compute_seconds_for(WANTED))
            table.add_row(point.strategy, *cells, needed, style="bold" if bends else None)
        return table

    def write(self, folder: Path, *, command: str, least: float) -> Path:
        """Write the study into ``folder``, from which ``worldsize report`` draws it; return the file.

        Raises:
            ConfigError: it cannot be written.
        """
        rows = [
            {**asdict(point), "efficiency": each.efficiency, "marginal": further}
            for point, each, further in zip(self.points, self._forecasts, marginals(self.points), strict=True)
        ]
        study = {"schema": 1, "recipe": self._recipe, "mode": self._mode, "predicted": True, "command": command}
        outcome = {"points": rows, "knee": knees(self.points, least=least), "least": least}
        file = folder / "scaling.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**study, **outcome}, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written: {error.strerror}. Name another folder with --study."
            ) from None
        return file


def _knee_text(size: int, largest: int, least: float) -> str:
    share = f"{least:.0%} of the speed of one"
    if size == largest:
        return f"no knee up to {size} processes, each further one adds {share} or more."
    return f"the knee is at {size} processes, beyond which a further one adds less than {share}."


def _point(name: str, settings: Settings, forecast: Forecast) -> Point:
    cluster, batch_size = settings.cluster, settings.training.batch_size
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
