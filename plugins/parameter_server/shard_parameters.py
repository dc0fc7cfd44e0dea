"""The parameters that one server owns, with the optimizer and the schedule that update them.

A bucket has an optimizer of its own, made by the recipe for the pieces that are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plugins.parameter_server.gradients import Gradient
from plugins.parameter_server.row_tables import Rows
from plugins.parameter_server.sharding import Bucket, RowPiece
from worldsize.core import ConfigError
from worldsize.optimizers.groups import all_parameters
from worldsize.strategies.optimizer_trial import substituted
from worldsize.strategies.train_state import TrainState


@final
class ShardParameters:
    """The ``buckets`` of a model, with its optimizer and schedule, and the rows of ``tables``.

    Their gradients are numbered: buckets first, then tables.

    Args:
        train_state: The full model, whose schedule is used. Its optimizer loses its parameters.
        buckets: The pieces of parameters that this server owns.
        tables: The rows that it owns.
        make: Makes the recipe's optimizer for a model.

    Attributes:
        values: The values of each bucket, a tensor (n,), which the optimizer updates in place.
    """

    def __init__(
        self,
        train_state: TrainState,
        buckets: Sequence[Bucket],
        tables: Sequence[Rows] = (),
        *,
        make: MakeOptimizer,
    ) -> None:
        model = train_state.model
        full = dict(model.named_parameters())
        self.buckets, self.tables = buckets, tables
        self.values = [_flat(bucket, full) for bucket in buckets]
        self._leading, self._schedule = train_state.optimizer, train_state.schedule
        self._own = [
            BucketOptimizer(make, model, self._leading, bucket, values)
            for bucket, values in zip(buckets, self.values, strict=True)
        ]
        for group in self._leading.param_groups:
            group["params"] = []
        self._leading.state.clear()
        self._leading._opt_called = True  # type: ignore[attr-defined]  # else schedules warn that it takes no steps

    @property
    def gradients(self) -> int:
        """Number of gradients of a complete update."""
        return len(self.buckets) + len(self.tables)

    @property
    def lr(self) -> float:
        return float(self._leading.param_groups[0]["lr"])

    def update(self, index: int, gradient: Gradient, share: float = 1.0, *, present: Tensor | None = None) -> None:
        """Update one bucket or table by its gradient, with a fraction ``share`` of the learning rate.

        ``present``: which pieces of the bucket have a gradient, bool (pieces,); None: all.
        """
        if not isinstance(gradient, Tensor):
            self.tables[index - len(self.buckets)].push(*gradient, share)
            return
        views = self.buckets[index].views(gradient)
        has = _presence(present, len(views))
        self._own[index].step([view if own else None for view, own in zip(views, has, strict=True)], share)

    def advance_schedule(self) -> None:
        """Set the learning rate of the next step, and other options that the schedule changes."""
        if self._schedule is not None:
            self._advance(self._schedule.step)

    def advance_schedule_by(self, value: float, *, step: int) -> None:
        """Advance a schedule that needs a metric by that of the evaluation after ``step``."""
        if self._schedule is not None:
            self._advance(partial(self._schedule.advance_by, value, step=step))

    def _advance(self, advance: Callable[[], None]) -> None:
        """Call ``advance``, and set the options that it changes for all buckets."""
        before = options_of(self._leading)
        advance()
        changed = [
            {name: value for name, value in options.items() if name not in old or value is not old[name]}
            for options, old in zip(options_of(self._leading), before, strict=True)
        ]
        for own in self._own:
            own.set_options(changed)

    def norms(self, gradients: Mapping[int, Gradient], present: Mapping[int, Tensor]) -> dict[str, list[float]]:
        """Return the L2 norm of each piece of these gradients, by parameter; see
        :attr:`StepGradients.present` (pieces,) for ``present``.
        """
        norms: dict[str, list[float]] = {}
        for index, gradient in gradients.items():
            if isinstance(gradient, Tensor):
                bucket = self.buckets[index]
                has = _presence(present.get(index), len(bucket.pieces))
                for piece, view, has_gradient in zip(bucket.pieces, bucket.views(gradient), has, strict=True):
                    if has_gradient:
                        norms.setdefault(piece.name, []).append(float(torch.linalg.vector_norm(view)))
            else:
                name = self.tables[index - len(self.buckets)].table.name
                norms.setdefault(name, []).append(float(torch.linalg.vector_norm(gradient[1])))
        return norms

    def image(self) -> dict[str, Any]:
        """Return the complete state by position, for a standby; tensors are not copied."""
        return {
            "values": self.values,
            "states": [own.states() for own in self._own],
            "groups": [options_of(self._leading), *(own.groups() for own in self._own)],
            "schedule": self._schedule_state(),
            "tables": [rows.state() for rows in self.tables],
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Load the :meth:`image` of the master's parameters."""
        for mine, theirs in zip(self.values, image["values"], strict=True):
            mine.copy_(theirs)
        leading, *groups = image["groups"]
        for group, values in zip(self._leading.param_groups, leading, strict=True):
            group.update(values)
        for own, states, options in zip(self._own, image["states"], groups, strict=True):
            own.load_states(states)
            own.set_options(options)
        if self._schedule is not None:
            self._schedule.load_state_dict(image["schedule"])
        for rows, state in zip(self.tables, image["tables"], strict=True):
            rows.load(state)

    def state(self) -> dict[str, Any]:
        """Return a copy by name: each parameter's pieces with their first row, value and optimizer state."""
        entries: dict[str, Any] = {}
        for bucket, own in zip(self.buckets, self._own, strict=True):
            for piece, parameter, state in zip(bucket.pieces, own.parameters, own.states(), strict=True):
                copy = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
                entry = {"first": piece.first, "value": parameter.detach().clone(), "state": copy}
                entries.setdefault(piece.name, []).append(entry)
        return {
            "parameters": entries,
            "schedule": self._schedule_state(),
            "groups": self._groups(),
            "tables": {rows.table.name: rows.state() for rows in self.tables},
        }

    def _groups(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups, with the counters of the first bucket."""
        return self._own[0].groups() if self._own else options_of(self._leading)

    def _schedule_state(self) -> dict[str, Any]:
        return self._schedule.state_dict() if self._schedule is not None else {}


def _flat(bucket: Bucket, full: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([piece.of(full[piece.name]).detach().flatten() for piece in bucket.pieces])


def _presence(present: Tensor | None, pieces: int) -> list[bool]:
    return [True] * pieces if present is None else present.tolist()


def gather_states(states: Sequence[Mapping[str, Any]], train_state: TrainState) -> None:
    """Combine the :meth:`ShardParameters.state` of all shards in a full model, optimizer and schedule."""
    pieces: dict[str, list[Any]] = {}
    for state in states:
        for name, entries in state["parameters"].items():
            pieces.setdefault(name, []).extend(entries)
    for name, parameter in train_state.model.named_parameters():
        if name in pieces:
            _gather(parameter, sorted(pieces[name], key=lambda entry: int(entry["first"])), train_state.optimizer)
    counted = next((state for state in states if state["parameters"]), states[0])
    for group, values in zip(train_state.optimizer.param_groups, counted["groups"], strict=True):
        group.update(values)
    if train_state.schedule is not None:
        train_state.schedule.load_state_dict(states[0]["schedule"])


def _gather(parameter: nn.Parameter, entries: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    with torch.no_grad():
        parameter.copy_(_joined([entry["value"] for entry in entries]))
    state = {key: _joined([entry["state"][key] for entry in entries]) for key in entries[0]["state"]}
    if state:
        optimizer.state[parameter] = state


def _joined(values: Sequence[Any]) -> Any:
    is_divided = len(values) > 1 and isinstance(values[0], Tensor) and values[0].ndim
    return torch.cat(list(values)) if is_divided else values[0]


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


_Part = list[tuple[RowPiece, nn.Parameter]]


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


def _part(value: Any, piece: RowPiece) -> Any:
    return piece.of(value).clone() if isinstance(value, Tensor) else value
