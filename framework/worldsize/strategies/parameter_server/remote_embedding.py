"""Embeddings whose rows are on servers: they pull what a batch touches, and keep its gradients to be pushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldsize.core import ConfigError, Recipe, RowValues
from worldsize.strategies.parameter_server.row_cache import RowCache
from worldsize.strategies.parameter_server.row_tables import RowGradients, RowRule, Table, tables
from worldsize.strategies.parameter_server.shard_link import ShardLink

Pull = Callable[[Table, Tensor], Tensor]  # int64 [n], sorted and each once, to float32 [n, dim]


@dataclass
class _Touch:
    """The rows that one forward pass used; ``rows_nd`` gets their gradient."""

    ids_n: Tensor
    rows_nd: Tensor


class RemoteTable(nn.Module):
    """Stands in for an nn.Embedding; ``pull`` fetches rows. Its own weight has no rows: optimizers may hold it."""

    def __init__(self, table: Table, like: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        if like.max_norm is not None or like.scale_grad_by_freq:
            raise ConfigError(f"{table.name}: max_norm and scale_grad_by_freq need the whole table on every worker.")
        self.table = table
        self.weight = nn.Parameter(torch.empty(0, table.dim), requires_grad=False)
        self.pull: Pull | None = None
        self.touched: list[_Touch] = []

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Pull the rows of a batch, each once; also give each id's index among them, and that of the padding."""
        assert self.pull is not None, "connected before the first batch"
        ids_n, places = torch.unique(ids, return_inverse=True)
        rows_nd = self.pull(self.table, ids_n)
        if self.training:
            self.touched.append(_Touch(ids_n, rows_nd.requires_grad_()))
        padding = (ids_n == self.table.padding).nonzero() if self.table.padding is not None else ids_n[:0]
        return rows_nd, places, int(padding) if len(padding) else None

    def take(self) -> tuple[Tensor, Tensor]:
        """Give ids, sorted and each once, and their gradients since the last call: int64 [n] and float32 [n, dim]."""
        touched, self.touched = [touch for touch in self.touched if touch.rows_nd.grad is not None], []
        if not touched:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.table.dim)
        ids_n, places = torch.unique(torch.cat([touch.ids_n for touch in touched]), return_inverse=True)
        gradients_nd = torch.zeros(len(ids_n), self.table.dim)
        gradients = [touch.rows_nd.grad for touch in touched if touch.rows_nd.grad is not None]
        gradients_nd.index_add_(0, places, torch.cat(gradients))
        return ids_n, gradients_nd


@final
class RemoteEmbedding(RemoteTable):
    """An nn.Embedding with its rows on servers."""

    def forward(self, ids: Tensor) -> Tensor:
        rows_nd, places, padding = self.rows(ids)
        return F.embedding(places, rows_nd, padding_idx=padding)


@final
class RemoteEmbeddingBag(RemoteTable):
    """An nn.EmbeddingBag with its rows on servers."""

    def __init__(self, table: Table, like: nn.EmbeddingBag) -> None:
        super().__init__(table, like)
        self.mode, self.include_last_offset = like.mode, like.include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows_nd, places, padding = self.rows(ids)
        return F.embedding_bag(
            places,
            rows_nd,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def remote_model(recipe: Recipe) -> nn.Module:
    """Make the recipe's model with its tables replaced."""
    model = recipe.model()
    return made_remote(model, recipe.row_values(model))


def made_remote(model: nn.Module, values: Mapping[str, RowValues]) -> nn.Module:
    """Replace every table of ``model``, see :func:`~worldsize.strategies.parameter_server.row_tables.tables`."""
    replaced = {table.name: table for table in tables(model, values)}
    for name, module in list(model.named_modules()):
        if table := replaced.get(f"{name}.weight"):
            parent, _, own = name.rpartition(".")
            remote: RemoteTable
            if isinstance(module, nn.EmbeddingBag):
                remote = RemoteEmbeddingBag(table, module)
            else:
                assert isinstance(module, nn.Embedding)
                remote = RemoteEmbedding(table, module)
            setattr(model.get_submodule(parent), own, remote)
    return model


def remotes(model: nn.Module) -> Iterator[RemoteTable]:
    """List the tables of ``model`` that are on servers, in its order."""
    return (module for module in model.modules() if isinstance(module, RemoteTable))


@final
class TableLinks:
    """The tables of ``model`` on its servers. ``step``: the one whose updates pulled rows must have seen.

    With ``cache_rows`` of each table kept, a row that has seen the updates up to ``oldest`` is not pulled again; None:
    every row is.
    """

    def __init__(self, model: nn.Module, rule: RowRule, *, cache_rows: int = 0) -> None:
        self._remotes, self._rule, self._cache_rows = list(remotes(model)), rule, cache_rows
        self._places = {remote.table.name: place for place, remote in enumerate(self._remotes)}
        self.links: Sequence[ShardLink] = ()
        self.step = 0
        self.oldest: int | None = None
        for remote in self._remotes:
            remote.pull = self._pull

    def connect(self, links: Sequence[ShardLink]) -> None:
        """Use these servers from now on; what was cached from others is forgotten."""
        self.links = links
        self.caches = [RowCache(self._cache_rows, remote.table.dim) for remote in self._remotes]

    def _pull(self, table: Table, ids_n: Tensor) -> Tensor:
        if self.oldest is None or not self._cache_rows:
            return self._pulled(table, ids_n)[0]
        cache = self.caches[self._places[table.name]]
        rows_nd, missing_n = cache.get(ids_n, self.oldest)
        wanted_n = ids_n[missing_n]
        if len(wanted_n):
            pulled_nd, clock = self._pulled(table, wanted_n)
            rows_nd[missing_n] = pulled_nd
            cache.put(wanted_n, pulled_nd, clock)
        return rows_nd

    def _pulled(self, table: Table, ids_n: Tensor) -> tuple[Tensor, int]:
        """Pull float32 [n, dim] from the servers; also give the clock of the one that is behind the others."""
        place = self._places[table.name]
        if len(self.links) == 1:
            return self.links[0].pull_rows(place, ids_n, table.dim, step=self.step)
        rows_nd, owners_n, clocks = torch.empty(len(ids_n), table.dim), self._rule.shard_of(ids_n, table), []
        for shard, link in enumerate(self.links):
            mine_n = (owners_n == shard).nonzero().flatten()
            if len(mine_n):
                rows_nd[mine_n], clock = link.pull_rows(place, ids_n[mine_n], table.dim, step=self.step)
                clocks.append(clock)
        return rows_nd, min(clocks, default=0)

    def cache_facts(self) -> list[str]:
        """Describe how much was read from the caches."""
        each = zip(self._remotes, self.caches, strict=True)
        return [
            f"{1 - cache.missed / cache.read:.0%} of {remote.table.name} cached" for remote, cache in each if cache.read
        ]

    def take(self) -> list[RowGradients]:
        """Give the gradients of each table since the last call."""
        return [remote.take() for remote in self._remotes]

    def push(self, gradients: Sequence[RowGradients], *, step: int, width: int, node: int) -> None:
        """Push to every server, also where there is nothing, so that each knows what has come."""
        part = {"step": step, "width": width, "node": node}
        for place, (remote, (ids_n, gradients_nd)) in enumerate(zip(self._remotes, gradients, strict=True)):
            owners_n = self._rule.shard_of(ids_n, remote.table)
            for shard, link in enumerate(self.links):
                mine_n = owners_n == shard
                link.push_rows(place, ids_n[mine_n], gradients_nd[mine_n], **part)
