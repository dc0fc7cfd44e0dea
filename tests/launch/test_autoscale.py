"""A policy changes the number of processes while a run trains, and never harms the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest

from tests.clusters.test_own_project import files_of
from worldsize.config.shape import check_autoscale
from worldsize.core import Autoscaler, Block, Cluster, ConfigError, GangState, Plan, Role
from worldsize.launch import autoscale
from worldsize.launch.autoscale import FileAutoscaler, ScheduleAutoscaler
from worldsize.testing.importing import import_plugins

CLUSTER = Cluster("laptop", nodes=1, processes=4, device="cpu", backend="gloo")
HEAL = {"worker": Role(4, restart="heal", min_processes=2)}
BLOCKS = {"worker": Role(4, restart="heal", blocks=(Block(2),))}


@final
@dataclass(frozen=True, kw_only=True)
class Calls(Autoscaler):
    """Answers with a function's result."""

    body: Callable[[GangState], Any]

    def choose_process_count(self, state: GangState) -> int:
        answer: int = self.body(state)
        return answer


def state(folder: Path, seconds: float = 0.0) -> GangState:
    return GangState(folder, step=5, processes=3, seconds=seconds, least=1, most=8)


def test_the_file_in_the_run_folder_says_how_many(tmp_path: Path) -> None:
    policy = FileAutoscaler()
    assert policy.choose_process_count(state(tmp_path)) == 3  # there is none yet
    (tmp_path / "autoscale").write_text(" 6\n")
    assert policy.choose_process_count(state(tmp_path)) == 6
    (tmp_path / "elsewhere").write_text("2")
    assert FileAutoscaler(path=str(tmp_path / "elsewhere")).choose_process_count(state(tmp_path)) == 2


@pytest.mark.parametrize("content", [b"", b"many", b"-1", b"2.5", b"\xff", "²".encode(), b"0x4"], ids=repr)
def test_a_file_without_a_number_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "autoscale").write_bytes(content)
    with pytest.raises(ConfigError, match="autoscale"):
        FileAutoscaler().choose_process_count(state(tmp_path))


def test_a_schedule_says_how_many_from_when_on(tmp_path: Path) -> None:
    policy = ScheduleAutoscaler(stages=[{"after": 10, "processes": 4}, {"after": 60.5, "processes": 1}])
    wanted = [policy.choose_process_count(state(tmp_path, seconds=seconds)) for seconds in (0, 9.9, 10, 60, 61, 1e9)]
    assert wanted == [3, 3, 4, 4, 1, 1]


@pytest.mark.parametrize(
    "stages",
    [
        [{"after": 2, "processes": 1}, {"after": 1, "processes": 1}],
        [{"after": 1}],
        [{"after": 1, "processes": 1.5}],
        [{"after": "1 h", "processes": 4}],
        [{"after": 1, "processes": "four"}],
        [{"after": -1, "processes": 4}],
        [{"after": 1, "processes": 0}],
        [{"after": float("inf"), "processes": 4}],
        [4],
    ],
    ids=str,
)
def test_a_schedule_that_makes_no_sense_is_refused(stages: Any) -> None:
    with pytest.raises(ConfigError, match=r"autoscale\.stages"):
        ScheduleAutoscaler(stages=stages)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The change requests that reach a launching process whose gang has three training processes."""
    requests: list[dict[str, Any]] = []

    def answer(sign: Path, **facts: Any) -> Any:
        return {"step": 5, "processes": 3} if facts == {"do": "state"} else requests.append(facts)

    monkeypatch.setattr(autoscale, "send_request", answer)
    return requests


@pytest.mark.parametrize(
    ("wanted", "most", "requested"), [(4, 8, 4), (100, 8, 8), (100, 6, 6), (0, 8, 2), (3, 8, None)]
)
def test_what_a_policy_wants_is_moved_into_the_bounds(
    tmp_path: Path, asked: list[dict[str, Any]], wanted: int, most: int, requested: int | None
) -> None:
    seen = list[GangState]()

    def body(state: GangState) -> int:
        seen.append(state)
        return wanted

    policy = Calls(max_processes=None if most == 8 else most, body=body)
    plan = Plan(tmp_path, CLUSTER, HEAL, {}, logical_ranks=8, autoscaler=policy)
    assert autoscale.query_policy(policy, plan, 7.0) == ""
    assert seen == [GangState(tmp_path, 5, 3, 7.0, least=2, most=most)]
    assert [each["processes"] for each in asked] == ([] if requested is None else [requested])


@pytest.mark.parametrize(("wanted", "requested"), [(1, 4), (6, 4), (8, 8), (100, 32)])
def test_what_a_policy_wants_is_rounded_down_to_whole_blocks(
    tmp_path: Path, asked: list[dict[str, Any]], wanted: int, requested: int
) -> None:
    policy = Calls(body=lambda state: wanted)
    roles = {"worker": Role(4, restart="heal", min_processes=3, blocks=(Block(4),))}
    assert (
        autoscale.query_policy(policy, Plan(tmp_path, CLUSTER, roles, {}, logical_ranks=8, autoscaler=policy), 0.0)
        == ""
    )
    assert [each["processes"] for each in asked] == [requested]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda _: 1 // 0, "ZeroDivisionError"),
        (lambda _: None, "returned None; expected an int"),
        (lambda _: 2.0, "returned 2.0"),
        (lambda _: [][0], "IndexError"),
    ],
)
def test_a_policy_that_fails_changes_nothing_and_says_why(
    tmp_path: Path, asked: list[dict[str, Any]], body: Callable[[GangState], Any], said: str
) -> None:
    policy = Calls(body=body)
    assert said in autoscale.query_policy(
        policy, Plan(tmp_path, CLUSTER, HEAL, {}, logical_ranks=8, autoscaler=policy), 0.0
    )
    assert asked == []


@pytest.mark.parametrize(
    ("roles", "most", "said"),
    [
        ({"worker": Role(4)}, None, "Set strategy.on_failure=heal"),
        (HEAL, 3, "is less than the initial cluster.processes=4"),
        (HEAL, 9, "one logical rank per process, but the run has 8 logical ranks"),
        (BLOCKS, 17, "per 2 processes, but the run has 8 logical ranks. Set autoscale.max_processes to at most 16, or"),
    ],
)
def test_what_cannot_scale_is_refused(roles: dict[str, Role], most: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_autoscale(FileAutoscaler(max_processes=most), roles, CLUSTER, 8)
    check_autoscale(FileAutoscaler(max_processes=8), HEAL, CLUSTER, 8)
    check_autoscale(FileAutoscaler(max_processes=16), BLOCKS, CLUSTER, 8)


def test_the_policy_that_the_documentation_shows_goes_by_the_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Any, warm_python: Path
) -> None:
    for name, text in files_of("plugins/spot/").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = ("recipe=digits", "strategy.on_failure=heal", "autoscale=by_price", "launch=show")
    refused = train(*words, "autoscale.budget=0", python=warm_python)
    assert (refused.code, "autoscale.budget=0" in refused.error) == (2, True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    import_plugins()
    from plugins.spot.autoscaler import ByPrice  # type: ignore[import-not-found]  # the documentation's

    policy = ByPrice(prices=str(tmp_path / "price"), budget=2.0)
    for price, wanted in (("0.5", 4), ("3", 0), ("0", 8)):
        (tmp_path / "price").write_text(price)
        assert policy.choose_process_count(state(tmp_path)) == wanted
