"""Determines which ranks of a pipeline hold which tensors, by name, since dividing a module replaces its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError

Place = tuple[nn.Module, str]


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters and buffers under every name that they have."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _place(model: nn.Module, name: str) -> Place:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


@final
class Ownership:
    """Records which ranks of a pipeline hold each tensor of a model.

    ``ranks`` has the ranks by the tensor's first name; a tensor of no stage belongs to the first rank.

    It is made before the model is divided; tensors may be on the meta device. ``stages``: the layers of each stage;
    stage s is on rank s mod ``pipeline``. ``p``: this rank.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[nn.Module]], *, pipeline: int, p: int) -> None:
        self._model, self._p = model, p
        self._first = {id(tensor): name for name, tensor in reversed(list(_named(model)))}
        self._aliases = {name: self._first[id(tensor)] for name, tensor in _named(model)}
        self._parameters = {name for name, _ in model.named_parameters()}
        self.stages: dict[str, list[int]] = {name: [] for name in self._aliases.values()}
        self._places: dict[str, Place] = {}
        for index, layers in enumerate(stages):
            self._add(index, layers, mine=index % pipeline == p)
        self.ranks = {
            name: sorted({stage % pipeline for stage in indices or [0]}) for name, indices in self.stages.items()
        }
        self._others: set[Place] = {
            _place(model, name) for name, first in self._aliases.items() if p not in self.ranks[first]
        }

    def _add(self, stage: int, layers: Sequence[nn.Module], *, mine: bool) -> None:
        for module in {module for layer in layers for module in layer.modules()}:
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                if id(tensor) not in self._first:
                    raise ConfigError(f"a layer holds {key!r}, which the model does not. Give it to the model.")
                name = self._first[id(tensor)]
                self.stages[name] = sorted({*self.stages[name], stage})
                if mine:
                    self._places[name] = (module, key)

    def holds(self, module: nn.Module, key: str) -> bool:
        """Return whether this rank holds the tensor ``key`` of ``module``. Call it before :meth:`leave_others`."""
        return (module, key) not in self._others

    def check_sharded_once(self) -> None:
        """Raise ConfigError if two stages of one rank share a parameter: the data axis would shard it twice."""
        for name in self._parameters:
            if len(self.ranks[name]) < len(self.stages[name]):
                raise ConfigError(
                    f"two stages of one rank share {name}, which can be sharded only once. "
                    "Set strategy.schedule=1f1b, another strategy.split, or strategy.data=1 with "
                    "strategy.on_failure=restart."
                )

    def tied(self) -> dict[tuple[int, ...], list[str]]:
        """Return the parameters that several ranks of the pipeline hold, by these ranks, in the same order on all."""
        names_by_ranks: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(self._parameters):
            if len(self.ranks[name]) > 1:
                names_by_ranks.setdefault(tuple(self.ranks[name]), []).append(name)
        return names_by_ranks

    def parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """Return those of the named parameters that this rank holds, after the model is divided."""
        return [getattr(*self._places[name]) for name in names if name in self._places]

    def spare(self) -> list[nn.Parameter]:
        """Return this rank's parameters that an earlier rank also holds."""
        names = [name for group in self.tied().values() for name in group]
        return self.parameters([name for name in names if self.ranks[name][0] != self._p])

    def leave_others(self) -> None:
        """Replace the tensors that other ranks hold by meta tensors, in the divided model."""
        empty: dict[str, Tensor] = {}
        for name, first in self._aliases.items():
            module, key = _place(self._model, name)
            table: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
            if first in self._places:
                table[key] = getattr(*self._places[first])
            elif self._p not in self.ranks[first]:
                table[key] = empty.setdefault(first, _empty(getattr(module, key)))


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
