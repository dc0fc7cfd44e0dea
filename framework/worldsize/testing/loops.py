"""Small edge-case programs that strategies must train like a plain PyTorch loop, or refuse.

A case is a recipe and a loop in plain PyTorch. :class:`~worldsize.testing.contract.StrategyContract` tests each
strategy and plugin with all of :data:`worldsize.testing.cases.CASES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Batch, ConfigError, Numerics, Recipe, RunContext, Strategy
from worldsize.data.batches import fetch_batch, get_collate_fn
from worldsize.data.order import Order
from worldsize.plan.construction import check_construction, check_trainable
from worldsize.testing.recipes import ByMetric
from worldsize.testing.training import BATCH, SEED, cluster_with, run_in_roles, train

REMEDY = re.compile(
    r"\b(Set|Use|Let|Give|Define|Declare|Register|Pass|Call|Compute|Leave|Make|Freeze|Write|Keep|Return"
    r"|Add|Change|Create|Move|Remove|Rename|Store)\b"
)
Reference = Callable[["Case", Sequence[Batch]], Mapping[str, Tensor]]


@final
@dataclass(frozen=True)
class Case:
    """A program to test strategies with.

    Attributes:
        name: A few hyphenated words, used as the name in tests.
        recipe: The recipe; its model has the same weights on each call.
        steps: Number of steps to train.
        numerics: Precision and clipping.
        reference: Trains on whole batches, one per step, and returns the weights by name. None for a plain loop.
        apart: Whether only some ranks may refuse, so that the case needs its own processes.
        tolerance: Maximum difference of a weight from the reference.
    """

    name: str
    recipe: Recipe
    steps: int = 6
    numerics: Numerics = field(default_factory=Numerics)
    reference: Reference | None = None
    apart: bool = False
    tolerance: float = 2e-5

    def train_reference(self) -> Mapping[str, Tensor]:
        """Return the weights by name, in model shapes, after training with the reference."""
        data, order = self.recipe.data("train"), Order(SEED, BATCH, 1, (0,))
        batches = [
            fetch_batch(data, order.compute_indices(step, 0, len(data)), get_collate_fn(self.recipe))
            for step in range(1, self.steps + 1)
        ]
        return (self.reference or plain_loop)(self, batches)


@final
@dataclass(frozen=True)
class CaseOutcome:
    """The outcome of a case: the trained ``weights`` by name, or a refusal."""

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    refusal: str = ""


def plain_loop(case: Case, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """Train like a PyTorch tutorial, and return the weights by name, in model shapes."""
    recipe, limit = case.recipe, case.numerics.clip_norm
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer)
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = recipe.loss_at(model, batch, step)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        if schedule is not None and not isinstance(recipe, ByMetric):
            schedule.step()
        elif isinstance(recipe, ByMetric) and step % recipe.evaluate_every == 0:
            advance: Any = schedule
            advance.step(_evaluate_metric(recipe, model))
    return model.state_dict()


def _evaluate_metric(recipe: Recipe, model: nn.Module) -> float:
    """Return the recipe's only metric on the test data."""
    data, modes = recipe.data("test"), [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        batch = fetch_batch(data, torch.arange(len(data)), get_collate_fn(recipe))
        ((total, count),) = recipe.evaluate(model, batch).values()
    for module, was_training in modes:
        module.training = was_training
    return float(total / count)


def outcomes(
    strategy: Strategy,
    cases: Sequence[Case],
    size: int,
    *,
    local_size: int | None = None,
    logical_ranks: int | None = None,
) -> Mapping[str, CaseOutcome]:
    """Train each of ``cases`` on ``size`` processes, and return the outcomes by name.

    Cases share processes if possible. ``logical_ranks``: number per step; None for at least two per data-parallel rank.

    Raises:
        RuntimeError: a case raised an error other than ConfigError.
    """
    cluster = cluster_with(strategy, size)
    total = logical_ranks or strategy.data_parallel(cluster) * max(2, strategy.default_micro_batches)
    ended = {
        case.name: CaseOutcome(refusal=refusal)
        for case in cases
        if (refusal := find_early_refusal(strategy, case.recipe, case.numerics))
    }
    left = [case for case in cases if case.name not in ended]
    serves = set(strategy.roles(cluster)) != {"worker"}
    together = [] if serves else [case for case in left if not case.apart]
    gangs = [together] if together else []
    for gang in [*gangs, *([case] for case in left if case not in together)]:
        ended |= _train_cases(strategy, gang, size, local_size, total)
    return ended


def find_early_refusal(strategy: Strategy, recipe: Recipe, numerics: Numerics | None = None) -> str:
    """Return the message if ``recipe`` is refused before any process starts, else ""."""
    metric = "error" if isinstance(recipe, ByMetric) else None
    try:
        check_trainable(recipe, strategy)
        check_construction(recipe, strategy, numerics, schedule_metric=metric)
    except ConfigError as refusal:
        return str(refusal)
    return ""


def _train_cases(
    strategy: Strategy, cases: Sequence[Case], size: int, local_size: int | None, logical_ranks: int
) -> dict[str, CaseOutcome]:
    serves = any(role.serves for role in strategy.roles(cluster_with(strategy, size)).values())

    def run_cases(context: RunContext) -> dict[str, CaseOutcome]:
        return {
            case.name: _run_case(strategy, case, context, logical_ranks, apart=case.apart or serves) for case in cases
        }

    try:
        ended: dict[str, CaseOutcome] = run_in_roles(strategy, run_cases, size, local_size=local_size)[0]
    except RuntimeError as failure:  # includes a refusal by only one rank
        (refusal, *_) = [*re.findall(r"^(?:worldsize\.\S*)?ConfigError: (.*)", str(failure), re.MULTILINE), ""]
        if len(cases) > 1 or not refusal:
            raise
        return {cases[0].name: CaseOutcome(refusal=refusal)}
    return ended


def _run_case(strategy: Strategy, case: Case, context: RunContext, logical_ranks: int, *, apart: bool) -> CaseOutcome:
    """Train ``case`` and return the outcome; re-raise a refusal if ``apart``, since other processes would wait."""
    run = replace(context, numerics=case.numerics, logical_ranks=logical_ranks)
    try:
        trained = train(strategy, run, case.steps, recipe=case.recipe)
    except ConfigError as refusal:
        if apart or context.rendezvous:  # servers would wait for a rank that has refused
            raise
        return CaseOutcome(refusal=str(refusal))
    return CaseOutcome(trained.model)


def find_faults(cases: Sequence[Case], ended: Mapping[str, CaseOutcome], *, exact: bool = True) -> list[str]:
    """Return a message for each case neither trained like the loop nor refused with a remedy.

    ``exact``: whether to compare weights with the plain loop; otherwise a case only has to complete.
    """
    lines = []
    for case in cases:
        outcome = ended[case.name]
        if outcome.refusal:
            if not REMEDY.search(outcome.refusal):
                lines.append(f"{case.name}: refused without a remedy: {outcome.refusal.splitlines()[0]}")
        elif exact and (difference := largest_difference(outcome.weights, case.train_reference())) > case.tolerance:
            lines.append(f"{case.name}: differs from the plain loop by {difference:.1e}")
    return lines


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of tensors with equal shapes, or inf if names differ."""
    if actual.keys() != expected.keys():
        return float("inf")
    differences = [(actual[name] - value).abs().double() for name, value in expected.items() if value.numel()]
    return max(float(each.nan_to_num(float("inf")).max()) for each in differences)


@dataclass(frozen=True)
class Loop(Recipe):
    """Base of recipes with weights and data from formulas; subclasses vary model or loss."""

    def build_net(self) -> nn.Module:
        """Create the model, inputs (batch, 4), outputs (batch, 1); :meth:`model` sets weights."""
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def model(self) -> nn.Module:
        model = self.build_net()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters(), 1):
                values = torch.sin(torch.arange(parameter.numel(), device=parameter.device) * 0.7 + number)
                parameter.copy_(0.3 * values.view(parameter.shape))
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split: str) -> TensorDataset:
        samples = torch.arange(72.0).unsqueeze(1) if split == "train" else torch.arange(100.0, 113.0).unsqueeze(1)
        inputs = torch.sin(samples * torch.arange(1, 5) * 0.37)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) * 0.5 + 0.1 * torch.cos(samples))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"error": ((model(batch[0]) - batch[1]).square().sum(), torch.tensor(len(batch[0])))}
