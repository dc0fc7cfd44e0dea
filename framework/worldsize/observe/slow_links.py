"""Finds hosts with slow links, by measuring links when all ranks wait long for communication.

Ranks that wait for each other wait equally long for a slow link, so their own times do not show which link it is.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import final

import torch.distributed as dist

from worldsize.core import Link, StepDone, World
from worldsize.observe.stragglers import Straggler

_WINDOWS, _SECONDS = 3, 0.5  # number of windows in the median, and their seconds; a window has at least one logged step
_SHARE = 0.5  # share of a step waiting for communication that triggers the first measurement
_WORSE = 1.5  # multiple of the usual wait that triggers another one
_LEAST = 0.1  # minimal share of a step for another one
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
        return exposed > (_SHARE * step if self._usual is None else max(_WORSE * self._usual, _LEAST * step))

    def _fills_a_window(self, done: StepDone) -> bool:
        self._seconds += (done.step - self._last) * max(done.step_seconds)
        self._last = done.step
        if is_full := self._seconds >= _SECONDS:
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
