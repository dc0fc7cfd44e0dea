"""Policies that change the number of processes of a run while it trains: by a file, and by a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

from worldsize.core import Autoscaler, ConfigError, FilePath, GangState
from worldsize.files import read_regular

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
