"""How much a step may send: the efficiency of a strategy by the bytes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, final

from rich.table import Table

from worldsize.errors import ConfigError
from worldsize.plan.advice import size_text

if TYPE_CHECKING:  # torch takes seconds
    from worldsize.config.settings import Settings
    from worldsize.plan.predictor import Predictor

_SWEPT = [10.0 ** (place / 2) for place in range(8, 25)]  # bytes: 10 kB to 1 TB, two points a decade
_LEAST, _MOST = 1.0, 1e13  # bytes
_PRECISION = 1e-4  # relative, of the limit


@final
class PayloadSweep:
    """The efficiency of strategies over payloads, and the payload at which it falls to the share ``wanted``.

    A payload is the bytes of all parameters, which are as many as those of the gradients that are summed.
    """

    def __init__(self, wanted: float) -> None:
        self._wanted = wanted
        self._swept: dict[str, list[float]] = {}  # efficiencies by strategy
        self.limits: dict[str, float] = {}

    def add(self, strategies: Iterable[tuple[str, Settings]], predictor: Predictor, refused: dict[str, str]) -> None:
        """Sweep each strategy; ``refused`` gets the reasons of those that have no cost model."""
        for name, settings in strategies:

            def at(payload: float, settings: Settings = settings) -> float:
                return predictor.with_parameters(payload).forecast(settings).efficiency

            try:
                self._swept[name] = [at(payload) for payload in _SWEPT]
                self.limits[name] = payload_limit(at, self._wanted)
            except ConfigError as error:
                refused[name] = str(error)

    def shown(self) -> Iterator[Table | str]:
        """Yield a table, and a sentence for each strategy."""
        if not self.limits:
            return
        table = Table("payload", *self._swept, title="efficiency by bytes of parameters")
        for place, payload in enumerate(_SWEPT):
            table.add_row(size_text(payload), *(f"{shares[place]:.1%}" for shares in self._swept.values()))
        yield table
        for name, limit in self.limits.items():
            yield f"{name}: {_limit_text(limit, self._wanted)}"


def payload_limit(efficiency_at: Callable[[float], float], wanted: float) -> float:
    """Return the payload, in bytes, at which an efficiency that falls with it is ``wanted``.

    0: it is below that with the smallest payload; infinite: it is not with the largest one.
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
        return f"the latency of the links alone leaves less than {wanted:.0%}."
    if math.isinf(limit):
        return f"with any payload up to {size_text(_MOST)} {wanted:.0%} or more of a step computes."
    return f"{wanted:.0%} of a step computes with {size_text(limit)} of parameters; with more, less."
