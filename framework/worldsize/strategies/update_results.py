"""Combines the results of a step's updates into the result of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from worldsize.core import ConfigError, StepResult


@final
@dataclass(frozen=True)
class UpdateResult:
    """The result of one update in this process; :class:`StepResult` is that of a step."""

    names: Sequence[str]  # of the optimizers that took it
    losses: Sequence[Tensor]
    grad_norm: Tensor | None
    skipped: bool
    metrics: Mapping[str, Tensor]
    overflowed: bool = False


def step_result(
    results: Sequence[UpdateResult],
    rates: Mapping[str, float | None],
    returned: Mapping[str, Tensor],
    *,
    kind: str,
    step: int,
) -> StepResult:
    """Combine the results of a step's updates.

    Args:
        results: Results of the updates, in order.
        rates: The learning rate of each optimizer when the step began, in the recipe's order.
        returned: Metrics that the generators returned at their ends, float64 (micro-batches, 2) each.
        kind: Name of the recipe's class.
        step: Number of the step.

    Raises:
        ConfigError: there was no update, or a metric's name is taken.
    """
    if not results:
        raise ConfigError(f"{kind}.updates yielded nothing in step {step}. Yield an update in every step.")
    skips = [result.skipped for result in results]
    norms = [result.grad_norm for result in results if result.grad_norm is not None]
    return StepResult(
        losses=_sums([result.losses for result in results]),
        lr=next(iter(rates.values())),
        grad_norm=torch.linalg.vector_norm(torch.stack(norms)) if norms else None,
        skipped=any(skips),
        metrics=_metrics(results, rates, returned),
        partly=any(skips) and not all(skips),
        occasional=True,
        overflowed=any(result.overflowed for result in results),
    )


def first_rate(optimizer: Optimizer) -> float | None:
    """Return the learning rate of an optimizer's first group; None if it has none."""
    rate: float | None = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def _sums(losses: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return, for each micro-batch, the sum of its losses in the updates.

    It is summed in float64, the dtype of losses from other processes, so that the sum is the same on all of them.
    """
    return [torch.stack([loss.double() for loss in own]).sum() for own in zip(*losses, strict=True)]


def _metrics(
    results: Sequence[UpdateResult], rates: Mapping[str, float | None], returned: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the metrics of updates and generators, each optimizer's mean loss, and all learning rates but the first.

    The counts of an optimizer that did not step are 0, so that all steps have the same names.
    """
    metrics: dict[str, Tensor] = {}
    for own_metrics in [*(result.metrics for result in results), returned]:
        for name, pairs_b2 in own_metrics.items():
            metrics[name] = metrics[name] + pairs_b2 if name in metrics else pairs_b2
    for name in rates:
        if metrics.keys() & {f"loss/{name}", f"lr/{name}"}:
            raise ConfigError(
                f"the recipe's updates name a metric loss/{name} or lr/{name}, which each logged step has of the "
                f"optimizer {name!r}. Rename it."
            )
    losses = results[0].losses
    one_b = torch.ones(len(losses), dtype=torch.float64, device=losses[0].device)
    for place, (name, rate) in enumerate(rates.items()):
        own = [result.losses for result in results if name in result.names]
        total_b = torch.stack(_sums(own)) if own else one_b * 0
        metrics[f"loss/{name}"] = torch.stack([total_b, one_b * len(own)], dim=1)
        if place and rate is not None:
            metrics[f"lr/{name}"] = torch.stack([one_b * rate, one_b], dim=1)
    return metrics
