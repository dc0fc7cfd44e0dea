"""The probe's schedule measures every link once, and each uplink with one and with all hosts of a rack."""

from __future__ import annotations

import pytest

from worldsize.worker.probe import plan_ring, schedule, tournament

Edges = list[tuple[int, int]]


def together(sizes: dict[str, int], *, pairs: bool) -> list[tuple[str, list[Edges]]]:
    """Return each tier's edges by phase, as planned by all ranks; both ends of an edge must plan it."""
    plans = [schedule(sizes, rank, pairs=pairs) for rank in range(max(sizes.values()))]
    tiers = []
    for each in zip(*plans, strict=True):
        phases = list(zip(*(turns for _, turns in each), strict=True))
        for phase in phases:
            assert all(
                edge is None or (rank in edge and phase[sum(edge) - rank] == edge) for rank, edge in enumerate(phase)
            )
        tiers.append((each[0][0], [sorted({edge for edge in phase if edge}) for phase in phases]))
    return tiers


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 5), (2, 1), (3, 2), (4, 4), (7, 1)])
@pytest.mark.parametrize("pairs", [False, True])
def test_every_link_is_measured_once_and_no_rank_is_busy_twice(nodes: int, per_node: int, pairs: bool) -> None:
    inside, across = (phases for _, phases in together({"node": per_node, "network": nodes * per_node}, pairs=pairs))
    for phases in (inside, across):
        for phase in phases:
            ends = [rank for edge in phase for rank in edge]
            assert len(ends) == len(set(ends))
    rings = {(rank, rank // per_node * per_node + (rank + 1) % per_node) for rank in range(nodes * per_node)}
    assert sorted(edge for phase in inside for edge in phase) == (sorted(rings) if per_node > 1 else [])
    between = sorted((source // per_node, target // per_node) for phase in across for source, target in phase)
    ahead = range(1, nodes if pairs else min(2, nodes))
    assert between == sorted((n, (n + far) % nodes) for n in range(nodes) for far in ahead for _ in range(per_node))


@pytest.mark.parametrize("pairs", [False, True])
def test_the_links_of_each_tier_are_measured_apart(pairs: bool) -> None:
    """Three pods of two racks of three nodes of two ranks."""
    planned = together({"node": 2, "rack": 6, "pod": 12, "network": 36}, pairs=pairs)
    assert [tier for tier, _ in planned] == ["node", "rack", "pod", "one-host pod", "network", "one-host network"]
    for tier, phases in planned:
        below, unit = {"node": (1, 2), "rack": (2, 6), "pod": (6, 12), "network": (12, 36)}[tier.split()[-1]]
        ahead = range(1, unit // below if pairs and tier != "node" else 2)
        sources = range(36) if tier.split()[0] != "one-host" else [rank for rank in range(36) if rank % below < 2]
        expected = [
            (rank, rank // unit * unit + (rank % unit + far * below) % unit) for rank in sources for far in ahead
        ]
        assert sorted(edge for phase in phases for edge in phase) == sorted(expected)
        for phase in phases:
            ends = [rank for edge in phase for rank in edge]
            assert len(ends) == len(set(ends))
            for edge in phase:  # all that share a link with a sender send, too
                home = edge[0] // below * below
                assert {source for source, _ in phase} >= {*sources} & {*range(home, home + below)}


@pytest.mark.parametrize("members", [1, 2, 3, 8, 9])
def test_all_pairs_take_the_fewest_rounds_in_which_as_many_as_can_measure_at_once(members: int) -> None:
    """A round has two turns, one in each direction."""
    turns = [tournament(members, own) for own in range(members)]
    rounds = 0 if members < 2 else members - 1 + members % 2
    assert {len(each) for each in turns} == {2 * rounds}
    for phase in zip(*turns, strict=True):
        assert sum(edge is None for edge in phase) == members % 2


@pytest.mark.parametrize(("members", "distance"), [(2, 1), (5, 2), (6, 3), (6, 4), (9, 6), (12, 5)])
def test_each_member_sends_to_the_one_at_a_distance_in_two_or_three_phases(members: int, distance: int) -> None:
    turns = [plan_ring(members, own, distance) for own in range(members)]
    phases = list(zip(*turns, strict=True))
    assert len(phases) in (2, 3)
    sent = [edge for phase in phases for own, edge in enumerate(phase) if edge and edge[0] == own]
    assert sorted(sent) == [(own, (own + distance) % members) for own in range(members)]
    heard = [edge for phase in phases for own, edge in enumerate(phase) if edge and edge[1] == own]
    assert sorted(heard) == sorted(sent)
