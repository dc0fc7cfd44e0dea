"""The tree of logical ranks follows its definition, and the reduction matches one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worldsize.collectives.ordered import Counter, Tree, reduce_ordered, sum_level, summation_tree
from worldsize.collectives.staged import finish_reduction
from worldsize.core import World
from worldsize.testing.worlds import run_in_worlds

DIVISORS = [(total, size) for total in (1, 2, 3, 4, 6, 8, 12, 16) for size in range(1, total + 1) if total % size == 0]


def values(total: int, length: int = 1003) -> Tensor:
    """Draw values of very different magnitudes, so that every summation order rounds differently."""
    generator = torch.Generator().manual_seed(total)
    return torch.randn(total, length, generator=generator) * 10 ** torch.empty(total, length).uniform_(
        -4, 4, generator=generator
    )


def by_definition(rows: Tensor) -> Tensor:
    """Sum the rows by the tree defined in the module's docstring."""
    count = len(rows)
    if count == 1:
        return rows[0]
    if count % 2 == 0:
        return by_definition(torch.stack([rows[i] + rows[i + count // 2] for i in range(count // 2)]))
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def nodes_of(rank: int, size: int, total: int) -> list[Tensor]:
    """Return the nodes that process ``rank`` sums before it communicates."""
    tree, mine = Tree(total, size), values(total)[rank::size]
    counters = [Counter() for _ in range(tree.local_nodes)]
    for node, counter in enumerate(counters):
        for leaf in tree.list_leaves(node):
            counter.add([mine[leaf].clone()])
    return [counter.waiting[0][0] for counter in counters]


@pytest.mark.parametrize(("total", "size"), DIVISORS)
def test_local_sums_finish_to_the_tree_by_definition(total: int, size: int) -> None:
    nodes = [nodes_of(rank, size, total) for rank in range(size)]
    level = [nodes[index % size][index // size] for index in range(Tree(total, size).nodes)]
    assert torch.equal(sum_level(level), by_definition(values(total)))


@pytest.mark.parametrize("total", [1, 2, 3, 6, 8, 12, 20, 24, 40])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sums_of_neighbouring_logical_ranks_finish_to_the_tree_by_definition(total: int, size: int) -> None:
    """Process p has the logical ranks from p * total on, of total * size in all; the m-th of all are summed first."""
    rows_pmn = values(total * size).view(size, total, -1)
    tree = summation_tree(total, size, "block")
    counters = [Counter() for _ in range(tree.local_nodes)]
    for node, counter in enumerate(counters):
        for leaf in tree.list_leaves(node):
            counter.add([sum_level(rows_pmn[:, leaf].unbind())])
    total_n = sum_level([counter.waiting[0][0] for counter in counters])
    assert torch.equal(total_n, by_definition(values(total * size)))


def test_processes_together_compute_the_tree_of_neighbouring_logical_ranks() -> None:
    def reduced(world: World) -> Tensor:
        assert world.group is not None
        mine = values(12)[6 * world.rank : 6 * world.rank + 6]
        return finish_reduction(reduce_ordered(mine.unbind(), world.group, "block"))

    for result in run_in_worlds(reduced, 2):
        assert torch.equal(result, by_definition(values(12)))


def test_powers_of_two_send_one_node_each() -> None:
    assert all(Tree(8, size).local_nodes == 1 for size in (1, 2, 4, 8))
    assert Tree(6, 2).local_nodes == 3


def test_the_order_matters_for_these_values() -> None:
    assert not torch.equal(values(8).sum(0), by_definition(values(8)))


@pytest.mark.parametrize(("total", "size"), [(8, 2), (8, 4), (6, 2), (6, 3), (3, 3)])
def test_processes_together_compute_the_tree_by_definition(total: int, size: int) -> None:
    def reduced(world: World) -> Tensor:
        assert world.group is not None
        return finish_reduction(reduce_ordered(nodes_of(world.rank, size, total), world.group))

    for result in run_in_worlds(reduced, size):
        assert torch.equal(result, by_definition(values(total)))


@pytest.mark.parametrize(("total", "size"), [(8, 3), (4, 3), (5, 2), (7, 4), (8, 5)])
def test_processes_with_different_numbers_of_logical_ranks_compute_the_tree_by_definition(
    total: int, size: int
) -> None:
    """Process p has the logical ranks p, p + size, ..., so that some have one less than others."""
    tree = Tree(total, size)
    assert sum(tree.count_nodes(rank) for rank in range(size)) == tree.nodes == total

    def reduced(world: World) -> Tensor:
        assert world.group is not None
        mine = values(total)[world.rank :: size]
        return finish_reduction(reduce_ordered([row.clone() for row in mine], world.group, nodes=tree.nodes))

    for result in run_in_worlds(reduced, size):
        assert torch.equal(result, by_definition(values(total)))
