"""Collectives of a sharded model's units: order checks, fixed-order sums and timing.

A unit must be computed by all ranks or none. Otherwise a rank's gather could match another rank's gather of a different
unit, and training would continue with mixed-up data. ``UnitOrder`` checks that all ranks run the collectives in the
same order, regardless of their data.

``OrderedScatters`` implements the reduce-scatters of ``fully_shard`` with the fixed tree of
:mod:`worldsize.collectives.ordered`. :func:`time_sharding` times the waits of sharded models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from worldsize.collectives.group import start_collective
from worldsize.collectives.ordered import Counter, Tree, sum_level
from worldsize.collectives.step_timer import mark_phase
from worldsize.core import ConfigError, Dealing
from worldsize.strategies.gradient_reducer import Observe

_END = -1  # event after the last collective of a step
_LOSS = -2  # event after the last collective of a forward pass; collectives outside units may follow
_MOST, _STEPS = 2**16, 4  # limits of the record: events (some megabytes) or steps, whichever is longer
_Size = Sequence[int | torch.SymInt]


def time_sharding(model: nn.Module, device: torch.device, *, copies: bool) -> None:
    """Time the waits of every unit of ``model``, and let them end with the gang's membership.

    On the CPU, the collectives of ``fully_shard`` block, so the call is the wait. On CUDA they run on separate streams;
    PyTorch hooks cannot see the waits between streams, which therefore count toward the phase in which they occur.

    ``copies``: whether gradients are also summed over replicas of the sharded model, as in HSDP.
    """
    if device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_TimedGather())
            module.set_custom_reduce_scatter(_TimedScatter(then_all_reduce=copies))
            if copies:
                module.set_all_reduce_hook(lambda _: mark_phase("compute"))  # called after the sum over copies


@final
class _TimedGather(AllGather):
    def allocate(self, size: _Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        work = start_collective(dist.all_gather_into_tensor, output_tensor, input_tensor, group=group)
        if async_op:
            return work
        work.wait()
        return None


@final
class _TimedScatter(ReduceScatter):
    def __init__(self, *, then_all_reduce: bool) -> None:
        self._then_all_reduce = then_all_reduce

    def allocate(self, size: _Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._then_all_reduce:  # the all-reduce follows even for unsharded copies; its hook ends the phase
            mark_phase("communication")
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        work = start_collective(dist.reduce_scatter_tensor, output_tensor, input_tensor, op=op, group=group)
        if async_op:
            return work
        work.wait()
        return None


@final
class UnitOrder:
    """Checks that all ranks of ``group`` run the units of ``model`` in the same order.

    In the first step, ranks compare each collective before it runs. Later, a rank compares its order with its own
    earlier steps, and waits for the other ranks only at a new order. Ranks with a known order do not take part, so the
    wait is limited to half the group's timeout. After many different orders, all ranks clear their records and start
    again.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._group = group
        self._names: list[str] = []
        self._next: dict[int, int] = {}  # next event, by the hash of the events before it
        self._is_first = True
        self._is_open = False
        self._sequence = self._count = self._longest = 0
        self._device = torch.device("cpu")
        for name, module in model.named_modules():
            units: list[Any] = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
            if isinstance(module, FSDPModule) and units:  # all units of a module share their collectives
                number, self._device = len(self._names), units[0].device
                module.set_custom_all_gather(_CheckedGather(units[0]._all_gather_comm, self, 2 * number))
                module.set_custom_reduce_scatter(_CheckedScatter(units[0]._reduce_scatter_comm, self, 2 * number + 1))
                self._names.append(name.removeprefix("model.") or "the model")  # prefix from CallingRoot
        model.register_forward_hook(self._check_loss_end)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Check that all ranks run the same collectives within the context, see :meth:`check_event`.

        An error also ends the step, since evaluation or a repeated step may run different collectives. A nested call,
        for one of several updates in a step, does nothing.
        """
        if self._is_open:
            yield
            return
        self._sequence, self._is_open = 0, True
        before = self._count
        try:
            yield
            self.check_event(_END)
            self._longest = max(self._longest, self._count - before)
            self._is_first = len(self._next) > max(_MOST, _STEPS * self._longest)  # the same on all ranks
            if self._is_first:
                self._next = {}
        finally:
            self._is_open = False

    def _check_loss_end(self, *_: object) -> None:
        self.check_event(_LOSS)

    def check_event(self, event: int) -> None:
        """Check that all ranks run ``event`` next.

        ``event``: twice the unit's index, plus 1 for a sum of gradients.

        Raises:
            ConfigError: another rank runs a different collective.
        """
        if not self._is_open:
            return
        self._count += 1
        if self._next.get(self._sequence) != event:
            if not (self._agrees_at_once(event) if self._is_first else self._wait_for_agreement(event)):
                raise self._build_order_error(event)
            self._next[self._sequence] = event
        self._sequence = hash((self._sequence, event))

    def _agrees_at_once(self, event: int) -> bool:
        bounds = torch.tensor([event, -event], device=self._device)
        start_collective(dist.all_reduce, bounds, op=dist.ReduceOp.MAX, group=self._group).wait()
        return bool((bounds[0] == -bounds[1]).item())  # True for the fake tensors of a rehearsal

    def _wait_for_agreement(self, event: int) -> bool:
        """Wait until all ranks reach the same new event, using the store that created the groups."""
        store = dist.distributed_c10d._get_default_store()
        key = f"order/{self._group.group_name}/{self._count}/{event}"
        if store.add(key, 1) == self._group.size():
            store.set(f"{key}/all", "1")
        try:
            store.wait([f"{key}/all"], self._timeout / 2)
        except (RuntimeError, TimeoutError):
            return False
        return True

    @property
    def _timeout(self) -> timedelta:
        """The group's timeout for collectives, which torch does not expose publicly."""
        backend: Any = self._group._get_backend(self._device)
        timeout: timedelta = backend.options._timeout
        return timeout

    def _build_order_error(self, event: int) -> ConfigError:
        if event in (_LOSS, _END):
            done = "has computed all units of the model, but other processes compute another one"
        else:
            done = f"{'sums gradients of' if event % 2 else 'computes'} {self._names[event // 2]}, but others do not"
        return ConfigError(
            f"this process {done}. All processes must gather the sharded units in the same order. Make every "
            "micro-batch compute all units; or make the module that selects between them a single unit, in "
            "Recipe.blocks or with a larger strategy.wrap_parameters; or use strategy=ddp or zero with "
            "strategy.find_unused_parameters=true."
        )


@final
class _CheckedGather(AllGather):
    def __init__(self, inner: AllGather, order: UnitOrder, event: int) -> None:
        self._inner, self._order, self._event = inner, order, event

    def allocate(self, size: _Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        self._order.check_event(self._event)
        return self._inner(output_tensor, input_tensor, group, async_op)


@final
class _CheckedScatter(ReduceScatter):
    def __init__(self, inner: ReduceScatter, order: UnitOrder, event: int) -> None:
        self._inner, self._order, self._event = inner, order, event

    def allocate(self, size: _Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        self._order.check_event(self._event)
        return self._inner(output_tensor, input_tensor, group, op, async_op)


@final
class OrderedScatters:
    """Reduce-scatters of all units of ``model`` with the fixed tree.

    ``group``: the ranks that train it. ``copies``: the ranks with the same shards, or None if there is one copy.
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup, copies: ProcessGroup | None = None, dealing: Dealing = "cyclic"
    ) -> None:
        self.dealing: Dealing = dealing
        units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        names = [name.removeprefix("model.") or "the model" for name in units]  # prefix from CallingRoot
        self._scatters = [_OrderedScatter(name, _Exchange(group, copies), dealing) for name in names]
        for module, scatter in zip(units.values(), self._scatters, strict=True):
            module.set_custom_reduce_scatter(scatter)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def begin_step(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step with ``micro_batches`` (0: only discarded passes) in ``nodes`` tree nodes."""
        for scatter in self._scatters:
            scatter.reset_sums(nodes, micro_batches, logical_ranks=logical_ranks)

    def end_pass(self, micro_batches: int) -> None:
        """Set the number of finished ``micro_batches``; units that skipped some will add zeros."""
        for scatter in self._scatters:
            scatter.done = micro_batches

    @contextmanager
    def observe_units(self, observe: Observe) -> Iterator[None]:
        """Call ``observe`` in this block with the gradients of each unit in each pass, before their sums.

        They are one tensor (shards, s), with padding of zeros.
        """
        for scatter in self._scatters:
            scatter.observe = observe
        try:
            yield
        finally:
            for scatter in self._scatters:
                scatter.observe = None

    @property
    def kept(self) -> list[Tensor]:
        """Partial sums, of any shapes, held by all units between micro-batches."""
        return [tensor for scatter in self._scatters for tensor in scatter.kept]


@final
class _OrderedScatter(ReduceScatter):
    """Sums one unit's gradients over micro-batches; the last call outputs this rank's shard.

    If a rank has several tree nodes, it computes them in order. Sharded nodes are summed as they are completed;
    unsharded ones must all be complete first, since the tree continues across ranks.
    """

    def __init__(self, name: str, exchange: _Exchange, dealing: Dealing) -> None:
        self._name, self._exchange, self._sums_shards = name, exchange, dealing == "block"
        self.observe: Observe | None = None
        """Called with the gradients of each pass; see :meth:`OrderedScatters.observe_units`."""
        self._nodes = self._leaves = 1  # this rank's nodes in a step, and leaves per node
        self._logical_ranks = exchange.ranks
        self._counter, self._sums = Counter(), list[Tensor]()  # of the current node, and of earlier nodes
        self._taken = 0  # number of micro-batches in the sums so far
        self.done = 0
        """Number of computed micro-batches of the step, whether they used this unit or not."""

    def reset_sums(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step with ``micro_batches`` (0: only discarded passes) in ``nodes`` tree nodes."""
        self._nodes, self._leaves, self._logical_ranks = nodes, micro_batches // nodes, logical_ranks
        self._counter, self._sums, self._taken, self.done = Counter(), [], 0, 0

    @property
    def kept(self) -> list[Tensor]:
        """Sums, of any shapes, of complete nodes, and partial sums of the current node."""
        return [*self._sums, *(tensor for tensors in self._counter.waiting for tensor in tensors)]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add gradients ``input_tensor`` (shards * s,); write the mean to ``output_tensor`` (s,)."""
        gradient = input_tensor.view(group.size(), -1)
        if self.observe is not None:
            gradient = self.observe(self._name, gradient)
        if self._leaves == 0:
            output_tensor.zero_()
            return
        ranks = self._exchange.ranks
        leaf = self._exchange.sum_of_part([gradient], ranks) if self._sums_shards else gradient.clone()
        for _ in range(self.done - self._taken):  # earlier micro-batches that did not compute the unit
            self._add_leaf(torch.zeros_like(leaf))
        self._add_leaf(leaf)
        if self._taken < self._nodes * self._leaves:
            output_tensor.zero_()
            return
        nodes, self._sums = self._sums, []
        all_nodes = Tree(self._logical_ranks, ranks).nodes
        part = nodes[0] if self._sums_shards else self._exchange.sum_of_part(nodes, all_nodes)
        output_tensor.copy_(self._exchange.gather_shard(part / self._logical_ranks)[: len(output_tensor)])

    def _add_leaf(self, leaf: Tensor) -> None:
        self._taken += 1
        self._counter.add([leaf])
        if self._taken % self._leaves:
            return
        ((node,),) = self._counter.waiting
        self._counter = Counter()
        if self._sums and self._sums_shards:
            self._sums[0] += node  # the number of nodes is odd, so they are summed in order, not as a tree
        else:
            self._sums.append(node)


@final
class _Exchange:
    """Sums one unit's gradients over all copies at once; each rank sums a part of its shard.

    ``group``: all ranks, with consecutive ranks for each model copy; ``copies``: the ranks with the same shard.
    """

    def __init__(self, group: ProcessGroup, copies: ProcessGroup | None) -> None:
        self._group, self._copies = group, copies
        self.ranks = group.size()

    def sum_of_part(self, rows: Sequence[Tensor], nodes: int) -> Tensor:
        """Sum the tree nodes of all ranks; return this rank's part of the sum.

        ``rows``: this rank's nodes, each (shards, s). ``nodes``: total number of nodes, assigned to ranks cyclically.
        """
        copies = self._copies.size() if self._copies else 1
        shards, length = rows[0].shape
        size = -(-length // copies)
        mine = rows[0].new_zeros(copies, shards, -(-nodes // self.ranks), size)
        for node, row in enumerate(rows):
            for copy, piece in enumerate(torch.split(row, size, dim=1)):
                mine[copy, :, node, : piece.shape[1]] = piece
        theirs_pns = torch.empty_like(mine.flatten(0, 1))
        start_collective(dist.all_to_all_single, theirs_pns, mine.flatten(0, 1), group=self._group).wait()
        return sum_level(theirs_pns.transpose(0, 1).flatten(0, 1)[:nodes].unbind())

    def gather_shard(self, part: Tensor) -> Tensor:
        """Gather this rank's shard, with padding at its end, from the parts on all copies."""
        if self._copies is None:
            return part
        shard = part.new_empty(self._copies.size() * len(part))
        start_collective(dist.all_gather_into_tensor, shard, part, group=self._copies).wait()
        return shard
