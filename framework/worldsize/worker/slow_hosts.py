"""Detects slow ranks and links during training, and can exclude their hosts from the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from worldsize.core import Emit, Event, RunStarted, StepDone, Straggling, World
from worldsize.observe.stragglers import Straggler, Stragglers, slow_link_search
from worldsize.plan.doctor.findings import aggregate_links
from worldsize.worker.probe import network_edges
from worldsize.world.world import publish_place


@final
class SlowHostWatch:
    """Listener that compares the times of all ranks, and emits :class:`Straggling` events.

    Every rank of ``world`` must create one, since the first rank gathers the hosts and devices of the others. ``peers``
    are groups of ranks with equal work. ``exclude`` is called with the host of each slow rank or link; None: the run
    keeps the host. ``health`` describes problems of a host, given its name and the global rank of a process on it.
    """

    def __init__(
        self,
        world: World,
        peers: Sequence[Sequence[int]],
        *,
        emit: Emit,
        exclude: Callable[[str], None] | None,
        health: Callable[[str, int], str],
    ) -> None:
        self._health, self._first = health, world.global_rank - world.rank
        self._world, self._peers, self._emit, self._exclude = world, peers, emit, exclude
        self._place_of = publish_place(world)
        self._stragglers = Stragglers(peers)
        self._links = slow_link_search(world)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self._stragglers = Stragglers(self._peers, first)
            case StepDone(step=step, splits=splits) if splits:
                self._report_stragglers(step, self._stragglers.find_stragglers(step, splits))

    def measure_links(self, done: StepDone) -> None:
        """Measure the links between hosts if waits are unusually long; all ranks must call this."""
        if self._links and self._links.is_due(done):
            edges = network_edges(self._world, self._links.per_node, self._links.distance)
            slow = self._links.find_slow_hosts(aggregate_links(edges, self._links.per_node)["network"])
            if self._world.rank == 0:
                self._report_stragglers(done.step, slow)

    def _report_stragglers(self, step: int, stragglers: Iterable[Straggler]) -> None:
        for slow in stragglers:
            host, device = self._place_of(slow.rank)
            health = self._health(host, self._first + slow.rank)
            self._emit(Straggling(step, host=host, device=device, **vars(slow), health=health))
            if self._exclude is not None:
                self._exclude(host)
