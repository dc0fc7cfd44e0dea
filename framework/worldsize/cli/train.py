"""``train.py`` and ``worldsize train``: compose the configuration and run it, once per point of a sweep."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from worldsize.cli import (
    VERSION,
    call_composed,
    check_working_directory,
    exit_process,
    print_version,
    remove_leftovers,
    write_result_path,
)
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import report_error, show_messages, until_output_closes

if TYPE_CHECKING:
    from worldsize.config.objective import Trial
    from worldsize.core import Cluster, LaunchMethod
    from worldsize.launch.execute import Launch


def main(result_fd: int | None = None) -> None:
    show_messages()
    check_working_directory()
    if sys.argv[1:] in [[word] for word in VERSION]:
        print_version()
        return
    remove_leftovers()
    with until_output_closes():
        exit_process(train(sys.argv[1:], result_fd))


def train(arguments: Sequence[str], result_fd: int | None = None) -> int:
    """Train; return 0 if completed, 1 if a process failed, 2 if it cannot run, 128 + n if ended by signal n.

    ``result_fd``: file descriptor for the path of each run folder.
    """
    sweep: list[Launch] = []
    asked: list[tuple[LaunchMethod, Cluster]] = []

    def train_with_config(cfg: DictConfig) -> Trial:
        # imports torch, which takes seconds, only after misspelt options have been reported
        from worldsize.launch.execute import execute_run

        return execute_run(cfg, sweep, lambda folder: write_result_path(folder, result_fd))

    def check_config(cfg: DictConfig) -> None:
        from worldsize.launch.execute import prepare_settings

        prepare_settings(cfg, asked)

    from worldsize.config.compose import wants_sweep  # imported here, since other commands do not need Hydra

    try:
        if wants_sweep(arguments):
            if result_fd is not None:
                return report_error(
                    ConfigError(
                        "these overrides start a sweep, but train() starts a single run. Use the command line with "
                        "--multirun."
                    )
                )
            from worldsize.launch.sweep import call_sweep

            code = call_sweep(train_with_config, arguments, check=check_config)
        else:
            code = call_composed(lambda cfg: train_with_config(cfg).exit_code, arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code or (_submit_runs(sweep) if sweep else 0)


def _submit_runs(sweep: Sequence[Launch]) -> int:
    """Submit the runs of a sweep after all of them have passed the checks."""
    from worldsize.launch.execute import submit_sweep

    try:
        return submit_sweep(sweep)
    except WorldsizeError as error:
        return report_error(error)
