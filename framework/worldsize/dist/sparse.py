"""Sums of which each rank sends only some of its numbers: the largest (top-k), or some that all ranks draw (random-k).

What a rank does not send it keeps, and adds to its next numbers (error feedback, also called memory). Both choices
leave out at most the share 1 - k/n of the squared norm, top-k always and random-k on average, which is what the proof
of convergence needs (Stich et al. 2018, arXiv 1809.07599, definition 2.1 and lemma A.1).
"""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.dist.staged import Phases
from worldsize.dist.step_timer import started, wait
from worldsize.dist.summation import Summation
from worldsize.devices import on_device


def kept(length: int, density: float) -> int:
    """Return k, how many of ``length`` numbers are sent: the share ``density`` of them, and at least one."""
    return max(1, int(length * density))


@final
class TopK(Summation):
    """Each rank sends its k largest numbers with their indices (Aji and Heafield 2017; Lin et al. 2018, algorithm 1).

    An all-gather of k float32 and k int32 from each rank, which every rank adds up in the order of ranks. A number that
    is not finite is among the largest, so that all ranks get it, and it is not kept.
    """

    keeps_errors = True

    def __init__(self, density: float) -> None:
        self._density = density

    def total(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        assert error_n is not None
        size, count = dist.get_world_size(group), kept(flat_n.numel(), self._density)
        error_n.add_(flat_n)
        places_k = error_n.abs().topk(count, sorted=False).indices
        message = torch.stack([places_k.int(), error_n[places_k].view(torch.int32)])
        messages = message.new_empty(size * message.numel())
        work = started(dist.all_gather_into_tensor(messages, message.view(-1), group=group, async_op=True))
        yield
        _forget(error_n, places_k)
        wait(work)
        total_n = flat_n.zero_()
        for indices_k, values_k in messages.view(size, 2, count):
            total_n.index_add_(0, indices_k, values_k.view(torch.float32).to(total_n.dtype))
        return total_n


@final
class RandomK(Summation):
    """All ranks send their numbers at the same k places, drawn from the seed, so that no index is sent.

    An all-reduce of k numbers. The places are one of each n/k neighbours, so that each number is sent with probability
    k/n, and drawing takes k random numbers instead of n. Without ``keeps_errors`` nothing is kept, and what is sent is
    divided by its probability, so that the sum is right on average (Wangni et al. 2018, arXiv 1710.09854, section 2).
    """

    def __init__(self, density: float, *, keeps_errors: bool) -> None:
        self._density, self.keeps_errors = density, keeps_errors

    def total(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        places_k, widths_k = (
            on_device(each, flat_n.device) for each in drawn(flat_n.numel(), kept(flat_n.numel(), self._density), seed)
        )
        broken = flat_n.sum().mul_(0)  # NaN if a number is not finite, which the drawn ones may not show
        values_k = flat_n[places_k] * widths_k if error_n is None else error_n.add_(flat_n)[places_k]
        work = started(dist.all_reduce(values_k.add_(broken), group=group, async_op=True))
        yield
        if error_n is not None:
            _forget(error_n, places_k)
        wait(work)
        flat_n.zero_()[places_k] = values_k.to(flat_n.dtype)
        return flat_n


def drawn(length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide ``length`` places into ``count`` runs of neighbours, and draw one place of each.

    The generator is the CPU's on every device, so that ranks with other devices draw the same.

    Returns:
        The places, int64 (count,), ascending; and the lengths of the runs, int64 (count,): each place of a run is drawn
        with probability 1 / length.
    """
    edges = torch.arange(count + 1) * length // count
    widths_k = edges.diff()
    random_k = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return edges[:-1] + (random_k * widths_k).long().minimum(widths_k - 1), widths_k


def _forget(error_n: Tensor, places_k: Tensor) -> None:
    """Remove what was sent, and what is not finite: it would never leave the sums again."""
    error_n[places_k] = 0
    error_n.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
