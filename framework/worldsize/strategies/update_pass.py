"""The pass of one micro-batch through the updates of a step, with its own random stream."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, final
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.collectives.group import start_collective
from worldsize.core import ConfigError, Loss, LossOutput, MicroBatch, Recipe, Update, World
from worldsize.errors import neighbours
from worldsize.seeds import GeneratorStates, seed_generators
from worldsize.strategies.loss_record import LossRecord, differentiable
from worldsize.strategies.model_replica import ModelFlags


@final
@dataclass(frozen=True)
class _End:
    """The end of a generator, with its return value."""

    returned: Any


@final
class UpdatePass:
    """Advances the generator of one micro-batch from update to update.

    Args:
        recipe: The recipe, which creates the generator.
        batch: The micro-batch.
        names: Names of the recipe's optimizers.
        device: Device of the computation.
        flags: Frozen parameters and training modes of the model at the start of the step. The generator's changes to
            them apply only to its own pass, not to other passes of the process.
    """

    def __init__(
        self,
        recipe: Recipe,
        batch: MicroBatch,
        *,
        names: Collection[str],
        device: torch.device,
        flags: ModelFlags,
    ) -> None:
        self._recipe, self._kind, self._batch = recipe, type(recipe).__name__, batch
        self._names, self._device, self._flags = names, device, flags
        self._states: GeneratorStates | None = None  # random states after the last update
        self._updates: Iterator[Update] | None = None
        self.update: tuple[str, ...] = ()
        """Optimizers of the pending update, in the recipe's order; empty if the generator has ended."""
        self._loss: Loss | None = None  # loss of the pending update
        self._taken: tuple[ReferenceType[Tensor], str] | None = None  # the previous loss, and its optimizers
        self._returned: Any = None

    def advance(self, call: Callable[[Callable[[], Any]], Any]) -> None:
        """Run the generator to its next update or its end; ``call`` runs functions with the model.

        Raises:
            ConfigError: the recipe did not return a generator, or the generator did not yield an update.
        """
        if self._updates is None:
            seed_generators(self._batch.seed, self._device)
            self._updates = self._generator()
        elif self._states is not None:
            self._states.restore(self._device)
        updates = self._updates
        self._flags.restore()
        yielded = call(lambda: _get_next_update(updates))
        self._flags = ModelFlags(self._flags.model)
        self._states = GeneratorStates.from_device(self._device)  # others also use the generators meanwhile
        if isinstance(yielded, _End):
            self.update, self._loss, self._returned = (), None, yielded.returned
        else:
            self.update, self._loss = self._parse_update(yielded)

    def close(self) -> None:
        """Close the generator, running its ``finally`` blocks."""
        if isinstance(self._updates, Generator):
            self._updates.close()

    def take_loss(self) -> tuple[Tensor, LossRecord]:
        """Pop the scalar loss of the update and its record for the log.

        Raises:
            ConfigError: the loss is not a scalar, or does not depend on any trained parameter.
        """
        yielded, self._loss = self._loss, None
        assert yielded is not None, "the generator has ended"
        self._refuse_twice(yielded)
        loss, record = differentiable(yielded)
        if loss.ndim:
            raise ConfigError(
                f"{self._kind}.updates yielded a loss of shape {list(loss.shape)} for {_format_names(self.update)}, "
                "expected a scalar. Yield loss.mean(), or (loss.sum(), weight)."
            )
        if not loss.requires_grad:
            raise ConfigError(
                f"the loss yielded by {self._kind}.updates for {_format_names(self.update)} does not require grad. "
                "Compute it from the model's output, outside torch.no_grad() and without detach()."
            )
        return loss, record

    def _refuse_twice(self, yielded: Loss) -> None:
        loss, names = LossOutput.from_loss(yielded).loss, _format_names(self.update)
        tensor = loss[0] if isinstance(loss, tuple) else loss
        if self._taken is not None and self._taken[0]() is tensor:
            raise ConfigError(
                f"{self._kind}.updates yielded the loss of {self._taken[1]} again for {names}, but its graph was freed "
                "after one backward pass. To train several optimizers with one loss, yield it once: `yield (name, "
                "other), loss`."
            )
        self._taken = ref(tensor), names

    def take_metrics(self) -> LossRecord:
        """Pop the metrics that the generator returned at its end.

        Raises:
            ConfigError: the generator returned something other than metrics.
        """
        returned, self._returned = self._returned, None
        if not isinstance(returned, Mapping | None):
            raise ConfigError(
                f"{self._kind}.updates returned {_format_type(returned)}. Return metrics by name, each as (sum, "
                "count), or nothing."
            )
        return differentiable(LossOutput(torch.zeros((), device=self._device), returned or {}))[1]

    def check_same(self, other: UpdatePass) -> None:
        """Refuse a sequence of updates that depends on more than the step.

        Raises:
            ConfigError: ``other``, at the same position, is at a different update.
        """
        if self.update != other.update:
            raise updates_differ(
                self._kind, self._batch.step, one="one micro-batch", its=other.update, other="another", has=self.update
            )

    def check_same_on(self, world: World, rates: Mapping[str, Sequence[float]]) -> None:
        """Refuse updates, metric names or learning rates that differ between ranks (collective).

        Raises:
            ConfigError: a rank is at a different update, or has different metric names or learning ``rates``.
        """
        known = list(self._names)
        owners = [name for name, own in rates.items() for _ in own]
        mine = torch.tensor(
            [
                *(name in self.update for name in known),
                self._metrics_key(),
                *(rate for own in rates.values() for rate in own),
            ],
            dtype=torch.float64,
        )
        rows = mine.new_empty(world.size * len(mine))
        start_collective(dist.all_gather_into_tensor, rows, mine, group=world.group).wait()
        updates = [tuple(compress(known, row)) for row in rows.view(world.size, -1)[:, : len(known)].tolist()]
        (key, *first), *others = rows.view(world.size, -1)[:, len(known) :].tolist()
        for rank, (other_key, *theirs) in enumerate(others, 1):
            if updates[rank] != updates[0]:
                raise updates_differ(
                    self._kind,
                    self._batch.step,
                    one="rank 0",
                    its=updates[0],
                    other=f"rank {rank}",
                    has=updates[rank],
                )
            if other_key != key:
                raise ConfigError(
                    f"{self._kind}.updates: in step {self._batch.step}, the metric names of rank {rank} differ from "
                    "rank 0. Return names that depend only on the step, with (0, 0) for a metric without values."
                )
            for owner, one, another in zip(owners, first, theirs, strict=True):
                if one != another:
                    raise ConfigError(
                        f"{self._kind}.updates: in step {self._batch.step}, the learning rate of {owner!r} is {one:g} "
                        f"on rank 0 but {another:g} on rank {rank}. Make the learning rate depend only on the step, "
                        "not on data or random numbers."
                    )

    def _metrics_key(self) -> int:
        """Return a checksum of the names of the current metrics."""
        said = self._returned if self._loss is None else LossOutput.from_loss(self._loss).metrics
        return zlib.crc32("\n".join(sorted(map(str, said))).encode()) if isinstance(said, Mapping) else 0

    def _generator(self) -> Iterator[Update]:
        updates: Any = self._recipe.micro_batch_updates(self._flags.model, self._batch)
        if not hasattr(updates, "__next__"):
            raise ConfigError(
                f"{self._kind}.updates returned {_format_type(updates)}, expected a generator. Write it with `yield "
                "name_of_optimizer, loss` for each update."
            )
        generator: Iterator[Update] = updates
        return generator

    def _parse_update(self, yielded: Any) -> tuple[tuple[str, ...], Loss]:
        """Return the names of the update's optimizers in the recipe's order, and its loss."""
        match yielded:
            case (str() as name, Tensor() | (Tensor(), _) | LossOutput() as loss):
                return self._order_names([name]), loss
            case ([str(), *_] as names, Tensor() | (Tensor(), _) | LossOutput() as loss):
                return self._order_names(names), loss
        raise ConfigError(
            f"{self._kind}.updates yielded {_format_type(yielded)}. Yield the name of an optimizer and a loss: "
            "`yield name_of_optimizer, loss`."
        )

    def _order_names(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            if name not in self._names:
                raise ConfigError(
                    f"{self._kind}.updates: unknown optimizer {name!r}{neighbours(str(name), self._names)}"
                )
        return tuple(name for name in self._names if name in names)


def updates_differ(
    kind: str, step: int, *, one: str, its: Sequence[str], other: str, has: Sequence[str]
) -> ConfigError:
    """Return the error for a sequence of updates that depends on more than the step.

    Args:
        kind: Name of the recipe's class.
        step: The step in which sequences differ.
        one: Description of a pass (a micro-batch or rank).
        its: Optimizers of the next update of ``one``; empty if it has ended.
        other: Description of a pass with a different update at the same position.
        has: Optimizers of the next update of ``other``; empty if it has ended.
    """
    return ConfigError(
        f"{kind}.updates: in step {step}, {one} {_format_next_update(its)} but {other} {_format_next_update(has)}. The "
        "sequence of updates must depend only on the step, not on data or random numbers."
    )


def _get_next_update(updates: Iterator[Update]) -> Update | _End:
    try:
        return next(updates)
    except StopIteration as end:
        return _End(end.value)


def _format_type(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _format_next_update(names: Sequence[str]) -> str:
    return f"updates {_format_names(names)}" if names else "ends"


def _format_names(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
