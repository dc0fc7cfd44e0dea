"""A worker that lost a connection rejoins, and none of its unfinished work reaches the servers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.parameter_server import task_loop, worker
from plugins.parameter_server.remote_embedding import build_linked_model
from plugins.parameter_server.row_tables import RowRule
from plugins.parameter_server.sharding import BucketKey, ShardingPlan, plan_shards
from plugins.parameter_server.worker import OverlappedPush, Worker, WorkerOptions
from worldsize.core import EvaluationBatch, MicroBatch, RunContext, World
from worldsize.net.channel import LostError
from worldsize.net.registry import Dialer
from worldsize.testing.recipes import Chain

# ---------------------------------------------------------------- pushes during the backward pass


class Pass:
    """A model of three layers, one bucket each, and the pushes of its backward passes."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        parameters = dict(self.model.named_parameters())
        self.overlap = OverlappedPush(parameters, plan_shards(parameters, 1, bucket_bytes=64, cut=False))
        self.pushed: list[tuple[BucketKey, Mapping[str, Tensor]]] = []

    def push(self, key: BucketKey, gradients: Mapping[str, Tensor | None]) -> None:
        own = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
        self.pushed.append((key, own))

    def run(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Run one backward pass; return the pushed gradients by parameter."""
        self.model.zero_grad()
        self.pushed.clear()
        with self.overlap.during_backward(self.push):
            self.model(torch.full((2, 4), scale)).sum().backward()
        return {name: gradient for _, gradients in self.pushed for name, gradient in gradients.items()}


def lost(*_: object, **__: object) -> None:
    raise LostError("the peer has gone")


def test_what_a_push_that_failed_has_left_is_not_pushed_in_the_next_pass() -> None:
    passes = Pass()
    with pytest.raises(LostError), passes.overlap.during_backward(lost):
        passes.model(torch.ones(2, 4)).sum().backward()
    pushed = passes.run(scale=3.0)
    assert len(passes.pushed) == 3
    assert all(torch.equal(pushed[name], p.grad) for name, p in passes.model.named_parameters() if p.grad is not None)


def test_no_thread_outlives_a_pass_that_failed() -> None:
    passes = Pass()
    with pytest.raises(LostError), passes.overlap.during_backward(passes.push):
        lost()
    assert not [thread for thread in threading.enumerate() if thread.name == "push"]
    assert len(passes.run()) == 3
    assert len(passes.pushed) == 3


# ---------------------------------------------------------------- joining again


class Control:
    """A connection to the leading server, with these tasks as answers."""

    def __init__(self, tasks: list[dict[str, Any]]) -> None:
        self._tasks = tasks
        self.is_closed = False

    def send_message(self, *_: object) -> None: ...

    def send(self, *_: object) -> None: ...

    def receive_answer(self, *_: object) -> None: ...

    def receive_message(self, _: object) -> dict[str, Any]:
        return self._tasks.pop(0)

    def close(self) -> None:
        self.is_closed = True


class Links:
    """Stands in for connections to shards; ``losses`` lists the calls that lose one, "made" or "push"."""

    def __init__(self, losses: list[str]) -> None:
        self.losses = losses
        self.pushed: dict[int, bytes] = {}
        self.step = self.closed = 0

    def __call__(self, *_: object) -> Links:
        self._lose("made")
        return self

    def push_bucket(self, table: int, _: torch.dtype, payload: list[memoryview], **part: int) -> None:
        self._lose("push")
        self.pushed[table] = b"".join(payload)

    def _lose(self, where: str) -> None:
        if self.losses[:1] == [where]:
            del self.losses[0]
            raise LostError("the peer has gone")

    def request_weights(self, step: int) -> None: ...

    def receive_weights(self, tables: object) -> None: ...

    def wait_for_pushes(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


class Data:
    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        dataset = Chain().data("train")
        return MicroBatch(dataset[:8], 7)

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        return []


TRAIN, STOP = {"do": "train", "step": 1, "ranks": [0]}, {"do": "stop", "why": "enough"}


def worked(monkeypatch: pytest.MonkeyPatch, tasks: list[dict[str, Any]], losses: list[str]) -> Links:
    """Let a worker do ``tasks`` until it is stopped; return its links to one shard."""
    links, controls = Links(losses), list[Control]()

    def connect(_: Dialer, service: str, kind: str, **facts: Any) -> tuple[Control, dict[str, Any]]:
        controls.append(Control(tasks))
        return controls[-1], {"epoch": len(controls)}

    monkeypatch.setattr(worker, "_OVERLAPPED", 0)
    monkeypatch.setattr(task_loop, "ShardLink", links)
    monkeypatch.setattr(Dialer, "connect", connect)
    recipe = Chain()
    plan = ShardingPlan(
        plan_shards(dict(recipe.model().named_parameters()), 1, bucket_bytes=1024, cut=False), RowRule(0)
    )
    context = RunContext(World.create_single(torch.device("cpu")), data=Data())
    dialer = Dialer("worker-0", None, None, 1.0, None)  # type: ignore[arg-type]
    model, tables = build_linked_model(recipe, plan.rows)
    Worker(recipe, context, dialer, plan, WorkerOptions(synchronous=True), model=model, tables=tables).run(60.0)
    assert all(control.is_closed for control in controls)
    assert not losses
    return links


def test_a_worker_joins_again_if_a_connection_is_lost_while_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    worked(monkeypatch, [STOP], ["made"])


def test_gradients_of_a_pass_that_was_lost_are_not_added_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = worked(monkeypatch, [dict(TRAIN), STOP], []).pushed
    again = worked(monkeypatch, [dict(TRAIN), dict(TRAIN), STOP], ["push"]).pushed
    assert len(expected) > 3
    assert again == expected
