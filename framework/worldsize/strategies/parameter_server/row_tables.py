"""Sparse tables on a server: a row exists once it has been touched, and its optimizer's state lies beside it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, RowValues
from worldsize.errors import neighbours
from worldsize.strategies.parameter_server.row_store import RowStore
from worldsize.strategies.parameter_server.row_updates import RowUpdate
from worldsize.strategies.parameter_server.slot_index import Sharding, slot_index
from worldsize.strategies.wrapping import sparse_embeddings

RowGradients = tuple[Tensor, Tensor]  # int64 [n], sorted and each once, and float32 [n, dim]
_SAMPLED = 16  # pushes of which one is sampled


@final
@dataclass(frozen=True)
class Table:
    """An embedding of the model whose rows live on servers.

    Attributes:
        name: The name of its weight in the model.
        rows: The number of rows that it has in all.
        dim: The numbers of a row.
        padding: The row that stays zero; None: there is none.
        values: What its rows are before their first update.
    """

    name: str
    rows: int
    dim: int
    padding: int | None
    values: RowValues


def find_tables(model: nn.Module, values: Mapping[str, RowValues]) -> list[Table]:
    """Describe every nn.Embedding and nn.EmbeddingBag with ``sparse=True``, in the order of ``model``.

    Args:
        model: The recipe's model.
        values: What rows are before their first update, by the name of the module, see :meth:`Recipe.row_values`.

    Raises:
        ConfigError: ``values`` names a module that ``model`` does not have.
    """
    modules, normal = dict(model.named_modules()), RowValues()
    for name in values:
        if name not in modules:
            raise ConfigError(f"row_values: the model has no module {name!r}{neighbours(name, modules)}")
    return [
        Table(f"{name}.weight", each.num_embeddings, each.embedding_dim, each.padding_idx, values.get(name, normal))
        for name, each in sparse_embeddings(model).items()
    ]


def initial_rows(seed: int, table: Table, ids_n: Tensor) -> Tensor:
    """Compute what the rows ``ids_n`` (int64) are before their first update: float32 [n, dim].

    It follows from (seed, table, row id) alone: splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195) of a
    counter, as uniform numbers or by Box and Muller (1958) as normal ones.
    """
    digest = hashlib.blake2b(f"{seed}/row/{table.name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    counter_nd = ids_n[:, None] * table.dim + torch.arange(table.dim)
    first_nd = _uniform(counter_nd + key)
    if table.values.kind == "uniform":
        rows_nd = (2 * first_nd - 1) * table.values.scale
    else:
        angle_nd = _uniform(counter_nd + (key ^ 0x5DEECE66D)) * (2 * torch.pi)
        rows_nd = (-2 * (1 - first_nd).log()).sqrt() * angle_nd.cos() * table.values.scale
    if table.padding is not None:
        rows_nd[ids_n == table.padding] = 0.0
    return rows_nd.float()


def _uniform(counter: Tensor) -> Tensor:
    """Hash int64 to float64 in [0, 1); arithmetic wraps, and shifts are made logical."""
    x = counter * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


@final
@dataclass(frozen=True)
class RowRule:
    """Rule by which rows are dealt to servers, and kept there.

    Attributes:
        seed: Decides the initial values, together with the table and the row.
        shards: Number of servers.
        sharding: "hash" deals by id modulo servers, "range" by ranges of ids.
        admit_after: Pushes before a row is kept.
        capacity: Rows of a table that a server keeps, the ones touched last; None: all.
    """

    seed: int
    shards: int = 1
    sharding: Sharding = "hash"
    admit_after: int = 0
    capacity: int | None = None

    def shard_of(self, ids_n: Tensor, table: Table) -> Tensor:
        """Return the server of each row: int64 [n]."""
        if self.sharding == "hash":
            return ids_n % self.shards
        return ids_n // -(-table.rows // self.shards)


@final
class Rows:
    """The rows of ``table`` on server ``shard``. Not safe for threads; callers hold the shard's lock.

    Args:
        table: The embedding that they are of.
        rule: How rows are dealt to servers, and which are kept.
        shard: The number of this server.
        update: How gradients change them; the learning rate in its group may change.

    Attributes:
        store: The memory that they are in.
        missed: Gradients of rows that were not there any more, or not yet.
    """

    def __init__(self, table: Table, rule: RowRule, shard: int, update: RowUpdate) -> None:
        index = slot_index(table.rows, shards=rule.shards, sharding=rule.sharding)
        self.table, self.rule, self.shard = table, rule, shard
        self.store = RowStore(update.width(table.dim), index, capacity=rule.capacity)
        self.missed = 0
        self._update = update
        self._clock = 0  # counts pulls and pushes
        self._pending = Counter[int]()  # pushes of rows that are not admitted yet
        self._sampled = Counter[int]()  # rows, in one push of sixteen

    def pull(self, ids_n: Tensor) -> Tensor:
        """Read rows: float32 [n, dim]. A row that is not kept has its initial value."""
        self._clock += 1
        slots_n = self.store.index.get(ids_n)
        if self.rule.admit_after == 0 and _lacks(slots_n):
            self._create(torch.unique(ids_n[slots_n < 0]))
            slots_n = self.store.index.get(ids_n)
        if self.rule.admit_after == 0 or bool((slots_n >= 0).all()):
            self.store.touch(slots_n, self._clock)
            return self.store.data[:, : self.table.dim].index_select(0, slots_n)
        rows_nd, kept_n = initial_rows(self.rule.seed, self.table, ids_n), slots_n >= 0
        rows_nd[kept_n] = self.store.data[slots_n[kept_n], : self.table.dim]
        return rows_nd

    def push(self, ids_n: Tensor, gradients_nd: Tensor, share: float = 1.0) -> None:
        """Update rows, each of which occurs once. One that is not kept is left out; its neighbours are not moved."""
        self._clock += 1
        if self._clock % _SAMPLED == 0:
            self._sampled.update(ids_n.tolist())
        if self.rule.admit_after:
            self._admit(ids_n)
        slots_n = self.store.index.get(ids_n)
        if _lacks(slots_n):
            kept_n = slots_n >= 0
            self.missed += int((~kept_n).sum())
            slots_n, gradients_nd = slots_n[kept_n], gradients_nd[kept_n]
        lr = float(self._update.group["lr"]) * share
        self._update.apply(self.store.data, slots_n, gradients_nd, lr, self.table.dim)
        self.store.touch(slots_n, self._clock)

    def _admit(self, ids_n: Tensor) -> None:
        """Count a push of rows, and create those that were pushed often enough."""
        new = ids_n[self.store.index.get(ids_n) < 0].tolist()
        self._pending.update(new)
        admitted = [row for row in new if self._pending[row] >= self.rule.admit_after]
        for row in admitted:
            del self._pending[row]
        self._create(torch.tensor(admitted, dtype=torch.int64))

    def _create(self, ids_n: Tensor) -> None:
        if not len(ids_n):
            return
        slots_n = self.store.allocate(ids_n, self._clock)
        self.store.data[slots_n] = self._update.initial_state()
        self.store.data[slots_n, : self.table.dim] = initial_rows(self.rule.seed, self.table, ids_n)

    def facts(self, *, hottest: int) -> dict[str, Any]:
        """Return counts, and the ``hottest`` rows of a sample of pushes since the last call: [id, times] each."""
        often = [[row, times] for row, times in self._sampled.most_common(hottest)]
        self._sampled.clear()
        return {"rows": self.store.count, "evicted": self.store.evicted, "missed": self.missed, "hottest": often}

    def state(self) -> dict[str, Tensor]:
        """Copy all rows, ordered by id, with their optimizer's state."""
        ids_n, rows_nw = self.store.by_id()
        return {"ids": ids_n, "rows": rows_nw}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take those rows of a :meth:`state` that belong to this server."""
        mine_n = self.rule.shard_of(state["ids"], self.table) == self.shard
        ids_n = state["ids"][mine_n]
        self._create(ids_n)
        self.store.data[self.store.index.get(ids_n)] = state["rows"][mine_n]


def _lacks(slots_n: Tensor) -> bool:
    """Whether a row has no slot. By numpy, in a third of torch's time where there are few rows."""
    return len(slots_n) > 0 and bool(slots_n.numpy().min() < 0)
