"""The tables of a worker, and its connections to the servers that have their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from worldsize.core import Recipe
from worldsize.strategies.parameter_server.remote_embedding import replace_tables
from worldsize.strategies.parameter_server.row_cache import RowCache
from worldsize.strategies.parameter_server.row_tables import RowGradients, RowRule, Table, find_tables
from worldsize.strategies.parameter_server.shard_link import ShardLink


@final
class TableLinks:
    """Pulls rows of ``tables`` from their servers, and pushes gradients of rows.

    Args:
        tables: The tables of the model, in its order.
        rule: How rows are assigned to servers.
        cache_rows: Number of rows of each table to cache, and read again while they are recent enough.

    Attributes:
        links: The connections to the servers, by shard.
        step: The step whose updates pulled rows must include.
        oldest: The step whose updates cached rows must include; None: all rows are pulled.
    """

    def __init__(self, tables: Sequence[Table], rule: RowRule, *, cache_rows: int = 0) -> None:
        self._tables, self._rule, self._cache_rows = tables, rule, cache_rows
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._caches: Sequence[RowCache] = ()
        self.links: Sequence[ShardLink] = ()
        self.step = 0
        self.oldest: int | None = None

    def connect(self, links: Sequence[ShardLink]) -> None:
        """Replace the connections to the servers, and clear the cache."""
        self.links = links
        self._caches = [RowCache(self._cache_rows, table.dim) for table in self._tables]

    def pull(self, table: Table, ids_n: Tensor) -> Tensor:
        """Return the rows (n, dim), float32, of unique sorted ids, int64 (n,)."""
        if self.oldest is None or not self._cache_rows:
            return self._pulled(table, ids_n)[0]
        cache = self._caches[self._numbers[table.name]]
        rows_nd, missing_n = cache.get(ids_n, self.oldest)
        wanted_n = ids_n[missing_n]
        if len(wanted_n):
            pulled_nd, clock = self._pulled(table, wanted_n)
            rows_nd[missing_n] = pulled_nd
            cache.put(wanted_n, pulled_nd, clock)
        return rows_nd

    def _pulled(self, table: Table, ids_n: Tensor) -> tuple[Tensor, int]:
        """Pull float32 (n, dim) from the servers; also return the lowest of their clocks."""
        number = self._numbers[table.name]
        if len(self.links) == 1:
            (link,) = self.links
            link.ask_rows(number, ids_n, step=self.step)
            return link.receive_rows(number, ids_n, table.dim, step=self.step)
        rows_nd, owners_n, clocks = torch.empty(len(ids_n), table.dim), self._rule.shard_of(ids_n, table), []
        mine = [(owners_n == shard).nonzero().flatten() for shard in range(len(self.links))]
        asked = [(link, mine_n, ids_n[mine_n]) for link, mine_n in zip(self.links, mine, strict=True) if len(mine_n)]
        for link, _, wanted_n in asked:  # all of them, before the first is waited for
            link.ask_rows(number, wanted_n, step=self.step)
        for link, mine_n, wanted_n in asked:
            rows_nd[mine_n], clock = link.receive_rows(number, wanted_n, table.dim, step=self.step)
            clocks.append(clock)
        return rows_nd, min(clocks, default=0)

    def push(self, gradients: Sequence[RowGradients], *, step: int, width: int, node: int) -> None:
        """Push to every server, even without rows for it, so that each knows which parts of the step are complete."""
        part = {"step": step, "width": width, "node": node}
        for number, (table, (ids_n, gradients_nd)) in enumerate(zip(self._tables, gradients, strict=True)):
            if len(self.links) == 1:
                self.links[0].push_rows(number, ids_n, gradients_nd, **part)
                continue
            owners_n = self._rule.shard_of(ids_n, table)
            for shard, link in enumerate(self.links):
                mine_n = (owners_n == shard).nonzero().flatten()
                link.push_rows(number, ids_n[mine_n], gradients_nd[mine_n], **part)

    def cache_facts(self) -> list[str]:
        """Describe how many rows were read from the caches."""
        each = zip(self._tables, self._caches, strict=True)
        return [f"{1 - cache.missed / cache.read:.0%} of {table.name} cached" for table, cache in each if cache.read]


def linked_model(recipe: Recipe, rule: RowRule, *, cache_rows: int = 0) -> tuple[nn.Module, TableLinks]:
    """Make the recipe's model with its tables on servers, and the links through which it reads rows."""
    model = recipe.model()
    listed = find_tables(model, recipe.row_values(model))
    links = TableLinks(listed, rule, cache_rows=cache_rows)
    return replace_tables(model, listed, links.pull), links
