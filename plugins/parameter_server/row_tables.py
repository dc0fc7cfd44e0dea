"""Sparse tables on a server, whose rows are created with their optimizer state on first use."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from plugins.parameter_server.row_store import RowStore, RowUpdate, Sharding, slot_index
from worldsize.core import ConfigError, RowValues
from worldsize.errors import neighbours
from worldsize.strategies.wrapping import sparse_embeddings

RowGradients = tuple[Tensor, Tensor]  # unique sorted ids, int64 (n,), and values, float32 (n, dim)
_SAMPLED = 16  # sample one in this many pushes


@final
@dataclass(frozen=True)
class Table:
    """An embedding of the model with rows on servers.

    Attributes:
        name: The name of its weight in the model.
        rows: Number of rows.
        dim: Elements per row.
        padding: The row that stays zero, or None.
        values: Distribution of the rows' initial values.
    """

    name: str
    rows: int
    dim: int
    padding: int | None
    values: RowValues


def find_tables(model: nn.Module, values: Mapping[str, RowValues]) -> list[Table]:
    """Return a Table for each ``sparse=True`` nn.Embedding and nn.EmbeddingBag, in order.

    Args:
        model: The recipe's model.
        values: Initial distributions of rows by module name; see :meth:`Recipe.row_values`.

    Raises:
        ConfigError: ``values`` names a module that ``model`` does not have.
    """
    modules, normal = dict(model.named_modules()), RowValues()
    for name in values:
        if name not in modules:
            raise ConfigError(f"row_values: unknown module {name!r}{neighbours(name, modules)}")
    return [
        Table(f"{name}.weight", each.num_embeddings, each.embedding_dim, each.padding_idx, values.get(name, normal))
        for name, each in sparse_embeddings(model).items()
    ]


def initial_rows(seed: int, table: Table, ids_n: Tensor) -> Tensor:
    """Return the initial values of the rows ``ids_n``, int64 (n,), as float32 (n, dim).

    They depend only on (seed, table, row id). A counter is hashed with splitmix64 (Steele et al. 2014,
    doi:10.1145/2660193.2660195) to uniform values, and converted to normal values by the Box-Muller transform (1958) if
    needed.
    """
    digest = hashlib.blake2b(f"{seed}/row/{table.name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    counter_nd = ids_n[:, None] * table.dim + torch.arange(table.dim)
    first_nd = _hash_to_uniform(counter_nd + key)
    if table.values.kind == "uniform":
        rows_nd = (2 * first_nd - 1) * table.values.scale
    else:
        angle_nd = _hash_to_uniform(counter_nd + (key ^ 0x5DEECE66D)) * (2 * torch.pi)
        rows_nd = (-2 * (1 - first_nd).log()).sqrt() * angle_nd.cos() * table.values.scale
    if table.padding is not None:
        rows_nd[ids_n == table.padding] = 0.0
    return rows_nd.float()


def _hash_to_uniform(counter: Tensor) -> Tensor:
    """Hash int64 to float64 in [0, 1). Arithmetic wraps around, and shifts are logical."""
    x = counter * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


@final
@dataclass(frozen=True)
class RowRule:
    """Assigns rows to servers, and decides which of them to retain.

    Attributes:
        seed: Seed of the initial values, together with the table and the row.
        shards: Number of servers.
        sharding: "hash" assigns rows by id modulo servers, "range" by ranges of ids.
        admit_after: Number of pushes before a row is stored.
        capacity: Maximum number of rows per table and server; the least recently used are evicted. None for unlimited.
    """

    seed: int
    shards: int = 1
    sharding: Sharding = "hash"
    admit_after: int = 0
    capacity: int | None = None

    def assign_shards(self, ids_n: Tensor, table: Table) -> Tensor:
        """Return the server of each row ``ids_n`` (n,), int64 (n,)."""
        if self.sharding == "hash":
            return ids_n % self.shards
        return ids_n // -(-table.rows // self.shards)


@final
class Rows:
    """Rows of ``table`` on server ``shard``. The caller must hold the shard's lock.

    Args:
        table: The embedding of the rows.
        rule: How rows are assigned to servers, and which are retained.
        shard: Index of this server.
        update: How gradients change rows; the learning rate in its group may change.

    Attributes:
        store: The memory of the rows.
        missed: Number of row gradients dropped because the row was evicted, or not yet admitted.
    """

    def __init__(self, table: Table, rule: RowRule, shard: int, update: RowUpdate) -> None:
        index = slot_index(table.rows, shards=rule.shards, sharding=rule.sharding)
        self.table, self.rule, self.shard = table, rule, shard
        self.store = RowStore(update.compute_width(table.dim), index, capacity=rule.capacity)
        self.missed = 0
        self._update = update
        self._clock = 0  # counts pulls and pushes
        self._pending = Counter[int]()  # number of pushes of each row not yet admitted
        self._sampled = Counter[int]()  # number of uses of each row in the sampled pushes

    def pull(self, ids_n: Tensor) -> Tensor:
        """Return rows ``ids_n`` (n,) as float32 (n, dim); rows not admitted yet have initial values."""
        self._clock += 1
        slots_n = self.store.index.get(ids_n)
        if self.rule.admit_after == 0 and _has_missing_slots(slots_n):
            self._create_rows(torch.unique(ids_n[slots_n < 0]))
            slots_n = self.store.index.get(ids_n)
        if self.rule.admit_after == 0 or bool((slots_n >= 0).all()):
            self.store.record_use(slots_n, self._clock)
            return self.store.data[:, : self.table.dim].index_select(0, slots_n)
        rows_nd, kept_n = initial_rows(self.rule.seed, self.table, ids_n), slots_n >= 0
        rows_nd[kept_n] = self.store.data[slots_n[kept_n], : self.table.dim]
        return rows_nd

    def push(self, ids_n: Tensor, gradients_nd: Tensor, share: float = 1.0) -> None:
        """Update unique rows ``ids_n`` (n,) with gradients (n, dim) at ``share`` × the learning rate.

        Gradients of rows that are not stored are dropped.
        """
        self._clock += 1
        if self._clock % _SAMPLED == 0:
            self._sampled.update(ids_n.tolist())
        if self.rule.admit_after:
            self._admit_rows(ids_n)
        slots_n = self.store.index.get(ids_n)
        if _has_missing_slots(slots_n):
            kept_n = slots_n >= 0
            self.missed += int((~kept_n).sum())
            slots_n, gradients_nd = slots_n[kept_n], gradients_nd[kept_n]
        lr = float(self._update.group["lr"]) * share
        self._update.update_rows(self.store.data, slots_n, gradients_nd, lr, self.table.dim)
        self.store.record_use(slots_n, self._clock)

    def _admit_rows(self, ids_n: Tensor) -> None:
        """Count pushes of new rows, and create rows that were pushed often enough."""
        new = ids_n[self.store.index.get(ids_n) < 0].tolist()
        self._pending.update(new)
        admitted = [row for row in new if self._pending[row] >= self.rule.admit_after]
        for row in admitted:
            del self._pending[row]
        self._create_rows(torch.tensor(admitted, dtype=torch.int64))

    def _create_rows(self, ids_n: Tensor) -> None:
        if not len(ids_n):
            return
        slots_n = self.store.allocate(ids_n, self._clock)
        self.store.data[slots_n] = self._update.initial_state()
        self.store.data[slots_n, : self.table.dim] = initial_rows(self.rule.seed, self.table, ids_n)

    def collect_usage(self, *, hottest: int) -> dict[str, Any]:
        """Return counts, and the ``hottest`` rows of sampled new pushes as [id, count]."""
        often = [[row, times] for row, times in self._sampled.most_common(hottest)]
        self._sampled.clear()
        return {"rows": self.store.count, "evicted": self.store.evicted, "missed": self.missed, "hottest": often}

    def state(self) -> dict[str, Tensor]:
        """Return copies of all rows with state, sorted by id: ids (n,) and rows (n, width)."""
        ids_n, rows_nw = self.store.copy_sorted_rows()
        return {"ids": ids_n, "rows": rows_nw}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the rows of a :meth:`state` that belong to this server: ids (n,) and rows (n, width)."""
        mine_n = self.rule.assign_shards(state["ids"], self.table) == self.shard
        ids_n = state["ids"][mine_n]
        self._create_rows(ids_n)
        self.store.data[self.store.index.get(ids_n)] = state["rows"][mine_n]


def _has_missing_slots(slots_n: Tensor) -> bool:
    """Return whether any slot is missing. For few rows, NumPy is three times as fast as torch."""
    return len(slots_n) > 0 and bool(slots_n.numpy().min() < 0)
