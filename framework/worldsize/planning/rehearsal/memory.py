"""Counts the bytes of every tensor that one rank makes and frees, and names what is there when most are."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldsize.collectives.per_rank import local
from worldsize.core import StateDict

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations")
"""What memory is for, in the order of a report; activations are all that is nothing else."""


@final
@dataclass(frozen=True)
class Peak:
    """The moment at which a rank holds most.

    Attributes:
        nbytes: Bytes of all tensors.
        parts: Bytes by what they are for, one of ``PARTS``.
    """

    nbytes: int
    parts: Mapping[str, int]


@final
class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of all tensors that are made within, until they are freed.

    What a storage is for is often known later than it is made: a gradient is one when the optimizer takes it. So sizes
    are kept in order, and read again once all is known.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes: list[tuple[int, int]] = []  # number of a storage, and bytes more or less
        self._labels: dict[int, str] = {}
        self._numbers: dict[int, int] = {}  # by the address of a storage that lives
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        self._owns: Callable[[FakeTensor], bool] | None = None
        self._made = 0
        self._built = 0  # changes before the first step
        self._trained: int | None = None  # changes before the evaluation

    @contextmanager
    def recording(self, owns: Callable[[FakeTensor], bool] | None = None) -> Iterator[None]:
        """Follow what is made within; ``owns`` tells which fakes are the rank's tensors; None: they are real."""
        self._owns = owns
        with ExitStack() as stack:
            hooks = (
                register_optimizer_step_pre_hook(self._before_update),
                register_optimizer_step_post_hook(self._after_update),
            )
            for hook in hooks:
                stack.callback(hook.remove)
            stack.enter_context(self._resizes_seen())
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come again, as the rank's own tensors
        made = func(*args, **kwargs or {})
        self.see(made)
        return made

    def see(self, tree: Any) -> None:
        """Count the tensors of ``tree``, which no operator of torch has made within."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and self._is_own(leaf):
                self._see(leaf.untyped_storage())

    def _is_own(self, tensor: Tensor) -> bool:
        """Tell whether the rank computes with it: it is no fake by which torch finds out the sizes of others."""
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return False
        if isinstance(tensor, FakeTensor):
            return self._owns is not None and self._owns(tensor)
        return self._owns is None

    def _see(self, storage: UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._numbers:
            self._made += 1
            self._numbers[address] = self._made
            self._alive[address] = weakref.ref(storage, partial(self._freed, address))
        number, nbytes = self._numbers[address], storage.nbytes()
        if nbytes != self._sizes.get(number, 0):
            self._changes.append((number, nbytes - self._sizes.get(number, 0)))
            self._sizes[number] = nbytes

    def _freed(self, address: int, _: object) -> None:
        del self._alive[address]
        number = self._numbers.pop(address)
        self._changes.append((number, -self._sizes.pop(number, 0)))

    @contextmanager
    def _resizes_seen(self) -> Iterator[None]:
        """See storages that change their size, as FSDP's do when a unit is gathered: no operator of torch does that."""
        resize = UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._numbers:
                self._see(storage)

        UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    # ------------------------------------------------------------ what it is for

    def label_state(self, state: StateDict) -> None:
        """Learn from a replica's state which storages are buffers, and which parameters no optimizer has stepped."""
        self._label("buffers", state["model"].values())

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._label("parameters", parameters)
        self._label("gradients", [each.grad for each in parameters if each.grad is not None])

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._label("optimizer", tree_leaves(list(optimizer.state.values())))

    def _label(self, part: str, tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                number = self._numbers.get(local(tensor).untyped_storage()._cdata)
                if number is not None:
                    self._labels.setdefault(number, part)

    def trains(self) -> None:
        """Note that the replica is built here, and training begins."""
        self._built = len(self._changes)

    def evaluates(self) -> None:
        """Note that training ends here, and an evaluation begins."""
        self._trained = self._trained or len(self._changes)

    def peak(self) -> Peak:
        """Return the moment of training at which most was there."""
        return self._peak(self._changes[: self._trained], after=self._built)

    def evaluation_peak(self) -> Peak | None:
        """Return the moment of the evaluation at which most was there; None: nothing was evaluated."""
        return None if self._trained is None else self._peak(self._changes, after=self._trained)

    def _peak(self, changes: Sequence[tuple[int, int]], after: int = 0) -> Peak:
        most, best, now = 0, -1, 0
        for place, (_, change) in enumerate(changes):
            now += change
            if now > most and place >= after:
                most, best = now, place
        parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        for number, change in changes[: best + 1]:
            parts[self._labels.get(number, "activations")] += change
        return Peak(most, dict(parts))
