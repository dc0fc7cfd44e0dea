"""Models that a process makes again and again, to load their state: they are described only the first time.

Recording what a constructor does takes many times as long as the constructor itself. It is not needed again where all
that was recorded is replaced by what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from worldsize.strategies.deferred.draws import InitialStates
from worldsize.strategies.deferred.slots import Slot, Table, like, saved_tensors, slots_of

_MOST = 1 << 16  # bytes of a tensor that is kept, since no state has it
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

_Place: TypeAlias = tuple[str, Table, str]
"""The path of a module, and the table and the name of a tensor in it."""


@final
class KnownModels:
    """Makes models again, on the meta device, that were described before."""

    def __init__(self) -> None:
        self._models: dict[Callable[[], nn.Module], _KnownModel] = {}

    def keep(self, make: Callable[[], nn.Module], model: nn.Module, deferred: Collection[Slot]) -> None:
        """Remember the model that ``make`` has returned, before it is sharded, if it can be made again.

        Args:
            make: Returns the model.
            model: The model as it was described, with its tensors on the meta device or made already.
            deferred: The places of those that are yet to be made.
        """
        saved = saved_tensors(model)
        own = [slot for slot in slots_of(model) if slot not in deferred and id(slot.tensor) not in saved]
        if all(id(slot.tensor) in saved for slot in deferred) and all(_is_small(slot.tensor) for slot in own):
            paths = _paths(model)
            values = {_place(slot, paths): slot.tensor.detach().clone() for slot in own}
            self._models[make] = _KnownModel(_form(model), values, {_place(slot, paths) for slot in deferred})

    def again(self, make: Callable[[], nn.Module]) -> nn.Module | None:
        """Return the model of ``make``, whose tensors of its state are on the meta device, if it is known.

        None: it is not known, or not the same again.
        """
        known = self._models.pop(make, None)
        if known is None:
            return None
        begin, dtype, needs_gradients = InitialStates.now(), torch.get_default_dtype(), torch.is_grad_enabled()
        try:
            with torch.device("meta"):
                model = make()
            is_same = known.fits(model)
        except Exception:  # any: the constructor is anyone's code, and may need values
            is_same = False
        if is_same:
            self._models[make] = known
            return model
        begin.restore()
        torch.set_default_dtype(dtype)  # the constructor may not have come to where it sets it back
        torch.set_grad_enabled(needs_gradients)
        return None


@final
@dataclass(frozen=True)
class _KnownModel:
    """Holds what the models of a constructor have in common.

    Attributes:
        form: The form of each module, by its path.
        values: Tensors that no state has, in their shapes.
        deferred: The places of tensors that must not be made at once, since they may be large.
    """

    form: Mapping[str, Any]
    values: Mapping[_Place, Tensor]
    deferred: Collection[_Place]

    def fits(self, model: nn.Module) -> bool:
        """Put the values that no state has in their places; return whether ``model`` is the same again."""
        if _form(model) != self.form:
            return False
        paths = _paths(model)
        for slot in slots_of(model):
            place = _place(slot, paths)
            if slot.tensor.is_meta and place in self.values:
                slot.set(like(slot.tensor, self.values[place].clone()))
            elif not slot.tensor.is_meta and place in self.deferred:
                return False
        saved = saved_tensors(model)
        return all(id(slot.tensor) in saved for slot in slots_of(model) if slot.tensor.is_meta)


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _place(slot: Slot, paths: Mapping[nn.Module, str]) -> _Place:
    return paths[slot.module], slot.table, slot.name


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.nbytes < _MOST


def _form(model: nn.Module) -> dict[str, Any]:
    """Return the class, the plain attributes and the tensors of each module, by its path."""
    form: dict[str, Any] = {}
    numbers: dict[int, int] = {}  # of the tensors: one may be in several places
    for path, module in model.named_modules():
        form[path] = type(module), {name: value for name, value in vars(module).items() if _is_plain(value)}
    paths = _paths(model)
    for slot in slots_of(model):
        tensor, number = slot.tensor, numbers.setdefault(id(slot.tensor), len(numbers))
        layout = tensor.stride() if tensor.layout is torch.strided else tensor.layout
        kind = (type(tensor), tensor.dtype, tensor.requires_grad)
        form[" ".join(_place(slot, paths))] = tensor.shape, layout, kind, number
    return form


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
