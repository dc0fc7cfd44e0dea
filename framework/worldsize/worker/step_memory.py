"""Training state beside the replica's: sums of training metrics, and the recipe's state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from worldsize.checkpoint.format import RECIPE_STATES, Checkpoint
from worldsize.checkpoint.load import read_tensors
from worldsize.collectives.exact import gather_tensors
from worldsize.config.shape import check_resumes
from worldsize.core import ConfigError, Recipe, Strategy, World, saves_state
from worldsize.data.order import Order
from worldsize.data.stream_state import decode_state, encode_state
from worldsize.loop.fit import TrainingProgress
from worldsize.loop.training_metrics import gather_by_logical_rank

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class SharedStep:
    """Values of a step that every process of a healing gang stores, in case other processes die.

    Attributes:
        metrics: Sums and counts of training metrics since the last logged step, by name, for all logical ranks.
        recipe: The recipe's encoded state for each logical rank; empty if it does not have a state.
    """

    metrics: Mapping[str, list[list[float]]]
    recipe: Mapping[int, bytes]


@final
class StepMemory:
    """Saves and restores the values of one process's logical ranks.

    Args:
        recipe: The recipe.
        world: The training processes.
        part: This process's data-parallel rank and size.
        order: The data order of this process.
        exact: The reproducibility mode if it guarantees bitwise identical results, otherwise None.
    """

    def __init__(self, recipe: Recipe, world: World, part: World, order: Order, *, exact: str | None = None) -> None:
        self._recipe, self._world, self._part, self._exact = recipe, world, part, exact
        self.order = order
        self.has_state = saves_state(recipe)
        """Whether the recipe has its own state."""
        self._kind = type(recipe).__name__
        self._shared: Mapping[int, bytes] | None = None  # this process's states in the last call of share_step()

    def metrics_of_all(self, sums: Mapping[str, Tensor]) -> Mapping[str, list[list[float]]]:
        """Gather the sums of training metrics of all logical ranks; every rank must call it."""
        ranks, parts = self.order.logical_ranks, self._part.size
        return gather_by_logical_rank(sums, self.order.mine, self._world, logical_ranks=ranks, parts=parts)

    def own_metrics(self, by_rank: Mapping[str, list[list[float]]]) -> dict[str, Tensor]:
        """Return this process's sums from ``by_rank``, the result of :meth:`metrics_of_all`.

        Each sum is float64 (logical ranks, 2). The result is empty if the total number of logical ranks has changed.
        """
        mine = list(self.order.mine)
        rows = {name: torch.tensor(pairs, dtype=torch.float64) for name, pairs in by_rank.items()}
        fits = all(len(pairs) == self.order.logical_ranks for pairs in rows.values())  # otherwise, sums restart at 0
        return {name: pairs[mine].to(self._world.device) for name, pairs in rows.items()} if fits else {}

    def share_step(self, sums: Mapping[str, Tensor]) -> SharedStep:
        """Gather the values of the step that all processes store; every rank must call it.

        ``sums``: this process's sums of training metrics, float64 (logical ranks, 2) by name.
        """
        self._shared = self._encode_states()
        states = {(rank,): _convert_to_tensor(state) for rank, state in self._shared.items()}
        gathered = gather_tensors(states, self._world) if self.has_state else {}
        recipe = {rank: state.numpy().tobytes() for (rank,), state in gathered.items()}
        return SharedStep(self.metrics_of_all(sums), recipe)

    def check_shared(self) -> None:
        """Raise ConfigError if the recipe's state has changed since :meth:`share_step`."""
        if self._shared and self._encode_states() != self._shared:
            raise ConfigError(
                f"with strategy.on_failure=heal, {self._kind} may change its state only in micro_batch_loss, not in "
                "an optimizer hook or in evaluate. Change the state in micro_batch_loss, or set "
                "strategy.on_failure=restart."
            )

    def restore_or_share(self, first: TrainingProgress) -> TrainingProgress:
        """Restore the shared values of the last step, or share them for the first time.

        Every rank must call it. Returns ``first`` with this process's sums, float64 (logical ranks, 2) by name, or with
        the values that it shared.
        """
        shared: SharedStep | None = first.shared
        if shared is None:
            return replace(first, shared=self.share_step(first.metrics))
        self._load_states({rank: shared.recipe[rank] for rank in self.order.mine} if shared.recipe else {})
        return replace(first, metrics=self.own_metrics(shared.metrics))

    def collect_states(self) -> dict[str, Tensor]:
        """Return the recipe's states of this process's logical ranks, each as uint8 (bytes,)."""
        return {f"{RECIPE_STATES}/{rank}": _convert_to_tensor(state) for rank, state in self._encode_states().items()}

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore the recipe's state from a checkpoint, which may come from any number of processes.

        Raises:
            ConfigError: the checkpoint has states for a different number of logical ranks, or ``exact`` requires a
            state that the recipe does not save.
        """
        if self._world.rank == 0 or self._exact:
            check_resumes(self._recipe, checkpoint.step, exact=self._exact)
        prefix = f"{RECIPE_STATES}/"
        saved = {name.removeprefix(prefix) for name in checkpoint.tensors if name.startswith(prefix)}
        if not saved or not self.has_state:
            if self.has_state and self._world.rank == 0:
                _logger.warning("%s has no state of %s; starting from the initial state", checkpoint.path, self._kind)
            return
        if saved != {str(rank) for rank in range(self.order.logical_ranks)}:
            raise ConfigError(
                f"{checkpoint.path} has {self._kind}'s states for {len(saved)} logical ranks, the run has "
                f"{self.order.logical_ranks}. Resume with logical_ranks={len(saved)}, or reset the recipe's state "
                f"with --ignore {RECIPE_STATES}."
            )
        tensors = read_tensors(checkpoint, RECIPE_STATES, only=set(map(str, self.order.mine)))
        self._load_states({int(rank): tensor.numpy().tobytes() for rank, tensor in tensors.items()})

    def _encode_states(self) -> dict[int, bytes]:
        if not self.has_state:
            return {}
        return {rank: encode_state(self._recipe.state(rank), self._kind) for rank in self.order.mine}

    def _load_states(self, states: Mapping[int, bytes]) -> None:
        self._shared = None
        for rank, state in states.items():
            self._recipe.load_state(rank, decode_state(state, self._kind))


def writes_states(strategy: Strategy, world: World) -> bool:
    """Return whether this process writes the recipe's states.

    The first process of each data-parallel rank does.
    """
    part = strategy.data_rank(world)
    return all(strategy.data_rank(replace(world, rank=rank)) != part for rank in range(world.rank))


def _convert_to_tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
