"""Train runs and compose configurations from scripts and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worldsize.api.run import Run, add_keywords
from worldsize.api.subprocesses import call_command, call_in_fork
from worldsize.errors import ConfigError, RunFailedError, WorldsizeError
from worldsize.messages import CONFIG_ERROR
from worldsize.record.run_directory import RunDirectory

if TYPE_CHECKING:  # slow imports
    from omegaconf import DictConfig

    from worldsize.core import Recipe


def train(*words: str, recipe: type[Recipe] | str | None = None, **values: Any) -> Run:
    """Train, with overrides as on the command line: ``train("cluster.processes=2", recipe="digits", steps=40)``.

    Output is forwarded line by line. An interrupt (Ctrl-C, or a notebook's stop button) makes the run save and end.

    Args:
        words: Overrides of the configuration.
        recipe: The name of a recipe, or a recipe class of this script or notebook. The parameters of a class become
            keys under ``recipe``; ``make_optimizer`` and ``make_schedule`` receive the configured factories. The run
            uses forks of this process, so it is limited to this machine and cannot be resumed or evaluated afterwards.
        values: Values of top-level keys, as in ``steps=40``; nested keys are written as ``"cluster.processes=2"``.

    Returns:
        The completed run; with a batch scheduler such as Slurm, or with ``launch=write``, the recorded run.

    Raises:
        ConfigError: The run is refused, or the overrides start several runs or none.
        RunFailedError: The run did not complete; ``error.folder`` is its folder.
    """
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"{flags[0]}: train() accepts only overrides. Call train() in a loop to start several runs.")
    if isinstance(recipe, type):
        ended = call_in_fork(recipe, add_keywords(words, values))
    else:
        named = {} if recipe is None else {"recipe": recipe}
        ended = call_command("train", *add_keywords(words, {**named, **values}), has_result=True)
    if ended.result is not None and RunDirectory(ended.result).manifest.exists():  # removed if a worker refused to run
        run = Run(ended.result)
        if ended.code:
            raise RunFailedError(run.failure or ended.messages or f"exit code {ended.code}", run.folder)
        return run
    if ended.code in (0, CONFIG_ERROR):
        unstarted = "launch=show does not start a run. Use the command worldsize train."
        raise ConfigError(ended.messages if ended.code else unstarted)
    raise WorldsizeError(ended.messages or f"training ended with exit code {ended.code} before the run was recorded.")


def compose(*words: str, **values: Any) -> DictConfig:
    """Compose the configuration of a run from overrides and values of top-level keys, without starting it.

    Raises:
        ConfigError: An override is invalid; the message suggests a similar key.
    """
    from worldsize.config.compose import compose_only

    return compose_only(add_keywords(words, values))
