"""Tracks asynchronous calls until a rank waits for them, and reports the creation of process groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_leaves


@final
class PendingCalls:
    """The calls of a rank by what it may wait for: torch's handle, or the tensor of a functional collective."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Work, int] = weakref.WeakKeyDictionary()
        self._sources: weakref.WeakKeyDictionary[Work, int] = weakref.WeakKeyDictionary()
        self._made: dict[int, int] = {}  # by the address of a storage
        self._last: Work | None = None  # kept until the caller has received it

    def add(self, number: int, result: Any, source: int | None) -> None:
        """Record what call ``number`` returned; ``source``: the index in the group of a message's sender."""
        self._last = None
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.ScriptObject) and str(leaf._type()).endswith(".Work"):
                self._last = work = Work.unbox(leaf)
                self._numbers[work] = number
                if source is not None:
                    self._sources[work] = source
            elif isinstance(leaf, Tensor):
                self._made[leaf.untyped_storage()._cdata] = number

    def number(self, work: Work) -> int | None:
        """Return the number of the call that returned ``work``; None if it was not recorded."""
        if work is self._last:
            self._last = None
        return self._numbers.get(work)

    def making(self, tensor: Tensor) -> int | None:
        """Return the number of the pending call that fills ``tensor``, of any shape; None: none does."""
        return self._made.pop(tensor.untyped_storage()._cdata, None)

    def source(self, work: Work) -> int:
        """Return the index in the group of a received message's sender, 0 if unknown."""
        return self._sources.get(work, 0)


@contextmanager
def waits_watched(pending: PendingCalls, report: Callable[[int | None], None]) -> Iterator[None]:
    """Call ``report`` with the number of each call that is waited for, and set the sender of received messages."""
    with ExitStack() as stack:
        for kind in _kinds_of(Work):
            if "wait" in vars(kind):
                stack.enter_context(patch.object(kind, "wait", _waiting(kind.wait, pending, report)))
        original = Work._source_rank

        def source(work: Work) -> int:
            try:
                return int(original(work))
            except RuntimeError:  # of the fake group
                return pending.source(work)

        stack.enter_context(patch.object(Work, "_source_rank", source))
        yield


def _waiting(original: Any, pending: PendingCalls, report: Callable[[int | None], None]) -> Any:
    def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
        report(pending.number(work))
        return original(work, *args, **kwargs)

    return wait


def _kinds_of(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    below: list[type[Any]] = kind.__subclasses__()
    for each in below:
        yield from _kinds_of(each)


class _GroupMade(Protocol):
    def __call__(self, members: Sequence[int] | None, *, is_local: bool) -> None: ...


@contextmanager
def groups_watched(report: _GroupMade) -> Iterator[None]:
    """Call ``report`` with each process group before its creation: its members, and whether only they create it."""
    original = dist.distributed_c10d._new_group_with_tag

    def make(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> ProcessGroup | Any:
        report(ranks, is_local=bool(kwargs.get("use_local_synchronization", False) or (len(args) > 4 and args[4])))
        return original(ranks, *args, **kwargs)

    with patch.object(dist.distributed_c10d, "_new_group_with_tag", make):
        yield
