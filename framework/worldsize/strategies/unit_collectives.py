"""The collectives of the units of a sharded model: in one order on all ranks, and with sums in the fixed tree.

A part of a model that is gathered by itself must be computed by all ranks or by none: otherwise one rank's gather
would receive what another sends for a different part, and training would go on with a mixture of both. ``UnitOrder``
checks that all ranks run the collectives in one order, whatever their data are.

``OrderedScatters`` are the fixed tree of :mod:`worldsize.collectives.ordered` as reduce-scatters of a model sharded by
``fully_shard``.
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

from worldsize.collectives.ordered import Counter, Tree, sum_level
from worldsize.collectives.step_timer import started, wait
from worldsize.core import ConfigError, Dealing

_END = -1  # the event after the last collective of a step
_LOSS = -2  # the event after the last collective of a forward pass: others may follow that are of no unit
_MOST, _STEPS = 2**16, 4  # remember this many events (some megabytes), or this many steps if longer
_Size = Sequence[int | torch.SymInt]


@final
class UnitOrder:
    """The order of the collectives of all units of ``model`` in a step, the same on all ranks of ``group``.

    In its first step the ranks compare each collective before it runs. Later a rank compares its collectives with those
    of its own last step, which costs a look-up, and asks the others only where they differ. If these do not differ,
    they do not answer, so that the wait has half the timeout of the group. After many different orders all begin again.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._group = group
        self._names: list[str] = []
        self._next: dict[int, int] = {}  # the event that follows on a sequence of events, by the hash of that
        self._is_first = True
        self._is_open = False
        self._sequence = self._count = self._longest = 0
        self._device = torch.device("cpu")
        for name, module in model.named_modules():
            units: list[Any] = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
            if isinstance(module, FSDPModule) and units:  # all units of a module have the same collectives
                number, self._device = len(self._names), units[0].device
                module.set_custom_all_gather(_CheckedGather(units[0]._all_gather_comm, self, 2 * number))
                module.set_custom_reduce_scatter(_CheckedScatter(units[0]._reduce_scatter_comm, self, 2 * number + 1))
                self._names.append(name.removeprefix("model.") or "the model")  # in a CallingRoot
        model.register_forward_hook(self._after_loss)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Check the collectives inside the context, and at its end that no rank has more. Raises :meth:`check`'s error.

        A step that raises an error ends, too: evaluation, and a repeated step, may run other collectives. Within a step
        it does nothing: an update is part of the step that has several.
        """
        if self._is_open:
            yield
            return
        self._sequence, self._is_open = 0, True
        before = self._count
        try:
            yield
            self.check(_END)
            self._longest = max(self._longest, self._count - before)
            self._is_first = len(self._next) > max(_MOST, _STEPS * self._longest)  # alike on all ranks
            if self._is_first:
                self._next = {}
        finally:
            self._is_open = False

    def _after_loss(self, *_: object) -> None:
        self.check(_LOSS)

    def check(self, event: int) -> None:
        """Check the next collective, twice the unit's index, plus one if it sums gradients. Others wait for the same.

        Raises:
            ConfigError: another rank runs a different one.
        """
        if not self._is_open:
            return
        self._count += 1
        if self._next.get(self._sequence) != event:
            if not (self._agrees_at_once(event) if self._is_first else self._agrees(event)):
                raise self._differs(event)
            self._next[self._sequence] = event
        self._sequence = hash((self._sequence, event))

    def _agrees_at_once(self, event: int) -> bool:
        bounds = torch.tensor([event, -event], device=self._device)
        wait(started(dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._group, async_op=True)))
        return bool((bounds[0] == -bounds[1]).item())  # true of fakes, too

    def _agrees(self, event: int) -> bool:
        """Wait until all ranks have come to the same new event; the store is the one that made their groups."""
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
        """The longest wait of a collective of the group, to which torch gives no public access."""
        backend: Any = self._group._get_backend(self._device)
        timeout: timedelta = backend.options._timeout
        return timeout

    def _differs(self, event: int) -> ConfigError:
        if event in (_LOSS, _END):
            done = "has computed all its parts of the model when others compute one more"
        else:
            done = f"{'sums gradients of' if event % 2 else 'computes'} {self._names[event // 2]} where others do not"
        return ConfigError(
            f"this process {done}: each part is divided over processes, which must gather it in the same order. Let "
            "every micro-batch compute all of them, or make the module that chooses between parts a part by itself: "
            "name it in Recipe.blocks, or set a larger strategy.wrap_parameters; or use strategy=ddp or zero with "
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
        self._order.check(self._event)
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
        self._order.check(self._event)
        return self._inner(output_tensor, input_tensor, group, op, async_op)


@final
class OrderedScatters:
    """The reduce-scatters of all units of ``model``, in the fixed tree.

    ``group``: the ranks that train it; ``copies``: those with the same shards (None: there is one copy).
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup, copies: ProcessGroup | None = None, dealing: Dealing = "cyclic"
    ) -> None:
        self.dealing: Dealing = dealing
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._scatters = [_OrderedScatter(_Exchange(group, copies), dealing) for _ in units]
        for module, scatter in zip(units, self._scatters, strict=True):
            module.set_custom_reduce_scatter(scatter)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def begin(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step in which this rank adds up its micro-batches in ``nodes`` nodes; without any it adds nothing."""
        for scatter in self._scatters:
            scatter.begin(nodes, micro_batches, logical_ranks=logical_ranks)

    def end_pass(self, micro_batches: int) -> None:
        """Record that so many ``micro_batches`` of the step are done; units that were not computed add zeros."""
        for scatter in self._scatters:
            scatter.done = micro_batches

    @property
    def kept(self) -> list[Tensor]:
        """Partial sums, of any shapes, that all units keep between two micro-batches."""
        return [tensor for scatter in self._scatters for tensor in scatter.kept]


@final
class _OrderedScatter(ReduceScatter):
    """Sums the gradients of one unit's micro-batches; the last call returns this rank's shard of their mean.

    If a rank has several nodes of the tree, it computes one after the other. Shards are added up as they arrive;
    unsharded nodes must all be complete first, since the tree continues across ranks.
    """

    def __init__(self, exchange: _Exchange, dealing: Dealing) -> None:
        self._exchange, self._sums_shards = exchange, dealing == "block"
        self._nodes = self._leaves = 1  # this rank's nodes in a step, and the leaves of each
        self._logical_ranks = exchange.ranks
        self._counter, self._sums = Counter(), list[Tensor]()  # of the node in progress, and of earlier nodes
        self._taken = 0  # micro-batches of the step so far that are in the sums
        self.done = 0
        """Micro-batches of the step that have been computed, with this unit or without it."""

    def begin(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step in which this rank adds up its micro-batches in ``nodes`` nodes; without any it adds nothing."""
        self._nodes, self._leaves, self._logical_ranks = nodes, micro_batches // nodes, logical_ranks
        self._counter, self._sums, self._taken, self.done = Counter(), [], 0, 0

    @property
    def kept(self) -> list[Tensor]:
        """Sums, of any shapes, of the nodes that are complete, and partial ones of that in progress."""
        return [*self._sums, *(tensor for tensors in self._counter.waiting for tensor in tensors)]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add the unit's gradients ``input_tensor`` (shards * s,); write this rank's mean to ``output_tensor`` (s,)."""
        if self._leaves == 0:
            output_tensor.zero_()
            return
        gradient = input_tensor.view(group.size(), -1)
        ranks = self._exchange.ranks
        leaf = self._exchange.sum_of_part([gradient], ranks) if self._sums_shards else gradient.clone()
        for _ in range(self.done - self._taken):  # earlier ones that did not compute the unit
            self._add(torch.zeros_like(leaf))
        self._add(leaf)
        if self._taken < self._nodes * self._leaves:
            output_tensor.zero_()
            return
        nodes, self._sums = self._sums, []
        all_nodes = Tree(self._logical_ranks, ranks).nodes
        part = nodes[0] if self._sums_shards else self._exchange.sum_of_part(nodes, all_nodes)
        output_tensor.copy_(self._exchange.shard_of(part / self._logical_ranks)[: len(output_tensor)])

    def _add(self, leaf: Tensor) -> None:
        self._taken += 1
        self._counter.add([leaf])
        if self._taken % self._leaves:
            return
        ((node,),) = self._counter.waiting
        self._counter = Counter()
        if self._sums and self._sums_shards:
            self._sums[0] += node  # an odd number of nodes is added up from the left
        else:
            self._sums.append(node)


@final
class _Exchange:
    """Sums one unit's gradients over the ranks of all copies at once; each rank sums a part of its shard.

    ``group``: all ranks, where those of one copy of the model are consecutive; ``copies``: the ranks with the same
    shard.
    """

    def __init__(self, group: ProcessGroup, copies: ProcessGroup | None) -> None:
        self._group, self._copies = group, copies
        self.ranks = group.size()

    def sum_of_part(self, rows: Sequence[Tensor], nodes: int) -> Tensor:
        """Return this rank's part of the sum over all ranks of ``rows``, which are nodes of the tree: (shards, s).

        ``nodes``: those of all ranks, which deal them cyclically.
        """
        copies = self._copies.size() if self._copies else 1
        shards, length = rows[0].shape
        size = -(-length // copies)
        mine = rows[0].new_zeros(copies, shards, -(-nodes // self.ranks), size)
        for node, row in enumerate(rows):
            for copy, piece in enumerate(torch.split(row, size, dim=1)):
                mine[copy, :, node, : piece.shape[1]] = piece
        theirs_pns = torch.empty_like(mine.flatten(0, 1))
        wait(dist.all_to_all_single(theirs_pns, mine.flatten(0, 1), group=self._group, async_op=True))
        return sum_level(theirs_pns.transpose(0, 1).flatten(0, 1)[:nodes].unbind())

    def shard_of(self, part: Tensor) -> Tensor:
        """Concatenate the parts of all copies to this rank's shard, with padding at its end."""
        if self._copies is None:
            return part
        shard = part.new_empty(self._copies.size() * len(part))
        wait(dist.all_gather_into_tensor(shard, part, group=self._copies, async_op=True))
        return shard
