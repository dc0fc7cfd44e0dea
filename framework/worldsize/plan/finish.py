"""Predicts the end of a run and its price, on nodes that fail now and then, from measurements of earlier runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from worldsize.checkpoint.format import complete, read
from worldsize.collectives.cost import chosen_seconds, expected_seconds
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import RunView, look

if TYPE_CHECKING:
    from worldsize.config.settings import Settings


_RUNS = 2000  # simulated runs
_HOPELESS = 1000  # a run that takes so many times its training is not simulated
QUANTILES = (0.1, 0.5, 0.9)  # the first and the last one bound 80 % of all runs


@dataclass(frozen=True)
class Finish:
    """The times at which a run may end, and what happens on the way.

    Attributes:
        seconds: Durations that 10, 50 and 90 % of all runs do not exceed.
        failures: Mean number of failures of a run.
        interval: Seconds of training between two saves.
    """

    seconds: Sequence[float]
    failures: float
    interval: float


def finish(work: float, save_seconds: float, mtbf: float, restart: float) -> Finish:
    """Simulate runs whose failures are a Poisson process, and which save as ``checkpoint.every=auto`` does.

    Args:
        work: Seconds of training without saves and failures.
        save_seconds: Seconds by which a save holds up training.
        mtbf: Mean seconds between two failures of the run.
        restart: Seconds from a failure until training goes on.

    Raises:
        ConfigError: failures come so fast that the run would hardly ever end.
    """
    segments = max(1, round(work / chosen_seconds(save_seconds, mtbf, is_expected=True)))
    interval = work / segments
    if not _expected(work, interval, save_seconds, mtbf, restart) < _HOPELESS * work:
        raise ConfigError(
            f"with a failure every {mtbf:.3g} s, a restart of {restart:.3g} s and a save of {save_seconds:.3g} s the "
            "run would hardly ever end. Take fewer nodes, or nodes that fail less often."
        )
    generator = numpy.random.default_rng(0)
    failures, lost = _lost(generator, numpy.full(_RUNS, segments), interval + save_seconds, mtbf)
    again, lost_again = _lost(generator, failures, restart, mtbf)
    seconds = work + segments * save_seconds + lost + failures * restart + lost_again
    return Finish(numpy.quantile(seconds, QUANTILES).tolist(), float((failures + again).mean()), interval)


def _expected(work: float, interval: float, save_seconds: float, mtbf: float, restart: float) -> float:
    try:
        return expected_seconds(work, interval, save_seconds, mtbf, restart)
    except OverflowError:
        return math.inf


def _lost(
    generator: numpy.random.Generator, pieces: NDArray[numpy.int64], seconds: float, mtbf: float
) -> tuple[NDArray[numpy.int64], NDArray[numpy.float64]]:
    """Return, by run, the failures and the seconds lost until all its ``pieces`` were done, each at one go.

    A piece of ``seconds`` succeeds with probability exp(-seconds / mtbf); a failure loses an exponentially distributed
    time, given that it is shorter than the piece.
    """
    success = math.exp(-seconds / mtbf)
    if success == 1:
        return numpy.zeros_like(pieces), numpy.zeros(len(pieces))
    failures = numpy.where(pieces, generator.negative_binomial(numpy.maximum(pieces, 1), success), 0)
    lost = [-mtbf * numpy.log1p(-(1 - success) * generator.random(number)).sum() for number in failures]
    return failures, numpy.array(lost)


def earlier_runs(folder: Path) -> Iterator[RunView]:
    """Yield the runs in ``folder``, the newest first."""
    runs: list[RunDirectory] = []
    with suppress(WorldsizeError):  # this user may not read the folder
        runs = runs_below(folder)
    for run in reversed(runs):  # by date and time
        with suppress(WorldsizeError):
            yield look(run)


def newest_like(settings: Settings, folder: Path) -> RunView | None:
    """Return the newest complete run in ``folder`` of as many steps on as many processes, or None."""
    for run in earlier_runs(folder):
        with suppress(WorldsizeError, KeyError):
            config, cluster = run.manifest["config"], settings.cluster
            then = config["steps"], config["cluster"]["processes"], config["cluster"]["nodes"]
            if run.exit_reason == "completed" and then == (settings.training.steps, cluster.processes, cluster.nodes):
                return run
    return None


def measured_save(run: RunView) -> float | None:
    """Return the seconds by which a save held up the training of ``run``, if its checkpoints say so."""
    for path in reversed(complete(run.directory.checkpoints)):
        with suppress(WorldsizeError, KeyError):
            return float(read(path).facts["save_interval"]["save_seconds"])
    return None


def measured_restart(run: RunView) -> float | None:
    """Return the mean seconds of a restart of ``run``, if it had any."""
    seconds = run.results.get("goodput", {}).get("recover_seconds")
    return sum(seconds) / len(seconds) if seconds else None
