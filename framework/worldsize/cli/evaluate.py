"""``worldsize evaluate RUN [checkpoint=best|last|STEP] [split=NAME] [OVERRIDE ...]``: evaluate a run's checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig
from rich.console import Console

from worldsize.cli import RUN, call_composed, exit_process, run_and_overrides, write_result_path
from worldsize.config.arguments import parse_override_key
from worldsize.config.compose import compose_only, resolve_config
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.recorded_run import build_run_options, check_before_start, enter_project
from worldsize.messages import outlive_output, report_error
from worldsize.record.run_record import RunView, read_run

_OWN = ("checkpoint", "split")  # arguments of this command; all others are configuration keys


def main(result_fd: int | None = None) -> None:
    parser = argparse.ArgumentParser(prog="worldsize evaluate", description=__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN | OVERRIDE",
        help=f"{RUN}; checkpoint=best, last (default) or a step; split=NAME (default: the splits of the run); "
        "overrides, e.g. cluster.processes=2",
    )
    parser.add_argument("--yes", action="store_true", help="evaluate another user's run without asking")
    options = parser.parse_intermixed_args()
    outlive_output()
    try:
        run, words = run_and_overrides(options.words)
        choices = {
            parse_override_key(word): word.partition("=")[2] for word in words if parse_override_key(word) in _OWN
        }
        overrides = [word for word in words if parse_override_key(word) not in _OWN]
        code = evaluate(read_run(run), choices, overrides, yes=options.yes, result_fd=result_fd)
    except WorldsizeError as error:
        code = report_error(error)
    exit_process(code)


def evaluate(
    record: RunView,
    choices: Mapping[str, str],
    overrides: Sequence[str],
    *,
    yes: bool = False,
    result_fd: int | None = None,
) -> int:
    """Evaluate the checkpoint and split in ``choices``, print the metrics, and return the exit code.

    ``result_fd``: file descriptor for the path of the evaluation folder.

    Raises:
        WorldsizeError: the checkpoint or split does not exist, the checkpoint is damaged, or the run is another user's
            and the user did not agree to use it.
    """
    from worldsize.launch.evaluate import choose_checkpoint, evaluate_checkpoint  # importing torch takes seconds

    path = choose_checkpoint(record, choices.get("checkpoint", "last"))
    split = choices.get("split")
    if split == "":
        raise ConfigError("split= is empty. Set e.g. split=test, or remove split=.")
    words = [*enter_project(record, overrides, yes=yes), *build_run_options(record)]

    def evaluate_with_config(cfg: DictConfig) -> int:
        done = evaluate_checkpoint(cfg, record, path, split=split, words=overrides)
        if isinstance(done, int):
            return done
        table, folder = done
        Console().print(table)
        write_result_path(folder, result_fd)
        return 0

    if record.is_own:
        return call_composed(evaluate_with_config, words)
    cfg = compose_only(words)
    check_before_start(record.manifest, resolve_config(cfg), overrides, yes=yes)
    return evaluate_with_config(cfg)
