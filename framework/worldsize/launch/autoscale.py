"""Asks a policy, in a process of its own, how many processes are to train, and requests that number of the gang."""

from __future__ import annotations

import logging
import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import format_exc
from typing import Self, final

from worldsize.core import Autoscaler, GangState, Plan, WorldsizeError
from worldsize.launch.control import request
from worldsize.record.run_directory import RunDirectory
from worldsize.world.fork import ready_to_fork
from worldsize.world.parent import die_with_parent
from worldsize.world.preemption import SIGNALS
from worldsize.world.roles import block_of, fewest

_logger = logging.getLogger(__name__)


@final
class AutoscaleProcess:
    """Context with the process that asks the policy of a run.

    It asks the launching process for a change as ``worldsize workers`` does, so that a policy that hangs or crashes
    holds up nothing.
    """

    def __init__(self, plan: Plan) -> None:
        self._name = type(plan.autoscaler).__name__
        self._process: BaseProcess = get_context("fork").Process(target=_body, args=(plan, os.getpid()))

    def __enter__(self) -> Self:
        with ready_to_fork():
            self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        if (code := self._process.exitcode) is not None:
            _logger.error("autoscale: the process of %s ended before the run, with code %s", self._name, code)
        self._process.kill()
        self._process.join()


def _body(plan: Plan, parent: int) -> None:
    """Ask the policy until this process is killed."""
    die_with_parent(parent)
    for number in (*SIGNALS, signal.SIGINT):  # the launching process decides when this one ends
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    assert plan.autoscaler is not None
    begun, said = time.monotonic(), ""
    while True:
        time.sleep(plan.autoscaler.every)
        problem = ask(plan.autoscaler, plan, time.monotonic() - begun)
        if problem and problem != said:
            _logger.error("autoscale: %s. The number of processes stays.", problem)
        said = problem


def ask(policy: Autoscaler, plan: Plan, seconds: float) -> str:
    """Ask the policy once, ``seconds`` after the attempt began, and request what it wants; return what went wrong."""
    sign = RunDirectory(plan.run_dir).control
    block = block_of(plan.roles)
    least, most = fewest(plan.roles), policy.max_processes or plan.logical_ranks * block
    try:
        state = _state(sign, plan.run_dir, seconds, least, most)
        wanted = policy.wanted(state)
        if type(wanted) is not int:
            return f"{type(policy).__name__}.wanted returned {wanted!r}, which is no number of processes"
        wanted = max(least, min(wanted, most) // block * block)  # more would only wait
        if wanted != state.processes:
            request(sign, do="resize", processes=wanted)
    except WorldsizeError as error:
        return str(error).rstrip(".")
    except Exception:
        return f"{type(policy).__name__} failed:\n{format_exc().rstrip()}\n"
    return ""


def _state(sign: Path, run_dir: Path, seconds: float, least: int, most: int) -> GangState:
    facts = request(sign, do="state")
    return GangState(run_dir, facts["step"], facts["processes"], seconds, least, most)
