"""DDP communication hooks: hierarchical and compressed gradients, and torch's PowerSGD.

Hierarchical and compressed sums use :mod:`worldsize.collectives.reductions`. PowerSGD (Vogels et al. 2019, arXiv
1905.13727) is torch's hook, with its state saved in checkpoints. ``Tiers`` are the process groups of hierarchical sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.group import start_collective
from worldsize.collectives.per_rank import local_row, stack_per_rank
from worldsize.collectives.reductions import all_reduced, hierarchical
from worldsize.collectives.staged import Phases, Staged, Summation
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import StateDict, World
from worldsize.seeds import derive_seed
from worldsize.strategies.ddp_reducers import BucketHook


@final
class CompressedHook(BucketHook):
    """Averages gradients with ``summation``, or uncompressed if it is None.

    With ``tiers``, ``summation`` applies only to the last tier. The compression error of a message is added to the
    next one (error feedback). Random choices depend on the run's ``seed``, the step and the bucket.
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

    def begin_step(self, step: int) -> None:
        self._step = step

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer().div_(self._world.size)  # before encoding, to avoid overflow in float16
        return self._staged.add(flat, self._reduce_bucket(flat, bucket), last=bucket.is_last())

    def _reduce_bucket(self, flat: Tensor, bucket: GradBucket) -> Phases:
        parameters = bucket.parameters() if self._errors else []
        add = partial(self._sum_over_group, bucket=bucket.index(), parameters=parameters)
        if self._tiers is not None:
            return hierarchical(flat, self._tiers.inner, self._tiers.across, add)
        assert self._world.group is not None
        return add(flat, self._world.group)

    def _sum_over_group(
        self, flat: Tensor, group: ProcessGroup, *, bucket: int, parameters: Sequence[Tensor]
    ) -> Phases:
        if self._summation is None:
            return all_reduced(flat, group)
        error = self._errors.get_errors(bucket, flat.numel(), parameters) if self._errors else None
        seed = derive_seed(self._seed, "sparse", self._step, bucket)
        return self._summation.all_reduce(flat, group, error_n=error, seed=seed)

    def prepare_buckets(self, discarded_pass: Callable[[], None]) -> None:
        before = self._errors.copy_errors() if self._errors else None
        discarded_pass()
        if self._errors and before is not None:
            self._errors.restore_errors(before)

    def state(self) -> StateDict:
        return {"errors": stack_per_rank(self._errors.copy_errors(), self._world)} if self._errors else {}

    def load(self, state: StateDict) -> None:
        if self._errors:
            self._errors.restore_errors(local_row(state["errors"]).clone())


@final
class Errors:
    """This rank's compression errors, float32 (n,), with a slice for each bucket.

    The errors are stored in parameter order, regardless of DDP's buckets. If ``shares`` ranks split each bucket, the
    errors are instead in the order of the buckets' first use. Checkpoints need an ``n`` that does not depend on the
    buckets, so it then includes one element of padding per parameter.
    """

    def __init__(self, module: nn.Module, shares: int) -> None:
        gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sizes = [gradient.numel() for gradient in gradients]
        self._first = dict(zip(map(id, gradients), accumulate([0, *sizes]), strict=False))  # offsets by id
        self._is_whole, self._device = shares == 1, gradients[0].device
        self._length = sum(sizes) if self._is_whole else -(-sum(sizes) // shares) + len(gradients)
        self._undealt: Tensor | None = torch.zeros(self._length, device=self._device)  # not yet in slots
        self._slots: dict[int, tuple[Tensor, Sequence[tuple[int, Tensor]]]] = {}  # errors by bucket, with their offsets

    def copy_errors(self) -> Tensor:
        """Return a copy of all errors, float32 (n,)."""
        undealt = self._undealt
        kept_n = torch.zeros(self._length, device=self._device) if undealt is None else undealt.clone()
        for _, parts in self._slots.values():
            for first, part in parts:
                kept_n[first : first + part.numel()] = part
        return kept_n

    def restore_errors(self, kept_n: Tensor) -> None:
        """Restore what :meth:`copy_errors` returned, and clear the assignment to buckets."""
        self._undealt, self._slots = kept_n, {}

    def get_errors(self, bucket: int, length: int, parameters: Sequence[Tensor]) -> Tensor:
        """Return a bucket's errors, float32 (length,), to update in place; assign them on first use."""
        if bucket not in self._slots:
            self._assign_slice(bucket, length, parameters)
        return self._slots[bucket][0]

    def _assign_slice(self, bucket: int, length: int, parameters: Sequence[Tensor]) -> None:
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
            self._undealt = None  # the slots hold all errors now


_WARM_UP = 2  # passes before torch's hook starts to compress; they are discarded


@final
class PowerSGDHook(BucketHook):
    """Low-rank gradient compression with error feedback and warm start (PowerSGD of ``rank``).

    With ``tiers``, only the sums of the last tier are compressed; the others, such as within a node, are exact.
    """

    def __init__(self, module: DistributedDataParallel, world: World, *, rank: int, tiers: Tiers | None) -> None:
        self._world, self._rank, self._tiers = world, rank, tiers
        self._loaded: Tensor | None = None
        self._length = sum(
            parameter.numel() + _count_factor_elements(parameter, rank)
            for parameter in module.parameters()
            if parameter.requires_grad
        )
        self._torch = self._create_state()

    @property
    def has_bucket_memory(self) -> bool:
        return True

    def _create_state(self) -> PowerSGDState:
        group = self._tiers.across if self._tiers else self._world.group
        return PowerSGDState(group, self._rank, start_powerSGD_iter=_WARM_UP, orthogonalization_epsilon=1e-8)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        for group in self._tiers.inner if self._tiers else ():
            bucket.buffer().div_(dist.get_world_size(group))
            start_collective(dist.all_reduce, bucket.buffer(), group=group).wait()
        future: Future[Tensor] = powerSGD_hook(self._torch, bucket)
        if bucket.buffer().device.type == "cpu":
            with measure_phase("communication"):
                future.wait()  # its callbacks start collectives that must not interleave with the next bucket's
        return future

    def prepare_buckets(self, discarded_pass: Callable[[], None]) -> None:
        self._torch = self._create_state()
        for _ in range(_WARM_UP + 1):  # the last pass creates the state of each bucket
            discarded_pass()
        layout, self._torch = self._torch, self._create_state()
        self._torch.iter = _WARM_UP
        if self._loaded is not None:
            self._restore_memory(self._loaded, layout)
            self._loaded = None

    def _restore_memory(self, memory: Tensor, layout: PowerSGDState) -> None:
        memory = memory.clone()
        for bucket in sorted(layout.error_dict):
            self._torch.error_dict[bucket], memory = _split_memory(memory, layout.error_dict[bucket])
        for bucket in sorted(layout.q_memory_dict):
            self._torch.q_memory_dict[bucket], memory = _split_memory(memory, layout.q_memory_dict[bucket])
        self._torch.p_memory_dict = layout.p_memory_dict  # recomputed in each step

    def state(self) -> StateDict:
        """Return the errors of all buckets, followed by their right factors for the next step."""
        if self._loaded is not None:
            return {"memory": stack_per_rank(self._loaded, self._world)}
        memories = (self._torch.error_dict, self._torch.q_memory_dict)
        parts = [memory[bucket] for memory in memories for bucket in sorted(memory)]
        rest = torch.zeros(self._length - sum(part.numel() for part in parts), device=self._world.device)
        return {"memory": stack_per_rank(torch.cat([*parts, rest]), self._world)}

    def load(self, state: StateDict) -> None:
        memory = local_row(state["memory"])
        self._loaded = memory if memory.any() else None  # all zeros if saved before the first step


def _split_memory(memory: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    return memory[: like.numel()], memory[like.numel() :]


def _count_factor_elements(parameter: Tensor, rank: int) -> int:
    """Return the maximum number of elements of the matrix's right factor."""
    return 0 if parameter.ndim < 2 else parameter[0].numel() * min(rank, *parameter.flatten(1).shape)


@final
@dataclass(frozen=True)
class Tiers:
    """Process groups of this rank for hierarchical sums.

    Attributes:
        inner: Groups of all tiers but the last: the ranks of this node, then ranks with this index in other units.
        across: Group of the last tier, which has the slowest links.
    """

    inner: Sequence[ProcessGroup]
    across: ProcessGroup

    @staticmethod
    def from_world(world: World) -> Tiers | None:
        """Return the tiers of ``world``, or None if it is on one node."""
        if "node" not in world.groups:
            return None
        named = [group for name, group in world.groups.items() if name.startswith("tier/")]
        *inner, across = [world.groups["node"], *(named or [world.groups["across"]])]
        return Tiers([group for group in inner if dist.get_world_size(group) > 1], across)

    @property
    def shares(self) -> int:
        """Number of ranks that split a bucket before it is sent over the last tier."""
        ranks = 1
        for group in self.inner:
            ranks *= dist.get_world_size(group)
        return ranks
