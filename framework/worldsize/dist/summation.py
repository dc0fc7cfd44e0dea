"""The contract of sums over ranks that send fewer bytes than the numbers have."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.dist.staged import Phases


class Summation(ABC):
    """Sums a tensor over ranks, approximately; what a message leaves out may be added to the next one."""

    keeps_errors = False  # whether it needs a memory for what its messages leave out (error feedback)

    @abstractmethod
    def total(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        """Sum a tensor over the ranks of ``group``; all of them get the same bits.

        Args:
            flat_n: the numbers of this rank, of shape (n,). Its memory may be reused for the result.
            group: the ranks that take part.
            error_n: what earlier messages of this rank left out, float32 (n,), updated in place; None without
                ``keeps_errors``.
            seed: the seed of all random choices, which is the same on all ranks.
        """
