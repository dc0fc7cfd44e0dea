"""Ranks are chosen, counted in their parts, and ended or refused if they cannot be rehearsed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeStore

from tests.plan.rehearsal.composed import isolated
from tests.plan.rehearsal.talking import Talking
from worldsize.config.settings import Settings
from worldsize.core import Cluster, ConfigError
from worldsize.plan.dry_run import world_seen_by
from worldsize.plan.rehearsal import ranks as rehearsals
from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.memory import Peak
from worldsize.plan.rehearsal.operators import Group
from worldsize.plan.rehearsal.rank import Rehearsed, RehearsedPart, load_splits
from worldsize.plan.rehearsal.ranks import choose_ranks, compute_traffic, rehearse

OPTIONS = ("recipe=digits", "strategy=ddp", "batch_size=32")


@pytest.mark.parametrize(
    ("processes", "per_node", "near"),
    [(1024, 8, range(16)), (1024, 16, [*range(8), *range(16, 24)]), (4096, 64, [*range(8), *range(64, 72)])],
)
def test_ranks_of_the_first_two_nodes_stand_for_a_large_world(processes: int, per_node: int, near: Any) -> None:
    cluster = Cluster("test", processes // per_node, processes, "cpu", "gloo")
    doubled = {2**power for power in range(12) if 2**power < processes}
    assert choose_ranks(cluster) == sorted({*near, *doubled, processes - 1})


def test_a_small_world_is_rehearsed_whole() -> None:
    assert choose_ranks(Cluster("test", 8, 64, "cpu", "gloo")) == list(range(64))


def rehearsed(settings: Settings, part: RehearsedPart) -> list[Rehearsed]:
    return rehearse(settings, range(2), part)


def test_traffic_is_that_of_the_step_alone() -> None:
    without, with_it = (
        isolated(rehearsed, *OPTIONS, "cluster.processes=2", given=(RehearsedPart(evaluates=evaluates),))[0]
        for evaluates in (False, True)
    )
    assert {call.phase for call in with_it.calls} == {"building", "step", "logging", "evaluation"}
    in_step = [call for call in without.calls if (call.step, call.phase) == (2, "step")]
    for each in (without, with_it):
        assert compute_traffic(each, 2, step=2).calls == len(in_step)
        assert compute_traffic(each, 2, step=2).inside == compute_traffic(without, 2, step=2).inside > 0


def test_a_rank_that_calls_otherwise_each_time_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def once(ranks: Any, work: Any, longest: float) -> list[Rehearsed]:
        turns.append(len(turns))
        calls = [Call("barrier", Group((0, 1), 0), "", None, 0, "program.py:1 (step)", 1)] * len(turns)
        return [Rehearsed(rank, calls[rank:], Peak(0, {}), None, {}) for rank in (1, 0)]

    monkeypatch.setattr(rehearsals, "_rehearse_once", once)
    monkeypatch.setattr(rehearsals, "_asks_again", lambda rehearsed, said: True)
    monkeypatch.setattr(rehearsals, "load_splits", lambda settings, part: {})
    settings: Any = None
    assert [each.is_settled for each in rehearse(settings, [0, 1], RehearsedPart())] == [False, False]
    assert len(turns) < 10


def test_data_that_cannot_be_loaded_are_an_error_of_the_configuration() -> None:
    class Broken:
        def data(self, split: str) -> Any:
            raise KeyError("text")

    settings: Any = SimpleNamespace(recipe=Broken(), evaluation=SimpleNamespace(splits=()))
    with pytest.raises(ConfigError, match=r"Broken failed to load the train data: .*KeyError.* Change the options"):
        load_splits(settings, RehearsedPart())


def kept(settings: Settings) -> bool:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with world_seen_by(0, settings, torch.device("cpu")):
        pass
    return dist.is_initialized()


def test_a_group_that_the_world_has_not_made_outlives_it() -> None:
    assert isolated(kept, *OPTIONS, "cluster.processes=1")


def failing(settings: Settings) -> list[str | None]:
    return [each.error for each in rehearse(replace(settings, recipe=Talking("fail")), range(2), RehearsedPart())]


def test_what_all_fail_with_has_one_text() -> None:
    (text,) = set(isolated(failing, *OPTIONS, "cluster.processes=2"))
    assert text.startswith("in step 1: ValueError: the same on all (tests/plan/rehearsal/talking.py:")
