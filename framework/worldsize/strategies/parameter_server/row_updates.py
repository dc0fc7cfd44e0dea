"""Optimizers that update single rows of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError
from worldsize.strategies.wrapping import sparse_embeddings


class RowUpdate(ABC):
    """An optimizer's update of single rows, which are stored with their state.

    A row is ``dim`` values, then the ``row_state`` parts of its state, then the ``scalar_state`` numbers.

    Args:
        group: The optimizer's parameter group, with its options.

    Attributes:
        row_state: Parts of the state that are as large as the row's values.
        scalar_state: Parts of the state that are one number.
    """

    row_state: ClassVar[int] = 0
    scalar_state: ClassVar[int] = 0

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.group = group

    def width(self, dim: int) -> int:
        """Return the number of elements of a row of ``dim`` values with its state."""
        return dim * (1 + self.row_state) + self.scalar_state

    def initial_state(self) -> float:
        """Return the initial value of all elements of a row's state."""
        return 0.0

    @abstractmethod
    def apply(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        """Update rows of ``data``, float32 (slots, width), in place.

        Args:
            data: All rows with their state.
            slots_n: Unique indices of the rows to update, int64 (n,).
            gradients_nd: Their gradients, float32 (n, dim).
            lr: Learning rate.
            dim: Number of values of a row.
        """


def _read_change_write(data: Tensor, slots_n: Tensor, change: Callable[[Tensor], None]) -> None:
    rows_nw = data.index_select(0, slots_n)
    change(rows_nw)
    data.index_copy_(0, slots_n, rows_nw)


@final
class SGDRows(RowUpdate):
    """The update of torch.optim.SGD without momentum."""

    def apply(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        data.scatter_add_(0, slots_n[:, None].expand(-1, dim), gradients_nd * -lr)  # twice as fast as index_add_


@final
class AdagradRows(RowUpdate):
    """The update of torch.optim.Adagrad (Duchi et al. 2011)."""

    row_state = 1

    def initial_state(self) -> float:
        return float(self.group["initial_accumulator_value"])

    def apply(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        _read_change_write(data, slots_n, lambda rows_nw: self._change(rows_nw, gradients_nd, lr, dim))

    def _change(self, rows_nw: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        values_nd, sums_nd = rows_nw[:, :dim], rows_nw[:, dim:]
        sums_nd.addcmul_(gradients_nd, gradients_nd)
        values_nd.addcdiv_(gradients_nd, sums_nd.sqrt().add_(self.group["eps"]), value=-lr)


@final
class AdamRows(RowUpdate):
    """The update of torch.optim.Adam (Kingma and Ba 2015) or AdamW; each row counts its own steps."""

    row_state, scalar_state = 2, 1

    def apply(self, data: Tensor, slots_n: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
        _read_change_write(data, slots_n, lambda rows_nw: self._change(rows_nw, gradients_nd, lr, dim))

    def _change(self, rows_nw: Tensor, gradients_nd: Tensor, lr: float, dim: int) -> None:
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


def update_of(optimizer: Optimizer, group: Mapping[str, Any], name: str) -> RowUpdate:
    """Return the row-wise form of ``optimizer`` with the options of ``group``, for the rows of the table ``name``.

    Raises:
        ConfigError: The optimizer has no row-wise form.
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
        f"rows of {name} cannot be trained by {kind} as it is set. Use SGD without momentum, Adagrad, Adam or AdamW."
    )


def check_rows(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` has no row-wise form for a table of ``model``."""
    names = {id(embedding.weight): name for name, embedding in sparse_embeddings(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                update_of(optimizer, group, names[id(parameter)])
