"""What every strategy promises, as tests that an author derives from.

    class TestEASGD(StrategyContract):
        strategy = EASGD(period=4)
        tolerance = 0.05                # its mathematics is not that of one process

It holds for the processes that train; a strategy whose other processes serve overrides ``run`` to start those beside
them. Each test trains :class:`~worldsize.testing.recipes.Chain` on real
gloo processes; what is compared with is a plain PyTorch loop on one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.checkpoints.load import load, newest, read_tensors
from worldsize.checkpoints.retention import Retention
from worldsize.checkpoints.save import Saver
from worldsize.collectives.gather_full import gather_full
from worldsize.collectives.per_rank import local
from worldsize.core import (
    Cluster,
    ConfigError,
    Recipe,
    Replica,
    RunContext,
    Strategy,
    World,
)
from worldsize.data.fetch import collate_of, fetch
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, logical_ranks_of
from worldsize.engine.heap import Heap
from worldsize.planning.construction import check_trainable
from worldsize.testing.evaluation import evaluate
from worldsize.testing.leaks import LOOPBACK, children, listening
from worldsize.testing.plain import plain_step
from worldsize.testing.recipes import AveragedChain, Chain, TwoPlayers
from worldsize.testing.worlds import run_in_worlds

STEPS, BATCH, SEED = 20, 24, 3
CHAIN = Chain()
ALONE = World.alone(torch.device("cpu"))


@dataclass(frozen=True)
class Trained:
    """The outcome of :func:`train` or :func:`reference`.

    Attributes:
        losses: Loss of each step, the mean over all ranks.
        error: Error on the test data.
        model: The model's full state by name, on rank 0; empty on the others.
        moved: Whether training changed parameters that this rank holds.
    """

    losses: Sequence[float]
    error: float
    model: Mapping[str, Tensor]
    moved: bool


def train(
    strategy: Strategy,
    context: RunContext,
    steps: int,
    folder: Path | None = None,
    *,
    save: bool = False,
    perturbed: bool = False,
    recipe: Recipe = CHAIN,
) -> Trained:
    """Train ``strategy`` in this process up to step ``steps``.

    Args:
        strategy: Strategy to train under.
        context: Context of this process.
        steps: Number of the last step.
        folder: Folder of checkpoints; training goes on from the newest one in it.
        save: Whether to save a checkpoint there after the last step.
        perturbed: Whether to train on a heap in disorder, which must not change a bit.
        recipe: Recipe to train.
    """
    heap, world = Heap(), context.world
    disturb = heap.perturb if perturbed else _nothing
    disturb()
    replica = strategy.replica(recipe, context)
    disturb()
    first = _resumed(replica, world, folder)
    before = _held(replica)
    part = strategy.data_rank(world), strategy.data_parallel(_beside(strategy, world.size))
    total = part[1] * strategy.default_micro_batches
    order = Order(SEED, BATCH, total, logical_ranks_of(*part, total, replica.dealing))
    batches = micro_batches(recipe.data("train"), order, world.device, first=first, collate=collate_of(recipe))
    losses = []
    for _ in range(first, steps):
        disturb()
        losses.append(_mean_loss(replica.step(next(batches)).losses, world))
    if save and folder is not None:
        _save(replica, world, folder, steps)
    part_of_world = World(**{**vars(world), "rank": part[0], "size": part[1]})
    (error,) = evaluate(replica, recipe.data("test"), part_of_world, batch_size=5, collate=collate_of(recipe)).values()
    moved = first == steps or any(not torch.equal(now, old) for now, old in zip(_held(replica), before, strict=True))
    model = gather_full(replica.state()["model"], world)
    replica.close(complete=True)
    return Trained(losses, error, {name: tensor.clone() for name, tensor in model.items()}, moved)


def _nothing() -> None: ...


def _resumed(replica: Replica, world: World, folder: Path | None) -> int:
    checkpoint = newest(folder, world) if folder else None
    if checkpoint is None:
        return 0
    replica.load(load(checkpoint, replica.state()))
    return checkpoint.step


def _save(replica: Replica, world: World, folder: Path, step: int) -> None:
    saver = Saver(folder, world, world.groups.get(f"checkpoint/{world.role}"), keep=Retention())
    saver.save(replica.state(), step=step, facts={"metrics": {}})
    saver.finish()
    saver.close()


def _held(replica: Replica) -> list[Tensor]:
    tensors = [tensor for tensor in replica.state()["model"].values() if not tensor.is_meta]
    return [local(tensor).clone() for tensor in tensors]


def _mean_loss(losses: Sequence[Tensor], world: World) -> float:
    gathered: list[Any] = [[float(loss) for loss in losses]]
    if world.group is not None:
        gathered *= world.size
        dist.all_gather_object(gathered, gathered[world.rank], group=world.group)
    flat = [loss for rank in gathered for loss in rank]
    return math.fsum(flat) / len(flat)


def _cluster(size: int, nodes: int = 1) -> Cluster:
    return Cluster("test", nodes, size, "cpu", "gloo")


def _beside(strategy: Strategy, workers: int) -> Cluster:
    """The smallest cluster on which so many processes train, beside those that serve."""
    return next(
        cluster for cluster in map(_cluster, count(workers)) if strategy.roles(cluster)["worker"].processes == workers
    )


def reference(recipe: Recipe = CHAIN) -> Trained:
    """Train ``recipe`` by plain PyTorch on whole batches, in the documented order of samples."""
    model, data, order = recipe.model(), recipe.data("train"), Order(SEED, BATCH, 1, (0,))
    losses, step = [], plain_step(recipe, model)
    for number in range(1, STEPS + 1):
        losses.append(step(fetch(data, order.indices(number, 0, len(data)), collate_of(recipe)), number))
    with torch.no_grad():
        test = recipe.data("test")
        ((total, count),) = recipe.evaluate(
            model.eval(), fetch(test, torch.arange(len(test)), collate_of(recipe))
        ).values()
    error = float(total / count)
    return Trained(losses, error, model.state_dict(), moved=True)


_Ended = tuple[Trained, set[int], dict[str, tuple[str, int]]]  # and the processes and ports that are left then
_ended: dict[tuple[type, int], list[_Ended]] = {}
_saved: dict[type, tuple[Path, Trained]] = {}


class StrategyContract:
    """Tests of one strategy: derive from this class, and set ``strategy``.

    Attributes:
        strategy: The strategy under test.
        sizes: World sizes to train on.
        local_size: Ranks of a node; None: all are on one node.
        impossible: World size that the strategy must refuse; None: there is none.
        tolerance: How much worse the loss after 20 steps and the test error may be than those of one process, relative
            to them.
        two_sided: Whether they must not be better by more than that either, as if the algorithm is that of one process.
        loss_differs: Reason why the algorithm by design does not have the loss of one process; empty: it does. The test
            then asks only that the loss falls, and is skipped with this reason, which ``pytest -rs`` shows.
        partners: Strategies that must load its checkpoints and it theirs, at the first of ``sizes``.
    """

    strategy: ClassVar[Strategy]
    sizes: ClassVar[Sequence[int]] = (2, 3, 4)
    local_size: ClassVar[int | None] = None
    impossible: ClassVar[int | None] = None
    tolerance: ClassVar[float] = 1e-5
    two_sided: ClassVar[bool] = False
    loss_differs: ClassVar[str] = ""
    partners: ClassVar[Sequence[Strategy]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test that takes ``size`` at every one of ``sizes``."""
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)

    def run(self, size: int, body: Callable[[RunContext], Any], recipe: Recipe = CHAIN) -> list[Any]:
        """Call ``body`` on each of ``size`` processes that train ``recipe``, and return their results by rank."""
        return run_in_worlds(lambda world: body(RunContext(world)), size, local_size=self.local_size)

    def _ended(self, size: int) -> list[_Ended]:
        """Return how training ended on each rank; it runs once for all tests of this process."""
        key, recipe = (type(self), size), self._recipe()
        if key not in _ended:
            _ended[key] = self.run(
                size, lambda context: (train(self.strategy, context, STEPS, recipe=recipe), children(), listening())
            )
        return _ended[key]

    def _recipe(self) -> Recipe:
        """Return a recipe that changes weights outside the optimizer; a plain one if the strategy refuses that."""
        recipe = AveragedChain()
        with torch.device("meta"):
            model = recipe.model()
            try:
                self.strategy.check_built(recipe, model, recipe.optimizer(model))
            except ConfigError:
                return CHAIN
        return recipe

    def _saved(self, folders: pytest.TempPathFactory) -> tuple[Path, Trained]:
        """Return the checkpoints of 4 steps at the largest size, and their outcome; see :meth:`_ended`."""
        if type(self) not in _saved:
            folder, size, recipe = folders.mktemp("saved"), self.sizes[-1], self._recipe()
            ended = self.run(size, lambda context: train(self.strategy, context, 4, folder, save=True, recipe=recipe))
            _saved[type(self)] = folder, ended[0]
        return _saved[type(self)]

    def test_the_loss_is_that_of_one_process(self, size: int) -> None:
        """Compare with plain PyTorch, up to ``tolerance``, at every size; so do weights that no optimizer changes."""
        compare = assert_close if self.two_sided else assert_no_worse
        expected = reference(self._recipe())
        for rank, (actual, *_) in enumerate(self._ended(size)):
            if not self.loss_differs:
                compare("loss", actual.losses[-1], expected.losses[-1], self.tolerance)
                compare("test error", actual.error, expected.error, self.tolerance)
            else:
                first, last = actual.losses[0], actual.losses[-1]
                assert last < first, f"the loss does not fall: {first} after step 1, {last} after step {STEPS}"
            assert actual.moved, f"rank {rank} is idle: its parameters are what they were"
        if self.loss_differs:
            pytest.skip(f"its loss is not that of one process: {self.loss_differs}")

    def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Compare 7 steps with 4, a checkpoint and 3 more, at the largest size."""
        size, recipe = self.sizes[-1], self._recipe()
        straight = self.run(size, lambda context: train(self.strategy, context, 7, recipe=recipe))[0]
        folder, _ = self._saved(tmp_path_factory)
        resumed = self.run(
            size, lambda context: train(self.strategy, context, 7, folder, perturbed=True, recipe=recipe)
        )[0]
        assert resumed.losses == straight.losses[4:], f"{resumed.losses}, not {straight.losses[4:]}"
        assert_same(resumed.model, straight.model)

    def test_its_checkpoint_holds_the_plain_model(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Compare the saved weights with those in memory after 4 steps at the largest size, by the recipe's names."""
        folder, saved = self._saved(tmp_path_factory)
        checkpoint = newest(folder, ALONE)
        assert checkpoint is not None
        assert_same(read_tensors(checkpoint, "model"), saved.model)
        self._recipe().model().load_state_dict(dict(saved.model))

    def test_checkpoints_load_under_its_partners_and_theirs_under_it(self, tmp_path: Path) -> None:
        """Go on under each of ``partners``, and from each of them, at the smallest size."""
        size = self.sizes[0]
        for number, partner in enumerate(self.partners):
            for first, then in ((self.strategy, partner), (partner, self.strategy)):
                folder = tmp_path / f"{number}_{type(first).__name__}"
                saved = self.run(size, lambda context: train(first, context, 4, folder, save=True))[0]  # noqa: B023
                loaded = self.run(size, lambda context: train(then, context, 4, folder))[0]  # noqa: B023
                assert_same(loaded.model, saved.model)

    def test_a_wrong_world_size_is_refused_before_anything_starts(self) -> None:
        """Expect a ConfigError that names the size ``impossible``; None: every size is possible."""
        if self.impossible is None:  # it runs at every world size
            return
        with pytest.raises(ConfigError, match=rf"\b{self.impossible}\b"):
            self.strategy.roles(_cluster(self.impossible))

    def test_several_updates_a_step_are_those_of_one_process(self, tmp_path: Path) -> None:
        """Compare :class:`~worldsize.testing.recipes.TwoPlayers` with plain PyTorch; resumed, it has the same bits.

        A strategy that does not train such a recipe refuses it before anything starts.
        """
        recipe, size = TwoPlayers(), self.sizes[-1]
        try:
            check_trainable(recipe, self.strategy)
        except ConfigError as refusal:
            assert "several updates a step" in str(refusal)  # noqa: PT017 - it may be refused or not
            return

        def trained(steps: int, **options: Any) -> list[Trained]:
            return self.run(
                size, lambda context: train(self.strategy, context, steps, recipe=recipe, **options), recipe
            )

        straight = trained(STEPS)
        for each in straight:
            assert_close("loss", each.losses[-1], reference(recipe).losses[-1], self.tolerance)
        trained(7, folder=tmp_path, save=True)
        resumed = trained(STEPS, folder=tmp_path)[0]
        assert resumed.losses == straight[0].losses[7:]
        assert_same(resumed.model, straight[0].model)

    def test_nothing_is_left_behind(self) -> None:
        """Expect no child process and no listening port after training."""
        for _, processes, ports in self._ended(self.sizes[0]):
            assert not processes, f"processes {sorted(processes)} were left"
            shown = sorted(ports.values())
            assert all(host in LOOPBACK for host, _ in shown), f"{shown}: open to more than this machine"
            assert not ports.keys() & listening(of_all=True).keys(), f"some of {shown} are still open"


def assert_close(what: str, actual: float, expected: float, tolerance: float) -> None:
    """Fail unless the relative difference is at most ``tolerance``."""
    difference = abs(actual - expected) / abs(expected)
    assert difference <= tolerance, f"{what} {actual}, on one process {expected}: {difference:.1e} > {tolerance:.1e}"


def assert_no_worse(what: str, actual: float, expected: float, tolerance: float) -> None:
    """Fail if a figure of which less is better exceeds another one by more than ``tolerance``, relative to that."""
    difference = (actual - expected) / abs(expected)
    assert difference <= tolerance, (
        f"{what} {actual}, on one process {expected}: worse by {difference:.1e} > {tolerance:.1e}"
    )


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless both have the same names and every tensor the same bits."""
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different, f"other bits: {', '.join(different)}"
