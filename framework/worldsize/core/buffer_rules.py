"""How the values of a buffer that a step's forward passes change are combined over logical ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

BufferSum = Literal["mean", "sum", "equal", "last"]
BUFFER_SUMS: tuple[BufferSum, ...] = get_args(BufferSum)


@dataclass(frozen=True)
class Concatenated:
    """A ring of rows into which each logical rank writes its own, one after the other, such as MoCo's queue of keys.

    With K rows, and the pointer at p when a step begins, a logical rank writes its n rows at p, p + 1, ..., p + n - 1
    (modulo K) and moves the pointer to p + n (modulo K). After the step the rows of logical rank 0 are at p, those of
    logical rank 1 behind them, and so on, and the pointer is behind the last: as if one process had written the rows of
    the whole batch at once. If they are more than K, later rows replace earlier ones.

    Attributes:
        pointer: Name of the buffer with the position of the next row, one integer, in the same module as the queue.
        dim: Dimension of the queue along which its rows are.
    """

    pointer: str
    dim: int = 0


BufferRule: TypeAlias = BufferSum | Concatenated
