"""The probe's schedule measures every link once."""

from __future__ import annotations

import pytest

from worldsize.worker.probe import schedule


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 5), (2, 1), (3, 2), (4, 4), (7, 1)])
@pytest.mark.parametrize("pairs", [False, True])
def test_every_link_is_measured_once_and_no_rank_is_busy_twice(nodes: int, per_node: int, pairs: bool) -> None:
    inside, across = (phases for _, phases in schedule(nodes, per_node, pairs=pairs))
    for phases in (inside, across):
        for phase in phases:
            ends = [rank for edge in phase for rank in edge]
            assert len(ends) == len(set(ends))
    rings = {(rank, rank // per_node * per_node + (rank + 1) % per_node) for rank in range(nodes * per_node)}
    assert sorted(edge for phase in inside for edge in phase) == (sorted(rings) if per_node > 1 else [])
    between = sorted((source // per_node, target // per_node) for phase in across for source, target in phase)
    ahead = range(1, nodes if pairs else min(2, nodes))
    assert between == sorted((n, (n + far) % nodes) for n in range(nodes) for far in ahead for _ in range(per_node))
