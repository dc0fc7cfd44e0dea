"""Embeddings whose rows are on servers: they pull the rows of a batch, and keep its gradients until they are pushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldsize.core import ConfigError, Recipe
from worldsize.strategies.parameter_server.row_tables import RowGradients, Table, find_tables

Pull = Callable[[Table, Tensor], Tensor]  # unique sorted ids, int64 (n,), to float32 (n, dim)


@dataclass
class _Touch:
    """The rows that one forward pass used; ``rows_nd`` receives their gradient."""

    ids_n: Tensor
    rows_nd: Tensor


class RemoteTable(nn.Module):
    """Replaces the embedding ``like``, and fetches rows with ``pull``.

    Its own weight has no rows; it exists only so that optimizers can hold it.
    """

    def __init__(self, table: Table, like: nn.Embedding | nn.EmbeddingBag, pull: Pull) -> None:
        super().__init__()
        if like.max_norm is not None or like.scale_grad_by_freq:
            raise ConfigError(f"{table.name}: max_norm and scale_grad_by_freq need the whole table on every worker.")
        self.table = table
        self.weight = nn.Parameter(torch.empty(0, table.dim), requires_grad=False)
        self._pull = pull
        self.touched: list[_Touch] = []

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Pull the unique rows of ``ids``, which may have any shape.

        Returns:
            The rows (n, dim), the index of each id among them in the shape of ``ids``, and that of the padding row.
        """
        ids_n, inverse = torch.unique(ids, return_inverse=True)
        rows_nd = self._pull(self.table, ids_n)
        if self.training:
            self.touched.append(_Touch(ids_n, rows_nd.requires_grad_()))
        padding = (ids_n == self.table.padding).nonzero() if self.table.padding is not None else ids_n[:0]
        return rows_nd, inverse, int(padding) if len(padding) else None

    def take(self) -> RowGradients:
        """Return unique sorted ids, int64 (n,), and their gradients since the last call, float32 (n, dim)."""
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
    """An nn.Embedding whose rows are on servers."""

    def forward(self, ids: Tensor) -> Tensor:
        rows_nd, inverse, padding = self.rows(ids)
        return F.embedding(inverse, rows_nd, padding_idx=padding)


@final
class RemoteEmbeddingBag(RemoteTable):
    """An nn.EmbeddingBag whose rows are on servers."""

    def __init__(self, table: Table, like: nn.EmbeddingBag, pull: Pull) -> None:
        super().__init__(table, like, pull)
        self.mode, self.include_last_offset = like.mode, like.include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows_nd, inverse, padding = self.rows(ids)
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
    """Replace ``tables`` in ``model`` by modules that fetch rows with ``pull``; return ``model``."""
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
    """Make the recipe's model without the rows of its tables, for a server, which never calls it."""
    model = recipe.model()
    return replace_tables(model, find_tables(model, recipe.row_values(model)), _no_rows)


def _no_rows(table: Table, ids_n: Tensor) -> Tensor:
    raise AssertionError(f"{table.name} has no rows in a process that does not train")


def remotes(model: nn.Module) -> Iterator[RemoteTable]:
    """List the tables of ``model`` that are on servers, in its order."""
    return (module for module in model.modules() if isinstance(module, RemoteTable))


def take_gradients(remotes: Sequence[RemoteTable]) -> list[RowGradients]:
    """Return the gradients of each table since the last call: ids (n,) and values (n, dim)."""
    return [remote.take() for remote in remotes]
