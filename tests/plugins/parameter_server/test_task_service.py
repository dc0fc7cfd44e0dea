"""Tests of the service that sends tasks to workers."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from plugins.parameter_server.protocol import Operation
from plugins.parameter_server.task_pool import StalenessScheduler
from plugins.parameter_server.task_scheduler import TaskScheduler, TaskService
from worldsize.net.channel import Channel
from worldsize.net.frames import CommonOperation


def test_the_leading_server_does_not_end_before_its_workers_are_told() -> None:
    scheduler = TaskScheduler(StalenessScheduler(0, logical_ranks=4, lease=60.0, first=8), timeout=60.0)
    members_before_sending: list[list[str]] = []

    def next_task(name: str, epoch: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        task = scheduler.next_task(name, epoch, facts)
        members_before_sending.append(scheduler.workers)
        return task

    service = TaskService(scheduler, next_task)
    ours, theirs = (Channel(end, operations=Operation) for end in socket.socketpair())
    with ThreadPoolExecutor(2) as pool, closing(ours), closing(theirs):
        served = pool.submit(service.serve_control, theirs, {"name": "worker-0"})
        ours.receive_message(ours.receive_answer(CommonOperation.WELCOME))
        ended = pool.submit(scheduler.end_run, "the run is complete")
        ours.send_message(Operation.TICK, {"leaves": False})
        assert ours.receive_message(ours.receive_answer(Operation.TASK)) == {"do": "stop", "why": "the run is complete"}
        ended.result(5)
        served.result(5)
    assert members_before_sending == [["worker-0"]]
    assert not scheduler.workers
