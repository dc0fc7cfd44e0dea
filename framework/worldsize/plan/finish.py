"""Predicts duration and price of a run on nodes that may fail, from earlier runs.

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

from worldsize.checkpoint.format import complete, read_checkpoint
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import RunView, refresh_run

if TYPE_CHECKING:
    from worldsize.core import Cluster


_RUNS = 2000  # number of simulated runs
_HOPELESS = 1000  # do not simulate runs expected to take more than this multiple of their training time
QUANTILES = (0.1, 0.5, 0.9)  # 80% of all runs are between the first and the last

# Default hours between failures of a node with eight GPUs, without a declared or observed rate. "The Llama 3 Herd of
# Models" (arXiv:2407.21783), section 3.3.4, counts 419 unexpected interruptions of 16,384 GPUs in 54 days.
USUAL_MTBF_HOURS = 54 * 24 * (16384 / 8) / 419

LONGEST = 570.0  # maximum seconds between cheap saves, so that each starts within ten minutes
_SHARE = 0.01  # maximum fraction of time for saves, unless expected failures justify more


def mtbf_seconds(mtbf_hours: float | None, nodes: int, *, failures: int = 0, seconds: float = 0.0) -> float:
    """Return the expected seconds between failures, from declared and observed rates.

    A declared rate counts as much as one failure (the mean of a Gamma posterior with shape 1 + ``failures``). Without a
    declared rate, only observed failures count, or :data:`USUAL_MTBF_HOURS` before the first one.

    Args:
        mtbf_hours: Declared mean time between failures of one node, in hours. None if not declared.
        nodes: Number of nodes; the failure of any node is a failure of the run.
        failures: Number of failures of the run so far.
        seconds: Duration of the run so far.
    """
    if mtbf_hours is None and failures:
        return seconds / failures
    declared = 3600 * (USUAL_MTBF_HOURS if mtbf_hours is None else mtbf_hours) / nodes
    return (declared + seconds) / (1 + failures)


def interval_seconds(save_seconds: float, mtbf: float) -> float:
    """Return the training seconds between saves that minimize the cost of saves and failures.

    This is Daly's higher-order estimate (2006, doi:10.1016/j.future.2004.11.016, equation 37). It refines Young's
    sqrt(2 δ M) (1974, doi:10.1145/361147.361115).

    Args:
        save_seconds: δ, seconds that a save blocks training.
        mtbf: M, mean seconds between failures of the run.
    """
    if save_seconds >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(save_seconds / (2 * mtbf))
    return math.sqrt(2 * save_seconds * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - save_seconds


def longest_seconds(save_seconds: float) -> float:
    """Return the maximum seconds between saves: ten minutes, or more if saves would exceed 1%."""
    return max(LONGEST, save_seconds / _SHARE)


def choose_save_interval(save_seconds: float, mtbf: float, *, is_expected: bool) -> float:
    """Return the seconds of training between saves chosen by ``checkpoint.every=auto``.

    Args:
        save_seconds: Seconds that a save blocks training.
        mtbf: Mean seconds between failures of the run.
        is_expected: Whether failures were declared or observed. If not, saves take at most 1% of the time.
    """
    best = interval_seconds(save_seconds, mtbf)
    return min(best if is_expected else max(best, save_seconds / _SHARE), longest_seconds(save_seconds))


def compute_expected_seconds(work: float, interval: float, save_seconds: float, mtbf: float, restart: float) -> float:
    """Return a run's expected duration with Poisson failures (Daly 2006, equation 20).

    Args:
        work: Seconds of training without saves and failures.
        interval: Seconds of training between saves.
        save_seconds: Seconds that a save blocks training.
        mtbf: Mean seconds between failures.
        restart: Seconds from a failure until training resumes; restarts may fail, too.
    """
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + save_seconds) / mtbf) * work / interval


@dataclass(frozen=True)
class Finish:
    """Distribution of a run's duration, mean number of failures, and save interval.

    Attributes:
        seconds: 10th, 50th and 90th percentiles of the duration.
        failures: Mean number of failures per run.
        interval: Seconds of training between saves.
    """

    seconds: Sequence[float]
    failures: float
    interval: float


def simulate_runs(work: float, save_seconds: float, mtbf: float, restart: float) -> Finish:
    """Simulate runs with Poisson failures and the saves of ``checkpoint.every=auto``.

    Args:
        work: Seconds of training without saves and failures.
        save_seconds: Seconds that a save blocks training.
        mtbf: Mean seconds between failures of the run.
        restart: Seconds from a failure until training resumes.

    Raises:
        ConfigError: failures are so frequent that the run would hardly ever end.
    """
    segments = max(1, round(work / choose_save_interval(save_seconds, mtbf, is_expected=True)))
    interval = work / segments
    if not _estimate_seconds(work, interval, save_seconds, mtbf, restart) < _HOPELESS * work:
        raise ConfigError(
            f"the run would make almost no progress: a failure is expected every {mtbf:.3g} s, a restart "
            f"takes {restart:.3g} s and a save {save_seconds:.3g} s. Use fewer or more reliable nodes."
        )
    generator = numpy.random.default_rng(0)
    failures, lost = _sample_failures(generator, numpy.full(_RUNS, segments), interval + save_seconds, mtbf)
    again, lost_again = _sample_failures(generator, failures, restart, mtbf)
    seconds = work + segments * save_seconds + lost + failures * restart + lost_again
    return Finish(numpy.quantile(seconds, QUANTILES).tolist(), float((failures + again).mean()), interval)


def _estimate_seconds(work: float, interval: float, save_seconds: float, mtbf: float, restart: float) -> float:
    try:
        return compute_expected_seconds(work, interval, save_seconds, mtbf, restart)
    except OverflowError:
        return math.inf


def _sample_failures(
    generator: numpy.random.Generator, pieces: NDArray[numpy.int64], seconds: float, mtbf: float
) -> tuple[NDArray[numpy.int64], NDArray[numpy.float64]]:
    """Sample, per run, the number of failures and the seconds lost before all ``pieces`` succeed.

    A piece succeeds if it completes without a failure, with probability exp(-seconds / mtbf). A failure loses an
    exponentially distributed time, conditional on being shorter than the piece.
    """
    success = math.exp(-seconds / mtbf)
    if success == 1:
        return numpy.zeros_like(pieces), numpy.zeros(len(pieces))
    failures = numpy.where(pieces, generator.negative_binomial(numpy.maximum(pieces, 1), success), 0)
    lost = [-mtbf * numpy.log1p(-(1 - success) * generator.random(number)).sum() for number in failures]
    return failures, numpy.array(lost)


def earlier_runs(folder: Path) -> Iterator[RunView]:
    """Yield the runs in ``folder``, newest first."""
    runs: list[RunDirectory] = []
    with suppress(WorldsizeError):  # this user may not have permission to read the folder
        runs = runs_below(folder)
    for run in reversed(runs):  # sorted by date and time
        with suppress(WorldsizeError):
            yield refresh_run(run)


def newest_like(cluster: Cluster, steps: int, folder: Path) -> RunView | None:
    """Return the newest completed run with the same steps, processes and nodes, or None."""
    for run in earlier_runs(folder):
        with suppress(WorldsizeError, KeyError):
            config = run.manifest["config"]
            then = config["steps"], config["cluster"]["processes"], config["cluster"]["nodes"]
            if run.exit_reason == "completed" and then == (steps, cluster.processes, cluster.nodes):
                return run
    return None


def read_save_seconds(run: RunView) -> float | None:
    """Return the seconds that a save blocked training in ``run``, or None if not recorded."""
    for path in reversed(complete(run.directory.checkpoints)):
        with suppress(WorldsizeError, KeyError):
            return float(read_checkpoint(path).facts["save_interval"]["save_seconds"])
    return None


def read_restart_seconds(run: RunView) -> float | None:
    """Return the mean seconds per restart of ``run``, or None if it had none."""
    seconds = run.results.get("goodput", {}).get("recover_seconds")
    return sum(seconds) / len(seconds) if seconds else None
