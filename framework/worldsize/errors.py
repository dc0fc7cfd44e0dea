"""Errors whose message is all that a user needs: the fact, then the remedy. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class WorldsizeError(Exception):
    """An error that is shown without a traceback."""


class ConfigError(WorldsizeError):
    """The configuration cannot run; raised before any process starts where that can be known."""


class MissingProgramError(ConfigError):
    """This machine lacks the program that starts or submits a run; its files can still be written."""


class CheckpointError(WorldsizeError):
    """A checkpoint cannot be written, is damaged, or does not fit the run."""


class SaveFailedError(CheckpointError):
    """Storage refused a checkpoint on some rank. Every rank raises it, and the next save may succeed.

    Attributes:
        step: Step of the checkpoint.
        reason: What was refused, and to whom.
        newest: Step of the newest complete checkpoint, to which a restart goes back; None: there is none.
    """

    def __init__(self, step: int, reason: str, newest: int | None) -> None:
        super().__init__(
            f"the checkpoint of step {step} could not be written: {reason}. Make room, or choose another folder."
        )
        self.step, self.reason, self.newest = step, reason, newest


class OtherSchemaError(CheckpointError):
    """A checkpoint has a schema version that this worldsize does not read; it is not necessarily damaged."""


class FirstHostLostError(WorldsizeError):
    """The first host of a run does not answer any more, so that this one has ended its processes."""


class RunFolderError(WorldsizeError):
    """A run folder was deleted, or cannot be written to any more."""


class NonfiniteLossError(WorldsizeError):
    """The loss became NaN or infinite while ``nonfinite=stop``."""


def missing_extra(what: str, *, package: str, extra: str) -> ConfigError:
    """Return the error for a feature ``what`` whose ``package`` only an optional extra of worldsize installs."""
    return ConfigError(
        f"{what} needs {package}, which is not installed. Install the extra: uv sync --extra {extra} in a clone, "
        f"uv add 'worldsize[{extra}]' or pip install 'worldsize[{extra}]' elsewhere."
    )


def neighbours(name: str, known: Iterable[str]) -> str:
    """End a sentence about a misspelt ``name``: suggest the nearest known name, and list all if they are few."""
    names = sorted(word for word in known if not word.startswith("_"))
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"{guess} Known: {', '.join(names)}." if 0 < len(names) <= 40 else guess
