"""Converts the state of all shards to the form that every strategy saves, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import Recipe, StateDict
from worldsize.strategies.parameter_server.remote_embedding import RemoteTable, remotes, rowless_model
from worldsize.strategies.parameter_server.row_tables import RowRule, Rows, Table, initial_rows
from worldsize.strategies.parameter_server.row_updates import RowUpdate, update_of
from worldsize.strategies.train_state import OptimizedModel, TrainState

_DENSE = 1 << 30  # bytes of a table that is also saved as a whole, with the initial values of untouched rows
RowStates = Mapping[str, Mapping[str, Tensor]]


def train_state_of(recipe: Recipe) -> TrainState:
    """Make the model and optimizer of a recipe, without the rows of its tables."""
    return TrainState.of(recipe, rowless_model(recipe))


def tables_of(train_state: TrainState, rule: RowRule, shard: int) -> list[Rows]:
    """Make a server's rows of each table, which are updated with the options of the table's parameter group."""
    return [
        Rows(each.table, rule, shard, _update_of(train_state.optimizer, each)) for each in remotes(train_state.model)
    ]


def empty_rows(train_state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Make the state of tables without rows: ids (0,) and rows (0, width), by table."""
    return {
        each.table.name: {
            "ids": torch.empty(0, dtype=torch.int64),
            "rows": torch.empty(0, _update_of(train_state.optimizer, each).width(each.table.dim)),
        }
        for each in remotes(train_state.model)
    }


def _update_of(optimizer: Optimizer, remote: RemoteTable) -> RowUpdate:
    groups = optimizer.param_groups
    own = next((group for group in groups if any(each is remote.weight for each in group["params"])), groups[0])
    return update_of(optimizer, own, remote.table.name)


def joined_rows(states: Sequence[RowStates]) -> dict[str, dict[str, Tensor]]:
    """Join the rows of all shards, ordered by id: ids (n,) and rows (n, width), by table."""
    joined = {}
    for name in states[0]:
        ids_n = torch.cat([state[name]["ids"] for state in states])
        order_n = ids_n.argsort()
        rows_nw = torch.cat([state[name]["rows"] for state in states])
        joined[name] = {"ids": ids_n[order_n], "rows": rows_nw[order_n]}
    return joined


def full_state(train_state: OptimizedModel, rows: RowStates, rule: RowRule) -> StateDict:
    """Return model, optimizer and schedule as :meth:`TrainState.state` has them, with the tables."""
    return with_tables({**train_state.state(), "scaler": {}}, train_state.model, rows, rule)


def with_tables(state: StateDict, model: nn.Module, rows: RowStates, rule: RowRule) -> StateDict:
    """Add the tables' rows to ``state``; small tables also as the full weights of the recipe's model."""
    if not rows:
        return state
    dense = {
        remote.table.name: _dense(remote.table, rows[remote.table.name], rule)
        for remote in remotes(model)
        if remote.table.rows * remote.table.dim * 4 <= _DENSE
    }
    return {**state, "model": {**state["model"], **dense}, "tables": {name: dict(each) for name, each in rows.items()}}


def _dense(table: Table, state: Mapping[str, Tensor], rule: RowRule) -> Tensor:
    values_rd = initial_rows(rule.seed, table, torch.arange(table.rows))
    values_rd[state["ids"]] = state["rows"][:, : table.dim]
    return values_rd


def load_full_state(train_state: OptimizedModel, state: StateDict) -> None:
    """Load a :func:`full_state` without its tables."""
    empty = {remote.table.name: remote.weight for remote in remotes(train_state.model)}
    train_state.load({**state, "model": {**state["model"], **empty}})
