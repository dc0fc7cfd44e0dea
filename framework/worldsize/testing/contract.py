"""Contract tests for strategies; derive from :class:`StrategyContract` to test your own.

    class TestEASGD(StrategyContract):
        strategy = EASGD(period=4)
        tolerance = 0.05                # its algorithm differs from a single process's

Serving processes run in addition to training processes, as the strategy's roles require. Each test trains
:class:`~worldsize.testing.recipes.Chain` in real gloo processes, and compares with plain PyTorch on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from worldsize.checkpoint.load import find_newest, read_tensors
from worldsize.core import ConfigError, Recipe, RunContext, Strategy
from worldsize.plan.construction import check_construction, check_trainable
from worldsize.testing.cases import CASES
from worldsize.testing.interrupted import (
    REMEMBERED_STEPS,
    CountingChain,
    Remembered,
    find_interruption_changes,
    remembering_loop,
    train_healing,
)
from worldsize.testing.loops import REMEDY, Case, find_early_refusal, find_faults, largest_difference, outcomes
from worldsize.testing.recipes import AveragedChain, TwoPlayers
from worldsize.testing.runs import LOOPBACK, children, listening
from worldsize.testing.training import (
    ALONE,
    CHAIN,
    STEPS,
    Trained,
    cluster_with,
    create_cluster,
    reference,
    run_in_roles,
    train,
)
from worldsize.world.roles import can_heal

_Ended = tuple[Trained, set[int], dict[str, tuple[str, int]]]  # result, child processes, and listening ports by inode
_ended: dict[tuple[type, int], list[_Ended]] = {}
_saved: dict[type, tuple[Path, Trained]] = {}


class StrategyContract:
    """Contract tests for one strategy: derive from this class, and set ``strategy``.

    Attributes:
        strategy: The strategy under test.
        sizes: World sizes to train on.
        local_size: Ranks per node. None if all are on one node.
        impossible: World size that the strategy must refuse. None if every size is possible.
        tolerance: Maximum relative increase of the loss after 20 steps, and of the test error, over a single process.
        two_sided: Whether to bound decreases, too, for algorithms equivalent to a single process.
        loss_differs: Why the algorithm's loss differs by design from a single process, or empty. If set, the test only
            checks that the loss falls, and is skipped with this reason, shown by ``pytest -rs``.
        partners: Strategies that must exchange checkpoints with this one, in both directions, at the first of
            ``sizes``.
        cases: Programs that the strategy must train like a plain loop, or refuse.
        refuses: Names of the ``cases`` that it refuses. None to allow any refusal with a remedy.
    """

    strategy: ClassVar[Strategy]
    sizes: ClassVar[Sequence[int]] = (2, 3, 4)
    local_size: ClassVar[int | None] = None
    impossible: ClassVar[int | None] = None
    tolerance: ClassVar[float] = 1e-5
    two_sided: ClassVar[bool] = False
    loss_differs: ClassVar[str] = ""
    partners: ClassVar[Sequence[Strategy]] = ()
    cases: ClassVar[Sequence[Case]] = CASES
    refuses: ClassVar[Collection[str] | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with a ``size`` argument at all ``sizes``."""
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)

    def run(self, size: int, body: Callable[[RunContext], Any], recipe: Recipe = CHAIN) -> list[Any]:
        """Call ``body`` on ``size`` processes that train ``recipe``; return results by rank.

        Serving processes call ``body`` too, and :func:`train` makes them serve. If all processes serve, only the
        leader's result is returned.
        """
        return run_in_roles(self.strategy, body, size, local_size=self.local_size)

    def _train_once(self, size: int) -> list[_Ended]:
        """Return the outcome on each rank; training runs once for all tests in this process."""
        key, recipe = (type(self), size), recipe_for(self.strategy)
        if key not in _ended:
            _ended[key] = self.run(
                size, lambda context: (train(self.strategy, context, STEPS, recipe=recipe), children(), listening())
            )
        return _ended[key]

    def _save_checkpoints(self, folders: pytest.TempPathFactory) -> tuple[Path, Trained]:
        """Train 4 steps at the largest size; return the checkpoint folder and rank 0's result.

        Like :meth:`_train_once`, this runs once for all tests in this process.
        """
        if type(self) not in _saved:
            folder, size, recipe = folders.mktemp("saved"), self.sizes[-1], recipe_for(self.strategy)
            ended = self.run(size, lambda context: train(self.strategy, context, 4, folder, save=True, recipe=recipe))
            _saved[type(self)] = folder, ended[0]
        return _saved[type(self)]

    def test_the_loss_is_that_of_one_process(self, size: int) -> None:
        """Compare loss and test error with plain PyTorch at all sizes, with averaged weights if supported."""
        compare = _comparison(type(self))
        expected = reference(recipe_for(self.strategy))
        for rank, (actual, *_) in enumerate(self._train_once(size)):
            if not self.loss_differs:
                compare("loss", actual.losses[-1], expected.losses[-1], self.tolerance)
                compare("test error", actual.error, expected.error, self.tolerance)
            else:
                first, last = actual.losses[0], actual.losses[-1]
                assert last < first, f"the loss did not decrease: {first} after step 1, {last} after step {STEPS}"
            assert actual.moved, f"rank {rank} did not train: its parameters are unchanged"
        if self.loss_differs:
            pytest.skip(f"the loss differs from a single process: {self.loss_differs}")

    def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Compare 7 steps with 4 steps, a checkpoint and 3 more steps, at the largest size."""
        size, recipe = self.sizes[-1], recipe_for(self.strategy)
        straight = self.run(size, lambda context: train(self.strategy, context, 7, recipe=recipe))[0]
        folder, _ = self._save_checkpoints(tmp_path_factory)
        resumed = self.run(
            size, lambda context: train(self.strategy, context, 7, folder, perturbed=True, recipe=recipe)
        )[0]
        assert resumed.losses == straight.losses[4:], f"expected {straight.losses[4:]}, got {resumed.losses}"
        assert_same(resumed.model, straight.model)

    def test_its_checkpoint_holds_the_plain_model(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Compare saved weights by name with the weights in memory after 4 steps, at the largest size."""
        folder, saved = self._save_checkpoints(tmp_path_factory)
        checkpoint = find_newest(folder, ALONE)
        assert checkpoint is not None
        assert_same(read_tensors(checkpoint, "model"), saved.model)
        recipe_for(self.strategy).model().load_state_dict(dict(saved.model))

    def test_checkpoints_load_under_its_partners_and_theirs_under_it(self, tmp_path: Path) -> None:
        """Resume from this strategy under each of ``partners`` and vice versa, at the smallest size."""
        size = self.sizes[0]

        def train_strategy(strategy: Strategy, folder: Path, *, save: bool) -> Trained:
            def run_training(context: RunContext) -> Trained:
                return train(strategy, context, 4, folder, save=save)

            if strategy is self.strategy:
                results = self.run(size, run_training)
            else:
                results = run_in_roles(strategy, run_training, size, local_size=self.local_size)
            result: Trained = results[0]
            return result

        for number, partner in enumerate(self.partners):
            for first, then in ((self.strategy, partner), (partner, self.strategy)):
                folder = tmp_path / f"{number}_{type(first).__name__}"
                saved, loaded = train_strategy(first, folder, save=True), train_strategy(then, folder, save=False)
                assert_same(loaded.model, saved.model)

    def test_it_trains_what_a_plain_loop_trains_or_refuses_it(self) -> None:
        """Train ``cases``, and compare weights with a plain loop, at the smallest size.

        If ``tolerance`` is above 0.001 or the loss differs by design, weights are not compared.
        """
        ended = outcomes(self.strategy, self.cases, self.sizes[0], local_size=self.local_size)
        wrong = find_faults(self.cases, ended, exact=self.tolerance <= 1e-3 and not self.loss_differs)
        assert not wrong, "\n".join(wrong)
        refused = {name for name, outcome in ended.items() if outcome.refusal}
        assert self.refuses is None or refused == set(self.refuses), f"refused: {sorted(refused)}"

    def test_a_wrong_world_size_is_refused_before_anything_starts(self) -> None:
        """Expect a ConfigError that names the size ``impossible``, unless that is None."""
        if self.impossible is None:  # all world sizes are supported
            return
        with pytest.raises(ConfigError, match=rf"\b{self.impossible}\b"):
            self.strategy.roles(create_cluster(self.impossible))

    def test_several_updates_a_step_are_those_of_one_process(self, tmp_path: Path) -> None:
        """Compare :class:`~worldsize.testing.recipes.TwoPlayers` with plain PyTorch, and resume.

        Strategies without support for several updates must refuse the recipe before any process starts. Strategies
        that refuse its step hook train it without weight clipping.
        """
        recipe, size = TwoPlayers(), self.sizes[-1]
        try:
            check_trainable(recipe, self.strategy)
        except ConfigError as refusal:
            assert "several updates per step" in str(refusal)  # noqa: PT017 - either is allowed
            return
        try:
            check_construction(recipe, self.strategy)
        except ConfigError as refusal:
            assert "a step hook" in str(refusal)  # noqa: PT017
            recipe = TwoPlayers(clips=False)

        def train_recipe(steps: int, **options: Any) -> list[Trained]:
            return self.run(
                size, lambda context: train(self.strategy, context, steps, recipe=recipe, **options), recipe
            )

        straight = train_recipe(STEPS)
        for each in straight if not self.loss_differs else ():
            _comparison(type(self))("loss", each.losses[-1], reference(recipe).losses[-1], self.tolerance)
        train_recipe(7, folder=tmp_path, save=True)
        resumed = train_recipe(STEPS, folder=tmp_path, perturbed=True)[0]
        assert resumed.losses == straight[0].losses[7:]
        assert_same(resumed.model, straight[0].model)

    def test_an_average_in_a_buffer_is_that_of_one_process(self, tmp_path: Path) -> None:
        """Evaluate with an average in a buffer, updated by an optimizer hook, and resume.

        Strategies without support for it must refuse it before any process starts, with a remedy.
        """
        recipe, size = AveragedChain(in_buffer=True), self.sizes[-1]
        try:
            check_construction(recipe, self.strategy)
        except ConfigError as refusal:
            assert "a step hook" in str(refusal)  # noqa: PT017 - either is allowed
            assert "strategy=ddp" in str(refusal)  # noqa: PT017
            return
        straight = self.run(size, lambda context: train(self.strategy, context, STEPS, recipe=recipe), recipe)
        if not self.loss_differs:
            for each in straight:
                _comparison(type(self))("test error", each.error, reference(recipe).error, self.tolerance)
        for steps, saves in ((7, True), (STEPS, False)):
            resumed = self.run(
                size,
                lambda context: train(self.strategy, context, steps, tmp_path, save=saves, recipe=recipe),  # noqa: B023
                recipe,
            )
        assert resumed[0].error == straight[0].error
        assert_same(resumed[0].model, straight[0].model)

    def test_a_step_that_ends_before_its_update_changes_nothing(self) -> None:
        """Interrupt a step, and check that the state is unchanged, so that survivors can repeat the step."""
        if not can_heal(self.strategy.roles(cluster_with(self.strategy, self.sizes[-1]))) or self.strategy.shards_state:
            pytest.skip("survivors do not repeat steps from their own state with this strategy")
        recipes = (CountingChain(), CountingChain(whole_numbers=True))
        for size, totals in ((1, (1, 3)), (2, (4,))):
            cases = [(recipe, total) for recipe in recipes for total in totals]
            interrupted = partial(find_interruption_changes, self.strategy, cases=cases)
            assert self.run(size, interrupted) == [[]] * size

    def test_values_that_a_recipe_keeps_outlast_restarts_and_healing(self, tmp_path: Path) -> None:
        """Compare with plain PyTorch, and bit for bit with resumed and repeated steps.

        Strategies without support for recipe state must refuse the recipe before any process starts, with a remedy.
        """
        if refusal := find_early_refusal(self.strategy, Remembered()):
            assert REMEDY.search(refusal), refusal
            return
        size = self.sizes[0]
        cluster = cluster_with(self.strategy, size)
        roles = self.strategy.roles(cluster)
        total = self.strategy.data_parallel(cluster) * max(2, self.strategy.default_micro_batches)
        last: dict[str, Any] = {"steps": REMEMBERED_STEPS}
        parts = [last, {"steps": REMEMBERED_STEPS // 2, "folder": tmp_path, "save": True}, {**last, "folder": tmp_path}]

        def train_parts(context: RunContext, parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Tensor]]:
            own = replace(context, logical_ranks=total)
            return [train(self.strategy, own, recipe=Remembered(), **options).model for options in parts]

        gangs = [[options] for options in parts] if any(role.serves for role in roles.values()) else [parts]
        ended = [self.run(size, partial(train_parts, parts=each), Remembered())[0] for each in gangs]
        straight, _, resumed = [weights for each in ended for weights in each]
        if self.tolerance <= 1e-3 and not self.loss_differs:
            assert largest_difference(straight, remembering_loop(total)) <= 2e-5
        assert_same(resumed, straight)
        if can_heal(roles):
            repeated = partial(train_healing, self.strategy, logical_ranks=total)
            healed = self.run(size, repeated, Remembered())
            for point, weights in healed[0].items():
                assert_same(weights, straight, when=f" after a step interrupted at {point!r}")

    def test_nothing_is_left_behind(self) -> None:
        """Expect no child processes and no listening ports after training."""
        for _, processes, ports in self._train_once(self.sizes[0]):
            assert not processes, f"leftover processes: {sorted(processes)}"
            shown = sorted(ports.values())
            assert all(host in LOOPBACK for host, _ in shown), f"not restricted to loopback: {shown}"
            assert not ports.keys() & listening(of_all=True).keys(), f"ports still open: {shown}"


def recipe_for(strategy: Strategy) -> Recipe:
    """Return a recipe with weights changed by a hook, or CHAIN if ``strategy`` refuses it."""
    recipe = AveragedChain()
    try:
        check_construction(recipe, strategy)
    except ConfigError:
        return CHAIN
    return recipe


def _comparison(contract: type[StrategyContract]) -> Callable[[str, float, float, float], None]:
    """Return a one-sided or two-sided comparison with a single process."""
    return assert_close if contract.two_sided else assert_no_worse


def assert_close(what: str, actual: float, expected: float, tolerance: float) -> None:
    """Fail if the relative difference exceeds ``tolerance``."""
    difference = abs(actual - expected) / abs(expected)
    assert difference <= tolerance, (
        f"{what} {actual}, expected {expected} as on one process: {difference:.1e} > {tolerance:.1e}"
    )


def assert_no_worse(what: str, actual: float, expected: float, tolerance: float) -> None:
    """Fail if ``actual`` exceeds ``expected`` by a fraction of more than ``tolerance``."""
    difference = (actual - expected) / abs(expected)
    assert difference <= tolerance, (
        f"{what} {actual}, worse than {expected} on one process: {difference:.1e} > {tolerance:.1e}"
    )


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, when: str = "") -> None:
    """Fail unless both have the same names, and all tensors have the same shapes and bits."""
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different, f"tensors differ{when}: {', '.join(different)}"
