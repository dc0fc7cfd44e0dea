"""The parameters owned by one server, with their optimizer and schedule.

Each bucket has a separate optimizer, created by the recipe for its pieces.
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
from worldsize.strategies.optimizer_trial import substitute_parameters
from worldsize.strategies.train_state import OptimizerPart


@final
class ShardParameters:
    """The ``buckets`` of a model, with its optimizer and schedule, and the rows of ``tables``.

    Gradient indices count buckets first, then tables.

    Args:
        part: The optimizer of the full model, which is stripped of its parameters, and the schedule to use.
        buckets: The pieces of parameters owned by this server.
        tables: The rows owned by this server.
        make: Creates the recipe's optimizer for a model.

    Attributes:
        values: The values of each bucket, a tensor (n,), updated in place by the optimizer.
    """

    def __init__(
        self,
        part: OptimizerPart,
        buckets: Sequence[Bucket],
        tables: Sequence[Rows] = (),
        *,
        make: MakeOptimizer,
    ) -> None:
        model = part.model
        full = dict(model.named_parameters())
        self.buckets, self.tables = buckets, tables
        self.values = [_flatten_bucket(bucket, full) for bucket in buckets]
        self._leading, self._schedule = part.optimizer, part.schedule
        self._own = [
            BucketOptimizer(make, model, self._leading, bucket, values)
            for bucket, values in zip(buckets, self.values, strict=True)
        ]
        for group in self._leading.param_groups:
            group["params"] = []
        self._leading.state.clear()
        self._leading._opt_called = True  # type: ignore[attr-defined]  # else schedules warn

    @property
    def gradients(self) -> int:
        """Number of gradients in a complete update: one per bucket and per table."""
        return len(self.buckets) + len(self.tables)

    @property
    def lr(self) -> float:
        return float(self._leading.param_groups[0]["lr"])

    def apply_gradient(
        self, index: int, gradient: Gradient, share: float = 1.0, *, present: Tensor | None = None
    ) -> None:
        """Update a bucket or table with a gradient, at ``share`` × the learning rate.

        ``present``: which pieces of the bucket have a gradient, bool (pieces,). None if all have one.
        """
        if not isinstance(gradient, Tensor):
            self.tables[index - len(self.buckets)].push(*gradient, share)
            return
        views = self.buckets[index].split_views(gradient)
        has = _presence(present, len(views))
        self._own[index].step([view if own else None for view, own in zip(views, has, strict=True)], share)

    def advance_schedule(self) -> None:
        """Set the learning rate and other scheduled options for the next step."""
        if self._schedule is not None:
            self._advance_options(self._schedule.step)

    def advance_schedule_by(self, value: float, *, step: int) -> None:
        """Advance a metric-based schedule by the value evaluated after ``step``."""
        if self._schedule is not None:
            self._advance_options(partial(self._schedule.advance_by, value, step=step))

    def _advance_options(self, advance: Callable[[], None]) -> None:
        """Call ``advance``, and copy the changed options to all buckets."""
        before = collect_options(self._leading)
        advance()
        changed = [
            {name: value for name, value in options.items() if name not in old or value is not old[name]}
            for options, old in zip(collect_options(self._leading), before, strict=True)
        ]
        for own in self._own:
            own.set_options(changed)

    def compute_piece_norms(
        self, gradients: Mapping[int, Gradient], present: Mapping[int, Tensor]
    ) -> dict[str, list[float]]:
        """Return L2 norms of the gradients' pieces, by parameter; ``present``: bool (pieces,)."""
        norms: dict[str, list[float]] = {}
        for index, gradient in gradients.items():
            if isinstance(gradient, Tensor):
                bucket = self.buckets[index]
                has = _presence(present.get(index), len(bucket.pieces))
                for piece, view, has_gradient in zip(bucket.pieces, bucket.split_views(gradient), has, strict=True):
                    if has_gradient:
                        norms.setdefault(piece.name, []).append(float(torch.linalg.vector_norm(view)))
            else:
                name = self.tables[index - len(self.buckets)].table.name
                norms.setdefault(name, []).append(float(torch.linalg.vector_norm(gradient[1])))
        return norms

    def export_parameters(self) -> dict[str, Any]:
        """Return the complete state by position, for a standby. Tensors are not copied."""
        return {
            "values": self.values,
            "states": [own.export_states() for own in self._own],
            "groups": [collect_options(self._leading), *(own.export_groups() for own in self._own)],
            "schedule": self._schedule_state(),
            "tables": [rows.state() for rows in self.tables],
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Load an :meth:`export_parameters` of the master's parameters."""
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
        """Return a copy by name: pieces with first row, value and optimizer state."""
        entries: dict[str, Any] = {}
        for bucket, own in zip(self.buckets, self._own, strict=True):
            for piece, parameter, state in zip(bucket.pieces, own.parameters, own.export_states(), strict=True):
                copy = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
                entry = {"first": piece.first, "value": parameter.detach().clone(), "state": copy}
                entries.setdefault(piece.name, []).append(entry)
        return {
            "parameters": entries,
            "schedule": self._schedule_state(),
            "groups": self._export_groups(),
            "tables": {rows.table.name: rows.state() for rows in self.tables},
        }

    def _export_groups(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups, with the counters of the first bucket."""
        return self._own[0].export_groups() if self._own else collect_options(self._leading)

    def _schedule_state(self) -> dict[str, Any]:
        return self._schedule.state_dict() if self._schedule is not None else {}


def _flatten_bucket(bucket: Bucket, full: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([piece.slice_tensor(full[piece.name]).detach().flatten() for piece in bucket.pieces])


def _presence(present: Tensor | None, pieces: int) -> list[bool]:
    return [True] * pieces if present is None else present.tolist()


def gather_states(states: Sequence[Mapping[str, Any]], part: OptimizerPart) -> None:
    """Gather all shards' :meth:`ShardParameters.state` into model, optimizer and schedule."""
    pieces: dict[str, list[Any]] = {}
    for state in states:
        for name, entries in state["parameters"].items():
            pieces.setdefault(name, []).extend(entries)
    for name, parameter in part.model.named_parameters():
        if name in pieces:
            _gather_parameter(parameter, sorted(pieces[name], key=lambda entry: int(entry["first"])), part.optimizer)
    counted = next((state for state in states if state["parameters"]), states[0])
    for group, values in zip(part.optimizer.param_groups, counted["groups"], strict=True):
        group.update(values)
    if part.schedule is not None:
        part.schedule.load_state_dict(states[0]["schedule"])


def _gather_parameter(parameter: nn.Parameter, entries: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    with torch.no_grad():
        parameter.copy_(_join_pieces([entry["value"] for entry in entries]))
    state = {key: _join_pieces([entry["state"][key] for entry in entries]) for key in entries[0]["state"]}
    if state:
        optimizer.state[parameter] = state


def _join_pieces(values: Sequence[Any]) -> Any:
    is_divided = len(values) > 1 and isinstance(values[0], Tensor) and values[0].ndim
    return torch.cat(list(values)) if is_divided else values[0]


MakeOptimizer = Callable[[nn.Module], Optimizer]


@final
class BucketOptimizer:
    """Updates the pieces of ``bucket``, one step per gradient.

    Gradients arrive bucket by bucket. With a separate optimizer per bucket, counters in options or attributes correctly
    count training steps.

    Args:
        make: Creates the recipe's optimizer.
        model: The full model.
        leading: The optimizer of the full model, from which options and state are copied.
        bucket: The pieces.
        values: Their values, a tensor (n,), updated in place.

    Attributes:
        parameters: The pieces as parameters, in bucket order.
    """

    def __init__(
        self, make: MakeOptimizer, model: nn.Module, leading: Optimizer, bucket: Bucket, values: Tensor
    ) -> None:
        self.parameters = [nn.Parameter(view) for view in bucket.split_views(values)]
        pairs = list(zip(bucket.pieces, self.parameters, strict=True))
        self._optimizers = [_create_optimizer(make, model, leading, part) for part in _group_distinct_pieces(pairs)]
        self._owner = {id(each): optimizer for optimizer in self._optimizers for each in all_parameters(optimizer)}
        full = dict(model.named_parameters())
        for piece, parameter in pairs:
            if (state := leading.state.get(full[piece.name])) and (owner := self._owner.get(id(parameter))):
                owner.state[parameter] = {key: _slice_state(value, piece) for key, value in state.items()}

    def step(self, gradients: Sequence[Tensor | None], share: float) -> None:
        """Update the pieces with gradients of their shapes, at ``share`` × the learning rate.

        None for a piece leaves it unchanged.
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

    def export_groups(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups."""
        return collect_options(self._optimizers[0])

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Update options of each parameter group, such as the learning rate."""
        for optimizer in self._optimizers:
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)

    def export_states(self) -> list[dict[str, Any]]:
        """Return the optimizer state of each piece. Tensors are not copied."""
        return [
            dict(owner.state.get(each, {})) if (owner := self._owner.get(id(each))) else {} for each in self.parameters
        ]

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of :meth:`export_states`."""
        for parameter, state in zip(self.parameters, states, strict=True):
            if owner := self._owner.get(id(parameter)):
                owner.state[parameter] = dict(state)


def collect_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


_Part = list[tuple[RowPiece, nn.Parameter]]


def _group_distinct_pieces(pairs: _Part) -> list[_Part]:
    """Group pieces so that no group has two pieces of the same parameter."""
    parts: list[_Part] = [[]]
    for piece, parameter in pairs:
        free = next((part for part in parts if all(other.name != piece.name for other, _ in part)), None)
        if free is None:
            parts.append(free := [])
        free.append((piece, parameter))
    return parts


def _create_optimizer(make: MakeOptimizer, model: nn.Module, leading: Optimizer, part: _Part) -> Optimizer:
    """Create the recipe's optimizer for these pieces only."""
    full = dict(model.named_parameters(remove_duplicate=False))
    replacements = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
        for each in full.values()
    }
    replacements.update({id(full[piece.name]): parameter for piece, parameter in part})
    with substitute_parameters(model, replacements):
        optimizer = make(model)
    own, updated = {id(parameter) for _, parameter in part}, {id(each) for each in all_parameters(leading)}
    given = {id(each) for each in all_parameters(optimizer)}
    lost = [piece.name for piece, each in part if id(full[piece.name]) in updated and id(each) not in given]
    if lost or len(optimizer.param_groups) != len(leading.param_groups):
        count, expected = len(optimizer.param_groups), len(leading.param_groups)
        fault = f"lacks the parameter {lost[0]}" if lost else f"has {count} parameter groups instead of {expected}"
        raise ConfigError(
            f"on a server, which has only some parameters of the model, the {type(optimizer).__name__} that "
            f"optimizer(model) returns {fault}. Use the parameters of the given model, in groups that do not depend "
            "on their sizes, or set strategy=ddp."
        )
    for group, options in zip(optimizer.param_groups, collect_options(leading), strict=True):
        group["params"] = [each for each in group["params"] if id(each) in own]
        group.update(options)
    return optimizer


def _slice_state(value: Any, piece: RowPiece) -> Any:
    return piece.slice_tensor(value).clone() if isinstance(value, Tensor) else value
