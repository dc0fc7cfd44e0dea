"""A shard: the parameters of one server, and when gradients update them. No sockets; callers hold a lock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from worldsize.net.frames import RefusedError
from worldsize.strategies.parameter_server.shard_parameters import ShardParameters
from worldsize.strategies.parameter_server.step_gradients import Gradient, StepGradients
from worldsize.strategies.parameter_server.unit_log import UnitLog


@final
@dataclass(frozen=True)
class Rule:
    """Rule by which gradients become an update.

    Attributes:
        logical_ranks: Number of logical ranks of a step.
        synchronous: Whether the mean over all logical ranks of a step is one update. Otherwise each logical rank's
            gradient is an update, with a fraction of the learning rate.
        by_staleness: Whether that fraction is 1 / staleness of the gradient (Zhang et al. 2016, arXiv 1511.05950)
            instead of 1 / logical ranks.
        requires_commit: Whether the update of a step waits for :meth:`Shard.apply`.
        finite: Whether NaN and infinite gradients are refused.
    """

    logical_ranks: int
    synchronous: bool = True
    by_staleness: bool = False
    requires_commit: bool = False
    finite: bool = True


@final
class Shard:
    """Updates ``parameters`` according to ``rule``.

    Args:
        parameters: The parameters that this server owns.
        rule: When gradients become an update.
        step: The last completed step.

    Attributes:
        updates: Number of updates since the run began.
        last_factor: Factor of the gradient in the last commit; None: its update was skipped.
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
        """The last step such that it and all earlier steps are complete."""
        return self.step if self.rule.synchronous else self._units.closed

    def push(
        self,
        index: int,
        gradient: Gradient,
        *,
        step: int,
        width: int,
        node: int,
        seen: int = 0,
        present: Tensor | None = None,
    ) -> bool:
        """Add the gradient of a bucket or a table.

        Args:
            index: Index of the bucket or the table; buckets are numbered first.
            gradient: For a bucket a tensor (n,); for a table unique sorted ids (n,) and values (n, dim).
            step: The step of the gradient.
            width: Number of nodes of a level of the tree over logical ranks, as in
                :class:`~worldsize.dist.ordered.PartialSums`.
            node: Index of the node of that level whose sum the gradient is. Without ``rule.synchronous``, the first
                logical rank of a unit, whose mean it is.
            seen: Number of updates in the worker's weights.
            present: Which pieces of the bucket have a gradient, bool (pieces,); None: all.

        Returns:
            Whether it is new; False if the gradient of these logical ranks was added before.

        Raises:
            RefusedError: The gradient is not finite, or its step is not being trained; nothing has changed.
        """
        values = gradient if isinstance(gradient, Tensor) else gradient[1]
        if self.rule.finite and not math.isfinite(float(values.sum())):
            raise RefusedError(f"a gradient for step {step} is NaN or infinite (nonfinite=ignore would accept it)")
        if not self.rule.synchronous:
            return self._push_unit(index, gradient, (step, node), seen, present)
        is_new = self._gradients.add(index, gradient, step=step, width=width, node=node, present=present)
        if index in self._gradients.means and not self.rule.requires_commit:
            present = self._gradients.present.get(index)
            self.parameters.update(index, self._gradients.take(index), present=present)
            if self._gradients.all_taken:
                self._end_step()
        return is_new

    def _push_unit(
        self, index: int, gradient: Gradient, unit: tuple[int, int], seen: int, present: Tensor | None
    ) -> bool:
        """Apply the update of one unit, with a learning rate of lr / logical ranks: those of a step add up to lr."""
        if not self._units.add(unit, index):
            return False
        staleness = max(1, (self.updates - seen + 1) % 2**32)
        share = 1 / (staleness if self.rule.by_staleness else self.rule.logical_ranks)
        self.parameters.update(index, gradient, share, present=present)
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
        """Whether the mean gradient of the next step is complete and waits for :meth:`apply`."""
        return self.rule.requires_commit and self._gradients.all_wait

    def weigh(self, step: int, factor: float) -> None:
        """Multiply the uncommitted mean gradient of ``step`` by ``factor``. Repeated calls have no effect.

        For losses that are a sum and a weight, it turns the mean of gradients into the gradient of the weighted mean.
        """
        if step == self.step + 1 and self.waits_for_commit:
            self._gradients.weigh(factor)

    def norms(self) -> dict[str, list[float]]:
        """Return the L2 norms of the pieces of the uncommitted mean gradient, by parameter."""
        return self.parameters.norms(self._gradients.means, self._gradients.present)

    def apply(self, step: int, factor: float | None) -> None:
        """Commit the update of ``step``, with its gradient multiplied by ``factor``; None skips the update."""
        if step != self.step + 1 or not self.waits_for_commit:
            return  # committed before, by a request whose answer was lost
        self.last_factor = factor
        for index, gradient in sorted(self._gradients.means.items()):
            if factor not in (None, 1.0):
                (gradient if isinstance(gradient, Tensor) else gradient[1]).mul_(factor)
            if factor is not None:
                self.parameters.update(index, gradient, present=self._gradients.present.get(index))
        self._end_step()

    def reset(self, step: int, factor: float | None) -> None:
        """Prepare for a new leading server: complete ``step``, if it was committed, and drop gradients of later steps.

        ``factor`` is that of the commit of ``step``; None: its update was skipped.
        """
        self.apply(step, factor)
        if self.rule.synchronous:
            self._gradients = self._gradients.empty(self.step + 1)

    def image(self) -> dict[str, Any]:
        """Return the complete state for a standby, including gradients of steps in progress; tensors are not copied."""
        return {
            "parameters": self.parameters.image(),
            "step": self.step,
            "updates": self.updates,
            "last_factor": self.last_factor,
            "gradients": self._gradients.image(),
            "units": self._units.image(),
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Load the :meth:`image` of the master's shard."""
        self.parameters.restore(image["parameters"])
        self.step, self.updates, self.last_factor = image["step"], image["updates"], image["last_factor"]
        self._gradients = self._gradients.empty(self.step + 1)
        self._gradients.restore(image["gradients"])
        self._units.restore(**image["units"])

    def state(self) -> dict[str, Any]:
        """Return a copy of the parameters by name, and the number of the last completed step."""
        return {**self.parameters.state(), "step": self.step}
