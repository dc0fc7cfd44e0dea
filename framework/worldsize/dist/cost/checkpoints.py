"""Costs of checkpoints and failures, in seconds: pure functions of what a save costs and how often a run fails."""

from __future__ import annotations

import math

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

    This is Daly's higher-order estimate (2006, doi:10.1016/j.future.2004.11.016, equation 37), which refines Young's
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
