"""A model whose tensors are made once it is known which part of each this process holds."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from worldsize.record.determinism import generators_kept
from worldsize.strategies.deferred.draws import InitialStates, SeededError
from worldsize.strategies.deferred.fakes import CannotDeferError, bytes_of, own_attributes, with_numbers
from worldsize.strategies.deferred.recorder import Recorder
from worldsize.strategies.deferred.tape import Deferred, Devices, Slot, Tape, like, slots_of

_logger = logging.getLogger(__name__)
_CLASSES = (Tensor, nn.Parameter, FakeTensor)  # any other would be lost
_SMALL = 16 * 2**20  # bytes that are not worth a warning
_PART = 1 / 4  # of the model
_TEMPORARY = 4  # temporary memory of an initialisation, in multiples of the largest tensor


@final
@dataclass(frozen=True)
class Footprint:
    """The bytes of a model, and those that each process needs of it at once.

    Attributes:
        model: Bytes of the model's tensors.
        made: Bytes of tensors that exist from the start: the model's, and those from which weights are made.
        largest: Bytes of the largest tensor that is still to be made.
        at_once: Most bytes that making one tensor takes, including the tensor itself.
    """

    model: int
    made: int
    largest: int
    at_once: int

    @staticmethod
    def of(there: Iterable[Tensor], borrowed: Iterable[Tensor], waiting: Collection[Deferred], tape: Tape) -> Footprint:
        """Measure a model.

        Args:
            there: The model's tensors that have memory, of any shapes.
            borrowed: Other tensors, of any shapes, from which the model's are made.
            waiting: The model's tensors that are still to be made.
            tape: How they are made.
        """
        own = _storages(there)
        sizes = {each.storage: tape.nbytes[each.storage] for each in waiting}
        return Footprint(
            model=sum(own.values()) + sum(sizes.values()),
            made=sum((own | _storages(borrowed)).values()),
            largest=max(sizes.values(), default=0),
            at_once=max((tape.needs(each) for each in waiting), default=0),
        )

    @property
    def peak(self) -> int:
        """Peak bytes of a process, in addition to its part of the model."""
        return self.made + self.at_once

    def complaint(self) -> str | None:
        """Return why a process holds much of the model at once, and the remedy; None: it does not."""
        together = max(0, self.at_once - _TEMPORARY * self.largest)
        if self.made + together <= max(_SMALL, _PART * self.model):
            return None
        if together > self.made:
            return "its constructor computes weights from each other. Let it initialise one at a time."
        return (
            "its constructor makes them by itself, for example from files. Let modules make their weights on the CPU "
            "by torch.nn.init, and name files that have weights in init_from."
        )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each piece of memory that ``tensors`` are in."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = 0 if storage.device.type == "meta" else storage.nbytes()
        else:
            sizes[id(tensor)] = bytes_of(tensor)
    return sizes


def _all(_: Slot) -> bool:
    return True


@final
@dataclass(frozen=True)
class _Refusal:
    """The reason why a model cannot be deferred, without the traceback, which would keep its tensors alive.

    Attributes:
        reason: What the constructor does.
        remedy: How to change the constructor.
        nbytes: Bytes of the tensors that it had made by then, a lower bound.
        is_seeded: Whether it can be deferred if random numbers are drawn twice.
    """

    reason: str
    remedy: str
    nbytes: int
    is_seeded: bool

    def log(self, level: int) -> None:
        """Log that every process makes the whole model."""
        _logger.log(
            level,
            "each process makes the whole model, at least %.2f GiB, before it keeps its part, since %s. %s",
            self.nbytes / 2**30,
            self.reason,
            self.remedy,
        )


@final
@dataclass(frozen=True)
class DeferredModel:
    """A model, some or all of whose tensors are on the meta device until :meth:`fill`.

    Attributes:
        model: The model, to be sharded before it is filled.
        tape: How its tensors are made.
        tensors: The tensors to be made, by their place.
        begin: Initial states of the generators from which they are drawn.
    """

    model: nn.Module
    tape: Tape
    tensors: dict[Slot, Deferred]
    begin: InitialStates

    @staticmethod
    def build(make: Callable[[], nn.Module], *, warns: bool = True) -> DeferredModel:
        """Describe the model that ``make`` returns, with its tensors on the meta device.

        A model that cannot be described, for example because its constructor keeps weights outside of its modules, is
        made completely, with the same values. ``make`` is called up to three times.

        Args:
            make: Returns the model, on the CPU.
            warns: Whether to warn about the cost if each process makes much of the model.
        """
        level = logging.WARNING if warns else logging.DEBUG
        begin = InitialStates.now()
        outcome = _described(make, draws_twice=False, level=level)
        if isinstance(outcome, _Refusal) and outcome.is_seeded:
            begin.restore()
            outcome = _described(make, draws_twice=True, level=level)
        if isinstance(outcome, DeferredModel):
            return outcome
        begin.restore()
        outcome.log(level)
        gc.collect()  # tensors of a failed attempt
        return DeferredModel(make(), Tape(), {}, InitialStates.now())

    def fill(
        self, device: torch.device, holds: Callable[[Slot], bool] = _all, *, shards: torch.device | None = None
    ) -> None:
        """Make the tensors one by one on the host; this process keeps its own part of each on ``device``.

        Afterwards the random generators have the states that making the whole model would leave, whatever has been
        drawn since it was built. Within :func:`filled_with` the tensors have no values, and within
        :func:`state_follows` those of the model's state are no numbers, and nothing is drawn for them.

        Args:
            device: Device of the tensors.
            holds: Returns whether this process holds a part of the tensor in a place.
            shards: Device of shards; None: ``device``.
        """
        self.begin.restore()
        devices = Devices(full=device, shards=shards or device)
        fakes, follow = _fakes.get(), _saved(self.model) if _follows.get() else set[int]()
        places: dict[Deferred, list[Slot]] = {}
        scratch: dict[Deferred, list[Slot]] = {}
        for slot, described in self.tensors.items():
            if slot.tensor.is_meta and holds(slot):
                chosen = scratch if id(slot.tensor) in follow else places
                chosen.setdefault(described, []).append(slot)
        for described in self.tape.in_order(places):
            value = self.tape.value(described) if fakes is None else _without_numbers(described, fakes)
            _put(value, places[described], devices)
        for described, slots in scratch.items():
            divided = all(isinstance(slot.tensor, DTensor) for slot in slots)  # else the memory of the whole is kept
            value = _no_numbers(described)
            _put(value if divided else described.scratch().copy_(value), slots, devices)
        if fakes is None and not follow:
            self.tape.draw_all()


def _no_numbers(described: Deferred) -> Tensor:
    """Return NaN in the same shape, which takes no memory and shows if anything is computed from it; 0 of integers."""
    value = math.nan if described.dtype.is_floating_point or described.dtype.is_complex else 0
    return torch.full((), value, dtype=described.dtype).expand(described.size)


def _put(value: Tensor, slots: Sequence[Slot], devices: Devices) -> None:
    by_tensor: dict[int, list[Slot]] = {}  # a tied parameter has several places
    for slot in slots:
        by_tensor.setdefault(id(slot.tensor), []).append(slot)
    for same in by_tensor.values():
        devices.put(value, same)


def _saved(model: nn.Module) -> set[int]:
    """Return the ids of the tensors of ``model`` that its state has as they are."""
    return {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}


_follows: ContextVar[bool] = ContextVar("_follows", default=False)
_fakes: ContextVar[FakeTensorMode | None] = ContextVar("_fakes", default=None)


@contextmanager
def state_follows() -> Iterator[None]:
    """Make no weights within the context, for models whose state is loaded before anything else is done with them.

    Drawing those of a model of 70 B parameters would take every process minutes.
    """
    token = _follows.set(True)
    try:
        yield
    finally:
        _follows.reset(token)


@contextmanager
def filled_with(mode: FakeTensorMode) -> Iterator[None]:
    """Fill models within the context with fakes of ``mode``, which take no memory, for rehearsals."""
    token = _fakes.set(mode)
    try:
        yield
    finally:
        _fakes.reset(token)


def _without_numbers(described: Deferred, mode: FakeTensorMode) -> Tensor:
    with mode:
        return described.scratch()


def describe(make: Callable[[], nn.Module]) -> None:
    """Describe the model that ``make`` returns, without making it, since what torch does once is fast the next time.

    The generators of the process keep their states.
    """
    with generators_kept():
        _described(make, draws_twice=False, level=logging.DEBUG)


def _described(make: Callable[[], nn.Module], *, draws_twice: bool, level: int) -> DeferredModel | _Refusal:
    """Run ``make`` with fakes; log at ``level`` why processes hold much of the model nevertheless."""
    recorder = Recorder(draws_twice=draws_twice)
    dtype, needs_gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with recorder:
            model = make()
        begin = recorder.finish(slot.tensor for slot in slots_of(model))
        tensors = _emptied(model, recorder)
        _check_kept(recorder)
    except Exception as error:  # any: the constructor is anyone's code, and may fail for what stands in its way
        recorder.forget()
        torch.set_default_dtype(dtype)  # the constructor may not have come to where it sets it back
        torch.set_grad_enabled(needs_gradients)
        return _Refusal(
            reason=str(error) if isinstance(error, CannotDeferError) else f"{type(error).__name__}: {error}",
            remedy=error.remedy if isinstance(error, CannotDeferError) else "Let it do without what fails.",
            nbytes=sum(storage.nbytes() for storage in recorder.fakes.in_use()),
            is_seeded=isinstance(error, SeededError),
        )
    there = [slot.tensor for slot in slots_of(model) if slot not in tensors]
    footprint = Footprint.of(there, recorder.borrowed.tensors(), set(tensors.values()), recorder.tape)
    if (complaint := footprint.complaint()) is not None:
        _logger.log(
            level,
            "each process has %.2f GiB of the model's %.2f GiB at once before it keeps its part, since %s",
            footprint.peak / 2**30,
            footprint.model / 2**30,
            complaint,
        )
    return DeferredModel(model, recorder.tape, tensors, begin)


def _check_kept(recorder: Recorder) -> None:
    """Raise CannotDeferError if someone still has a fake."""
    if recorder.fakes.in_use():
        gc.collect()
        if recorder.fakes.in_use():
            raise CannotDeferError(
                "its constructor keeps a tensor elsewhere than as an attribute of a module",
                "Let modules have their weights as parameters or buffers.",
            )


def _emptied(model: nn.Module, recorder: Recorder) -> dict[Slot, Deferred]:
    """Put tensors on the meta device in place of fakes; return what is to be made in each place."""
    tensors: dict[Slot, Deferred] = {}
    ordinary: dict[int, Tensor] = {}  # by the fake, which several modules may share
    places = list(slots_of(model))
    for slot in places:
        if (described := recorder.fakes.describe(slot.tensor)) is not None:
            tensors[slot] = described
        if id(slot.tensor) not in ordinary:
            ordinary[id(slot.tensor)] = _ordinary(slot.tensor, is_deferred=described is not None)
    if len({described.storage for described in tensors.values()}) < len(set(tensors.values())):
        raise CannotDeferError(
            "its constructor lets tensors that differ share memory", "Let it clone what is a part of another tensor."
        )
    for slot in places:
        if ordinary[id(slot.tensor)] is not slot.tensor:
            slot.set(ordinary[id(slot.tensor)])
    return tensors


def _ordinary(tensor: Tensor, *, is_deferred: bool) -> Tensor:
    """Return the replacement of ``tensor`` if it is a fake: a meta tensor if it is yet to be made.

    Raises:
        CannotDeferError: the tensor has a property that would be lost.
    """
    made = with_numbers(tensor)
    if made is tensor and not is_deferred:
        return tensor
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise CannotDeferError("its constructor gives a hook to a parameter", "Give it in the first call of forward.")
    if tensor.is_leaf and tensor.grad is not None:
        raise CannotDeferError("its constructor computes gradients", "Compute them in training alone.")
    if type(tensor) not in _CLASSES:
        raise CannotDeferError(
            f"its constructor makes tensors of the class {type(tensor).__name__}", "Let them be of torch's own classes."
        )
    if is_deferred:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return like(tensor, made, leave_out=own_attributes())
