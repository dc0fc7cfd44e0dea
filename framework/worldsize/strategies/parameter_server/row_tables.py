"""Sparse tables on a server: rows that exist once they have been touched, each with its optimizer's state beside it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, RowValues
from worldsize.errors import neighbours

Sharding = Literal["hash", "range"]
RowGradients = tuple[Tensor, Tensor]  # int64 [n], sorted and each once, and float32 [n, dim]
_DIRECT = 1 << 27  # a table with at most this many rows a server has an array of places; another one a dict
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
    """float32 [n, dim]: what the rows ``ids_n`` (int64) are before their first update.

    Follows from (seed, table, row id) alone: splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195) of a
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
    """How rows are dealt and kept. ``admit_after``: pushes before a row is kept; ``capacity``: rows of a server."""

    seed: int
    shards: int = 1
    sharding: Sharding = "hash"
    admit_after: int = 0
    capacity: int | None = None

    def shard_of(self, ids_n: Tensor, table: Table) -> Tensor:
        """The server of each row."""
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
        self._width = self.table.dim * (1 + self._update.rows) + self._update.numbers
        self._data = torch.empty(0, self._width)
        self._ids = torch.empty(0, dtype=torch.int64)
        self._last = torch.empty(0, dtype=torch.int64)
        self._used, self._free = 0, torch.empty(0, dtype=torch.int64)
        self._places = _places(self.table, self.rule)
        self._pending: Counter[int] = Counter()

    @property
    def count(self) -> int:
        return self._used - len(self._free)

    def pull(self, ids_n: Tensor) -> Tensor:
        """float32 [n, dim]. A row that is not kept has its initial value."""
        self._clock += 1
        places_n = self._found(ids_n, admit=self.rule.admit_after == 0)
        if self.rule.admit_after == 0 or bool((places_n >= 0).all()):
            self._touch(places_n)
            return self._data[:, : self.table.dim].index_select(0, places_n)
        rows_nd, kept_n = initial_rows(self.rule.seed, self.table, ids_n), places_n >= 0
        rows_nd[kept_n] = self._data[places_n[kept_n], : self.table.dim]
        return rows_nd

    def push(self, ids_n: Tensor, gradients_nd: Tensor, share: float = 1.0) -> None:
        """Update rows, each of which occurs once. One that is not kept is left out; its neighbours are not moved."""
        self._clock += 1
        if self._clock % _SAMPLED == 0:
            self.touches.update(ids_n.tolist())
        self._count_for_admission(ids_n)
        places_n = self._found(ids_n, admit=False)
        if _lacks(places_n):
            kept_n = places_n >= 0
            self.missed += int((~kept_n).sum())
            places_n, gradients_nd = places_n[kept_n], gradients_nd[kept_n]
        self._update(self._data, places_n, gradients_nd, float(self.group["lr"]) * share, self.table.dim)
        self._touch(places_n)

    def _touch(self, places_n: Tensor) -> None:
        if self.rule.capacity is not None:
            self._last.index_fill_(0, places_n, self._clock)

    def hottest(self, count: int) -> list[list[int]]:
        """Rows and how often they were pushed, in a sample since the last call."""
        found = [[row, times] for row, times in self.touches.most_common(count)]
        self.touches.clear()
        return found

    def _count_for_admission(self, ids_n: Tensor) -> None:
        if self.rule.admit_after == 0:
            return
        new = ids_n[self._found(ids_n, admit=False) < 0].tolist()
        self._pending.update(new)
        admitted = [row for row in new if self._pending[row] >= self.rule.admit_after]
        for row in admitted:
            del self._pending[row]
        self._create(torch.tensor(admitted, dtype=torch.int64))

    def _found(self, ids_n: Tensor, *, admit: bool) -> Tensor:
        """Places of rows; new ones are made if ``admit``, else theirs is -1."""
        places_n = self._places.get(ids_n)
        if not admit or not _lacks(places_n):
            return places_n
        self._create(torch.unique(ids_n[places_n < 0]))
        return self._places.get(ids_n)

    def _create(self, ids_n: Tensor) -> None:
        if not len(ids_n):
            return
        if self.rule.capacity is not None and self.count + len(ids_n) > self.rule.capacity:
            self._evict(self.count + len(ids_n) - self.rule.capacity)
        places_n = self._room(len(ids_n))
        self._data[places_n] = 0.0
        self._data[places_n, : self.table.dim] = initial_rows(self.rule.seed, self.table, ids_n)
        self._update.begin(self._data, places_n, self.table.dim)
        self._ids[places_n] = ids_n
        self._last[places_n] = self._clock
        self._places.set(ids_n, places_n)

    def _room(self, count: int) -> Tensor:
        """Places for ``count`` new rows: free ones first."""
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
        self._places.set(self._ids[gone_n], torch.full((count,), -1))
        self._free = torch.cat([self._free, gone_n])
        self.evicted += count

    def _live(self) -> Tensor:
        live_n = torch.ones(self._used, dtype=torch.bool)
        live_n[self._free] = False
        return live_n.nonzero().flatten()

    def state(self) -> dict[str, Tensor]:
        """A copy of all rows, ordered by id, with their optimizer's state."""
        live_n = self._live()
        order_n = live_n[self._ids[live_n].argsort()]
        return {"ids": self._ids[order_n].clone(), "rows": self._data[order_n].clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take those of the rows that belong to this server."""
        mine_n = self.rule.shard_of(state["ids"], self.table) == self.shard
        ids_n = state["ids"][mine_n]
        self._create(ids_n)
        self._data[self._places.get(ids_n)] = state["rows"][mine_n]


def _lacks(places_n: Tensor) -> bool:
    """Whether a row has no place. By numpy, in a third of torch's time where there are few rows."""
    return len(places_n) > 0 and bool(places_n.numpy().min() < 0)


class _Direct:
    """Places by row, in an array."""

    def __init__(self, rows: int, rule: RowRule, table: Table) -> None:
        self._rule, self._block = rule, -(-table.rows // rule.shards)
        self._places = torch.full((rows,), -1, dtype=torch.int64)

    def _index(self, ids_n: Tensor) -> Tensor:
        if self._rule.shards == 1:
            return ids_n
        return ids_n // self._rule.shards if self._rule.sharding == "hash" else ids_n % self._block

    def get(self, ids_n: Tensor) -> Tensor:
        return self._places.index_select(0, self._index(ids_n))

    def set(self, ids_n: Tensor, places_n: Tensor) -> None:
        self._places[self._index(ids_n)] = places_n


class _Hashed:
    """Places by row, in a dict: for tables whose ids are spread over a huge range."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def get(self, ids_n: Tensor) -> Tensor:
        return torch.tensor([self._places.get(row, -1) for row in ids_n.tolist()], dtype=torch.int64)

    def set(self, ids_n: Tensor, places_n: Tensor) -> None:
        for row, place in zip(ids_n.tolist(), places_n.tolist(), strict=True):
            if place < 0:
                self._places.pop(row, None)
            else:
                self._places[row] = place


def _places(table: Table, rule: RowRule) -> _Direct | _Hashed:
    owned = -(-table.rows // rule.shards)
    return _Direct(owned, rule, table) if owned <= _DIRECT else _Hashed()


# ---------------------------------------------------------------- optimizers, a row at a time


class _Update:
    """Changes rows of [n, dim] values, then ``rows`` tensors of their size and ``numbers`` numbers a row."""

    rows, numbers = 0, 0

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.group = group

    def begin(self, data: Tensor, places_n: Tensor, dim: int) -> None:
        """Set the state of new rows, which is zero."""

    def __call__(self, data: Tensor, places_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        """Update the rows at ``places_n``, each of which is there once."""
        rows_nw = data.index_select(0, places_n)
        self.change(rows_nw, gradients_nd, lr, dim)
        data.index_copy_(0, places_n, rows_nw)

    def change(self, rows_nw: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        raise NotImplementedError


@final
class _Descent(_Update):
    """torch.optim.SGD without momentum."""

    def __call__(self, data: Tensor, places_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        data.scatter_add_(0, places_n[:, None].expand(-1, dim), gradients_nd * -lr)  # twice as fast as index_add_


@final
class _Adagrad(_Update):
    """torch.optim.Adagrad (Duchi et al. 2011)."""

    rows = 1

    def begin(self, data: Tensor, places_n: Tensor, dim: int) -> None:
        data[places_n, dim:] = self.group["initial_accumulator_value"]

    def change(self, rows_nw: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        values_nd, sums_nd = rows_nw[:, :dim], rows_nw[:, dim:]
        sums_nd.addcmul_(gradients_nd, gradients_nd)
        values_nd.addcdiv_(gradients_nd, sums_nd.sqrt().add_(self.group["eps"]), value=-lr)


@final
class _Adam(_Update):
    """torch.optim.Adam (Kingma and Ba 2015), AdamW's decay included; each row counts its own steps."""

    rows, numbers = 2, 1

    def change(self, rows_nw: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        values_nd, means_nd, squares_nd = rows_nw[:, :dim], rows_nw[:, dim : 2 * dim], rows_nw[:, 2 * dim : 3 * dim]
        steps_n1 = rows_nw[:, 3 * dim :].add_(1).double()  # 1 - beta^steps cancels in float32
        first, second = self.group["betas"]
        if decay := self.group.get("weight_decay", 0):
            values_nd.mul_(1 - lr * decay)
        means_nd.lerp_(gradients_nd, 1 - first)
        squares_nd.mul_(second).addcmul_(gradients_nd, gradients_nd, value=1 - second)
        scale_n1 = (1 - second**steps_n1).sqrt_().float()
        denominator_nd = (squares_nd.sqrt() / scale_n1).add_(self.group["eps"])
        values_nd.sub_((lr / (1 - first**steps_n1)).float() * means_nd / denominator_nd)


def update_of(optimizer: Optimizer, group: Mapping[str, Any], name: str) -> _Update:
    """The row-wise form of ``optimizer``.

    Raises:
        ConfigError: there is none.
    """
    kind = type(optimizer).__name__
    plain = not group.get("weight_decay") and not group.get("momentum") and not group.get("lr_decay")
    if kind == "SGD" and plain:
        return _Descent(group)
    if kind == "Adagrad" and plain:
        return _Adagrad(group)
    if kind in ("Adam", "SparseAdam") and plain and not group.get("amsgrad"):
        return _Adam(group)
    if kind == "AdamW" and not group.get("amsgrad"):
        return _Adam(group)
    raise ConfigError(
        f"rows of {name} cannot be trained by {kind} as it is set. Use SGD without momentum, Adagrad, Adam or AdamW."
    )
