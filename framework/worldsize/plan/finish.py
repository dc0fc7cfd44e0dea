"""Predicts the end of a run and its price, on nodes that fail now and then, from measurements of earlier runs.

The interval between saves follows from the cost of a save and the failure rate of the run.
"""

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
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import RunView, look

if TYPE_CHECKING:
    from worldsize.config.settings import Settings


_RUNS = 2000  # simulated runs
_HOPELESS = 1000  # a run that takes so many times its training is not simulated
QUANTILES = (0.1, 0.5, 0.9)  # the first and the last one bound 80 % of all runs

# Hours between failures of a node of eight GPUs where nobody has declared or seen any: "The Llama 3 Herd of Models"
# (arXiv:2407.21783), section 3.3.4, counts 419 unexpected interruptions of 16,384 GPUs in 54 days.
USUAL_MTBF_HOURS = 54 * 24 * (16384 / 8) / 419

LONGEST = 570.0  # seconds from one save to the next that is cheap, so that it is begun within ten minutes
_SHARE = 0.01  # of the time, that saves may take by themselves


def mtbf_seconds(mtbf_hours: float | None, nodes: int, *, failures: int = 0, seconds: float = 0.0) -> float:
    """Return the expected seconds between two failures of a run, from what was declared and what was seen.

    A declared rate counts as much as one failure (the mean of a Gamma posterior with shape 1 + ``failures``). Where
    nothing is declared, what was seen counts alone, and :data:`USUAL_MTBF_HOURS` until something was.

    Args:
        mtbf_hours: Declared mean time between failures of one node, in hours; None: not declared.
        nodes: Nodes of the run; the failure of one is a failure of the run.
        failures: Failures of the run so far.
        seconds: Duration of the run so far.
    """
    if mtbf_hours is None and failures:
        return seconds / failures
    declared = 3600 * (USUAL_MTBF_HOURS if mtbf_hours is None else mtbf_hours) / nodes
    return (declared + seconds) / (1 + failures)


def interval_seconds(save_seconds: float, mtbf: float) -> float:
    """Return the seconds of training between two saves with which saves and lost steps together cost least.

    This is Daly's higher-order estimate (2006, doi:10.1016/j.future.2004.11.016, equation 37). It refines Young's
    sqrt(2 δ M) (1974, doi:10.1145/361147.361115).

    Args:
        save_seconds: δ, seconds by which a save holds up training.
        mtbf: M, mean seconds between two failures of the run.
    """
    if save_seconds >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(save_seconds / (2 * mtbf))
    return math.sqrt(2 * save_seconds * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - save_seconds


def longest_seconds(save_seconds: float) -> float:
    """Return the seconds from one save to the next after which it is overdue: ten minutes, or 1 % of the time."""
    return max(LONGEST, save_seconds / _SHARE)


def chosen_seconds(save_seconds: float, mtbf: float, *, is_expected: bool) -> float:
    """Return the seconds of training between two saves that ``checkpoint.every=auto`` chooses.

    Args:
        save_seconds: Seconds by which a save holds up training.
        mtbf: Mean seconds between two failures of the run.
        is_expected: Whether failures were declared or seen. If not, saves take at most 1 % of the time.
    """
    best = interval_seconds(save_seconds, mtbf)
    return min(best if is_expected else max(best, save_seconds / _SHARE), longest_seconds(save_seconds))


def expected_seconds(work: float, interval: float, save_seconds: float, mtbf: float, restart: float) -> float:
    """Return the expected duration of a run whose failures are a Poisson process (Daly 2006, equation 20).

    Args:
        work: Seconds of training without saves and failures.
        interval: Seconds of training between two saves.
        save_seconds: Seconds by which a save holds up training.
        mtbf: Mean seconds between two failures.
        restart: Seconds from a failure until training goes on; it may fail, too.
    """
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + save_seconds) / mtbf) * work / interval


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
