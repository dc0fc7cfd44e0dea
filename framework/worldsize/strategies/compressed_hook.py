"""DDP's gradients by way of the node, and in fewer bits: see :mod:`worldsize.collectives.reductions`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.codecs import CODECS, Codec
from worldsize.collectives.per_rank import local_row, stack_per_rank
from worldsize.collectives.reductions import all_reduced, compressed, hierarchical
from worldsize.collectives.staged import Phases, Staged
from worldsize.core import Reduction, StateDict, World
from worldsize.strategies.gradient_reducer import Flat, GradientReducer, gradient_reducer
from worldsize.strategies.powersgd_reducer import PowerSGD

Compression = Literal["none", "bf16", "fp16", "int8", "powersgd"]
SIZES = {"bf16": 0.5, "fp16": 0.5, "int8": 0.25 + 1 / 1024}  # to float32; of PowerSGD it depends on the matrices


def reduced(
    reduce: Reduction, compress: Compression, module: DistributedDataParallel, world: World, *, rank: int
) -> GradientReducer:
    """The mean gradient over ``world`` by ``reduce`` and ``compress``; ``rank``: of PowerSGD's approximation."""
    node = world.groups.get("node") if reduce == "hierarchical" else None
    if compress == "powersgd":
        return PowerSGD(module, world, rank=rank, node=node)
    if compress == "none" and node is None:
        return gradient_reducer(reduce, module, world.group)
    return Reduced(module, world, CODECS.get(compress), node)


@final
class Reduced(Flat):
    """``codec``: how sums are sent (None: as they are), with ``node`` only those that cross nodes."""

    def __init__(
        self, module: DistributedDataParallel, world: World, codec: Codec | None, node: ProcessGroup | None
    ) -> None:
        super().__init__(module)
        self._world, self._codec, self._node = world, codec, node
        self._staged = Staged()
        self._errors: Errors | None = None
        if codec and codec.lossy:
            self._errors = Errors(module, dist.get_world_size(node) if node else 1)
            self._settled = False  # errors are kept by bucket
        module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer().div_(self._world.size)  # before it is encoded: float16 has no large numbers
        return self._staged.add(flat, self._total(flat, bucket.index()), last=bucket.is_last())

    def _total(self, flat: Tensor, bucket: int) -> Phases:
        add = partial(self._sum, bucket=bucket)
        if self._node is not None:
            return hierarchical(flat, self._node, self._world.groups["across"], add)
        assert self._world.group is not None
        return add(flat, self._world.group)

    def _sum(self, flat: Tensor, group: ProcessGroup, *, bucket: int) -> Phases:
        if self._codec is None:
            return all_reduced(flat, group)
        error = self._errors.of(bucket, flat.numel()) if self._errors else None
        return compressed(flat, group, self._codec, error)

    def _settle(self, backward: Callable[[float], Tensor]) -> None:
        if self._errors is None:
            return super()._settle(backward)
        before = self._errors.now.clone()
        super()._settle(backward)
        return self._errors.begin(before)

    def state(self) -> StateDict:
        return {"errors": stack_per_rank(self._errors.now, self._world)} if self._errors else {}

    def load(self, state: StateDict) -> None:
        if self._errors:
            self._errors.now.copy_(local_row(state["errors"]))


@final
class Errors:
    """What this rank's messages have left out so far: float32 [n], dealt to buckets in the order in which they ask.

    ``shares``: ranks that divide a bucket. ``n`` is known beforehand, so that a checkpoint can be: it leaves room
    for the padding of as many buckets as there are parameters.
    """

    def __init__(self, module: nn.Module, shares: int) -> None:
        gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
        padding = len(gradients) if shares > 1 else 0
        length = -(-sum(gradient.numel() for gradient in gradients) // shares) + padding
        self.now = torch.zeros(length, device=gradients[0].device)
        self._slots: dict[int, Tensor] = {}

    def begin(self, now: Tensor) -> None:
        """Set them, and deal them anew."""
        self.now.copy_(now)
        self._slots = {}

    def of(self, bucket: int, length: int) -> Tensor:
        if bucket not in self._slots:
            dealt = sum(slot.numel() for slot in self._slots.values())
            self._slots[bucket] = self.now[dealt : dealt + length]
        return self._slots[bucket]
