"""Asks a policy how many processes are to train, and requests that number of the gang; two policies."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import format_exc
from typing import Annotated, Any, Self, final

from worldsize.core import Autoscaler, ConfigError, FilePath, GangState, Plan, WorldsizeError
from worldsize.files import read_regular
from worldsize.launch.control import request
from worldsize.record.run_directory import RunDirectory
from worldsize.world.processes import SIGNALS, die_with_parent, ready_to_fork
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


_LONGEST = 1000  # bytes of a file with a number


@final
@dataclass(frozen=True, kw_only=True)
class FileAutoscaler(Autoscaler):
    """Lets as many processes train as a file says.

    Args:
        path: The file, with a number; a relative path begins at the working directory. None: ``autoscale`` in the run
            folder.
    """

    path: Annotated[str | None, FilePath()] = None

    def wanted(self, state: GangState) -> int:
        path = Path(self.path).expanduser() if self.path else state.run_dir / "autoscale"
        try:
            text = read_regular(path, at_most=_LONGEST).decode().strip()
        except FileNotFoundError:
            return state.processes
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{path} has {text[:40]!r} where a number of processes should be")
        return int(text)


@final
@dataclass(frozen=True, kw_only=True)
class ScheduleAutoscaler(Autoscaler):
    """Lets another number of processes train from given times on.

    Args:
        stages: Each with ``after``, seconds since the attempt began, and ``processes`` from then on; in order.
    """

    stages: Sequence[Mapping[str, float]] = ()

    def __post_init__(self) -> None:
        for stage in self.stages:
            if not _is_stage(stage):
                raise ConfigError(f"autoscale.stages: {stage} is no stage. Write e.g. {{after: 3600, processes: 4}}.")
        times = [stage["after"] for stage in self.stages]
        if times != sorted(times):
            raise ConfigError(f"autoscale.stages begin after {times} seconds. Put them in order.")

    def wanted(self, state: GangState) -> int:
        begun = [stage for stage in self.stages if stage["after"] <= state.seconds]
        return int(begun[-1]["processes"]) if begun else state.processes


def _is_stage(stage: Any) -> bool:
    """Return whether a value of the configuration has a time and a number of processes, both finite numbers."""
    if not isinstance(stage, Mapping) or stage.keys() != {"after", "processes"}:
        return False
    after, processes = stage["after"], stage["processes"]
    are_numbers = all(type(each) in (int, float) and math.isfinite(each) for each in (after, processes))
    return are_numbers and after >= 0 and processes >= 1 and processes == int(processes)
