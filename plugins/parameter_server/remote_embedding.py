"""Embeddings with rows on servers: they pull a batch's rows and collect gradients.

``TableLinks`` connects a worker's tables to the servers of their rows. Workers may reuse cached rows that are recent
enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plugins.parameter_server.row_tables import RowGradients, RowRule, Table, find_tables
from plugins.parameter_server.shard_link import ShardLink
from worldsize.core import ConfigError, Recipe

Pull = Callable[[Table, Tensor], Tensor]  # unique sorted ids, int64 (n,), to float32 (n, dim)


@dataclass
class _Touch:
    """The rows used by one forward pass; their gradient is in ``rows_nd.grad``."""

    ids_n: Tensor
    rows_nd: Tensor


class RemoteTable(nn.Module):
    """Replacement for the embedding ``like`` that fetches rows with ``pull``.

    Its own weight is empty; it exists so that recipes can pass it to optimizers.
    """

    def __init__(self, table: Table, like: nn.Embedding | nn.EmbeddingBag, pull: Pull) -> None:
        super().__init__()
        if like.max_norm is not None or like.scale_grad_by_freq:
            raise ConfigError(
                f"{table.name}: max_norm and scale_grad_by_freq are not supported, since they require the whole table "
                "on every worker. Remove these options, or use strategy=ddp."
            )
        self.table = table
        self.weight = nn.Parameter(torch.empty(0, table.dim), requires_grad=False)
        self._pull = pull
        self.touched: list[_Touch] = []

    def pull_rows(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Pull the unique rows of ``ids``, a tensor of any shape.

        Returns:
            The rows (n, dim), the row index of each id in the shape of ``ids``, and the index of the padding row or
            None.
        """
        ids_n, inverse = torch.unique(ids, return_inverse=True)
        rows_nd = self._pull(self.table, ids_n)
        if self.training:
            self.touched.append(_Touch(ids_n, rows_nd.requires_grad_()))
        padding = (ids_n == self.table.padding).nonzero() if self.table.padding is not None else ids_n[:0]
        return rows_nd, inverse, int(padding) if len(padding) else None

    def take_gradient(self) -> RowGradients:
        """Return and clear the gradients: unique sorted ids, int64 (n,), and values, float32 (n, dim)."""
        touched, self.touched = [touch for touch in self.touched if touch.rows_nd.grad is not None], []
        if not touched:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.table.dim)
        if len(touched) == 1 and (gradient_nd := touched[0].rows_nd.grad) is not None:
            return touched[0].ids_n, gradient_nd.add_(0.0)  # -0.0 becomes 0.0, as in the sum below
        ids_n, inverse = torch.unique(torch.cat([touch.ids_n for touch in touched]), return_inverse=True)
        gradients_nd = torch.zeros(len(ids_n), self.table.dim)
        gradients = [touch.rows_nd.grad for touch in touched if touch.rows_nd.grad is not None]
        gradients_nd.index_add_(0, inverse, torch.cat(gradients))
        return ids_n, gradients_nd


@final
class RemoteEmbedding(RemoteTable):
    """An nn.Embedding with rows on servers."""

    def forward(self, ids: Tensor) -> Tensor:
        rows_nd, inverse, padding = self.pull_rows(ids)
        return F.embedding(inverse, rows_nd, padding_idx=padding)


@final
class RemoteEmbeddingBag(RemoteTable):
    """An nn.EmbeddingBag with rows on servers."""

    def __init__(self, table: Table, like: nn.EmbeddingBag, pull: Pull) -> None:
        super().__init__(table, like, pull)
        self.mode, self.include_last_offset = like.mode, like.include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows_nd, inverse, padding = self.pull_rows(ids)
        return F.embedding_bag(
            inverse,
            rows_nd,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def replace_tables(model: nn.Module, tables: Sequence[Table], pull: Pull) -> nn.Module:
    """Replace ``tables`` in ``model`` with modules that use ``pull``; return ``model``."""
    replaced = {table.name: table for table in tables}
    for name, module in list(model.named_modules()):
        if table := replaced.get(f"{name}.weight"):
            parent, _, own = name.rpartition(".")
            remote: RemoteTable
            if isinstance(module, nn.EmbeddingBag):
                remote = RemoteEmbeddingBag(table, module, pull)
            else:
                assert isinstance(module, nn.Embedding)
                remote = RemoteEmbedding(table, module, pull)
            setattr(model.get_submodule(parent), own, remote)
    return model


def rowless_model(recipe: Recipe) -> nn.Module:
    """Build the recipe's model without table rows, for a server, which never calls it."""
    model = recipe.model()
    return replace_tables(model, find_tables(model, recipe.row_values(model)), _no_rows)


def _no_rows(table: Table, ids_n: Tensor) -> Tensor:
    raise AssertionError(f"{table.name} is missing rows in a process that does not train")


def find_remote_tables(model: nn.Module) -> Iterator[RemoteTable]:
    """Iterate over the tables of ``model`` that are on servers, in model order."""
    return (module for module in model.modules() if isinstance(module, RemoteTable))


def take_gradients(remotes: Sequence[RemoteTable]) -> list[RowGradients]:
    """Return the gradients of each table since the last call: ids (n,) and values (n, dim)."""
    return [remote.take_gradient() for remote in remotes]


@final
class TableLinks:
    """Pulls rows of ``tables`` from their servers, and pushes row gradients.

    Args:
        tables: The tables of the model, in model order.
        rule: How rows are assigned to servers.
        cache_rows: Number of rows per table to cache and reuse while they are recent enough.

    Attributes:
        links: The connections to the servers, by shard.
        step: The step whose updates pulled rows must include.
        oldest: The step whose updates cached rows must include. None to pull all rows.
    """

    def __init__(self, tables: Sequence[Table], rule: RowRule, *, cache_rows: int = 0) -> None:
        self._tables, self._rule, self._cache_rows = tables, rule, cache_rows
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._caches: Sequence[RowCache] = ()
        self.links: Sequence[ShardLink] = ()
        self.step = 0
        self.oldest: int | None = None

    def replace_table_links(self, links: Sequence[ShardLink]) -> None:
        """Replace the connections to the servers, and clear the cache."""
        self.links = links
        self._caches = [RowCache(self._cache_rows, table.dim) for table in self._tables]

    def pull_table_rows(self, table: Table, ids_n: Tensor) -> Tensor:
        """Return the rows (n, dim), float32, for unique sorted ids, int64 (n,)."""
        if self.oldest is None or not self._cache_rows:
            return self._pull_uncached(table, ids_n)[0]
        cache = self._caches[self._numbers[table.name]]
        rows_nd, missing_n = cache.get(ids_n, self.oldest)
        wanted_n = ids_n[missing_n]
        if len(wanted_n):
            pulled_nd, clock = self._pull_uncached(table, wanted_n)
            rows_nd[missing_n] = pulled_nd
            cache.put(wanted_n, pulled_nd, clock)
        return rows_nd

    def _pull_uncached(self, table: Table, ids_n: Tensor) -> tuple[Tensor, int]:
        """Pull rows, float32 (n, dim), from the servers; also return the lowest clock of these servers."""
        number = self._numbers[table.name]
        if len(self.links) == 1:
            (link,) = self.links
            link.ask_rows(number, ids_n, step=self.step)
            return link.receive_rows(number, ids_n, table.dim, step=self.step)
        rows_nd, owners_n, clocks = torch.empty(len(ids_n), table.dim), self._rule.assign_shards(ids_n, table), []
        mine = [(owners_n == shard).nonzero().flatten() for shard in range(len(self.links))]
        asked = [(link, mine_n, ids_n[mine_n]) for link, mine_n in zip(self.links, mine, strict=True) if len(mine_n)]
        for link, _, wanted_n in asked:  # send all requests before waiting for the first answer
            link.ask_rows(number, wanted_n, step=self.step)
        for link, mine_n, wanted_n in asked:
            rows_nd[mine_n], clock = link.receive_rows(number, wanted_n, table.dim, step=self.step)
            clocks.append(clock)
        return rows_nd, min(clocks, default=0)

    def push_row_gradients(self, gradients: Sequence[RowGradients], *, step: int, width: int, node: int) -> None:
        """Push each table's gradients to all servers, even servers without rows, so that all can count steps."""
        part = {"step": step, "width": width, "node": node}
        for number, (table, (ids_n, gradients_nd)) in enumerate(zip(self._tables, gradients, strict=True)):
            if len(self.links) == 1:
                self.links[0].push_rows(number, ids_n, gradients_nd, **part)
                continue
            owners_n = self._rule.assign_shards(ids_n, table)
            for shard, link in enumerate(self.links):
                mine_n = (owners_n == shard).nonzero().flatten()
                link.push_rows(number, ids_n[mine_n], gradients_nd[mine_n], **part)

    def cache_facts(self) -> list[str]:
        """Return the cache hit rate of each table, as text."""
        each = zip(self._tables, self._caches, strict=True)
        return [f"{1 - cache.missed / cache.read:.0%} of {table.name} cached" for table, cache in each if cache.read]


def build_linked_model(recipe: Recipe, rule: RowRule, *, cache_rows: int = 0) -> tuple[nn.Module, TableLinks]:
    """Build the recipe's model with tables on servers; also return their connections."""
    model = recipe.model()
    listed = find_tables(model, recipe.row_values(model))
    links = TableLinks(listed, rule, cache_rows=cache_rows)
    return replace_tables(model, listed, links.pull_table_rows), links


@final
class RowCache:
    """Direct-mapped cache with ``capacity`` slots; a new row evicts the row in its slot.

    A row's clock is the last step whose updates it includes completely. A read is served from the cache if the row's
    clock is at least the required step (Ho et al. 2013, section 3).
    """

    def __init__(self, capacity: int, dim: int) -> None:
        self._rows = torch.empty(capacity, dim)
        self._ids = torch.full((capacity,), -1, dtype=torch.int64)
        self._clocks = torch.empty(capacity, dtype=torch.int64)
        self.read = self.missed = 0

    def get(self, ids_n: Tensor, clock: int) -> tuple[Tensor, Tensor]:
        """Return rows ``ids_n``, float32 (n, dim), and a mask of missing or outdated rows, bool (n,)."""
        slots_n = ids_n % len(self._ids)
        missing_n = (self._ids[slots_n] != ids_n) | (self._clocks[slots_n] < clock)
        self.read += len(ids_n)
        self.missed += int(missing_n.sum())
        return self._rows[slots_n], missing_n

    def put(self, ids_n: Tensor, rows_nd: Tensor, clock: int) -> None:
        """Store rows (n, dim) that include all updates up to ``clock``; ``ids_n`` (n,) are unique."""
        slots_n = ids_n % len(self._ids)
        self._ids[slots_n] = ids_n
        kept_n = self._ids[slots_n] == ids_n  # of several rows with the same slot, one is stored
        self._rows[slots_n[kept_n]] = rows_nd[kept_n]
        self._clocks[slots_n] = clock
