"""Models that a process makes again and again, to load their state: they are described only the first time.

Recording what a constructor does takes many times as long as the constructor itself. It is not needed again where all
that was recorded is replaced by what is loaded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

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
        self._models: dict[Callable[[], nn.Module], _KnownModel | None] = {}  # None: it was not the same again

    def keep(self, make: Callable[[], nn.Module], model: nn.Module, deferred: Collection[Slot]) -> None:
        """Remember the model that ``make`` has returned, before it is sharded, if it can be made again.

        Args:
            make: Returns the model.
            model: The model as it was described, with its tensors on the meta device or made already.
            deferred: The places of those that are yet to be made.
        """
        if make in self._models:
            return
        saved = saved_tensors(model)
        own = [slot for slot in slots_of(model) if slot not in deferred and id(slot.tensor) not in saved]
        followed = any(_has_hook(slot.tensor) for slot in slots_of(model))
        is_plain = not followed and all(_is_small(slot.tensor) for slot in own)
        if is_plain and all(id(slot.tensor) in saved for slot in deferred):
            paths = _paths(model)
            values = {_place(slot, paths): slot.tensor.detach().clone() for slot in own}
            self._models[make] = _KnownModel(_form(model), values, {_place(slot, paths) for slot in deferred})

    def again(self, make: Callable[[], nn.Module]) -> nn.Module | None:
        """Return the model of ``make``, whose tensors of its state are on the meta device, if it is known.

        None: it is not known, or not the same again, which is not tried twice: on the meta device, some constructors do
        something else.
        """
        known = self._models.get(make)
        if known is None:
            return None
        begin, dtype, needs_gradients = InitialStates.now(), torch.get_default_dtype(), torch.is_grad_enabled()
        made = _MadeOnMeta()
        try:
            with made:
                model = make()
            is_same = known.fits(model) and made.is_all_in(model)
        except Exception:  # any: the constructor is anyone's code, and may need values
            is_same = False
        if is_same:
            return model
        self._models[make] = None
        begin.restore()
        torch.set_default_dtype(dtype)  # the constructor may not have come to where it sets it back
        torch.set_grad_enabled(needs_gradients)
        return None


@final
class _MadeOnMeta(DeviceContext):
    """Makes tensors on the meta device within its context, and knows their memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.is_meta:
                storage = each.untyped_storage()
                self._storages[storage._cdata] = storage
        return result

    def is_all_in(self, model: nn.Module) -> bool:
        """Return whether each tensor made that still exists is an attribute of a module.

        Others, such as those in a list, or that the recipe has kept, would stay on the meta device.
        """
        own = {tensor.untyped_storage()._cdata for tensor in _distinct(model) if tensor.is_meta}
        if not self._used() <= own:
            gc.collect()  # what the constructor has let go of
        return self._used() <= own and all(torch._C._storage_Use_Count(each) == 2 for each in own)  # no one else's

    def _used(self) -> set[int]:
        return {each for each in self._storages if torch._C._storage_Use_Count(each) > 1}


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
        tensors = [tensor for tensor in _distinct(model) if tensor.is_meta]
        shares_memory = len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)
        if _form(model) != self.form or shares_memory:
            return False
        paths = _paths(model)
        for slot in slots_of(model):
            place, tensor = _place(slot, paths), slot.tensor
            if not tensor.is_meta and place in self.deferred:
                return False
            if tensor.is_meta and place in self.values:
                _replace(tensor, self.values[place].clone())
            elif tensor.is_meta and tensor._is_view():  # of a tensor that exists as long
                _replace(tensor, torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"))
        saved = saved_tensors(model)
        return all(id(slot.tensor) in saved for slot in slots_of(model) if slot.tensor.is_meta)


def _distinct(model: nn.Module) -> Collection[Tensor]:
    return {id(slot.tensor): slot.tensor for slot in slots_of(model)}.values()


def _replace(tensor: Tensor, other: Tensor) -> None:
    """Give ``tensor`` the values and the memory of ``other``, of the same shape, for all that have it."""
    torch.utils.swap_tensors(tensor, like(tensor, other))  # type: ignore[no-untyped-call]


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _place(slot: Slot, paths: Mapping[nn.Module, str]) -> _Place:
    return paths[slot.module], slot.table, slot.name


def _is_small(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_leaf
    return is_plain and tensor.nbytes < _MOST


def _has_hook(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


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
