"""A model with tensors that are created only after sharding, when each rank's part is known."""

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

from worldsize.seeds import keep_generators
from worldsize.strategies.deferred.draws import InitialStates, SeededError
from worldsize.strategies.deferred.fakes import CannotDeferError, count_bytes, own_attributes, unwrap_fake
from worldsize.strategies.deferred.recorder import Recorder
from worldsize.strategies.deferred.tape import Deferred, Devices, Slot, Tape, copy_attributes, iterate_slots

_logger = logging.getLogger(__name__)
_CLASSES = (Tensor, nn.Parameter, FakeTensor)  # other classes would be lost
_SMALL = 16 * 2**20  # bytes: smaller amounts are not worth a warning
_PART = 1 / 4  # fraction of the model that is worth a warning
_TEMPORARY = 4  # allowed temporary memory, in multiples of the largest tensor


@final
@dataclass(frozen=True)
class Footprint:
    """The size of a model, and the peak memory that each process needs to create it.

    Attributes:
        model: Bytes of the model's tensors.
        made: Bytes of tensors that already exist: some of the model's, and inputs of weights.
        largest: Bytes of the largest deferred tensor.
        at_once: Maximum bytes needed to create one tensor, including the tensor itself.
    """

    model: int
    made: int
    largest: int
    at_once: int

    @staticmethod
    def from_tensors(
        there: Iterable[Tensor], borrowed: Iterable[Tensor], waiting: Collection[Deferred], tape: Tape
    ) -> Footprint:
        """Measure a model.

        Args:
            there: The model's existing tensors, of any shapes.
            borrowed: Other tensors, of any shapes, that the model's are computed from.
            waiting: The model's deferred tensors.
            tape: The recorded operations that create them.
        """
        own = _storages(there)
        sizes = {each.storage: tape.nbytes[each.storage] for each in waiting}
        return Footprint(
            model=sum(own.values()) + sum(sizes.values()),
            made=sum((own | _storages(borrowed)).values()),
            largest=max(sizes.values(), default=0),
            at_once=max((tape.count_needed_bytes(each) for each in waiting), default=0),
        )

    @property
    def peak(self) -> int:
        """Peak bytes per process, in addition to its part of the model."""
        return self.made + self.at_once

    def complaint(self) -> str | None:
        """Return why a process holds much of the model at once, and a remedy; None if it does not."""
        together = max(0, self.at_once - _TEMPORARY * self.largest)
        if self.made + together <= max(_SMALL, _PART * self.model):
            return None
        if together > self.made:
            return "the constructor computes weights from other weights. Initialize one weight at a time."
        return (
            "the constructor creates weights outside torch.nn.init, for example from files. Create weights on the CPU "
            "with torch.nn.init, and set init_from to load files."
        )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each storage of ``tensors``, keyed by address or id."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = 0 if storage.device.type == "meta" else storage.nbytes()
        else:
            sizes[id(tensor)] = count_bytes(tensor)
    return sizes


def _accept_slot(_: Slot) -> bool:
    return True


@final
@dataclass(frozen=True)
class _Refusal:
    """The reason why a model cannot be deferred; a traceback would keep tensors alive.

    Attributes:
        reason: The unsupported action of the constructor.
        remedy: How to fix the constructor.
        nbytes: Bytes of the tensors created so far, a lower bound of the model's size.
        is_seeded: Whether the model can be deferred if random numbers are generated twice.
    """

    reason: str
    remedy: str
    nbytes: int
    is_seeded: bool

    def log_refusal(self, level: int) -> None:
        """Log that every process creates the whole model."""
        _logger.log(
            level,
            "each process creates the full model (at least %.2f GiB) before sharding, because %s. %s",
            self.nbytes / 2**30,
            self.reason,
            self.remedy,
        )


@final
@dataclass(frozen=True)
class DeferredModel:
    """A model, some or all of whose tensors are on the meta device until :meth:`fill_tensors`.

    Attributes:
        model: The model, to be sharded before it is filled.
        tape: The recorded operations that create its tensors.
        tensors: The deferred tensors by slot.
        begin: Initial states of the random generators.
    """

    model: nn.Module
    tape: Tape
    tensors: dict[Slot, Deferred]
    begin: InitialStates

    @staticmethod
    def from_factory(make: Callable[[], nn.Module], *, warns: bool = True) -> DeferredModel:
        """Describe the model that ``make`` returns, with its tensors on the meta device.

        A model that cannot be deferred, for example because its constructor keeps weights outside of its modules, is
        created as a whole, with the same values. ``make`` is called up to three times.

        Args:
            make: Returns the model, on the CPU.
            warns: Whether to warn if each process has to create much of the model at once.
        """
        level = logging.WARNING if warns else logging.DEBUG
        begin = InitialStates.capture_states()
        outcome = _trace_model(make, draws_twice=False, level=level)
        if isinstance(outcome, _Refusal) and outcome.is_seeded:
            begin.restore()
            outcome = _trace_model(make, draws_twice=True, level=level)
        if isinstance(outcome, DeferredModel):
            return outcome
        begin.restore()
        outcome.log_refusal(level)
        gc.collect()  # free the tensors of failed attempts
        return DeferredModel(make(), Tape(), {}, InitialStates.capture_states())

    def fill_tensors(
        self, device: torch.device, holds: Callable[[Slot], bool] = _accept_slot, *, shards: torch.device | None = None
    ) -> None:
        """Create the tensors one by one on the host; keep this process's part of each on ``device``.

        Afterwards, the random generators have the same states as if the whole model had been created, regardless of
        their use since :meth:`from_factory`. Within :func:`fill_with_fakes`, the tensors are fakes. Within
        :func:`state_follows`, tensors in the model's state dict are NaN, and random numbers are not generated.

        Args:
            device: Device of the tensors.
            holds: Returns whether this process holds a part of the tensor in a slot.
            shards: Device of shards, or None for ``device``.
        """
        self.begin.restore()
        devices = Devices(full=device, shards=shards or device)
        fakes, follow = _fakes.get(), _collect_saved_ids(self.model) if _follows.get() else set[int]()
        places: dict[Deferred, list[Slot]] = {}
        scratch: dict[Deferred, list[Slot]] = {}
        for slot, described in self.tensors.items():
            if slot.tensor.is_meta and holds(slot):
                chosen = scratch if id(slot.tensor) in follow else places
                chosen.setdefault(described, []).append(slot)
        for described in self.tape.sort_tensors(places):
            value = self.tape.create_tensor(described) if fakes is None else _create_fake(described, fakes)
            _place_value(value, places[described], devices)
        for described, slots in scratch.items():
            divided = all(isinstance(slot.tensor, DTensor) for slot in slots)  # others need memory of their full size
            value = _no_numbers(described)
            _place_value(value if divided else described.create_scratch().copy_(value), slots, devices)
        if fakes is None and not follow:
            self.tape.draw_all()


def _no_numbers(described: Deferred) -> Tensor:
    """Return NaNs (integers: 0), expanded without memory, to expose values never loaded."""
    value = math.nan if described.dtype.is_floating_point or described.dtype.is_complex else 0
    return torch.full((), value, dtype=described.dtype).expand(described.size)


def _place_value(value: Tensor, slots: Sequence[Slot], devices: Devices) -> None:
    by_tensor: dict[int, list[Slot]] = {}  # a tied parameter has several slots
    for slot in slots:
        by_tensor.setdefault(id(slot.tensor), []).append(slot)
    for same in by_tensor.values():
        devices.fill_slots(value, same)


def _collect_saved_ids(model: nn.Module) -> set[int]:
    """Return the ids of tensors that the model's state dict contains as the same objects."""
    return {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}


_follows: ContextVar[bool] = ContextVar("_follows", default=False)
_fakes: ContextVar[FakeTensorMode | None] = ContextVar("_fakes", default=None)


@contextmanager
def state_follows() -> Iterator[None]:
    """Skip weight initialization within the context, for models whose state is loaded next.

    Generating the weights of a model with 70 B parameters would take every process minutes.
    """
    token = _follows.set(True)
    try:
        yield
    finally:
        _follows.reset(token)


@contextmanager
def fill_with_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Fill models within the context with fake tensors of ``mode``, for rehearsals."""
    token = _fakes.set(mode)
    try:
        yield
    finally:
        _fakes.reset(token)


def _create_fake(described: Deferred, mode: FakeTensorMode) -> Tensor:
    with mode:
        return described.create_scratch()


def describe(make: Callable[[], nn.Module]) -> None:
    """Trace the model of ``make`` and discard it, to trigger torch's one-time initialization.

    The states of the process's random generators do not change.
    """
    with keep_generators():
        _trace_model(make, draws_twice=False, level=logging.DEBUG)


def _trace_model(make: Callable[[], nn.Module], *, draws_twice: bool, level: int) -> DeferredModel | _Refusal:
    """Run ``make`` with fakes; log at ``level`` if processes still hold much of the model."""
    recorder = Recorder(draws_twice=draws_twice)
    dtype, needs_gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with recorder:
            model = make()
        begin = recorder.finish_recording(slot.tensor for slot in iterate_slots(model))
        tensors = _replace_fakes(model, recorder)
        _check_kept(recorder)
    except Exception as error:  # any exception: user code may fail with fakes
        recorder.restore_generators()
        torch.set_default_dtype(dtype)  # the constructor may not have restored it
        torch.set_grad_enabled(needs_gradients)
        return _Refusal(
            reason=str(error)
            if isinstance(error, CannotDeferError)
            else f"the constructor raised {type(error).__name__}: {error}",
            remedy=error.remedy if isinstance(error, CannotDeferError) else "Remove the failing operation.",
            nbytes=sum(storage.nbytes() for storage in recorder.fakes.find_used_storages()),
            is_seeded=isinstance(error, SeededError),
        )
    there = [slot.tensor for slot in iterate_slots(model) if slot not in tensors]
    footprint = Footprint.from_tensors(there, recorder.borrowed.list_tensors(), set(tensors.values()), recorder.tape)
    if (complaint := footprint.complaint()) is not None:
        _logger.log(
            level,
            "each process allocates %.2f GiB of the model's %.2f GiB before sharding, because %s",
            footprint.peak / 2**30,
            footprint.model / 2**30,
            complaint,
        )
    return DeferredModel(model, recorder.tape, tensors, begin)


def _check_kept(recorder: Recorder) -> None:
    """Raise CannotDeferError if anything still refers to a fake."""
    if recorder.fakes.find_used_storages():
        gc.collect()
        if recorder.fakes.find_used_storages():
            raise CannotDeferError(
                "the constructor stores a tensor outside of module attributes",
                "Register weights as parameters or buffers.",
            )


def _replace_fakes(model: nn.Module, recorder: Recorder) -> dict[Slot, Deferred]:
    """Replace fakes with meta tensors; return the deferred tensor for each slot."""
    tensors: dict[Slot, Deferred] = {}
    ordinary: dict[int, Tensor] = {}  # keyed by fake, since several modules may share it
    places = list(iterate_slots(model))
    for slot in places:
        if (described := recorder.fakes.describe(slot.tensor)) is not None:
            tensors[slot] = described
        if id(slot.tensor) not in ordinary:
            ordinary[id(slot.tensor)] = _ordinary(slot.tensor, is_deferred=described is not None)
    if len({described.storage for described in tensors.values()}) < len(set(tensors.values())):
        raise CannotDeferError(
            "the constructor creates different tensors that share memory", "Clone views of other tensors."
        )
    for slot in places:
        if ordinary[id(slot.tensor)] is not slot.tensor:
            slot.set_tensor(ordinary[id(slot.tensor)])
    return tensors


def _ordinary(tensor: Tensor, *, is_deferred: bool) -> Tensor:
    """Return the replacement of a fake ``tensor``: a meta tensor if it is deferred.

    Raises:
        CannotDeferError: the tensor has a property that would be lost.
    """
    made = unwrap_fake(tensor)
    if made is tensor and not is_deferred:
        return tensor
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise CannotDeferError(
            "the constructor registers a hook on a parameter", "Register it in the first call of forward."
        )
    if tensor.is_leaf and tensor.grad is not None:
        raise CannotDeferError("the constructor computes gradients", "Compute gradients only during training.")
    if type(tensor) not in _CLASSES:
        raise CannotDeferError(
            f"the constructor creates tensors of class {type(tensor).__name__}", "Use torch's built-in tensor classes."
        )
    if is_deferred:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return copy_attributes(tensor, made, leave_out=own_attributes())
