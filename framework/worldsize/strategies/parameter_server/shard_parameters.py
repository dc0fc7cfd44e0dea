"""The parameters that one server owns, with the optimizer and the schedule that update them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.strategies.parameter_server.bucket_optimizer import BucketOptimizer, MakeOptimizer, options_of
from worldsize.strategies.parameter_server.row_tables import Rows
from worldsize.strategies.parameter_server.sharding import Bucket
from worldsize.strategies.parameter_server.step_gradients import Gradient
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
