"""A shard: the parameters of one server, and when gradients become their updates. No sockets; callers hold a lock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from worldsize.strategies.parameter_server.shard_parameters import ShardParameters
from worldsize.strategies.parameter_server.step_gradients import Gradient, StepGradients
from worldsize.strategies.parameter_server.unit_log import UnitLog
from worldsize.transport.frames import RefusedError


@final
@dataclass(frozen=True)
class Rule:
    """Rule by which gradients become an update.

    Attributes:
        logical_ranks: Parts of a step.
        synchronous: The mean over all logical ranks of a step is one update. Otherwise each logical rank's gradient is
            one, with its share of the learning rate.
        by_staleness: That share is 1 / staleness of the gradient (arXiv 1511.05950) instead of 1 / logical ranks.
        requires_commit: The update of a whole step waits for :meth:`Shard.apply`.
        finite: NaN and infinite gradients are refused.
    """

    logical_ranks: int
    synchronous: bool = True
    by_staleness: bool = False
    requires_commit: bool = False
    finite: bool = True


@final
class Shard:
    """Updates ``parameters`` as ``rule`` says.

    Args:
        parameters: What this server owns.
        rule: When gradients become an update.
        step: The last step that is done.

    Attributes:
        updates: The number of updates made since the run began.
        last_factor: What the gradient of the last commit was multiplied by; None: its update was left out.
    """

    def __init__(self, parameters: ShardParameters, rule: Rule, *, step: int = 0) -> None:
        self.parameters, self.rule, self.step = parameters, rule, step
        self.updates = step if rule.synchronous else step * rule.logical_ranks
        self.last_factor: float | None = 1.0
        buckets, tables = len(parameters.buckets), len(parameters.tables)
        self._gradients = StepGradients(step + 1, logical_ranks=rule.logical_ranks, buckets=buckets, tables=tables)
        self._units = UnitLog(step, logical_ranks=rule.logical_ranks, gradients=parameters.gradients)

    @property
    def closed(self) -> int:
        """The last step up to which no part of any step is missing."""
        return self.step if self.rule.synchronous else self._units.closed

    def push(self, index: int, gradient: Gradient, *, step: int, width: int, node: int, seen: int = 0) -> bool:
        """Take the gradient of a bucket or a table.

        Args:
            index: The number of the bucket, or of the table; buckets come first.
            gradient: Flat for a bucket; for a table ids, sorted and each once, and values [n, dim].
            step: The step that it is of.
            width: With ``node``, the part of the tree over logical ranks that it is the sum of, as in
                :class:`~worldsize.collectives.ordered.PartialSums`.
            node: See ``width``. Without ``rule.synchronous``, the first logical rank of a unit, whose mean it is.
            seen: The number of updates that its worker's weights had seen.

        Returns:
            Whether it is new; False if that of these logical ranks has come before.

        Raises:
            RefusedError: It is not finite, or of a step that is not being trained; nothing has changed.
        """
        values = gradient if isinstance(gradient, Tensor) else gradient[1]
        if self.rule.finite and not math.isfinite(float(values.sum())):
            raise RefusedError(f"a gradient for step {step} is NaN or infinite (nonfinite=ignore would accept it)")
        if not self.rule.synchronous:
            return self._push_unit(index, gradient, (step, node), seen)
        is_new = self._gradients.add(index, gradient, step=step, width=width, node=node)
        if index in self._gradients.means and not self.rule.requires_commit:
            self.parameters.update(index, self._gradients.take(index))
            if self._gradients.all_taken:
                self._end_step()
        return is_new

    def _push_unit(self, index: int, gradient: Gradient, unit: tuple[int, int], seen: int) -> bool:
        """Make one unit's update, with lr / logical ranks, so that those of a step add up to lr."""
        if not self._units.add(unit, index):
            return False
        staleness = max(1, (self.updates - seen + 1) % 2**32)
        self.parameters.update(index, gradient, 1 / (staleness if self.rule.by_staleness else self.rule.logical_ranks))
        if self._units.is_complete(unit):
            self.updates += 1
            if self.updates % self.rule.logical_ranks == 0:
                self.step += 1
                self.parameters.advance_schedule()
            self._units.close_steps()
        return True

    def _end_step(self) -> None:
        self.step += 1
        self.updates += 1
        self.parameters.advance_schedule()
        self._gradients = self._gradients.empty(self.step + 1)

    @property
    def waits_for_commit(self) -> bool:
        """Whether the mean gradient of the next step is complete and only :meth:`apply` is missing."""
        return self.rule.requires_commit and self._gradients.all_wait

    def weigh(self, step: int, factor: float) -> None:
        """Multiply the mean gradient of ``step``, which waits for its commit, by ``factor``; once, however often asked.

        Where losses are sums with a weight, it makes the gradient of their mean from the mean of their gradients.
        """
        if step == self.step + 1 and self.waits_for_commit:
            self._gradients.weigh(factor)

    def norms(self) -> dict[str, list[float]]:
        """Compute the norms of the pieces of the mean gradient that waits for its commit, by parameter."""
        return self.parameters.norms(self._gradients.means)

    def apply(self, step: int, factor: float | None) -> None:
        """Make the update of ``step`` that waits, its gradient times ``factor``; None leaves the update out."""
        if step != self.step + 1 or not self.waits_for_commit:
            return  # committed before, by one whose answer was lost
        self.last_factor = factor
        for index, gradient in sorted(self._gradients.means.items()):
            if factor not in (None, 1.0):
                (gradient if isinstance(gradient, Tensor) else gradient[1]).mul_(factor)
            if factor is not None:
                self.parameters.update(index, gradient)
        self._end_step()

    def reset(self, step: int, factor: float | None) -> None:
        """Begin with another server that leads: end ``step``, if it was committed, and drop what came of later ones."""
        self.apply(step, factor)
        if self.rule.synchronous:
            self._gradients = self._gradients.empty(self.step + 1)

    def image(self) -> dict[str, Any]:
        """Describe all of it, also what has come of steps in progress, for a standby; tensors are not copied."""
        return {
            "parameters": self.parameters.image(),
            "step": self.step,
            "updates": self.updates,
            "last_factor": self.last_factor,
            "gradients": self._gradients.image(),
            "units": self._units.image(),
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Become what the master's shard was when it gave its :meth:`image`."""
        self.parameters.restore(image["parameters"])
        self.step, self.updates, self.last_factor = image["step"], image["updates"], image["last_factor"]
        self._gradients = self._gradients.empty(self.step + 1)
        self._gradients.restore(image["gradients"])
        self._units.restore(**image["units"])

    def state(self) -> dict[str, Any]:
        """Copy the parameters by name, with the number of the last step that is done."""
        return {**self.parameters.state(), "step": self.step}
