"""Workers' gradients on a server: wire formats, a step's sum, and a log of applied units.

Gradients of a synchronous step are accumulated as they arrive. If steps overlap, applied units are recorded instead.
Both are pure logic: no sockets, locks or optimizer. Compressed formats use error feedback, which adds the compression
error to the next gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import numpy
import torch
from torch import Tensor

from plugins.parameter_server.row_tables import RowGradients
from worldsize.collectives.ordered import PartialSums
from worldsize.net.frames import RefusedError

Gradient = Tensor | RowGradients


def encode_presence(pieces: Sequence[bool], dtype: torch.dtype) -> Tensor | None:
    """Encode which pieces of a bucket have a gradient, as flags 1 or 0 of ``dtype``, (pieces,).

    The flags are sent after the bucket's gradient; None if all pieces have one. Missing gradients are sent as zeros.
    The optimizer must not update a piece if its gradient is missing on all workers.
    """
    return None if all(pieces) else torch.tensor(pieces).to(dtype)


@final
class StepGradients:
    """Sums the gradients of a step over logical ranks, in tree order.

    Args:
        step: The step in progress.
        logical_ranks: Number of logical ranks to average over.
        buckets: Number of buckets in the shard; their gradients have the first indices.
        tables: Number of tables in the shard; their gradients follow.

    Attributes:
        means: Complete mean gradients that have not been applied yet, by index.
        present: For each bucket index, which pieces have a gradient in any contribution, bool (pieces,). Missing once a
            contribution had all gradients.
    """

    def __init__(self, step: int, *, logical_ranks: int, buckets: int, tables: int) -> None:
        self.means: dict[int, Gradient] = {}
        self.present: dict[int, Tensor] = {}
        self._is_full: set[int] = set()  # buckets with a contribution that had all gradients
        self._step, self._logical_ranks = step, logical_ranks
        self._arrivals = [PartialSums(logical_ranks) for _ in range(buckets)]
        self._row_parts: list[dict[tuple[int, int], RowGradients]] = [{} for _ in range(tables)]
        self._covered: list[set[int]] = [set() for _ in range(buckets + tables)]  # logical ranks that have arrived
        self._updated = 0  # number of applied means
        self._is_weighed = False

    def create_empty(self, step: int) -> StepGradients:
        """Return an empty instance for ``step``, with the same buckets and tables."""
        buckets, tables = len(self._arrivals), len(self._row_parts)
        return StepGradients(step, logical_ranks=self._logical_ranks, buckets=buckets, tables=tables)

    def add_contribution(
        self, index: int, gradient: Gradient, *, step: int, width: int, node: int, present: Tensor | None = None
    ) -> bool:
        """Add a contribution to the mean gradient with this ``index``.

        ``gradient`` is the sum of tree node ``node`` on the level with ``width`` nodes, see
        :class:`~worldsize.collectives.ordered.PartialSums`. ``present``: which pieces of a bucket have a gradient, bool
        (pieces,). None if all have one.

        Returns:
            Whether the contribution is new; False if these logical ranks were added before.

        Raises:
            RefusedError: The node does not exist, overlaps with earlier contributions, or belongs to a later step.
        """
        if step < self._step:
            return False
        if step != self._step or not 0 <= node < width or self._logical_ranks % width:
            raise RefusedError(f"unexpected part {node} of {width} of step {step}; the shard is at step {self._step}")
        ranks, covered = set(range(node, self._logical_ranks, width)), self._covered[index]
        if ranks <= covered:
            return False
        if ranks & covered:
            raise RefusedError(f"part {node} of {width} of step {step} overlaps with earlier parts")
        covered |= ranks
        if present is None:
            self._is_full.add(index)
            self.present.pop(index, None)
        elif index not in self._is_full:
            self.present[index] = present | self.present.get(index, present)
        mean = self._compute_mean(index, gradient, width, node)
        if mean is not None:
            self.means[index] = mean
        return True

    def _compute_mean(self, index: int, gradient: Gradient, width: int, node: int) -> Gradient | None:
        """Add a contribution; return the mean over all logical ranks if it was the last one."""
        if isinstance(gradient, Tensor):
            self._arrivals[index].add(width, node, [gradient])
            total = self._arrivals[index].compute_total()
            return None if total is None else _divide_total(total[0], self._logical_ranks)
        parts = self._row_parts[index - len(self._arrivals)]
        parts[width, node] = gradient
        return row_mean(parts, self._logical_ranks) if len(self._covered[index]) == self._logical_ranks else None

    @property
    def all_wait(self) -> bool:
        """Whether all means are complete and none has been applied."""
        return len(self.means) == len(self._covered)

    def scale_means(self, factor: float) -> None:
        """Multiply all means by ``factor``. Repeated calls are ignored."""
        if not self._is_weighed:
            for gradient in self.means.values():
                (gradient if isinstance(gradient, Tensor) else gradient[1]).mul_(factor)
        self._is_weighed = True

    def pop_mean(self, index: int) -> Gradient:
        """Remove and return the mean of gradient ``index``, to apply it."""
        self._updated += 1
        return self.means.pop(index)

    @property
    def all_taken(self) -> bool:
        """Whether all means have been applied, so that the step is complete."""
        return self._updated == len(self._covered)

    def export_gradients(self) -> dict[str, Any]:
        """Return all gradients received for this step, for a standby. Tensors are not copied."""
        return {
            "means": [[index, gradient] for index, gradient in self.means.items()],
            "arrivals": [[[*key, part] for key, part in each.parts.items()] for each in self._arrivals],
            "row_parts": [[[*key, *part] for key, part in each.items()] for each in self._row_parts],
            "covered": [sorted(each) for each in self._covered],
            "updated": self._updated,
            "is_weighed": self._is_weighed,
            "present": [[index, present] for index, present in self.present.items()],
            "is_full": sorted(self._is_full),
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Load an :meth:`export_gradients` of the same step from the master."""
        self.means = dict(image["means"])
        for arrivals, parts in zip(self._arrivals, image["arrivals"], strict=True):
            arrivals.parts = {(width, node): part for width, node, part in parts}
        self._row_parts = [{(width, node): (ids, g) for width, node, ids, g in each} for each in image["row_parts"]]
        self._covered = [set(each) for each in image["covered"]]
        self._updated, self._is_weighed = image["updated"], image["is_weighed"]
        self.present, self._is_full = dict(image["present"]), set(image["is_full"])


def row_mean(parts: Mapping[tuple[int, int], RowGradients], logical_ranks: int) -> RowGradients:
    """Return a table's mean gradient over all logical ranks, ids (n,) and values (n, dim).

    Rows are summed in tree order. The result is bit-identical to the sum of dense gradients, since adding zeros changes
    nothing.
    """
    if len(parts) == 1:
        ((ids_n, values_nd),) = parts.values()
        return ids_n, _divide_total(values_nd, logical_ranks)
    ids_n = torch.unique(torch.cat([ids for ids, _ in parts.values()]))
    arrivals = PartialSums(logical_ranks)
    for (width, node), (ids, values) in parts.items():
        part_nd = values.new_zeros(len(ids_n), values.shape[1])
        part_nd[torch.searchsorted(ids_n, ids)] = values
        arrivals.add(width, node, [part_nd])
    total = arrivals.compute_total()
    assert total is not None, "all logical ranks have come"
    return ids_n, _divide_total(total[0], logical_ranks)


def _divide_total(total: Tensor, count: int) -> Tensor:
    return total.div_(count) if count > 1 else total


@final
class UnitLog:
    """Records which gradients of each unit have arrived, so that each is applied only once.

    A unit is identified by its step and its first logical rank.

    Args:
        closed: Initial value of the attribute ``closed``.
        logical_ranks: Number of units per step.
        gradients: Number of gradients per unit: one per bucket and one per table.

    Attributes:
        closed: The last step up to which all steps are complete.
    """

    def __init__(self, closed: int, *, logical_ranks: int, gradients: int) -> None:
        self.closed = closed
        self._logical_ranks, self._gradients = logical_ranks, gradients
        self._taken: dict[tuple[int, int], set[int]] = {}  # only for steps after `closed`

    def record_gradient(self, unit: tuple[int, int], index: int) -> bool:
        """Record gradient ``index`` of a unit as received; return False if it was received before."""
        if unit[0] <= self.closed or index in self._taken.get(unit, ()):
            return False
        self._taken.setdefault(unit, set()).add(index)
        return True

    def is_complete(self, unit: tuple[int, int]) -> bool:
        """Return whether all gradients of a unit have arrived."""
        return len(self._taken[unit]) == self._gradients

    def close_steps(self) -> None:
        """Drop the units of complete steps and advance ``closed``."""
        while True:
            of_next = [unit for unit in self._taken if unit[0] == self.closed + 1]
            if len(of_next) < self._logical_ranks or not all(self.is_complete(unit) for unit in of_next):
                return
            for unit in of_next:
                del self._taken[unit]
            self.closed += 1

    def export_log(self) -> dict[str, object]:
        """Return the complete log, for a standby."""
        return {"closed": self.closed, "taken": [[*unit, sorted(come)] for unit, come in self._taken.items()]}

    def restore(self, *, closed: int, taken: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Load an :meth:`export_log` of the master's log."""
        self.closed = closed
        self._taken = {(step, rank): set(come) for step, rank, come in taken}


Compression = Literal["none", "bf16", "onebit", "topk"]


class GradientCodec(ABC):
    """Wire format for float32 gradients (n,), with a payload length that depends only on n."""

    dtype: torch.dtype = torch.uint8

    @abstractmethod
    def compute_length(self, numel: int) -> int:
        """Return the payload length for ``numel`` elements, in elements of ``dtype``."""

    @abstractmethod
    def encode(self, gradient_n: Tensor) -> Tensor:
        """Encode float32 (n,) as a payload (length(n),). May modify ``gradient_n``."""

    @abstractmethod
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Decode a payload (length(numel),) to a float32 gradient (numel,)."""


@final
class HalfBytes(GradientCodec):
    """bfloat16: half the bytes."""

    dtype = torch.bfloat16

    def compute_length(self, numel: int) -> int:
        return numel

    def encode(self, gradient_n: Tensor) -> Tensor:
        return gradient_n.bfloat16()

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return payload.float()


@final
class OneBit(GradientCodec):
    """1-bit SGD: signs, and means of positive and negative elements (Seide et al., Interspeech 2014)."""

    def compute_length(self, numel: int) -> int:
        return 8 + -(-numel // 8)

    def encode(self, gradient_n: Tensor) -> Tensor:
        positive_n = gradient_n >= 0
        means = [float(part.mean()) if len(part) else 0.0 for part in (gradient_n[positive_n], gradient_n[~positive_n])]
        bits = torch.from_numpy(numpy.packbits(positive_n.numpy()))
        return torch.cat([torch.tensor(means).view(torch.uint8), bits])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        positive, negative = payload[:8].clone().view(torch.float32)
        bits = torch.from_numpy(numpy.unpackbits(payload[8:].numpy(), count=numel)).bool()
        return torch.where(bits, positive, negative)


@final
class TopK(GradientCodec):
    """The fraction ``share`` of elements with the largest magnitude (Aji & Heafield 2017, arXiv 1704.05021)."""

    def __init__(self, share: float) -> None:
        self._share = share

    def _count_kept(self, numel: int) -> int:
        return max(1, int(numel * self._share))

    def compute_length(self, numel: int) -> int:
        return 8 * self._count_kept(numel)

    def encode(self, gradient_n: Tensor) -> Tensor:
        places_k = gradient_n.abs().topk(self._count_kept(len(gradient_n)), sorted=False).indices
        return torch.cat([places_k.int().view(torch.uint8), gradient_n[places_k].view(torch.uint8)])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        half = len(payload) // 2
        places_k, values_k = payload[:half].clone().view(torch.int32).long(), payload[half:].clone().view(torch.float32)
        gradient_n = torch.zeros(numel)
        gradient_n[places_k.clamp(0, numel - 1)] = values_k
        return gradient_n


@final
class Feedback:
    """Adds each gradient's compression error to the next gradient, by key (error feedback, arXiv 1901.09847)."""

    def __init__(self, codec: GradientCodec) -> None:
        self.codec = codec
        self._lost: dict[object, Tensor] = {}

    def encode(self, key: object, gradient_n: Tensor) -> Tensor:
        whole_n = gradient_n if key not in self._lost else self._lost[key].add_(gradient_n)
        payload = self.codec.encode(whole_n)
        self._lost[key] = whole_n - self.codec.decode(payload, len(whole_n))
        return payload


def create_codec(compression: Compression, *, share: float) -> GradientCodec | None:
    """Create the wire format, or None for no compression. "topk" sends the fraction ``share``."""
    return {"none": None, "bf16": HalfBytes(), "onebit": OneBit(), "topk": TopK(share)}[compression]
