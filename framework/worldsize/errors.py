"""Errors with messages for users: the fact, then the remedy. This module has no slow imports."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path


class WorldsizeError(Exception):
    """Base class of errors for users, shown as a message without a traceback."""


class ConfigError(WorldsizeError):
    """The configuration cannot run; raised before any process starts if possible."""


class MissingProgramError(ConfigError):
    """The program that starts or submits a run is not installed here; the run's files can still be written."""


class SchedulerUnreachableError(ConfigError):
    """The scheduler does not respond to this machine; the run's files can still be written."""


class CheckpointError(WorldsizeError):
    """A checkpoint cannot be written, is damaged, or does not fit the run."""


class SaveFailedError(CheckpointError):
    """A rank failed to write a checkpoint. Every rank raises this error; the next save may succeed.

    Attributes:
        step: Step of the checkpoint.
        reason: The storage errors, with their ranks.
        newest: Step of the newest complete checkpoint, from which a restart resumes; None if none is complete.
    """

    def __init__(self, step: int, reason: str, newest: int | None) -> None:
        super().__init__(
            f"failed to write the checkpoint of step {step}: {reason}. Free disk space, or use another folder."
        )
        self.step, self.reason, self.newest = step, reason, newest


class OtherSchemaError(CheckpointError):
    """A checkpoint has a schema version that this release cannot read; it is not necessarily damaged."""


class FirstHostLostError(WorldsizeError):
    """The first host of a run stopped responding, so this host ended its processes."""


class RunFolderError(WorldsizeError):
    """A run folder was deleted or is no longer writable."""


class NonfiniteLossError(WorldsizeError):
    """The loss became NaN or infinite while ``nonfinite=stop``."""


class BitMismatchError(WorldsizeError):
    """Processes that must have the same bits have different ones.

    ``is_guilty``: whether this process has the wrong bits, or may have them because there is no majority.
    ``ends_run``: whether the run must end, rather than this process alone.
    """

    def __init__(self, message: str, *, is_guilty: bool, ends_run: bool) -> None:
        super().__init__(message)
        self.is_guilty, self.ends_run = is_guilty, ends_run


class RunFailedError(WorldsizeError):
    """A run, or a command on a run, ended before completion; ``folder`` is the run folder."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def require(what: str, package: str, *, extra: str | None = None) -> None:
    """Raise ConfigError if ``package``, needed by feature ``what``, is missing or has an unsupported version.

    The package is not imported. ``extra``: the extra of worldsize that installs it.
    """
    from importlib.metadata import PackageNotFoundError, requires

    from lightning_utilities.core.imports import RequirementCache
    from packaging.requirements import Requirement

    allowed = Requirement(package)
    with suppress(PackageNotFoundError):  # worldsize runs from source and is not installed
        for each in map(Requirement, requires("worldsize") or ()):
            if each.name == allowed.name and each.marker and each.marker.evaluate({"extra": extra or ""}):
                allowed.specifier = each.specifier
    if RequirementCache(str(allowed)):
        return
    install = f"Install it: uv pip install '{allowed}', or uv add '{allowed}' in your project."
    if extra:
        install = (
            f"Install the extra: uv sync --extra {extra} in a clone, uv add 'worldsize[{extra}]' or "
            f"pip install 'worldsize[{extra}]' elsewhere."
        )
    raise ConfigError(f"{what} requires {allowed}, which is not installed. {install}")


def neighbours(name: str, known: Iterable[str]) -> str:
    """Return the hint for an error about an unknown ``name``: the closest known name, and all names if at most 40."""
    names = sorted(word for word in known if not word.startswith("_"))
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"{guess} Available: {', '.join(names)}." if 0 < len(names) <= 40 else guess
