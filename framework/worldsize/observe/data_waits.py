"""Computes the share of time that each rank waits for data, and names the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from worldsize.observe.report.read import Line, number

_LONG = 0.05  # share of the time above which a remedy is named
_NAMED = 5  # number of ranks named, those that wait longest


def waited_share(lines: Sequence[Line]) -> float:
    """Return the share of step time that one rank waited for data, from its timing lines; NaN if unknown.

    A line has the means of the steps since the line before it.
    """
    data = total = 0.0
    last = 0
    for line in lines:
        steps, last = max(1, line["step"] - last), line["step"]
        wait, rest = number(line.get("data_seconds")), number(line.get("step_seconds"))
        if not math.isnan(wait + rest):
            data, total = data + steps * wait, total + steps * (wait + rest)
    return data / total if total > 0 else math.nan


def waiting_text(shares: Mapping[int, float], config: Mapping[str, Any]) -> str | None:
    """Describe which share of the time ranks wait for data, and the remedy; return None if it is at most 5 %.

    Args:
        shares: of each rank; NaN where it is not known.
        config: of the run, for its ``data_workers``.
    """
    known = {rank: share for rank, share in shares.items() if not math.isnan(share)}
    if not known or max(known.values()) <= _LONG:
        return None
    worst = sorted(known, key=lambda rank: -known[rank])[:_NAMED]
    mean = sum(known.values()) / len(known)
    ranks = ", ".join(f"rank {rank} {known[rank]:.0%}" for rank in worst)
    which = f": {ranks}" if len(known) <= _NAMED else f"; longest wait: {ranks}"
    return f"Steps wait for data for {mean:.0%} of the time{which if len(known) > 1 else ''}. {_remedy(config)}"


def _remedy(config: Mapping[str, Any]) -> str:
    workers = config.get("data_workers", 0)
    others = "give the data set a method load_batch, or prepare the data once (worldsize prepare, for text)."
    if workers == "auto":
        return f"More data_workers than auto has started did not help, or there are no cores for them: {others}"
    more = f", or more than {workers}" if isinstance(workers, int) and workers > 0 else ""
    return f"Set data_workers=auto{more}, {others}"
