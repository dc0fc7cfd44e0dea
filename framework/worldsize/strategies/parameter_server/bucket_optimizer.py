"""The optimizer of one bucket: made by the recipe for the pieces that are in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError
from worldsize.optimizers.names import all_parameters
from worldsize.strategies.parameter_server.sharding import Bucket, Piece
from worldsize.strategies.substitution import substituted

MakeOptimizer = Callable[[nn.Module], Optimizer]


@final
class BucketOptimizer:
    """Updates the pieces of ``bucket``, one step for each gradient of it.

    Gradients arrive bucket by bucket. With one optimizer for each, counters in options or attributes count the steps of
    training.

    Args:
        make: Makes the recipe's optimizer.
        model: The full model.
        leading: The optimizer of the full model, whose present options and state of the pieces are used.
        bucket: The pieces.
        values: Their values, a tensor (n,); it is updated in place.

    Attributes:
        parameters: The pieces as parameters, in the bucket's order.
    """

    def __init__(
        self, make: MakeOptimizer, model: nn.Module, leading: Optimizer, bucket: Bucket, values: Tensor
    ) -> None:
        self.parameters = [nn.Parameter(view) for view in bucket.views(values)]
        pairs = list(zip(bucket.pieces, self.parameters, strict=True))
        self._optimizers = [_made(make, model, leading, part) for part in _apart(pairs)]
        self._owner = {id(each): optimizer for optimizer in self._optimizers for each in all_parameters(optimizer)}
        full = dict(model.named_parameters())
        for piece, parameter in pairs:
            if (state := leading.state.get(full[piece.name])) and (owner := self._owner.get(id(parameter))):
                owner.state[parameter] = {key: _part(value, piece) for key, value in state.items()}

    def step(self, gradients: Sequence[Tensor | None], share: float) -> None:
        """Update the pieces by their gradients, of their shapes, with a fraction ``share`` of the learning rate.

        A piece without a gradient has None, and stays as it is.
        """
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self._optimizers:
            rates = [group["lr"] for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        for parameter in self.parameters:
            parameter.grad = None

    def groups(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups."""
        return options_of(self._optimizers[0])

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set some options of each parameter group."""
        for optimizer in self._optimizers:
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)

    def states(self) -> list[dict[str, Any]]:
        """Return the optimizer's state of each piece; tensors are not copied."""
        return [
            dict(owner.state.get(each, {})) if (owner := self._owner.get(id(each))) else {} for each in self.parameters
        ]

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what :meth:`states` returned."""
        for parameter, state in zip(self.parameters, states, strict=True):
            if owner := self._owner.get(id(parameter)):
                owner.state[parameter] = dict(state)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


_Part = list[tuple[Piece, nn.Parameter]]


def _apart(pairs: _Part) -> list[_Part]:
    """Divide pieces so that no two in a part are of one parameter."""
    parts: list[_Part] = [[]]
    for piece, parameter in pairs:
        free = next((part for part in parts if all(other.name != piece.name for other, _ in part)), None)
        if free is None:
            parts.append(free := [])
        free.append((piece, parameter))
    return parts


def _made(make: MakeOptimizer, model: nn.Module, leading: Optimizer, part: _Part) -> Optimizer:
    """Make the recipe's optimizer for these pieces only."""
    full = dict(model.named_parameters(remove_duplicate=False))
    replacements = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
        for each in full.values()
    }
    replacements.update({id(full[piece.name]): parameter for piece, parameter in part})
    with substituted(model, replacements):
        optimizer = make(model)
    own, updated = {id(parameter) for _, parameter in part}, {id(each) for each in all_parameters(leading)}
    given = {id(each) for each in all_parameters(optimizer)}
    lost = [piece.name for piece, each in part if id(full[piece.name]) in updated and id(each) not in given]
    if lost or len(optimizer.param_groups) != len(leading.param_groups):
        raise ConfigError(
            f"optimizer(model) makes a different {type(optimizer).__name__} for a part of the model"
            f"{f', without {lost[0]}' if lost else ''}: a server has parts of the parameters. Take parameters from the "
            "model that it is given, in groups that do not depend on sizes, or use strategy=ddp."
        )
    for group, options in zip(optimizer.param_groups, options_of(leading), strict=True):
        group["params"] = [each for each in group["params"] if id(each) in own]
        group.update(options)
    return optimizer


def _part(value: Any, piece: Piece) -> Any:
    return piece.of(value).clone() if isinstance(value, Tensor) else value
