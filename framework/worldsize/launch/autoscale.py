"""Autoscaling: a process that resizes the gang as a policy requests, and two policies."""

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
from worldsize.launch.control import send_request
from worldsize.record.run_directory import RunDirectory
from worldsize.world.processes import SIGNALS, die_with_parent, ready_to_fork
from worldsize.world.roles import count_at_most, get_blocks, get_min_processes, round_down

_logger = logging.getLogger(__name__)


@final
class AutoscaleProcess:
    """Context manager for the process that runs a run's autoscaling policy.

    It sends requests to the launching process, as ``worldsize workers`` does, so a policy that hangs or crashes does
    not block the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._name = type(plan.autoscaler).__name__
        self._process: BaseProcess = get_context("fork").Process(target=_run_policy, args=(plan, os.getpid()))

    def __enter__(self) -> Self:
        with ready_to_fork():
            self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        if (code := self._process.exitcode) is not None:
            _logger.error(
                "autoscale: the process of %s exited before the end of the run, with code %s", self._name, code
            )
        self._process.kill()
        self._process.join()


def _run_policy(plan: Plan, parent: int) -> None:
    """Query the policy repeatedly, until this process is killed."""
    die_with_parent(parent)
    for number in (*SIGNALS, signal.SIGINT):  # only the launching process ends this one, with SIGKILL
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    assert plan.autoscaler is not None
    begun, said = time.monotonic(), ""
    while True:
        time.sleep(plan.autoscaler.every)
        problem = query_policy(plan.autoscaler, plan, time.monotonic() - begun)
        if problem and problem != said:
            _logger.error("autoscale: %s. The number of processes remains unchanged.", problem)
        said = problem


def query_policy(policy: Autoscaler, plan: Plan, seconds: float) -> str:
    """Query ``policy`` and resize the gang; return an error message, or "" if successful.

    ``seconds``: time since the start of the attempt.
    """
    sign = RunDirectory(plan.run_dir).control
    blocks = get_blocks(plan.roles)
    least, most = get_min_processes(plan.roles), policy.max_processes or count_at_most(blocks, plan.logical_ranks)
    try:
        state = _request_state(sign, plan.run_dir, seconds, least, most)
        wanted = policy.choose_process_count(state)
        if type(wanted) is not int:
            return f"{type(policy).__name__}.choose_process_count returned {wanted!r}; expected an int"
        able = round_down(min(wanted, most), blocks, plan.logical_ranks)  # more processes could not train
        wanted = max(least, able)
        if wanted != state.processes:
            send_request(sign, do="resize", processes=wanted)
    except WorldsizeError as error:
        return str(error).rstrip(".")
    except Exception:
        return f"{type(policy).__name__} failed:\n{format_exc().rstrip()}\n"
    return ""


def _request_state(sign: Path, run_dir: Path, seconds: float, least: int, most: int) -> GangState:
    facts = send_request(sign, do="state")
    return GangState(run_dir, facts["step"], facts["processes"], seconds, least, most)


_LONGEST = 1000  # maximum bytes of the file


@final
@dataclass(frozen=True, kw_only=True)
class FileAutoscaler(Autoscaler):
    """Reads the number of training processes from a file.

    Args:
        path: The file, relative to the working directory; None for ``autoscale`` in the run folder.
    """

    path: Annotated[str | None, FilePath()] = None

    def choose_process_count(self, state: GangState) -> int:
        path = Path(self.path).expanduser() if self.path else state.run_dir / "autoscale"
        try:
            text = read_regular(path, at_most=_LONGEST).decode().strip()
        except FileNotFoundError:
            return state.processes
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{path}: expected a number of processes, got {text[:40]!r}")
        return int(text)


@final
@dataclass(frozen=True, kw_only=True)
class ScheduleAutoscaler(Autoscaler):
    """Changes the number of training processes on a schedule.

    Args:
        stages: Stages in order; each has ``after`` (seconds since the attempt started) and ``processes``.
    """

    stages: Sequence[Mapping[str, float]] = ()

    def __post_init__(self) -> None:
        for stage in self.stages:
            if not _is_stage(stage):
                raise ConfigError(
                    f"autoscale.stages: expected a stage such as {{after: 3600, processes: 4}}, got {stage}."
                )
        times = [stage["after"] for stage in self.stages]
        if times != sorted(times):
            raise ConfigError(f"autoscale.stages must be sorted by `after`, got {times}.")

    def choose_process_count(self, state: GangState) -> int:
        begun = [stage for stage in self.stages if stage["after"] <= state.seconds]
        return int(begun[-1]["processes"]) if begun else state.processes


def _is_stage(stage: Any) -> bool:
    """Return whether a configured value has a valid time and a valid number of processes."""
    if not isinstance(stage, Mapping) or stage.keys() != {"after", "processes"}:
        return False
    after, processes = stage["after"], stage["processes"]
    are_numbers = all(type(each) in (int, float) and math.isfinite(each) for each in (after, processes))
    return are_numbers and after >= 0 and processes >= 1 and processes == int(processes)
