"""Workers run each update together, and an abandoned step leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from plugins.parameter_server.protocol import Sessions
from plugins.parameter_server.replication import ReplicationLog, SoleMastership
from plugins.parameter_server.row_tables import RowRule
from plugins.parameter_server.server import StepStart
from plugins.parameter_server.shard import PushReceiver, Rule, Shard
from plugins.parameter_server.shard_master import ShardMaster
from plugins.parameter_server.shard_parameters import ShardParameters
from plugins.parameter_server.sharding import ShardPlanner, plan_shards
from plugins.parameter_server.task_pool import StalenessScheduler
from plugins.parameter_server.task_scheduler import TaskScheduler
from plugins.parameter_server.update_coordinator import Reported, UpdateCoordinator, UpdateRounds
from tests.plugins.parameter_server.players import Players
from worldsize.core import ConfigError, RunContext, World
from worldsize.errors import WorldsizeError
from worldsize.strategies.schedules import Schedule
from worldsize.strategies.train_state import OptimizerPart, TrainState

# ---------------------------------------------------------------- rollback of a shard


def made(model: nn.Module) -> Adam:
    return Adam(model.parameters(), lr=0.1)


def served() -> ShardMaster:
    torch.manual_seed(1)
    model = nn.Linear(3, 5)
    optimizer = made(model)
    (buckets,) = plan_shards(dict(model.named_parameters()), 1, bucket_bytes=1 << 20, cut=True)
    part = OptimizerPart(model, optimizer, Schedule(StepLR(optimizer, step_size=2, gamma=0.5)))
    log = ReplicationLog(SoleMastership(), lease=5.0, expects_standby=False)
    shard = Shard(ShardParameters(part, buckets, make=made), Rule(2, requires_commit=True))
    return ShardMaster(PushReceiver(shard, None), Sessions(), log, timeout=60.0)


def gradient(number: int) -> Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(number))


def update(master: ShardMaster, number: int) -> None:
    """Make the next update with gradient ``number`` of each of two logical ranks."""
    step = master.shard.step + 1
    for rank in range(2):
        assert master.shard.add_gradient(0, gradient(number) + rank, step=step, width=2, node=rank)
    master.commit_update(step, 1.0)


def weights(master: ShardMaster) -> Tensor:
    return master.shard.parameters.values[0].clone()


def test_a_step_that_is_taken_again_has_the_bits_of_one_that_was_not_given_up() -> None:
    straight, again = served(), served()
    start = StepStart(again)
    for master in (straight, again):
        update(master, 1)
    start.save_state(2)
    for lost in (3, 4, 5):  # in an abandoned attempt
        update(again, lost)
    for _ in range(2):  # abandoned a second time, after one of its updates
        start.roll_back(again.shard.step + 1)
        start.save_state(2)
        update(again, 6)
    update(straight, 6)
    for master in (straight, again):
        update(master, 7)
    assert torch.equal(weights(again), weights(straight))
    assert again.shard.parameters.lr == straight.shard.parameters.lr == pytest.approx(0.05)


def test_what_comes_late_from_an_attempt_that_was_given_up_is_not_taken() -> None:
    master = served()
    start, shard = StepStart(master), master.shard
    start.save_state(1)
    update(master, 1)
    assert shard.add_gradient(0, gradient(2), step=2, width=2, node=0)
    start.roll_back(2)
    start.roll_back(2)  # requested again, because the answer was lost
    assert not shard.add_gradient(0, gradient(2), step=2, width=2, node=1)
    assert not shard.waits_for_commit
    assert torch.equal(weights(master), weights(served()))
    update(master, 1)


# ---------------------------------------------------------------- rounds


class Leader:
    """Two workers whose requests wait in threads, and the leader's side."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.staleness = StalenessScheduler(0, logical_ranks=4, lease=60.0, first=8)
        self.scheduler = TaskScheduler(self.staleness, timeout=60.0)
        self.rounds = UpdateRounds("Two", self.scheduler)
        self._pool = pool
        self.epochs = {name: self.scheduler.admit_worker(name) for name in "ab"}

    def ask(self, name: str, **facts: Any) -> Future[dict[str, Any]]:
        return self._pool.submit(self.rounds.next_task, name, self.epochs[name], facts)

    def tasks(self) -> dict[str, dict[str, Any]]:
        asked = {name: self.ask(name) for name in self.epochs}
        return {name: each.result(5) for name, each in asked.items()}

    def report(self, name: str, task: dict[str, Any], optimizer: str) -> Future[dict[str, Any]]:
        records = [{"loss": float(rank), "metrics": {}} for rank in task["ranks"]]
        unit = {"unit_of": [task["step"], task["ranks"]], "attempt": task["attempt"]}
        return self.ask(name, update=optimizer, records=records, **unit)

    def end(self, name: str, task: dict[str, Any]) -> Future[dict[str, Any]]:
        records = [{"loss": 0.0, "metrics": {}} for _ in task["ranks"]]
        return self.ask(name, unit=[task["step"], task["ranks"]], records=records)


@pytest.fixture
def leader() -> Iterator[Leader]:
    with ThreadPoolExecutor(8) as pool:
        made = Leader(pool)
        made.rounds.start_attempt(9, {"x": 3, "y": 0}, again=False)
        yield made
        made.scheduler.ended = "enough"
        with made.scheduler.changed:
            made.scheduler.changed.notify_all()


def test_all_go_on_when_an_update_is_made_and_not_before(leader: Leader) -> None:
    tasks = leader.tasks()
    assert {name: (task["ranks"], task["counts"]) for name, task in tasks.items()} in (
        {"a": ((0, 2), {"x": 3, "y": 0}), "b": ((1, 3), {"x": 3, "y": 0})},
        {"b": ((0, 2), {"x": 3, "y": 0}), "a": ((1, 3), {"x": 3, "y": 0})},
    )
    waiting = {name: leader.report(name, task, "x") for name, task in tasks.items()}
    reported = leader.rounds.wait_for_update(9)
    assert isinstance(reported, Reported)
    assert (reported.names, [float(each.loss) for each in reported.records]) == (("x",), [0, 1, 2, 3])
    assert not any(each.done() for each in waiting.values())
    leader.rounds.complete_update()
    assert [each.result(5) for each in waiting.values()] == [{"do": "continue"}] * 2
    for name, task in tasks.items():
        leader.end(name, task)
    assert leader.rounds.wait_for_update(9) == Reported((), [])


def test_who_is_lost_has_the_step_repeated_by_those_who_stay(leader: Leader) -> None:
    tasks = leader.tasks()
    waits = leader.report("a", tasks["a"], "x")
    leader.scheduler.retire_worker("b", leader.epochs.pop("b"), "lost")
    assert leader.rounds.wait_for_update(9) is None
    leader.rounds.start_attempt(9, {"x": 5, "y": 1}, again=True)
    again = waits.result(5)
    assert (again["do"], sorted(again["ranks"]), again["counts"]) == ("train", [0, 1, 2, 3], {"x": 5, "y": 1})
    assert leader.report("a", tasks["a"], "x").result(5) == again  # from the previous attempt: it does not count
    leader.report("a", again, "y")
    reported = leader.rounds.wait_for_update(9)
    assert reported is not None
    assert reported.names == ("y",)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda leader, task: leader.report("b", task, "y"),
            "in step 9, one worker updates 'x' but another updates 'y'",
        ),
        (lambda leader, task: leader.end("b", task), "in step 9, one worker updates 'x' but another ends"),
    ],
    ids=["another update", "an end"],
)
def test_workers_that_are_not_at_the_same_update_are_refused(
    leader: Leader, act: Callable[[Leader, dict[str, Any]], Any], message: str
) -> None:
    tasks = leader.tasks()
    first = leader.report("a", tasks["a"], "x")
    while not leader.rounds._round.records:
        assert not first.done()
    act(leader, tasks["b"])
    with pytest.raises(ConfigError, match=message):
        leader.rounds.wait_for_update(9)


def test_a_step_in_which_workers_are_lost_each_time_ends_the_run() -> None:
    """No worker ever gets work in an update, and none waits: all are lost."""
    opened = []
    rounds = SimpleNamespace(
        scheduler=None,
        start_attempt=lambda step, _, again: opened.append((step, again)),
        wait_for_update=lambda _: None,
    )
    context = RunContext(World.create_single(torch.device("cpu")))
    train_state = TrainState.from_recipe(Players(), Players().model())
    leads = UpdateCoordinator({}, cast("Any", rounds), cast("Any", None), train_state, context, step_reached=8)
    with pytest.raises(WorldsizeError, match="step 9 was started 5 times"):
        leads.step([])
    assert opened == [(9, False)] + [(9, True)] * 4


# ---------------------------------------------------------------- ownership


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_every_parameter_is_owned_once_by_the_shards_of_its_optimizer(servers: int) -> None:
    state = TrainState.from_recipe(Players(), Players().model())
    planner = ShardPlanner(servers, bucket_bytes=256, keeps_whole=False, rows=RowRule(0), codec=None)
    plans = planner.create_plans(Players(), state)
    owned = {
        name: sorted(piece.name for shard in plan.shards for bucket in shard for piece in bucket.pieces)
        for name, plan in plans.items()
    }
    assert all(len(plan.shards) == servers for plan in plans.values())
    names = sorted(name for name, _ in state.model.named_parameters())
    assert sorted(name for each in owned.values() for name in each) == names
    assert {name.partition(".")[0] for name in owned["critic"]} == {"critic", "idle"}  # without an optimizer
    assert {name.partition(".")[0] for name in owned["generator"]} == {"generator"}
