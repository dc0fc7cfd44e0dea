"""A server's storage of a table's rows, their slot index, and row-wise optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError
from worldsize.strategies.wrapping import sparse_embeddings

_LEAST = 1024  # minimum number of slots to allocate
_EVICTED = 0.1  # fraction of the capacity to free per eviction


@final
class RowStore:
    """Rows in a growing tensor; at capacity, the least recently used rows are evicted.

    Args:
        width: Elements per row: its values, then its optimizer state.
        index: Maps row ids to slots; only this store may change it.
        capacity: Maximum number of rows. None for unlimited.

    Attributes:
        data: float32 (slots, width); replaced by a new tensor in :meth:`allocate`.
        evicted: Number of evicted rows.
    """

    def __init__(self, width: int, index: SlotIndex, *, capacity: int | None) -> None:
        self.data = torch.empty(0, width)
        self.index = index
        self.evicted = 0
        self._capacity = capacity
        self._ids = torch.empty(0, dtype=torch.int64)
        self._touched = torch.empty(0, dtype=torch.int64)  # clock of each slot's last use
        self._used, self._free = 0, torch.empty(0, dtype=torch.int64)

    @property
    def count(self) -> int:
        """Number of stored rows."""
        return self._used - len(self._free)

    def record_use(self, slots_n: Tensor, now: int) -> None:
        """Record that the rows in ``slots_n`` (n,) were used at the clock ``now``."""
        if self._capacity is not None:
            self._touched.index_fill_(0, slots_n, now)

    def allocate(self, ids_n: Tensor, now: int) -> Tensor:
        """Allocate slots, int64 (n,), for new rows ``ids_n`` (n,). The caller must fill their ``data``."""
        if self._capacity is not None and self.count + len(ids_n) > self._capacity:
            self._evict_rows(self.count + len(ids_n) - self._capacity, self._capacity)
        slots_n = self._allocate_slots(len(ids_n))
        self._ids[slots_n] = ids_n
        self._touched[slots_n] = now
        self.index.set(ids_n, slots_n)
        return slots_n

    def _allocate_slots(self, count: int) -> Tensor:
        """Return slots (count,) for ``count`` new rows, free ones first."""
        reused, self._free = self._free[:count], self._free[count:]
        first, self._used = self._used, self._used + count - len(reused)
        if self._used > len(self.data):
            more = max(2 * len(self.data), self._used, _LEAST) - len(self.data)
            self.data = torch.cat([self.data, torch.empty(more, self.data.shape[1])])
            unset = torch.empty(more, dtype=torch.int64)
            self._ids, self._touched = torch.cat([self._ids, unset]), torch.cat([self._touched, unset])
        return torch.cat([reused, torch.arange(first, self._used)])

    def _evict_rows(self, least: int, capacity: int) -> None:
        """Evict at least ``least`` of the least recently used rows."""
        live_n = self._find_live_slots()
        count = min(len(live_n), max(least, int(capacity * _EVICTED)))
        gone_n = live_n[self._touched[live_n].topk(count, largest=False).indices]
        self.index.set(self._ids[gone_n], torch.full((count,), -1))
        self._free = torch.cat([self._free, gone_n])
        self.evicted += count

    def _find_live_slots(self) -> Tensor:
        live_n = torch.ones(self._used, dtype=torch.bool)
        live_n[self._free] = False
        return live_n.nonzero().flatten()

    def copy_sorted_rows(self) -> tuple[Tensor, Tensor]:
        """Return copies of all ids, sorted, int64 (n,), and of their rows, float32 (n, width)."""
        live_n = self._find_live_slots()
        order_n = live_n[self._ids[live_n].argsort()]
        return self._ids[order_n].clone(), self.data[order_n].clone()


Sharding = Literal["hash", "range"]
_DIRECT = 1 << 27  # maximum rows per server for an index array; larger tables use a dict


class SlotIndex(ABC):
    """Maps row ids, int64 (n,), to slots, int64 (n,), or -1 for rows without a slot."""

    @abstractmethod
    def get(self, ids_n: Tensor) -> Tensor:
        """Return the slots of rows ``ids_n``, int64 (n,)."""

    @abstractmethod
    def set(self, ids_n: Tensor, slots_n: Tensor) -> None:
        """Assign slots (n,) to rows ``ids_n`` (n,); -1 removes the slot of a row."""


@final
class DirectSlotIndex(SlotIndex):
    """Slots in an array, with an entry for each row that the server may own.

    Args:
        block: Maximum number of the table's rows on one server.
        shards: Number of servers.
        sharding: How rows are assigned to servers.
    """

    def __init__(self, block: int, *, shards: int, sharding: Sharding) -> None:
        self._block, self._shards, self._sharding = block, shards, sharding
        self._slots = torch.full((block,), -1, dtype=torch.int64)

    def _map_to_local(self, ids_n: Tensor) -> Tensor:
        if self._shards == 1:
            return ids_n
        return ids_n // self._shards if self._sharding == "hash" else ids_n % self._block

    def get(self, ids_n: Tensor) -> Tensor:
        return self._slots.index_select(0, self._map_to_local(ids_n))

    def set(self, ids_n: Tensor, slots_n: Tensor) -> None:
        self._slots[self._map_to_local(ids_n)] = slots_n


@final
class HashedSlotIndex(SlotIndex):
    """Slots in a dict, for tables too large for an array."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def get(self, ids_n: Tensor) -> Tensor:
        return torch.tensor([self._slots.get(row, -1) for row in ids_n.tolist()], dtype=torch.int64)

    def set(self, ids_n: Tensor, slots_n: Tensor) -> None:
        for row, slot in zip(ids_n.tolist(), slots_n.tolist(), strict=True):
            if slot < 0:
                self._slots.pop(row, None)
            else:
                self._slots[row] = slot


def slot_index(rows: int, *, shards: int, sharding: Sharding) -> SlotIndex:
    """Create the index for one of ``shards`` servers, for a table with ``rows`` rows."""
    block = -(-rows // shards)
    return DirectSlotIndex(block, shards=shards, sharding=sharding) if block <= _DIRECT else HashedSlotIndex()


class RowUpdate(ABC):
    """An optimizer's update of individual rows, stored with their optimizer state.

    A row has ``dim`` values, then ``row_state`` state vectors of that size, then ``scalar_state`` scalars.

    Args:
        group: The optimizer's parameter group, with its options.

    Attributes:
        row_state: Number of state vectors as large as the row's values.
        scalar_state: Number of scalar states.
    """

    row_state: ClassVar[int] = 0
    scalar_state: ClassVar[int] = 0

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.group = group

    def compute_width(self, dim: int) -> int:
        """Return the number of elements of a row with ``dim`` values and its state."""
        return dim * (1 + self.row_state) + self.scalar_state

    def initial_state(self) -> float:
        """Return the initial value of all elements of a row's state."""
        return 0.0

    @abstractmethod
    def update_rows(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        """Update rows of ``data``, float32 (slots, width), in place.

        Args:
            data: All rows with their state.
            slots_n: Unique slots of the rows to update, int64 (n,).
            gradients_nd: Their gradients, float32 (n, dim).
            lr: Learning rate.
            dim: Number of values per row.
        """


def _read_change_write(data: Tensor, slots_n: Tensor, change: Callable[[Tensor], None]) -> None:
    rows_nw = data.index_select(0, slots_n)
    change(rows_nw)
    data.index_copy_(0, slots_n, rows_nw)


@final
class SGDRows(RowUpdate):
    """The update of torch.optim.SGD without momentum."""

    def update_rows(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        data.scatter_add_(0, slots_n[:, None].expand(-1, dim), gradients_nd * -lr)  # twice as fast as index_add_


@final
class AdagradRows(RowUpdate):
    """The update of torch.optim.Adagrad (Duchi et al. 2011)."""

    row_state = 1

    def initial_state(self) -> float:
        return float(self.group["initial_accumulator_value"])

    def update_rows(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        _read_change_write(data, slots_n, lambda rows_nw: self._change_adagrad_rows(rows_nw, gradients_nd, lr, dim))

    def _change_adagrad_rows(self, rows_nw: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        values_nd, sums_nd = rows_nw[:, :dim], rows_nw[:, dim:]
        sums_nd.addcmul_(gradients_nd, gradients_nd)
        values_nd.addcdiv_(gradients_nd, sums_nd.sqrt().add_(self.group["eps"]), value=-lr)


@final
class AdamRows(RowUpdate):
    """The update of torch.optim.Adam (Kingma and Ba 2015) or AdamW, with a step count per row."""

    row_state, scalar_state = 2, 1

    def update_rows(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        _read_change_write(data, slots_n, lambda rows_nw: self._change_adam_rows(rows_nw, gradients_nd, lr, dim))

    def _change_adam_rows(self, rows_nw: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        values_nd, means_nd, squares_nd = rows_nw[:, :dim], rows_nw[:, dim : 2 * dim], rows_nw[:, 2 * dim : 3 * dim]
        steps_n1 = rows_nw[:, 3 * dim :].add_(1).double()  # float64: 1 - beta^steps cancels in float32
        first, second = self.group["betas"]
        if decay := self.group.get("weight_decay", 0):
            values_nd.mul_(1 - lr * decay)
        means_nd.lerp_(gradients_nd, 1 - first)
        squares_nd.mul_(second).addcmul_(gradients_nd, gradients_nd, value=1 - second)
        scale_n1 = (1 - second**steps_n1).sqrt_().float()
        denominator_nd = (squares_nd.sqrt() / scale_n1).add_(self.group["eps"])
        values_nd.sub_((lr / (1 - first**steps_n1)).float() * means_nd / denominator_nd)


def create_row_update(optimizer: Optimizer, group: Mapping[str, Any], name: str) -> RowUpdate:
    """Return ``optimizer``'s row-wise form for the table ``name``, with ``group``'s options.

    Raises:
        ConfigError: The optimizer lacks a row-wise form.
    """
    kind = type(optimizer).__name__
    plain = not group.get("weight_decay") and not group.get("momentum") and not group.get("lr_decay")
    if kind == "SGD" and plain:
        return SGDRows(group)
    if kind == "Adagrad" and plain:
        return AdagradRows(group)
    if kind in ("Adam", "SparseAdam") and plain and not group.get("amsgrad"):
        return AdamRows(group)
    if kind == "AdamW" and not group.get("amsgrad"):
        return AdamRows(group)
    raise ConfigError(
        f"{kind} with these options is not supported for rows of {name}. Use SGD without momentum, "
        "Adagrad, Adam or AdamW."
    )


def check_rows(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` lacks a row-wise form for a table of ``model``."""
    names = {id(embedding.weight): name for name, embedding in sparse_embeddings(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                create_row_update(optimizer, group, names[id(parameter)])
