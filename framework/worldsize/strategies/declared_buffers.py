"""Rules from recipes and torch's layers for combining a model's buffers over logical ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from worldsize.core import BufferRule, Concatenated, ConfigError, Recipe
from worldsize.core.recipe import BUFFER_SUMS
from worldsize.errors import neighbours

# "same": equal on all logical ranks, since torch computes it without data, or counts batches
_Known: TypeAlias = BufferRule | Literal["same"] | None


@final
@dataclass(frozen=True, eq=False)
class BufferSlot:
    """A saved buffer of a module. User code may assign a new tensor to it in each step."""

    module: nn.Module
    own: str
    name: str
    """The buffer's name in the recipe's model."""
    rule: _Known
    """None if undeclared: a step must not change the buffer."""
    is_known: bool = False
    """Whether the rule is the built-in one for a torch layer."""

    @property
    def tensor(self) -> Tensor:
        """The current tensor in this slot, of any shape."""
        tensor = self.module._buffers[self.own]
        assert tensor is not None
        return tensor

    @property
    def pointer(self) -> BufferSlot:
        """The slot of a queue's pointer."""
        assert isinstance(self.rule, Concatenated)
        prefix = self.name.removesuffix(self.own)
        return BufferSlot(self.module, self.rule.pointer, f"{prefix}{self.rule.pointer}", None)

    @property
    def slots(self) -> Sequence[BufferSlot]:
        """The slots of all tensors that the rule changes."""
        return (self, self.pointer) if isinstance(self.rule, Concatenated) else (self,)

    def set_tensor(self, tensor: Tensor) -> None:
        """Put ``tensor``, of any shape, into this slot."""
        self.module._buffers[self.own] = tensor


@final
@dataclass(frozen=True)
class _Declared:
    """A recipe's rules for the buffers of one module, by local name, with the module's name."""

    prefix: str
    rules: Mapping[str, BufferRule]
    trains_apart: bool


# keyed by module, since names change if a model is split into stages
_DECLARED: WeakKeyDictionary[nn.Module, _Declared] = WeakKeyDictionary()


def declare_buffers(recipe: Recipe, model: nn.Module, *, trains_apart: bool = False) -> None:
    """Register the buffer rules of ``recipe`` for all reducers of ``model`` or its submodules.

    ``trains_apart``: whether other processes train the model independently, without its reducers.

    Raises:
        ConfigError: a pattern matches no saved buffer, or a rule does not suit a buffer's dtype or shape.
    """
    rules, names = recipe.buffers(model), [name for name, _ in model.named_buffers()]
    for module in model.modules():
        _DECLARED.pop(module, None)
    saved = {slot.name: slot for slot in buffer_slots(model)}
    matched: dict[str, BufferRule] = {}
    for pattern, rule in rules.items():
        matches = [name for name in saved if fnmatchcase(name, pattern)]
        if not matches:
            where = f"{type(recipe).__name__}.buffers: {pattern!r}"
            if any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"{where} has persistent=False and is not saved in checkpoints. Remove it from Recipe.buffers."
                )
            raise ConfigError(f"{where} is not a buffer of the model{neighbours(pattern, names)}")
        for name in matches:
            _check_rule(recipe, saved, name, rule, trains_apart=trains_apart)
            matched[name] = rule
    for prefix, module in model.named_modules():
        own = {name: matched[full] for name in module._buffers if (full := f"{prefix}.{name}".lstrip(".")) in matched}
        _DECLARED[module] = _Declared(prefix, own, trains_apart)


def _check_rule(
    recipe: Recipe, saved: Mapping[str, BufferSlot], name: str, rule: BufferRule, *, trains_apart: bool
) -> None:
    where, tensor = f"{type(recipe).__name__}.buffers: {name!r}", saved[name].tensor
    if not isinstance(rule, Concatenated) and rule not in BUFFER_SUMS:
        raise ConfigError(f"{where} has the unknown rule {rule!r}{neighbours(str(rule), BUFFER_SUMS)}")
    if rule == "mean" and not tensor.is_floating_point():
        raise ConfigError(
            f'{where} has dtype {tensor.dtype}, but "mean" requires a floating-point dtype. Declare it as "sum", or '
            "make it float."
        )
    if rule == "sum" and tensor.dtype is torch.bool:
        raise ConfigError(f'{where} has dtype torch.bool, which does not support "sum". Make it torch.int64.')
    if trains_apart and rule not in ("mean", "equal"):
        raise ConfigError(
            f'{where} must be "mean" or "equal", because this strategy does not synchronize workers in each step. '
            'Declare it as "mean", or use a synchronous strategy such as ddp.'
        )
    if isinstance(rule, Concatenated):
        pointer = saved.get(f"{name.rpartition('.')[0]}.{rule.pointer}".lstrip("."))
        if pointer is None or pointer.tensor.is_floating_point() or pointer.tensor.numel() != 1:
            raise ConfigError(
                f"{where} requires a pointer {rule.pointer!r}, a one-element integer buffer of the same module. "
                'Register the pointer, e.g. register_buffer("pointer", torch.zeros(1, dtype=torch.int64)).'
            )
        if not -tensor.ndim <= rule.dim < tensor.ndim:
            raise ConfigError(
                f"{where} has {tensor.ndim} dimensions, but its rule has dim={rule.dim}. Set dim to the dimension of "
                "the rows."
            )


def buffer_slots(model: nn.Module) -> list[BufferSlot]:
    """Return the saved buffers of a model or submodule, each once, in module order."""
    return list(_iterate_slots(model))


def trains_apart(model: nn.Module) -> bool:
    """Return whether other processes train ``model`` independently, without its reducers."""
    return model in _DECLARED and _DECLARED[model].trains_apart


def _iterate_slots(model: nn.Module) -> Iterator[BufferSlot]:
    seen = set[int]()
    for prefix, module in model.named_modules():
        declared = _DECLARED.get(module)
        rules = declared.rules if declared else {}
        known = _get_builtin_rules(module)
        pointers = {rule.pointer: rule for rule in rules.values() if isinstance(rule, Concatenated)}
        for own, tensor in module._buffers.items():
            if tensor is None or own in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{declared.prefix if declared else prefix}.{own}".lstrip(".")
            rule: _Known = rules.get(own, known.get(own))
            if own in pointers:
                continue  # handled with its queue
            yield BufferSlot(module, own, name, rule, is_known=own in known and own not in rules)


def _get_builtin_rules(module: nn.Module) -> Mapping[str, _Known]:
    """Return the built-in rules for the buffers of a torch layer, by buffer name."""
    if isinstance(module, _NormBase):
        return {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "same"}
    if isinstance(module, _SpectralNorm):
        return {"_u": "same", "_v": "same"}
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    return {f"{hook.name}_{vector}": "same" for hook in hooks for vector in "uv"}


def refuse_unserved_buffers(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a recipe with buffer rules, for strategies that do not synchronize buffers.

    Raises:
        ConfigError: the recipe declares a rule for a buffer.
    """
    for name in recipe.buffers(model):
        raise ConfigError(
            f"{type(recipe).__name__}.buffers declares {name!r}, but this strategy does not synchronize buffers: "
            "servers store only parameters. Use strategy=ddp, zero or fsdp."
        )
