"""The contract of strategies judges losses as its author declares."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from worldsize.strategies.single import Single
from worldsize.testing.contract import StrategyContract, recipe_for
from worldsize.testing.training import Trained, reference


@cache
def one_process() -> Trained:
    return reference(recipe_for(_Ended.strategy))


class _Ended(StrategyContract):
    """A contract whose training ended with ``factor`` times the loss and the error of one process."""

    strategy = Single()
    tolerance = 0.1
    factor: ClassVar[float] = 1.0

    def _train_once(self, size: int) -> list[Any]:
        exact = one_process()
        losses = [*exact.losses[:-1], exact.losses[-1] * self.factor]
        return [(replace(exact, losses=losses, error=exact.error * self.factor), set(), {})]


def judged(**declared: Any) -> None:
    kind = type("Judged", (_Ended,), declared)
    kind().test_the_loss_is_that_of_one_process(1)


@pytest.mark.parametrize("factor", [0.2, 0.95, 1.05])
def test_a_loss_that_is_better_or_within_the_tolerance_passes(factor: float) -> None:
    judged(factor=factor)


@pytest.mark.parametrize(("factor", "two_sided"), [(1.2, False), (1.2, True), (0.8, True)])
def test_a_loss_that_is_worse_or_not_that_of_the_same_algorithm_fails(factor: float, two_sided: bool) -> None:
    with pytest.raises(AssertionError, match=r"loss .* on one process: .* > 1.0e-01"):
        judged(factor=factor, two_sided=two_sided)


def test_a_worse_test_error_fails_with_a_loss_that_is_right() -> None:
    class WorseError(_Ended):
        def _train_once(self, size: int) -> list[Any]:
            ((trained, *others),) = super()._train_once(size)
            return [(replace(trained, error=trained.error * 1.5), *others)]

    with pytest.raises(AssertionError, match="test error"):
        WorseError().test_the_loss_is_that_of_one_process(1)


def test_an_exemption_is_a_skip_that_shows_its_reason_and_still_asks_that_training_works() -> None:
    with pytest.raises(
        pytest.skip.Exception, match="the loss differs from a single process: it samples half of the data"
    ):
        judged(factor=1.5, loss_differs="it samples half of the data")
    with pytest.raises(AssertionError, match="the loss did not decrease"):
        judged(factor=1000.0, loss_differs="it samples half of the data")


def test_an_empty_reason_exempts_from_nothing() -> None:
    with pytest.raises(AssertionError, match="loss .* on one process"):
        judged(factor=1.5, loss_differs="")


@pytest.mark.parametrize(("factor", "declared"), [(0.8, {}), (1.5, {"loss_differs": "workers see other data"})])
def test_several_updates_a_step_may_have_a_better_loss_too(factor: float, declared: Any, tmp_path: Path) -> None:
    """Accept any loss where it differs by design; a resumed run is still compared."""

    class Updated(_Ended):
        runs = 0

        def run(self, size: int, body: Any, recipe: Any = None) -> list[Any]:
            self.runs += 1
            exact = reference(recipe)
            losses = [factor * loss for loss in exact.losses]
            return [replace(exact, losses=losses[7:] if self.runs == 3 else losses)]

    kind = type("Declared", (Updated,), declared)
    kind().test_several_updates_a_step_are_those_of_one_process(tmp_path)
    worse = type("Exact", (Updated,), {"two_sided": True})
    with pytest.raises(AssertionError, match="loss"):
        worse().test_several_updates_a_step_are_those_of_one_process(tmp_path)
