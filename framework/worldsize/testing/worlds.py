"""Run a function in real gloo processes and collect results, for tests of strategies."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from worldsize.core import Cluster, Role, World
from worldsize.world.environments import Placement
from worldsize.world.processes import ready_to_fork
from worldsize.world.scratch import temporary_folder
from worldsize.world.world import open_world

T = TypeVar("T")
_FAILING = 5.0  # seconds for peers of a failed process to report their own errors


def run_in_worlds(
    body: Callable[[World], T],
    size: int,
    *,
    timeout: float = 240.0,
    local_size: int | None = None,
    tiers: Mapping[str, int] | None = None,
    roles: Mapping[str, Role] | None = None,
) -> list[T]:
    """Run ``body(world)`` in ``size`` forked single-threaded processes; return results by rank.

    ``local_size`` processes form one node (default: all). ``tiers``: nodes per unit, by tier. ``roles``: roles
    of the processes in rank order (default: all train); those that serve are not in a process group.

    Raises:
        RuntimeError: a process raised (the message has all tracebacks, the first one first), or did not answer within
            ``timeout`` seconds.
    """
    nodes = size // (local_size or size)
    cluster = Cluster("test", nodes, size, "cpu", "gloo", threads=1, timeout=240.0, tiers=tiers or {})
    with temporary_folder() as meeting:
        with ready_to_fork():
            placements = [
                Placement(rank, size, rank % (local_size or size), local_size or size, f"file://{meeting}/store")
                for rank in range(size)
            ]
            started = [
                _start_process(body, placement, cluster, roles or {"worker": Role(size)}) for placement in placements
            ]
        try:
            return _receive_all([connection for _, connection in started], timeout)
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def gather_losses(losses: Iterable[Tensor], world: World) -> list[float]:
    """Return the losses of all ranks, scalars, in rank order."""
    mine = list(map(float, losses))
    by_rank: list[Any] = [mine] * world.size
    if world.group is not None:
        dist.all_gather_object(by_rank, mine, group=world.group)
    return [loss for rank in by_rank for loss in rank]


def _start_process(
    body: Callable[[World], T], placement: Placement, cluster: Cluster, roles: Mapping[str, Role]
) -> tuple[BaseProcess, Connection[bytes, bytes]]:
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_process, args=(body, placement, cluster, roles, sender))
    process.start()
    sender.close()
    return process, receiver


def _run_process(
    body: Callable[[World], T],
    placement: Placement,
    cluster: Cluster,
    roles: Mapping[str, Role],
    sender: Connection[bytes, bytes],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        with open_world(placement, cluster, roles) as world:
            try:
                _send_result(sender, succeeded=True, result=body(world))
            except BaseException:  # report before open_world closes connections, which makes other processes fail
                _send_result(sender, succeeded=False, result=traceback.format_exc())
    except BaseException:
        _send_result(sender, succeeded=False, result=traceback.format_exc())


def _send_result(sender: Connection[bytes, bytes], *, succeeded: bool, result: object) -> None:
    # pickled by value: the connection's own pickler would share tensors with an exiting process
    sender.send_bytes(pickle.dumps((succeeded, result)))


def _receive_all(connections: Sequence[Connection[bytes, bytes]], timeout: float) -> list[Any]:
    """Return the results by rank; after a failure, stop once no rank answers for ``_FAILING`` seconds."""
    results, failures, waiting = dict[int, Any](), list[str](), {each: rank for rank, each in enumerate(connections)}
    while waiting:
        answered = wait(list(waiting), _FAILING if failures else timeout)
        if not answered:
            late = ", ".join(map(str, sorted(waiting.values())))
            failures = failures or [f"rank {late} did not respond within {timeout} s"]
            break
        for connection in answered:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            succeeded, result = _receive_result(connection)
            if succeeded:
                results[rank] = result
            else:
                failures.append(f"rank {rank} {result}")
    if failures:
        raise RuntimeError("\n".join(failures))
    return [results[rank] for rank in range(len(connections))]


def _receive_result(connection: Connection[bytes, bytes]) -> tuple[bool, Any]:
    try:
        succeeded, result = pickle.loads(connection.recv_bytes())
    except EOFError:
        return False, "exited without a result"
    return succeeded, result if succeeded else f"failed:\n{result}"
