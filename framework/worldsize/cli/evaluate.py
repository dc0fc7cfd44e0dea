"""``worldsize evaluate RUN [checkpoint=best|last|STEP] [split=NAME] [OVERRIDE ...]``: evaluate a run's checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from worldsize.cli import call_composed, exit_process
from worldsize.config.arguments import key_of
from worldsize.config.compose import compose_only, resolved
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.recorded_run import check_before_start, enter_project, placed
from worldsize.messages import outlive_output, refuse
from worldsize.record.run_record import RunView, view

_OWN = ("checkpoint", "split")  # words of this command, which are not configuration keys


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize evaluate", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "words",
        nargs="*",
        help="checkpoint=best, last (default) or a step; split=NAME (default: those that the run evaluates); "
        "changes, e.g. cluster.processes=2",
    )
    parser.add_argument("--yes", action="store_true", help="go on with another user's run without asking")
    options = parser.parse_intermixed_args()
    outlive_output()
    try:
        choices = {key_of(word): word.partition("=")[2] for word in options.words if key_of(word) in _OWN}
        overrides = [word for word in options.words if key_of(word) not in _OWN]
        code = evaluate(view(options.run), choices, overrides, yes=options.yes)
    except WorldsizeError as error:
        code = refuse(error)
    exit_process(code)


def evaluate(record: RunView, choices: Mapping[str, str], overrides: Sequence[str], *, yes: bool = False) -> int:
    """Evaluate the checkpoint and the split that ``choices`` names, and print the metrics; return the exit code.

    Raises:
        WorldsizeError: there is no such checkpoint or split, the checkpoint is damaged, or the run is another user's
            and the user did not agree to use it.
    """
    from worldsize.launch.evaluate import chosen_checkpoint, evaluate_checkpoint  # imports torch, which takes seconds

    path = chosen_checkpoint(record, choices.get("checkpoint", "last"))
    split = choices.get("split")
    if split == "":
        raise ConfigError("split= is empty. Leave it out, or name one: split=test.")
    words = [*enter_project(record, overrides, yes=yes), *placed(record)]

    def task(cfg: DictConfig) -> int:
        table, code = evaluate_checkpoint(cfg, record, path, split=split, words=overrides)
        if table is not None:
            Console().print(table)
        return code

    if record.is_own:
        return call_composed(task, words)
    cfg = compose_only(words)
    check_before_start(record.manifest, resolved(cfg), overrides, yes=yes)
    return task(cfg)
