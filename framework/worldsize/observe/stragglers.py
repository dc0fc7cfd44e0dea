"""Finds ranks that are slower than their peers, and the cause: data or computing (for networks see slow_links.py).

If ranks wait for each other, all take the same time for a step. They differ in how long each is busy: the time of a
step without waiting for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]
Cause = Literal["data", "compute", "network"]

_STEPS, _SECONDS = 40, 0.5  # a judgement needs at least this many steps, and this many seconds
_BLOCKS = 8  # number of blocks that these steps are divided into
_LEAST = 0.05  # a straggler is slower by this share in each block
_MARGIN = 0.10  # and by this share in most blocks
_DEVIATIONS = 2.5  # or by this many usual deviations of blocks, if that is more
_HISTORY = 5  # the usual deviation is taken from this many times as many steps
_KEPT, _TIMES = 5000, 400_000  # largest numbers of steps remembered, and of their times on all ranks together


@dataclass(frozen=True)
class Straggler:
    """A slow rank with the cause.

    ``slower``: its busy time divided by the median of its peers, or how many times less bandwidth its link has;
    ``since``: the first step of the evidence.
    """

    rank: int
    cause: Cause
    slower: float
    since: int


@final
@dataclass
class Stragglers:
    """Reports ranks judged slow twice in a row, and again if they have recovered in between.

    ``peers``: groups of ranks with equal work; ``first``: number of steps done before.

    Recent steps are divided into blocks, and a rank is judged by the median of each: a few slow steps do not change a
    median, and a short slowdown does not affect all blocks. The rank must be slower than the median of its peers in
    every block, and by a margin that grows with the noise: 2.5 times the median absolute deviation of blocks from their
    rank's own median, scaled to a standard deviation.
    """

    peers: Sequence[Sequence[int]]
    first: int = 0
    _recent: Figures = field(default_factory=lambda: np.empty((0, 0, 4)))  # [steps, ranks, 4]
    _numbers: list[int] = field(default_factory=list)  # of these steps
    _fresh: list[Figures] = field(default_factory=list)  # steps added since the last judgement
    _suspected: set[int] = field(default_factory=set)
    _named: set[int] = field(default_factory=set)

    def judge(self, step: int, splits: Sequence[Sequence[Sequence[float]]]) -> list[Straggler]:
        """Return the ranks that have become slow.

        ``splits`` [ranks, steps, 4]: seconds of data, compute, communication and update, up to ``step``.
        """
        self._fresh.append(np.array(splits, dtype=np.float64).reshape(len(splits), -1, 4).transpose(1, 0, 2))
        if not self._is_time():
            return []
        self._take(step)
        count = self._looked_at()
        if count > len(self._recent):
            return []
        windows = min(_HISTORY, len(self._recent) // count)
        recent = self._recent[-count * windows :]
        judged = [
            each
            for ranks in self.peers
            if len(ranks) > 1
            for each in _judged(recent.reshape(windows, count, -1, 4), ranks, since=self._numbers[-count])
        ]
        certain = {slow.rank for slow, is_certain in judged if is_certain}
        new = [slow for slow, _ in judged if slow.rank in (certain & self._suspected) - self._named]
        self._suspected = certain
        recovered = {slow.rank for slow, _ in judged if slow.slower < 1 + _LEAST}
        self._named = (self._named | {slow.rank for slow in new}) - recovered
        return new

    def _is_time(self) -> bool:
        """Return whether there are enough new steps to judge, which takes a fraction of a millisecond."""
        steps = sum(map(len, self._fresh))
        return steps >= _BLOCKS and steps * float(self._fresh[-1].sum(2).mean()) >= _SECONDS / _BLOCKS

    def _take(self, step: int) -> None:
        """Add the new steps, evenly spaced between the last known one and ``step``."""
        fresh, last = np.concatenate(self._fresh), self._numbers[-1] if self._numbers else self.first
        numbers = np.ceil(np.linspace(step, last, len(fresh), endpoint=False))[::-1]
        kept = _kept(fresh.shape[1])
        self._recent = np.concatenate([self._recent[-kept:], fresh]) if self._numbers else fresh
        self._numbers = [*self._numbers[-kept:], *map(int, numbers)]
        self._fresh = []

    def _looked_at(self) -> int:
        """Return the number of steps to judge, a multiple of the number of blocks."""
        seconds = float(np.median(self._recent[-_STEPS:].sum(2).max(1)))
        block = max(_STEPS / _BLOCKS, _SECONDS / max(seconds, 1e-9) / _BLOCKS)
        return _BLOCKS * min(math.ceil(block), _kept(self._recent.shape[1]) // _BLOCKS)


def _kept(ranks: int) -> int:
    """Return how many steps to remember for this number of ranks."""
    return max(_STEPS * _HISTORY, min(_KEPT, _TIMES // ranks))


def _judged(recent_wspk: Figures, ranks: Sequence[int], since: int) -> list[tuple[Straggler, bool]]:
    """Measure how slow each rank is in the last window, and whether that is significant."""
    data_wsp, compute_wsp, _, update_wsp = np.moveaxis(recent_wspk[:, :, ranks], 3, 0)
    ratio_wbp = _to_others(_blocks(data_wsp + compute_wsp + update_wsp))
    noise = 1.4826 * float(np.median(abs(ratio_wbp - np.median(ratio_wbp, 1, keepdims=True))))
    ratio_bp, ratio_p = ratio_wbp[-1], np.median(ratio_wbp[-1], 0)
    certain_p = (ratio_bp.min(0) > 1 + _LEAST) & (ratio_p > 1 + max(_MARGIN, _DEVIATIONS * noise))
    is_late_p = _excess(data_wsp[-1:]) > _excess((compute_wsp + update_wsp)[-1:])
    return [
        (Straggler(rank, "data" if is_late else "compute", float(ratio), since), bool(certain))
        for rank, is_late, ratio, certain in zip(ranks, is_late_p, ratio_p, certain_p, strict=True)
    ]


def _blocks(seconds_wsp: Figures) -> Figures:
    """Return the medians of blocks of equally many steps: [windows, blocks, ranks]."""
    windows, steps, ranks = seconds_wsp.shape
    return np.asarray(np.median(seconds_wsp.reshape(windows, _BLOCKS, steps // _BLOCKS, ranks), 2))


def _excess(seconds_wsp: Figures) -> Figures:
    """Return the seconds by which each rank exceeds its peers in most blocks: [ranks]."""
    blocks_wbp = _blocks(seconds_wsp)
    return np.asarray(np.median(blocks_wbp - median_of_others(blocks_wbp), (0, 1)))


def _to_others(blocks_wbp: Figures) -> Figures:
    return np.asarray(blocks_wbp / np.maximum(median_of_others(blocks_wbp), 1e-9))


def median_of_others(values: Figures) -> Figures:
    """Replace each value along the last axis by the median of the others."""
    order = np.argsort(values, -1)
    ordered, place = np.take_along_axis(values, order, -1), np.argsort(order, -1)
    others = values.shape[-1] - 1
    low, high = (others - 1) // 2, others // 2  # the middle ones of the others
    middle = [np.where(place > at, ordered[..., [at]], ordered[..., [at + 1]]) for at in (low, high)]
    return np.asarray((middle[0] + middle[1]) / 2)
