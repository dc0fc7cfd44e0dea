"""Checks that all ranks run the collectives of a sharded model in one order, whatever their data are.

A part of a model that is gathered by itself must be computed by all ranks or by none: otherwise one rank's gather would
receive what another sends for a different part, and training would go on with a mixture of both.
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

from worldsize.core import ConfigError
from worldsize.dist.step_timer import started, wait

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
