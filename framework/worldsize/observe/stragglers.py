"""Detects slow ranks and hosts with slow links, and the cause.

If ranks wait for each other, steps take the same time on all ranks. Stragglers differ in their busy time: the step time
without waiting for others.

A slow link makes all ranks wait equally long, so busy times do not show which link it is. Links are then measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from worldsize.core import Link, StepDone, World

Figures = NDArray[np.float64]
Cause = Literal["data", "compute", "network"]

_STEPS, _SECONDS = 40, 0.5  # minimum steps and seconds per judgment
_BLOCKS = 8  # number of blocks to split these steps into
_LEAST = 0.05  # minimum relative slowdown of a straggler in each block
_MARGIN = 0.10  # minimum relative slowdown of a straggler's median block
_DEVIATIONS = 2.5  # or this many typical deviations between blocks, if larger
_HISTORY = 5  # the typical deviation is computed over this many times as many steps
_KEPT, _TIMES = 5000, 400_000  # maximum number of steps stored, and of times over all ranks


@dataclass(frozen=True)
class Straggler:
    """A slow rank with the cause.

    ``slower``: ratio of the rank's busy time to the median of its peers, or of the median bandwidth to its host's.
    ``since``: the first step of the evidence.
    """

    rank: int
    cause: Cause
    slower: float
    since: int


@final
@dataclass
class Stragglers:
    """Reports ranks that are slow twice in a row, and again only after they have recovered.

    ``peers``: groups of ranks with equal work; ``first``: last step before this attempt.

    Recent steps are split into blocks, and a rank is judged by the median of each block, so that short slowdowns do not
    count. The rank must be slower than the median of its peers in every block, and by a margin that grows with the
    noise: 2.5 times the median absolute deviation of blocks from their rank's median, scaled to a standard deviation.
    """

    peers: Sequence[Sequence[int]]
    first: int = 0
    _recent: Figures = field(default_factory=lambda: np.empty((0, 0, 4)))  # (steps, ranks, 4)
    _numbers: list[int] = field(default_factory=list)  # step number of each row in _recent
    _fresh: list[Figures] = field(default_factory=list)  # steps added since the last judgment
    _suspected: set[int] = field(default_factory=set)
    _named: set[int] = field(default_factory=set)

    def find_stragglers(self, step: int, splits: Sequence[Sequence[Sequence[float]]]) -> list[Straggler]:
        """Return the ranks that have become slow.

        ``splits`` (ranks, steps, 4): seconds of data, compute, communication and update, up to ``step``.
        """
        self._fresh.append(np.array(splits, dtype=np.float64).reshape(len(splits), -1, 4).transpose(1, 0, 2))
        if not self._is_time():
            return []
        self._append_steps(step)
        count = self._count_judged_steps()
        if count > len(self._recent):
            return []
        windows = min(_HISTORY, len(self._recent) // count)
        recent = self._recent[-count * windows :]
        judged = [
            each
            for ranks in self.peers
            if len(ranks) > 1
            for each in _judge_ranks(recent.reshape(windows, count, -1, 4), ranks, since=self._numbers[-count])
        ]
        certain = {slow.rank for slow, is_certain in judged if is_certain}
        new = [slow for slow, _ in judged if slow.rank in (certain & self._suspected) - self._named]
        self._suspected = certain
        recovered = {slow.rank for slow, _ in judged if slow.slower < 1 + _LEAST}
        self._named = (self._named | {slow.rank for slow in new}) - recovered
        return new

    def _is_time(self) -> bool:
        """Return whether enough new steps were added for another judgment."""
        steps = sum(map(len, self._fresh))
        return steps >= _BLOCKS and steps * float(self._fresh[-1].sum(2).mean()) >= _SECONDS / _BLOCKS

    def _append_steps(self, step: int) -> None:
        """Append the new steps, assumed to be evenly spaced between the last one and ``step``."""
        fresh, last = np.concatenate(self._fresh), self._numbers[-1] if self._numbers else self.first
        numbers = np.ceil(np.linspace(step, last, len(fresh), endpoint=False))[::-1]
        kept = _count_kept_steps(fresh.shape[1])
        self._recent = np.concatenate([self._recent[-kept:], fresh]) if self._numbers else fresh
        self._numbers = [*self._numbers[-kept:], *map(int, numbers)]
        self._fresh = []

    def _count_judged_steps(self) -> int:
        """Return the number of steps to judge, a multiple of the number of blocks."""
        seconds = float(np.median(self._recent[-_STEPS:].sum(2).max(1)))
        block = max(_STEPS / _BLOCKS, _SECONDS / max(seconds, 1e-9) / _BLOCKS)
        return _BLOCKS * min(math.ceil(block), _count_kept_steps(self._recent.shape[1]) // _BLOCKS)


def _count_kept_steps(ranks: int) -> int:
    """Return the number of steps to store for this number of ranks."""
    return max(_STEPS * _HISTORY, min(_KEPT, _TIMES // ranks))


def _judge_ranks(recent_wspk: Figures, ranks: Sequence[int], since: int) -> list[tuple[Straggler, bool]]:
    """Compute the slowdown of each rank in the last window, and whether it is significant."""
    data_wsp, compute_wsp, _, update_wsp = np.moveaxis(recent_wspk[:, :, ranks], 3, 0)
    ratio_wbp = _divide_by_others(_compute_block_medians(data_wsp + compute_wsp + update_wsp))
    noise = 1.4826 * float(np.median(abs(ratio_wbp - np.median(ratio_wbp, 1, keepdims=True))))
    ratio_bp, ratio_p = ratio_wbp[-1], np.median(ratio_wbp[-1], 0)
    certain_p = (ratio_bp.min(0) > 1 + _LEAST) & (ratio_p > 1 + max(_MARGIN, _DEVIATIONS * noise))
    is_late_p = _compute_excess(data_wsp[-1:]) > _compute_excess((compute_wsp + update_wsp)[-1:])
    return [
        (Straggler(rank, "data" if is_late else "compute", float(ratio), since), bool(certain))
        for rank, is_late, ratio, certain in zip(ranks, is_late_p, ratio_p, certain_p, strict=True)
    ]


def _compute_block_medians(seconds_wsp: Figures) -> Figures:
    """Return the medians of blocks with the same number of steps: (windows, blocks, ranks)."""
    windows, steps, ranks = seconds_wsp.shape
    return np.asarray(np.median(seconds_wsp.reshape(windows, _BLOCKS, steps // _BLOCKS, ranks), 2))


def _compute_excess(seconds_wsp: Figures) -> Figures:
    """Return each rank's excess seconds over its peers in the median block, (ranks,)."""
    blocks_wbp = _compute_block_medians(seconds_wsp)
    return np.asarray(np.median(blocks_wbp - median_of_others(blocks_wbp), (0, 1)))


def _divide_by_others(blocks_wbp: Figures) -> Figures:
    return np.asarray(blocks_wbp / np.maximum(median_of_others(blocks_wbp), 1e-9))


def median_of_others(values: Figures) -> Figures:
    """Replace each value along the last axis with the median of the other values."""
    order = np.argsort(values, -1)
    ordered, place = np.take_along_axis(values, order, -1), np.argsort(order, -1)
    others = values.shape[-1] - 1
    low, high = (others - 1) // 2, others // 2  # indices of the middle values
    middle = [np.where(place > at, ordered[..., [at]], ordered[..., [at + 1]]) for at in (low, high)]
    return np.asarray((middle[0] + middle[1]) / 2)


_WINDOWS = 3  # number of windows to take the median over
_WINDOW_SECONDS = 0.5  # minimum seconds of a window, which has at least one logged step
_SHARE = 0.5  # fraction of a step waiting for communication in the first windows that triggers a measurement
_WORSE = 1.5  # multiple of the usual wait that triggers a later one
_LEAST_WAIT = 0.1  # minimum fraction of a step for a later one
_SLOWER = 3.0  # factor by which a slow host has less bandwidth than the median


def slow_link_search(world: World) -> SlowLinkSearch | None:
    """Return a search for slow links, or None if it is impossible.

    It requires at least three hosts, a process group per host, and that all processes train.
    """
    node = world.groups.get("node")
    if node is None or world.size < dist.get_world_size() or world.size <= 2 * node.size():
        return None
    return SlowLinkSearch(node.size())


@final
class SlowLinkSearch:
    """Decides when to measure links, identically on all ranks, from shared step times.

    A measurement blocks all ranks for a second or two. One is due if ranks wait for communication for more than half of
    a step in the first windows. Later ones are due if the wait exceeds 10% of a step and 1.5 times the shortest wait
    since the previous measurement (or the first windows). Each measurement without a finding delays the next one.

    A host is reported if all its links have less than a third of the median bandwidth of hosts in two measurements. The
    first measures links to neighbors, the second links at a distance of two, to acquit a host between two slow ones. A
    host is reported again only if waits have been shorter in between.
    """

    def __init__(self, per_node: int) -> None:
        self.per_node = per_node
        self._recent: deque[StepDone] = deque(maxlen=_WINDOWS)
        self._last, self._seconds = 0, 0.0  # the last logged step, and seconds of the current window
        self._usual: float | None = None  # usual seconds per step that ranks wait for communication
        self._rest, self._pause = 0, _WINDOWS  # windows to wait: now, and after a measurement without a finding
        self._since = 0
        self._suspected: set[int] = set()
        self._named: set[int] = set()

    @property
    def distance(self) -> int:
        """Distance in nodes of the links to measure next."""
        return 2 if self._suspected else 1

    def is_due(self, done: StepDone) -> bool:
        """Return whether to measure links after ``done``; then call :meth:`find_slow_hosts`."""
        if done.exposed_seconds is None or not self._fills_a_window(done):
            return False
        self._recent.append(done)
        self._rest = max(0, self._rest - 1)
        if len(self._recent) < _WINDOWS or self._rest:
            return False
        exposed = statistics.median(each.exposed_seconds or 0.0 for each in self._recent)
        step = statistics.median(max(each.step_seconds) for each in self._recent)
        if self._suspected or self._are_long(exposed, step):
            if not self._suspected:
                self._since = self._recent[0].step
            self._usual = exposed
            self._recent.clear()
            return True
        if self._usual is not None and _WORSE * exposed < self._usual:
            self._named.clear()
        self._usual = exposed if self._usual is None else min(exposed, self._usual)
        return False

    def _are_long(self, exposed: float, step: float) -> bool:
        return exposed > (_SHARE * step if self._usual is None else max(_WORSE * self._usual, _LEAST_WAIT * step))

    def _fills_a_window(self, done: StepDone) -> bool:
        self._seconds += (done.step - self._last) * max(done.step_seconds)
        self._last = done.step
        if is_full := self._seconds >= _WINDOW_SECONDS:
            self._seconds = 0.0
        return is_full

    def find_slow_hosts(self, links: Mapping[tuple[int, int], Link]) -> list[Straggler]:
        """Return the hosts that are slow in ``links`` and in the previous measurement.

        Each host is represented by its first rank.
        """
        best = {
            node: max(link.bandwidth for ends, link in links.items() if node in ends)
            for node in sorted({node for ends in links for node in ends})
        }
        usual = statistics.median(best.values())
        slower = {node: usual / bandwidth for node, bandwidth in best.items() if _SLOWER * bandwidth < usual}
        new = slower.keys() & self._suspected
        self._suspected = set() if self._suspected else slower.keys() - self._named
        self._named = (self._named & slower.keys()) | new
        self._pause = 2 * self._pause if not slower else _WINDOWS
        self._rest = 0 if self._suspected else self._pause
        return [Straggler(node * self.per_node, "network", slower[node], self._since) for node in sorted(new)]
