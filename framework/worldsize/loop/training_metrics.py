"""Accumulation of training metrics, which recipes return with losses, between log steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from worldsize.collectives.exact import exact_sum, quotient, start_all_gather
from worldsize.core import World
from worldsize.strategies.loss_record import metrics_differ

_logger = logging.getLogger(__name__)


@final
class TrainingMetrics:
    """Accumulates metrics per logical rank, so that the sums are the same at any world size.

    All restored sums are dropped, with a warning, if the metrics of the first added step have different names. If names
    may differ from step to step, restored sums are kept, and new names are added to them.

    Attributes:
        sums: Sums and counts since the last logged step, by name: float64 (local micro-batches, 2).
    """

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self.sums: Mapping[str, Tensor] = sums
        self._names: list[str] | None = None  # None until a step of this process is added
        self._agreed: set[tuple[str, ...]] = set()  # sets of names that all ranks have compared

    def add(self, metrics: Mapping[str, Tensor], *, occasional: bool = False) -> None:
        """Add a step's metrics by name, without waiting for the device.

        Each metric is float64 (local micro-batches, 2).

        Args:
            metrics: Metrics of the step.
            occasional: Whether names may differ from step to step, in the same way on all ranks.

        Raises:
            ConfigError: the names differ from earlier steps in this process, and ``occasional`` is false.
        """
        if occasional:
            self._names = sorted({*self.sums, *metrics})
        elif self._names is None:
            self._names = sorted(metrics)
            self._drop_renamed()
        elif sorted(metrics) != self._names:
            raise metrics_differ(self._names, metrics, where="two steps")
        added = {name: self.sums[name] + new_b2 if name in self.sums else new_b2 for name, new_b2 in metrics.items()}
        self.sums = {**self.sums, **added}

    def _drop_renamed(self) -> None:
        """Drop all restored sums if their names differ: the recipe has changed since the save."""
        if self.sums and sorted(self.sums) != self._names:
            _logger.warning(
                "the metrics of the recipe's loss have changed since the checkpoint was saved, from [%s] to [%s]. "
                "The next logged metrics exclude the steps before the checkpoint.",
                ", ".join(sorted(self.sums)),
                ", ".join(self._names or []) or "none",
            )
            self.sums = {}

    def check_names(self, world: World) -> None:
        """Check that all ranks have the same metric names, once per set of names.

        Ranks thus exchange tensors of equal size.

        Raises:
            ConfigError: a rank's names differ from rank 0's.
        """
        names = tuple(self._names or ())
        if names not in self._agreed:
            _check_same_names(list(names), world)
            self._agreed.add(names)

    def take_sums(self, world: World, padding: int = 0) -> tuple[Sequence[str], Tensor]:
        """Return the names and the sums, and reset the sums.

        The sums are a tensor (names × (micro-batches + padding) × 2,).

        Args:
            world: The participating ranks.
            padding: Number of zero micro-batches to append, if other ranks have more.

        Raises:
            ConfigError: a rank's names differ from rank 0's.
        """
        self.check_names(world)
        names = self._names or []
        sums = [F.pad(self.sums[name], (0, 0, 0, padding)).flatten() for name in names]
        self.sums = {}
        return names, torch.cat(sums) if sums else torch.empty(0, dtype=torch.float64)


def _check_same_names(names: list[str], world: World) -> None:
    if world.group is None:
        return
    of_all: list[list[str]] = [names] * world.size
    dist.all_gather_object(of_all, names, group=world.group)
    for rank, others in enumerate(of_all):
        if others != of_all[0]:
            raise metrics_differ(of_all[0], others, where=f"ranks 0 and {rank}")


def compute_means(names: Sequence[str], sums_pn: Tensor) -> dict[str, float]:
    """Divide the sums of all ranks by their counts.

    Each row of ``sums_pn`` is the result of :meth:`TrainingMetrics.take_sums` on one rank.
    """
    if not names:
        return {}
    sums_pmb2 = sums_pn.view(len(sums_pn), len(names), -1, 2)
    totals_m2 = [[exact_sum(side) for side in pairs] for pairs in sums_pmb2.permute(1, 3, 0, 2).flatten(2).tolist()]
    return {name: quotient(total, count) for name, (total, count) in zip(names, totals_m2, strict=True)}


def count_missing_ranks(own: int, parts: int, logical_ranks: int | None) -> int:
    """Return the number of padding rows, 0 or 1, for a replica with fewer logical ranks.

    Args:
        own: Number of its logical ranks.
        parts: Number of data-parallel replicas.
        logical_ranks: Total number of logical ranks; None: all replicas have the same number.
    """
    return 0 if logical_ranks is None else -(-logical_ranks // parts) - own


def gather_by_logical_rank(
    sums: Mapping[str, Tensor],
    mine: Sequence[int],
    world: World,
    *,
    logical_ranks: int | None = None,
    parts: int | None = None,
) -> dict[str, list[list[float]]]:
    """Gather each metric's [sum, count] of all logical ranks, in order of rank.

    Every rank must call this.

    Args:
        sums: Sums and counts of this process by name: (local logical ranks, 2).
        mine: Logical ranks of this process.
        world: The participating processes.
        logical_ranks: Total number of logical ranks, if some processes have one less than others.
        parts: Number of data-parallel replicas; None: one per process.
    """
    if not sums:
        return {}
    names, device = sorted(sums), next(iter(sums.values())).device
    ranks_b1 = torch.tensor(mine, dtype=torch.float64, device=device)[:, None]
    own_bn = torch.cat([ranks_b1, *(sums[name] for name in names)], dim=1)
    padded_bn = F.pad(own_bn, (0, 0, 0, count_missing_ranks(len(mine), parts or world.size, logical_ranks)), value=-1.0)
    rows = start_all_gather(padded_bn, world)().flatten(0, 1).tolist()
    in_order = [row for _, row in sorted({int(rank): row for rank, *row in rows if rank >= 0}.items())]
    return {name: [row[2 * place : 2 * place + 2] for row in in_order] for place, name in enumerate(names)}
