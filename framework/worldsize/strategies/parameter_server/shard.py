"""The parameters that one server owns, and the updates that gradients make of them. No sockets; callers hold a lock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.collectives.ordered import Arrivals
from worldsize.strategies.parameter_server.row_tables import RowGradients, Rows
from worldsize.strategies.parameter_server.sharding import Bucket
from worldsize.strategies.train_state import TrainState
from worldsize.transport.frames import RefusedError

_COUNTERS = ("step", "updates", "last_factor", "_applied", "_count", "_first", "_closed")


@final
@dataclass(frozen=True)
class Rule:
    """Rule by which gradients become an update.

    ``synchronous``: the mean over all ``logical_ranks`` of a step is one update; otherwise each logical rank's gradient
    is one, with its share of the learning rate (or 1 / staleness of it, ``by_staleness``, arXiv 1511.05950).
    ``requires_commit``: an update of a whole step waits for :meth:`Shard.apply`. ``finite``: NaN and
    infinite gradients are refused.
    """

    logical_ranks: int
    synchronous: bool = True
    by_staleness: bool = False
    requires_commit: bool = False
    finite: bool = True


Gradient = Tensor | RowGradients


def row_mean(parts: Mapping[tuple[int, int], RowGradients], logical_ranks: int) -> RowGradients:
    """Compute the mean over all logical ranks of a table's gradient, each row added in the tree's order.

    It has the same bits as the gradient of the whole table, summed in that tree: to add a zero changes nothing.
    """
    if len(parts) == 1:
        ((ids_n, values_nd),) = parts.values()
        return ids_n, _over(values_nd, logical_ranks)
    ids_n = torch.unique(torch.cat([ids for ids, _ in parts.values()]))
    arrivals = Arrivals(logical_ranks)
    for (width, node), (ids, values) in parts.items():
        part_nd = values.new_zeros(len(ids_n), values.shape[1])
        part_nd[torch.searchsorted(ids_n, ids)] = values
        arrivals.add(width, node, [part_nd])
    total = arrivals.total()
    assert total is not None, "all logical ranks have come"
    return ids_n, _over(total[0], logical_ranks)


def _over(total: Tensor, count: int) -> Tensor:
    return total.div_(count) if count > 1 else total


@final
class Shard:
    """The ``buckets`` of a model that is given whole, with optimizer and schedule, and the rows of ``tables``.

    What comes in is numbered: buckets first, then tables.
    """

    def __init__(
        self,
        learning: TrainState,
        buckets: Sequence[Bucket],
        rule: Rule,
        *,
        step: int = 0,
        tables: Sequence[Rows] = (),
    ) -> None:
        self.tables = tables
        self.optimizer, self.schedule = learning.optimizer, learning.schedule
        self.rule, self.buckets, self.step = rule, buckets, step
        self.updates = step if rule.synchronous else step * rule.logical_ranks
        self._whole = dict(learning.model.named_parameters())
        self.values = [_flat(bucket, self._whole) for bucket in buckets]
        pairs = zip(buckets, self.values, strict=True)
        self.parameters = [[nn.Parameter(view) for view in bucket.views(values)] for bucket, values in pairs]
        self._take_over()
        self.optimizer.step()  # without gradients it does nothing; schedules want to have seen one, also of rows alone
        self.begin_step()
        self.last_factor: float | None = 1.0  # of the last commit
        self._units: dict[tuple[int, int], set[int]] = {}  # parts of steps: buckets of each that have come
        self._count = 0  # logical ranks whose buckets have all come, of steps after `first`
        self._first = self._closed = step  # no unit of a step up to `closed` is missing

    def _take_over(self) -> None:
        """Let the optimizer hold the pieces instead of the whole parameters."""
        pieces: dict[Tensor, list[tuple[Any, nn.Parameter]]] = {}
        for bucket, parameters in zip(self.buckets, self.parameters, strict=True):
            for piece, parameter in zip(bucket.pieces, parameters, strict=True):
                pieces.setdefault(self._whole[piece.name], []).append((piece, parameter))
        before, self.optimizer.state = self.optimizer.state, type(self.optimizer.state)(dict)
        for group in self.optimizer.param_groups:
            owned = [(whole, *each) for whole in group["params"] for each in pieces.get(whole, [])]
            group["params"] = [parameter for _, _, parameter in owned]
            for whole, piece, parameter in owned:
                if state := before.get(whole):
                    self.optimizer.state[parameter] = {key: _part(value, piece) for key, value in state.items()}
        self._whole = {}

    def begin_step(self) -> None:
        """Forget what has come of the step in progress."""
        self._arrivals = [Arrivals(self.rule.logical_ranks) for _ in self.buckets]
        self._row_parts: list[dict[tuple[int, int], RowGradients]] = [{} for _ in self.tables]
        self._covered: list[set[int]] = [set() for _ in range(self._kinds)]
        self._ready: dict[int, Tensor | RowGradients] = {}
        self._applied = 0

    @property
    def _kinds(self) -> int:
        return len(self.buckets) + len(self.tables)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def push(self, index: int, gradient: Gradient, *, step: int, width: int, node: int, seen: int = 0) -> bool:
        """Take the gradient of a bucket (flat) or of rows (ids, sorted and each once, and [n, dim]).

        False if that of these logical ranks has come before. ``width`` and ``node``: which part of the tree over
        logical ranks it is the sum of, as in :class:`Arrivals`; without ``rule.synchronous``, the mean over a unit, of
        which ``node`` is the first logical rank. ``seen``: the number of updates that its worker's weights had seen.

        Raises:
            RefusedError: it is not finite, or of a step that is not being trained; nothing has changed.
        """
        values = gradient if isinstance(gradient, Tensor) else gradient[1]
        if self.rule.finite and not math.isfinite(float(values.sum())):
            raise RefusedError(f"a gradient for step {step} is NaN or infinite (nonfinite=ignore would accept it)")
        if self.rule.synchronous:
            return self._gather(index, gradient, step, width, node)
        return self._update(index, gradient, (step, node), seen)

    def _gather(self, index: int, gradient: Gradient, step: int, width: int, node: int) -> bool:
        if step <= self.step:
            return False
        if step != self.step + 1 or not 0 <= node < width or self.rule.logical_ranks % width:
            raise RefusedError(f"part {node} of {width} of step {step} cannot be; the shard is at step {self.step + 1}")
        ranks, covered = set(range(node, self.rule.logical_ranks, width)), self._covered[index]
        if ranks <= covered:
            return False
        if ranks & covered:
            raise RefusedError(f"part {node} of {width} of step {step} overlaps with what has come")
        covered |= ranks
        mean = self._mean(index, gradient, width, node)
        if mean is not None:
            self._ready[index] = mean
            if not self.rule.requires_commit:
                self._apply_one(index)
        return True

    def _mean(self, index: int, gradient: Gradient, width: int, node: int) -> Gradient | None:
        """Give the mean over all logical ranks, once all have come."""
        total = self.rule.logical_ranks
        if isinstance(gradient, Tensor):
            self._arrivals[index].add(width, node, [gradient])
            whole = self._arrivals[index].total()
            return None if whole is None else _over(whole[0], total)
        parts = self._row_parts[index - len(self.buckets)]
        parts[width, node] = gradient
        return row_mean(parts, total) if len(self._covered[index]) == total else None

    def _apply_one(self, index: int) -> None:
        self._descend(index, self._ready.pop(index))
        self._applied += 1
        if self._applied == self._kinds:
            self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self.updates += 1
        if self.schedule is not None:
            self.schedule.step()
        self.begin_step()

    @property
    def waits_for_commit(self) -> bool:
        return self.rule.requires_commit and len(self._ready) == self._kinds

    def norms(self) -> dict[str, list[float]]:
        """Compute the norms of the pieces of the mean gradient that waits for its commit, by parameter."""
        norms: dict[str, list[float]] = {}
        for index, gradient in self._ready.items():
            if isinstance(gradient, Tensor):
                bucket = self.buckets[index]
                for piece, view in zip(bucket.pieces, bucket.views(gradient), strict=True):
                    norms.setdefault(piece.name, []).append(float(torch.linalg.vector_norm(view)))
            else:
                name = self.tables[index - len(self.buckets)].table.name
                norms.setdefault(name, []).append(float(torch.linalg.vector_norm(gradient[1])))
        return norms

    def apply(self, step: int, factor: float | None) -> None:
        """Make the update of ``step`` that waits, its gradient times ``factor``; None leaves the update out."""
        if step != self.step + 1 or not self.waits_for_commit:
            return  # committed before, by one whose answer was lost
        self.last_factor = factor
        for index, gradient in sorted(self._ready.items()):
            if factor not in (None, 1.0):
                (gradient if isinstance(gradient, Tensor) else gradient[1]).mul_(factor)
            if factor is not None:
                self._descend(index, gradient)
        self._end_step()

    def reset(self, step: int, factor: float | None) -> None:
        """Begin with another server that leads: end ``step``, if it was committed, and drop what came of later ones."""
        self.apply(step, factor)
        if self.rule.synchronous:
            self.begin_step()

    def _update(self, index: int, gradient: Gradient, unit: tuple[int, int], seen: int) -> bool:
        """Make one unit's update, with lr / logical ranks, so that those of a step add up to lr."""
        if unit[0] <= self._closed or index in self._units.get(unit, ()):
            return False
        come = self._units.setdefault(unit, set())
        come.add(index)
        staleness = max(1, (self.updates - seen + 1) % 2**32)
        self._descend(index, gradient, 1 / (staleness if self.rule.by_staleness else self.rule.logical_ranks))
        if len(come) == self._kinds:
            self._end_unit()
        return True

    def _end_unit(self) -> None:
        self.updates += 1
        self._count += 1
        while self._first + self._count // self.rule.logical_ranks > self.step:
            self.step += 1
            if self.schedule is not None:
                self.schedule.step()
        self._forget()

    def _forget(self) -> None:
        """Forget the units of steps that are complete, which need not be remembered one by one."""
        while True:
            of_next = [unit for unit, come in self._units.items() if unit[0] == self._closed + 1]
            if len(of_next) < self.rule.logical_ranks or any(len(self._units[unit]) < self._kinds for unit in of_next):
                return
            for unit in of_next:
                del self._units[unit]
            self._closed += 1

    def _descend(self, index: int, gradient: Gradient, share: float = 1.0) -> None:
        if not isinstance(gradient, Tensor):
            self.tables[index - len(self.buckets)].push(*gradient, share)
            return
        parameters = self.parameters[index]
        for parameter, view in zip(parameters, self.buckets[index].views(gradient), strict=True):
            parameter.grad = view
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter in parameters:
            parameter.grad = None

    @property
    def closed(self) -> int:
        """The last step up to which no part of any step is missing."""
        return self.step if self.rule.synchronous else self._closed

    def image(self) -> dict[str, Any]:
        """Give everything, also what has come of steps in progress; not a copy."""
        states = [[self.optimizer.state.get(parameter, {}) for parameter in each] for each in self.parameters]
        return {
            "values": self.values,
            "states": [[dict(state) for state in each] for each in states],
            "groups": self._groups(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else {},
            "arrivals": [[[*key, part] for key, part in each.parts.items()] for each in self._arrivals],
            "covered": [sorted(each) for each in self._covered],
            "row_parts": [[[*key, *part] for key, part in each.items()] for each in self._row_parts],
            "ready": [[index, gradient] for index, gradient in self._ready.items()],
            "tables": [rows.state() for rows in self.tables],
            "units": [[*unit, sorted(come)] for unit, come in self._units.items()],
            **{name: getattr(self, name) for name in _COUNTERS},
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Become what another one was when it gave its image."""
        for mine, theirs in zip(self.values, image["values"], strict=True):
            mine.copy_(theirs)
        for parameters, states in zip(self.parameters, image["states"], strict=True):
            for parameter, state in zip(parameters, states, strict=True):
                self.optimizer.state[parameter] = dict(state)
        for group, values in zip(self.optimizer.param_groups, image["groups"], strict=True):
            group.update(values)
        if self.schedule is not None:
            self.schedule.load_state_dict(image["schedule"])
        self.begin_step()
        for arrivals, parts in zip(self._arrivals, image["arrivals"], strict=True):
            arrivals.parts = {(width, node): part for width, node, part in parts}
        self._covered = [set(each) for each in image["covered"]]
        self._row_parts = [{(width, node): (ids, g) for width, node, ids, g in each} for each in image["row_parts"]]
        self._ready = dict(image["ready"])
        for rows, state in zip(self.tables, image["tables"], strict=True):
            rows.load(state)
        self._units = {(step, rank): set(come) for step, rank, come in image["units"]}
        for name in _COUNTERS:
            setattr(self, name, image[name])

    def _groups(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def state(self) -> dict[str, Any]:
        """Copy everything, by parameter: pieces with their first row, value and optimizer state."""
        entries: dict[str, Any] = {}
        for bucket, parameters in zip(self.buckets, self.parameters, strict=True):
            for piece, parameter in zip(bucket.pieces, parameters, strict=True):
                state = self.optimizer.state.get(parameter, {})
                copy = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
                entry = {"first": piece.first, "value": parameter.detach().clone(), "state": copy}
                entries.setdefault(piece.name, []).append(entry)
        schedule = self.schedule.state_dict() if self.schedule is not None else {}
        return {
            "parameters": entries,
            "schedule": schedule,
            "groups": self._groups(),
            "step": self.step,
            "tables": self.table_states(),
        }

    def table_states(self) -> dict[str, dict[str, Tensor]]:
        """Copy the rows of each table, by its name."""
        return {rows.table.name: rows.state() for rows in self.tables}


def _flat(bucket: Bucket, whole: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([piece.of(whole[piece.name]).detach().flatten() for piece in bucket.pieces])


def _part(value: Any, piece: Any) -> Any:
    return piece.of(value).clone() if isinstance(value, Tensor) else value


def assembled(states: Sequence[Mapping[str, Any]], learning: TrainState) -> None:
    """Put the states of all shards together in a whole model, optimizer and schedule."""
    pieces: dict[str, list[Any]] = {}
    for state in states:
        for name, entries in state["parameters"].items():
            pieces.setdefault(name, []).extend(entries)
    for name, parameter in learning.model.named_parameters():
        if name in pieces:
            _assemble(parameter, sorted(pieces[name], key=lambda entry: int(entry["first"])), learning.optimizer)
    for group, values in zip(learning.optimizer.param_groups, states[0]["groups"], strict=True):
        group.update(values)
    if learning.schedule is not None:
        learning.schedule.load_state_dict(states[0]["schedule"])


def _assemble(parameter: nn.Parameter, entries: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    with torch.no_grad():
        parameter.copy_(_joined([entry["value"] for entry in entries]))
    state = {key: _joined([entry["state"][key] for entry in entries]) for key in entries[0]["state"]}
    if state:
        optimizer.state[parameter] = state


def _joined(values: Sequence[Any]) -> Any:
    whole = len(values) > 1 and isinstance(values[0], Tensor) and values[0].ndim
    return torch.cat(list(values)) if whole else values[0]
