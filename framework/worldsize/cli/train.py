"""``train.py`` and ``worldsize train``: compose the configuration, then run it, once per point of a sweep."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from worldsize.cli import call_composed, check_working_directory, exit_process, remove_leftovers
from worldsize.errors import WorldsizeError
from worldsize.messages import refuse, show_messages, until_output_closes

if TYPE_CHECKING:
    from worldsize.config.objective import Trial
    from worldsize.core import Cluster, LaunchMethod
    from worldsize.launch.execute import Launch


def main() -> None:
    show_messages()
    check_working_directory()
    remove_leftovers()
    with until_output_closes():
        exit_process(train(sys.argv[1:]))


def train(arguments: Sequence[str]) -> int:
    """Train; return 0 if completed, 1 if a process failed, 2 if it cannot run, 128 + n if ended by signal n."""
    sweep: list[Launch] = []
    asked: list[tuple[LaunchMethod, Cluster]] = []

    def task(cfg: DictConfig) -> Trial:
        # imports torch, which takes seconds: misspelt options are reported before
        from worldsize.launch.execute import execute

        return execute(cfg, sweep)

    def check(cfg: DictConfig) -> None:
        from worldsize.launch.execute import prepared

        prepared(cfg, asked)

    from worldsize.config.compose import wants_sweep  # imports Hydra, which other commands do not need

    try:
        if wants_sweep(arguments):
            from worldsize.launch.sweep import call_sweep

            code = call_sweep(task, arguments, check=check)
        else:
            code = call_composed(lambda cfg: task(cfg).exit_code, arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code or (_submit(sweep) if sweep else 0)


def _submit(sweep: Sequence[Launch]) -> int:
    """Submit the runs that a sweep has collected, since all are valid."""
    from worldsize.launch.execute import submit_sweep

    try:
        return submit_sweep(sweep)
    except WorldsizeError as error:
        return refuse(error)
