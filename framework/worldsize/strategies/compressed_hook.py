"""DDP hook for hierarchical and compressed gradients.

See :mod:`worldsize.collectives.reductions` and :mod:`worldsize.collectives.sparse`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.per_rank import local_row, stack_per_rank
from worldsize.collectives.reductions import all_reduced, hierarchical
from worldsize.collectives.staged import Phases, Staged
from worldsize.collectives.summation import Summation
from worldsize.core import StateDict, World
from worldsize.reproducibility.seeds import stream
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
        self._staged = Staged()
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
        return self._staged.add(flat, self._total(flat, bucket.index()), last=bucket.is_last())

    def _total(self, flat: Tensor, bucket: int) -> Phases:
        add = partial(self._sum, bucket=bucket)
        if self._tiers is not None:
            return hierarchical(flat, self._tiers.inner, self._tiers.across, add)
        assert self._world.group is not None
        return add(flat, self._world.group)

    def _sum(self, flat: Tensor, group: ProcessGroup, *, bucket: int) -> Phases:
        if self._summation is None:
            return all_reduced(flat, group)
        error = self._errors.of(bucket, flat.numel()) if self._errors else None
        seed = stream(self._seed, "sparse", self._step, bucket)
        return self._summation.total(flat, group, error_n=error, seed=seed)

    def settle(self, discarded_pass: Callable[[], None]) -> None:
        before = self._errors.now.clone() if self._errors else None
        discarded_pass()
        if self._errors and before is not None:
            self._errors.begin(before)

    def state(self) -> StateDict:
        return {"errors": stack_per_rank(self._errors.now, self._world)} if self._errors else {}

    def load(self, state: StateDict) -> None:
        if self._errors:
            self._errors.now.copy_(local_row(state["errors"]))


@final
class Errors:
    """Compression errors of this rank's messages: float32 (n,), assigned to buckets in the order of their requests.

    ``shares`` is the number of ranks that divide a bucket. ``n`` must be known in advance for checkpoints, so it leaves
    room for the padding of as many buckets as there are parameters.
    """

    def __init__(self, module: nn.Module, shares: int) -> None:
        gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
        padding = len(gradients) if shares > 1 else 0
        length = -(-sum(gradient.numel() for gradient in gradients) // shares) + padding
        self.now = torch.zeros(length, device=gradients[0].device)
        self._slots: dict[int, Tensor] = {}

    def begin(self, now: Tensor) -> None:
        """Set the errors, float32 (n,), and forget their assignment to buckets."""
        self.now.copy_(now)
        self._slots = {}

    def of(self, bucket: int, length: int) -> Tensor:
        """Return the bucket's errors, float32 (length,), a view to change in place; assigned at the first call."""
        if bucket not in self._slots:
            dealt = sum(slot.numel() for slot in self._slots.values())
            self._slots[bucket] = self.now[dealt : dealt + length]
        return self._slots[bucket]
