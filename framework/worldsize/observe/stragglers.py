"""Finds slow ranks and hosts with slow links, and the cause.

If ranks wait for each other, all take the same time for a step. They differ in how long each is busy: the time of a
step without waiting for others.

Ranks that wait for each other wait equally long for a slow link, so their own times do not show which link it is.
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


_WINDOWS = 3  # in the median
_WINDOW_SECONDS = 0.5  # a window has at least one logged step
_SHARE = 0.5  # share of a step waiting for communication that triggers the first measurement
_WORSE = 1.5  # multiple of the usual wait that triggers another one
_LEAST_WAIT = 0.1  # minimal share of a step for another one
_SLOWER = 3.0  # a slow host has this many times less bandwidth than most


def slow_link_search(world: World) -> SlowLinkSearch | None:
    """Return a search if hosts can be compared and all their processes train; else None."""
    node = world.groups.get("node")
    if node is None or world.size < dist.get_world_size() or world.size <= 2 * node.size():
        return None
    return SlowLinkSearch(node.size())


@final
class SlowLinkSearch:
    """Decides when to measure links; the same on all ranks, which all have the same figures.

    A measurement takes all ranks a second or two. The first is made when they wait for communication for half of a
    step, further ones when they wait 1.5 times as long; each that finds nothing delays the next.

    A host is reported when in two measurements each of its links has less than a third of the bandwidth of most hosts.
    The first measures links to neighbours, the second those at a distance of two, since a host between two slow ones is
    not slow. A host is reported again if waits have been shorter in between.
    """

    def __init__(self, per_node: int) -> None:
        self.per_node = per_node
        self._recent: deque[StepDone] = deque(maxlen=_WINDOWS)
        self._last, self._seconds = 0, 0.0  # the last logged step, and the seconds of the current window
        self._usual: float | None = None  # usual seconds per step that ranks wait for communication
        self._rest, self._pause = 0, _WINDOWS  # windows to wait: now, and after a measurement that finds nothing
        self._since = 0
        self._suspected: set[int] = set()
        self._named: set[int] = set()

    @property
    def distance(self) -> int:
        """Distance in nodes between the ends of the links that are measured next."""
        return 2 if self._suspected else 1

    def is_due(self, done: StepDone) -> bool:
        """Return whether all ranks should measure their links now, after the step ``done``, and call :meth:`judge`."""
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

    def judge(self, links: Mapping[tuple[int, int], Link]) -> list[Straggler]:
        """Return hosts with slow links, each by its first rank, from the measured ``links`` between nodes."""
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
