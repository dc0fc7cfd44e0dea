"""Links are measured when waits are long, and slow ones are reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from worldsize.core import Link, StepDone, Straggling
from worldsize.observe.events import describe_straggler
from worldsize.observe.stragglers import SlowLinkSearch, Straggler


def ring(nodes: int, distance: int, slow: Iterable[int]) -> dict[tuple[int, int], Link]:
    """Return links of 1 Gbit/s between neighbours in a ring, or 50 Mbit/s at the ``slow`` nodes."""
    edges = [(node, (node + distance) % nodes) for node in range(nodes)]
    return {ends: Link(6.25e6 if {*ends} & {*slow} else 125e6, 1e-4) for ends in edges}


def looks_of(
    links: SlowLinkSearch, waits: Iterable[float | None], slow: Iterable[int] = (), *, nodes: int = 4, first: int = 0
) -> Iterator[tuple[int, list[Straggler]]]:
    """Log steps of one second, and yield each step with a link measurement, with the ranks that it reports."""
    for step, exposed in enumerate(waits, first + 1):
        done = StepDone(step, step, 1.0, 0.1, None, 0, 0.0, (0.9, 1.0), 1.0, exposed_seconds=exposed)
        if links.is_due(done):
            yield step, links.find_slow_hosts(ring(nodes, links.distance, slow))


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([0.4] * 10, []),
        ([0.6] * 20, [3]),
        ([0.9, 0.1, 0.1] * 4, []),  # only occasionally slow
        ([0.2] * 5 + [0.35] * 20, [7]),
        ([0.6] * 5 + [0.7] * 20, [3]),
        ([0.01] * 5 + [0.05] * 20, []),  # a small part of a step
        ([None] * 10, []),  # without measured phases
    ],
)
def test_a_look_follows_three_windows_of_long_waits(waits: list[float | None], expected: list[int]) -> None:
    assert [step for step, _ in looks_of(SlowLinkSearch(1), waits)] == expected


def test_looks_that_find_nothing_become_rare() -> None:
    looks = [step for step, _ in looks_of(SlowLinkSearch(1), ([0.1] * 3 + [0.9] * 3) * 100)]
    assert 3 < len(looks) < 10
    assert looks[-1] - looks[-2] > 100


def test_short_windows_are_looked_at_as_one() -> None:
    links, looks = SlowLinkSearch(1), []
    for step in range(1, 1000):
        done = StepDone(step, step, 1.0, 0.1, None, 0, 0.0, (0.01, 0.01), 1.0, exposed_seconds=0.008)
        if links.is_due(done):
            looks.append(step)
            links.find_slow_hosts(ring(4, 1, []))
    assert looks == [pytest.approx(150, abs=3)]  # three windows of half a second


@pytest.mark.parametrize(("nodes", "slow"), [(3, [2]), (4, [0]), (7, [1, 3]), (7, [2, 3])])
def test_hosts_are_named_by_their_first_ranks_when_two_looks_find_them_slow(nodes: int, slow: list[int]) -> None:
    (first, nobody), (second, named) = looks_of(SlowLinkSearch(per_node=2), [0.7] * 20, slow, nodes=nodes)
    assert (first, nobody, second) == (3, [], 6)
    assert [(one.rank, one.cause, one.since) for one in named] == [(2 * node, "network", 1) for node in slow]
    assert all(10 < one.slower <= 20 for one in named)


def test_a_link_that_is_slow_in_one_look_only_is_not_named() -> None:
    links = SlowLinkSearch(1)
    assert list(looks_of(links, [0.6] * 3, [1])) == [(3, [])]
    assert list(looks_of(links, [0.6] * 20, [0], first=3)) == [(6, [])]


def test_a_host_that_was_well_in_between_is_named_again() -> None:
    links, first, reports = SlowLinkSearch(1), 0, []
    for waits, slow in (([0.2] * 5, []), ([0.9] * 20, [3]), ([0.2] * 20, []), ([0.9] * 20, [3])):
        reports.append([[one.rank for one in ranks] for _, ranks in looks_of(links, waits, slow, first=first)])
        first += len(waits)
    assert reports == [[], [[], [3]], [], [[], [3]]]


@pytest.mark.parametrize(("nodes", "slow"), [(4, [0, 1, 2, 3]), (2, [1])])
def test_nobody_is_named_if_all_links_are_equally_slow_or_only_two_hosts_share_one(nodes: int, slow: list[int]) -> None:
    assert [named for _, named in looks_of(SlowLinkSearch(1), [0.2] * 3 + [0.9] * 9, slow, nodes=nodes)] == [[]]


def test_the_event_says_how_much_less_the_link_carries() -> None:
    text = describe_straggler(Straggling(40, 4, "h3", "cpu", "network", 20.0, 10))
    assert "the network link of h3 (rank 4) has 5% of the typical bandwidth" in text
    assert "since step 10" in text
