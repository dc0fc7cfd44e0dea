"""DDP hook for hierarchical and compressed gradients.

See :mod:`worldsize.dist.reductions` and :mod:`worldsize.dist.sparse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import final

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import StateDict, World
from worldsize.dist.per_rank import local_row, stack_per_rank
from worldsize.dist.reductions import all_reduced, hierarchical
from worldsize.dist.staged import Phases, Staged
from worldsize.dist.summation import Summation
from worldsize.record.seeds import stream
from worldsize.strategies.all_reduce_reducer import BucketHook
from worldsize.strategies.tiers import Tiers


@final
class CompressedHook(BucketHook):
    """Computes sums by ``summation`` (None: uncompressed); with ``tiers`` only sums of the last tier.

    What a message leaves out is added to the next one (error feedback). Random choices follow from the run's ``seed``,
    the step and the bucket.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        world: World,
        summation: Summation | None,
        tiers: Tiers | None,
        *,
        seed: int = 0,
    ) -> None:
        self._world, self._summation, self._tiers = world, summation, tiers
        self._seed, self._step = seed, 0
        self._staged = Staged(world.device)
        self._errors: Errors | None = None
        if summation and summation.keeps_errors:
            self._errors = Errors(module, tiers.shares if tiers else 1)

    @property
    def has_bucket_memory(self) -> bool:
        return self._errors is not None

    def begin(self, step: int) -> None:
        self._step = step

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer().div_(self._world.size)  # before encoding, since the range of float16 is small
        return self._staged.add(flat, self._total(flat, bucket), last=bucket.is_last())

    def _total(self, flat: Tensor, bucket: GradBucket) -> Phases:
        parameters = bucket.parameters() if self._errors else []
        add = partial(self._sum, bucket=bucket.index(), parameters=parameters)
        if self._tiers is not None:
            return hierarchical(flat, self._tiers.inner, self._tiers.across, add)
        assert self._world.group is not None
        return add(flat, self._world.group)

    def _sum(self, flat: Tensor, group: ProcessGroup, *, bucket: int, parameters: Sequence[Tensor]) -> Phases:
        if self._summation is None:
            return all_reduced(flat, group)
        error = self._errors.of(bucket, flat.numel(), parameters) if self._errors else None
        seed = stream(self._seed, "sparse", self._step, bucket)
        return self._summation.total(flat, group, error_n=error, seed=seed)

    def settle(self, discarded_pass: Callable[[], None]) -> None:
        before = self._errors.kept() if self._errors else None
        discarded_pass()
        if self._errors and before is not None:
            self._errors.begin(before)

    def state(self) -> StateDict:
        return {"errors": stack_per_rank(self._errors.kept(), self._world)} if self._errors else {}

    def load(self, state: StateDict) -> None:
        if self._errors:
            self._errors.begin(local_row(state["errors"]).clone())


@final
class Errors:
    """Holds what this rank's messages have left out: float32 (n,), a part of it for each bucket.

    A checkpoint has it in the order of parameters, however DDP forms its buckets. Only where a node divides each bucket
    over its ranks (``shares``, their number) it is in the order in which buckets have asked for it. ``n`` must be known
    in advance for checkpoints, so it then leaves room for the padding of as many buckets as there are parameters.
    """

    def __init__(self, module: nn.Module, shares: int) -> None:
        gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sizes = [gradient.numel() for gradient in gradients]
        self._first = dict(zip(map(id, gradients), accumulate([0, *sizes]), strict=False))  # number of each parameter
        self._is_whole, self._device = shares == 1, gradients[0].device
        self._length = sum(sizes) if self._is_whole else -(-sum(sizes) // shares) + len(gradients)
        self._undealt: Tensor | None = torch.zeros(self._length, device=self._device)  # None: buckets have all of it
        self._slots: dict[int, tuple[Tensor, Sequence[tuple[int, Tensor]]]] = {}  # and which numbers its parts are

    def kept(self) -> Tensor:
        """Return a copy of all errors, float32 (n,)."""
        undealt = self._undealt
        kept_n = torch.zeros(self._length, device=self._device) if undealt is None else undealt.clone()
        for _, parts in self._slots.values():
            for first, part in parts:
                kept_n[first : first + part.numel()] = part
        return kept_n

    def begin(self, kept_n: Tensor) -> None:
        """Set the errors to what :meth:`kept` has returned, and forget their assignment to buckets."""
        self._undealt, self._slots = kept_n, {}

    def of(self, bucket: int, length: int, parameters: Sequence[Tensor]) -> Tensor:
        """Return the bucket's errors, float32 (length,), to change in place; assigned at the first call."""
        if bucket not in self._slots:
            self._deal(bucket, length, parameters)
        return self._slots[bucket][0]

    def _deal(self, bucket: int, length: int, parameters: Sequence[Tensor]) -> None:
        dealt = sum(slot.numel() for slot, _ in self._slots.values())
        assert self._undealt is not None
        if not self._is_whole:
            self._slots[bucket] = self._undealt[dealt : dealt + length], ()
            return
        firsts, sizes = [self._first[id(each)] for each in parameters], [each.numel() for each in parameters]
        slot = torch.cat([self._undealt[first : first + size] for first, size in zip(firsts, sizes, strict=True)])
        self._slots[bucket] = slot, list(zip(firsts, torch.split(slot, sizes), strict=True))
        if dealt + length == self._length:
            if self._undealt.is_cuda:  # a side stream may still read it
                self._undealt.record_stream(torch.cuda.current_stream(self._device))
            self._undealt = None  # so that there is one copy
