"""A model whose tensors are made when it is known which part of each this process holds."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from worldsize.reproducibility.seeds import GeneratorStates
from worldsize.strategies.deferred.draws import SeededError
from worldsize.strategies.deferred.fakes import CannotDeferError, bytes_of, own_attributes, with_numbers
from worldsize.strategies.deferred.recorder import Recorder
from worldsize.strategies.deferred.tape import Deferred, Tape

_logger = logging.getLogger(__name__)
_HOST = torch.device("cpu")


@final
@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a module, which stays the same when the module is sharded."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        tensor: Tensor = getattr(self.module, self.name)
        return tensor

    @property
    def moves(self) -> bool:
        """Whether the tensor moves with its module to another device."""
        return self.name in self.module._parameters or self.name in self.module._buffers


def _all(_: Slot) -> bool:
    return True


@final
@dataclass(frozen=True)
class DeferredModel:
    """A model, some or all of whose tensors are on the meta device until :meth:`fill`.

    Attributes:
        model: The model, to be sharded before it is filled.
        tape: How its tensors are made.
        tensors: What is to be made, by where it goes.
    """

    model: nn.Module
    tape: Tape
    tensors: dict[Slot, Deferred]

    @staticmethod
    def build(make: Callable[[], nn.Module]) -> DeferredModel:
        """Describe the model that ``make`` makes, with its tensors on the meta device.

        What cannot be described, such as a constructor that keeps weights elsewhere than in its modules, is made whole,
        with a warning that says what this costs. The numbers are the same.
        """
        states = GeneratorStates.of(_HOST)
        try:
            try:
                return _described(make, Recorder())
            except SeededError:
                states.restore(_HOST)
                return _described(make, Recorder(draws_twice=True))
        except Exception as error:  # any: the constructor is anyone's code, and may fail for what stands in its way
            states.restore(_HOST)
            model = make()
            _warn(model, str(error) if isinstance(error, CannotDeferError) else f"{type(error).__name__}: {error}")
        return DeferredModel(model, Tape(), {})

    def fill(self, device: torch.device, holds: Callable[[Slot], bool] = _all) -> None:
        """Make the tensors one after the other on the host; this process keeps what it holds of each on ``device``.

        Then the generators are where they are when the model is made whole. Within :func:`filled_with` the tensors have
        no numbers.

        Args:
            device: Where the tensors are to be.
            holds: Tells whether this process holds some of the tensor in a place.
        """
        places: dict[Deferred, list[Slot]] = {}
        for slot, described in self.tensors.items():
            if slot.tensor.is_meta and holds(slot):
                places.setdefault(described, []).append(slot)
        fakes = _fakes.get()
        for described in self.tape.in_order(places):
            value = self.tape.value(described) if fakes is None else _without_numbers(described, fakes)
            by_tensor: dict[int, list[Slot]] = {}  # a tied parameter has several places
            for slot in places[described]:
                by_tensor.setdefault(id(slot.tensor), []).append(slot)
            for slots in by_tensor.values():
                _put(value, slots, device)
        if fakes is None:
            self.tape.draw_all()


_fakes: ContextVar[FakeTensorMode | None] = ContextVar("_fakes", default=None)


@contextmanager
def filled_with(mode: FakeTensorMode) -> Iterator[None]:
    """Let models that are filled within have fakes of ``mode``, which take no memory, as a rehearsal wants them."""
    token = _fakes.set(mode)
    try:
        yield
    finally:
        _fakes.reset(token)


def _without_numbers(described: Deferred, mode: FakeTensorMode) -> Tensor:
    with mode:
        return described.scratch()


def _warn(model: nn.Module, reason: str) -> None:
    nbytes = sum(bytes_of(tensor) for tensor in (*model.parameters(), *model.buffers()))
    _logger.warning(
        "each process makes the whole model, %.2f GiB, before it keeps its part, since %s. Let modules make their "
        "weights by torch.nn.init, and keep them as parameters or buffers.",
        nbytes / 2**30,
        reason,
    )


def _described(make: Callable[[], nn.Module], recorder: Recorder) -> DeferredModel:
    with warnings.catch_warnings():
        # copy.deepcopy of a parameter looks whether a fake has memory
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with recorder:
            model = make()
    recorder.check()
    tensors = _emptied(model, recorder)
    if recorder.fakes.are_in_use():
        gc.collect()
        if recorder.fakes.are_in_use():
            raise CannotDeferError("its constructor keeps a tensor elsewhere than as an attribute of a module")
    return DeferredModel(model, recorder.tape, tensors)


def _emptied(model: nn.Module, recorder: Recorder) -> dict[Slot, Deferred]:
    """Put tensors on the meta device in place of fakes; return what is to be made in each place."""
    tensors: dict[Slot, Deferred] = {}
    ordinary: dict[int, Tensor] = {}  # by the fake, which several modules may share
    places = list(_slots(model))
    for slot in places:
        if (described := recorder.fakes.describe(slot.tensor)) is not None:
            tensors[slot] = described
        if id(slot.tensor) not in ordinary:
            ordinary[id(slot.tensor)] = _ordinary(slot.tensor, is_deferred=described is not None)
    if len({described.storage for described in tensors.values()}) < len(set(tensors.values())):
        raise CannotDeferError("its constructor lets tensors that differ share memory")
    for slot in places:
        if ordinary[id(slot.tensor)] is not slot.tensor:
            setattr(slot.module, slot.name, ordinary[id(slot.tensor)])
    return tensors


def _slots(model: nn.Module) -> Iterator[Slot]:
    """Iterate over the places of all tensors that are attributes of modules."""
    for module in model.modules():
        for table in (module._parameters, module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, Tensor):
                    yield Slot(module, name)


def _ordinary(tensor: Tensor, *, is_deferred: bool) -> Tensor:
    """Return what stands for ``tensor`` if it is a fake: on the meta device if it is yet to be made.

    Raises:
        CannotDeferError: something is called when its gradient is there.
    """
    made = with_numbers(tensor)
    if made is tensor and not is_deferred:
        return tensor
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise CannotDeferError("its constructor gives a hook to a parameter")
    if is_deferred:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    vars(made).update({name: value for name, value in vars(tensor).items() if name not in own_attributes(tensor)})
    return made


def _put(whole: Tensor, slots: Sequence[Slot], device: torch.device) -> None:
    """Put this process's part of ``whole`` in place of the one tensor that is at ``slots``."""
    empty = slots[0].tensor
    if isinstance(empty, DTensor):
        made: Tensor = _part(empty, whole, device)
    else:  # what is neither parameter nor buffer stays on the host, as it does when a module moves
        made = whole.to(device) if any(slot.moves for slot in slots) else whole
    if isinstance(empty, nn.Parameter):
        made = nn.Parameter(made, empty.requires_grad)
    vars(made).update(vars(empty))
    try:
        torch.utils.swap_tensors(empty, made)  # type: ignore[no-untyped-call] # whoever else has it has it made
    except RuntimeError:  # something refers to it weakly, as torch's LSTM does, which notes what is set
        for slot in slots:
            setattr(slot.module, slot.name, made)


def _part(empty: DTensor, whole: Tensor, device: torch.device) -> DTensor:
    mesh, placements = empty.device_mesh, empty.placements
    size, begin = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    box = tuple(slice(first, first + length) for first, length in zip(begin, size, strict=True))
    local = whole[box].to(device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=empty.stride())
