"""Sparse tables on a server: rows exist once they have been touched, each with its optimizer's state beside it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, RowValues
from worldsize.errors import neighbours
from worldsize.strategies.parameter_server.row_updates import update_of
from worldsize.strategies.parameter_server.slot_index import Sharding, slot_index

RowGradients = tuple[Tensor, Tensor]  # int64 [n], sorted and each once, and float32 [n, dim]
_SAMPLED = 16
_EVICTED = 0.1  # share of the rows that leave when there are too many


@final
@dataclass(frozen=True)
class Table:
    """An embedding of the model whose rows live on servers; ``name`` is its weight's."""

    name: str
    rows: int
    dim: int
    padding: int | None
    values: RowValues


def tables(model: nn.Module, values: Mapping[str, RowValues]) -> list[Table]:
    """Describe every nn.Embedding and nn.EmbeddingBag with ``sparse=True``, in the order of ``model``.

    ``values``: what their rows are before the first update, see :meth:`Recipe.row_values`.

    Raises:
        ConfigError: ``values`` names a module that ``model`` does not have.
    """
    modules, normal = dict(model.named_modules()), RowValues()
    for name in values:
        if name not in modules:
            raise ConfigError(f"row_values: the model has no module {name!r}{neighbours(name, modules)}")
    return [
        Table(f"{name}.weight", each.num_embeddings, each.embedding_dim, each.padding_idx, values.get(name, normal))
        for name, each in modules.items()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
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
    """float64 in [0, 1) from int64; arithmetic wraps, and shifts are made logical."""
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
        seed: From which initial values follow.
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
        """Give the server of each row: int64 [n]."""
        if self.sharding == "hash":
            return ids_n % self.shards
        return ids_n // -(-table.rows // self.shards)


@final
@dataclass
class Rows:
    """The rows of ``table`` on server ``shard``. Not safe for threads; callers hold the shard's lock."""

    table: Table
    rule: RowRule
    shard: int
    optimizer: Optimizer  # whose group ``group`` says how rows are updated; its learning rate may change
    group: Mapping[str, Any]
    evicted: int = 0
    missed: int = 0  # gradients of rows that were not there any more, or not yet
    touches: Counter[int] = field(default_factory=Counter)  # of rows, in one push of sixteen
    _clock: int = 0

    def __post_init__(self) -> None:
        self._update = update_of(self.optimizer, self.group, self.table.name)
        self._width = self.table.dim * (1 + self._update.row_state) + self._update.scalar_state
        self._data = torch.empty(0, self._width)
        self._ids = torch.empty(0, dtype=torch.int64)
        self._last = torch.empty(0, dtype=torch.int64)
        self._used, self._free = 0, torch.empty(0, dtype=torch.int64)
        self._slot_index = slot_index(self.table.rows, shards=self.rule.shards, sharding=self.rule.sharding)
        self._pending: Counter[int] = Counter()

    @property
    def count(self) -> int:
        return self._used - len(self._free)

    def pull(self, ids_n: Tensor) -> Tensor:
        """Read rows: float32 [n, dim]. A row that is not kept has its initial value."""
        self._clock += 1
        slots_n = self._slots(ids_n, admit=self.rule.admit_after == 0)
        if self.rule.admit_after == 0 or bool((slots_n >= 0).all()):
            self._touch(slots_n)
            return self._data[:, : self.table.dim].index_select(0, slots_n)
        rows_nd, kept_n = initial_rows(self.rule.seed, self.table, ids_n), slots_n >= 0
        rows_nd[kept_n] = self._data[slots_n[kept_n], : self.table.dim]
        return rows_nd

    def push(self, ids_n: Tensor, gradients_nd: Tensor, share: float = 1.0) -> None:
        """Update rows, each of which occurs once. One that is not kept is left out; its neighbours are not moved."""
        self._clock += 1
        if self._clock % _SAMPLED == 0:
            self.touches.update(ids_n.tolist())
        self._count_for_admission(ids_n)
        slots_n = self._slots(ids_n, admit=False)
        if _lacks(slots_n):
            kept_n = slots_n >= 0
            self.missed += int((~kept_n).sum())
            slots_n, gradients_nd = slots_n[kept_n], gradients_nd[kept_n]
        self._update.apply(self._data, slots_n, gradients_nd, float(self.group["lr"]) * share, self.table.dim)
        self._touch(slots_n)

    def _touch(self, slots_n: Tensor) -> None:
        if self.rule.capacity is not None:
            self._last.index_fill_(0, slots_n, self._clock)

    def hottest(self, count: int) -> list[list[int]]:
        """List the ``count`` rows that were pushed most often, in a sample since the last call: [id, times] each."""
        hottest = [[row, times] for row, times in self.touches.most_common(count)]
        self.touches.clear()
        return hottest

    def _count_for_admission(self, ids_n: Tensor) -> None:
        if self.rule.admit_after == 0:
            return
        new = ids_n[self._slots(ids_n, admit=False) < 0].tolist()
        self._pending.update(new)
        admitted = [row for row in new if self._pending[row] >= self.rule.admit_after]
        for row in admitted:
            del self._pending[row]
        self._create(torch.tensor(admitted, dtype=torch.int64))

    def _slots(self, ids_n: Tensor, *, admit: bool) -> Tensor:
        """Look up the slots of rows; rows that have none get one if ``admit``, else theirs is -1."""
        slots_n = self._slot_index.get(ids_n)
        if not admit or not _lacks(slots_n):
            return slots_n
        self._create(torch.unique(ids_n[slots_n < 0]))
        return self._slot_index.get(ids_n)

    def _create(self, ids_n: Tensor) -> None:
        if not len(ids_n):
            return
        if self.rule.capacity is not None and self.count + len(ids_n) > self.rule.capacity:
            self._evict(self.count + len(ids_n) - self.rule.capacity)
        slots_n = self._room(len(ids_n))
        self._data[slots_n] = self._update.initial_state()
        self._data[slots_n, : self.table.dim] = initial_rows(self.rule.seed, self.table, ids_n)
        self._ids[slots_n] = ids_n
        self._last[slots_n] = self._clock
        self._slot_index.set(ids_n, slots_n)

    def _room(self, count: int) -> Tensor:
        """Find slots for ``count`` new rows, free ones first."""
        reused, self._free = self._free[:count], self._free[count:]
        first, self._used = self._used, self._used + count - len(reused)
        if self._used > len(self._data):
            size = max(2 * len(self._data), self._used, 1024)
            self._data = torch.cat([self._data, torch.empty(size - len(self._data), self._width)])
            more = torch.empty(size - len(self._ids), dtype=torch.int64)
            self._ids, self._last = torch.cat([self._ids, more]), torch.cat([self._last, more])
        return torch.cat([reused, torch.arange(first, self._used)])

    def _evict(self, least: int) -> None:
        """Forget the rows that have not been touched for longest."""
        assert self.rule.capacity is not None
        live_n = self._live()
        count = min(len(live_n), max(least, int(self.rule.capacity * _EVICTED)))
        gone_n = live_n[self._last[live_n].topk(count, largest=False).indices]
        self._slot_index.set(self._ids[gone_n], torch.full((count,), -1))
        self._free = torch.cat([self._free, gone_n])
        self.evicted += count

    def _live(self) -> Tensor:
        live_n = torch.ones(self._used, dtype=torch.bool)
        live_n[self._free] = False
        return live_n.nonzero().flatten()

    def state(self) -> dict[str, Tensor]:
        """Copy all rows, ordered by id, with their optimizer's state."""
        live_n = self._live()
        order_n = live_n[self._ids[live_n].argsort()]
        return {"ids": self._ids[order_n].clone(), "rows": self._data[order_n].clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take those rows of a :meth:`state` that belong to this server."""
        mine_n = self.rule.shard_of(state["ids"], self.table) == self.shard
        ids_n = state["ids"][mine_n]
        self._create(ids_n)
        self._data[self._slot_index.get(ids_n)] = state["rows"][mine_n]


def _lacks(slots_n: Tensor) -> bool:
    """Whether a row has no slot. By numpy, in a third of torch's time where there are few rows."""
    return len(slots_n) > 0 and bool(slots_n.numpy().min() < 0)
