"""``worldsize resume RUN [OVERRIDE ...]``: go on from the newest checkpoint that verifies."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from worldsize.app import call_composed, exit_process, refuse
from worldsize.checkpoints.format import HYPERPARAMETERS, PARTS, complete, step_of
from worldsize.config.compose import GROUPS
from worldsize.errors import WorldsizeError
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import RunRecord, opened


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize resume", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("overrides", nargs="*", help="changes, e.g. cluster.processes=2 or steps=2000")
    parser.add_argument("--allow-older", action="store_true", help="an older checkpoint may stand in for a damaged one")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PART",
        help="a key of the configuration that may have changed (e.g. lr, recipe), 'data', or a part of the state that "
        "is not loaded (optimizer, schedule, hyperparameters); may be given more than once",
    )
    options = parser.parse_intermixed_args()
    try:
        with opened(RunDirectory(options.run.resolve())) as record:
            code = resume(record, options.overrides, options.ignore, allow_older=options.allow_older)
    except WorldsizeError as error:
        code = refuse(error)
    exit_process(code)


def _kept(recorded: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the recorded overrides that ``overrides`` do not replace.

    Another strategy drops those of the old one, and another cluster those of its launcher.
    """
    replaced = [_key(word) for word in overrides]
    groups = tuple(f"{key}." for key in replaced if key in GROUPS) + (("launcher.",) if "cluster" in replaced else ())
    return [word for word in recorded if _key(word) not in replaced and not (groups and _key(word).startswith(groups))]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def resume(record: RunRecord, overrides: Sequence[str], ignore: Sequence[str], *, allow_older: bool) -> int:
    """Train on as ``overrides`` say; return the exit code, as of ``worldsize train``.

    Raises:
        WorldsizeError: the run is complete.
    """
    run, manifest = record.directory, record.manifest
    if record.is_complete and not overrides:
        raise WorldsizeError(f"the run {run.path} is complete. To train it further, give a larger number: steps=...")
    folder = Path(manifest["config"]["run"]["import_path"][0])
    if folder.is_dir():
        os.chdir(folder)  # its recipes and plugins are found from there
    if run.plugins.is_dir():
        os.environ["WORLDSIZE_PLUGINS"] = str(run.plugins.resolve())  # it goes on with the code that it began with
    words = [*_kept(manifest["overrides"], overrides), *overrides]
    own = [f"run.root={run.path.parents[1]}", f"run.name={run.id}", f"checkpoint.allow_older={allow_older}"]
    parts = [part for part in ignore if part in (*PARTS, HYPERPARAMETERS)]
    if manifest.get("resumed") or any(key not in (*parts, "data") for key in ignore):
        parts.append(HYPERPARAMETERS)  # those of the changed configuration, also if no checkpoint has them yet
    if saved := complete(run.checkpoints):
        own.append(f"checkpoint.ignore_until={step_of(saved[-1])}")

    def task(cfg: DictConfig) -> int:
        from worldsize.driver.execute import resume_run

        return resume_run(cfg, record, words, ignore)

    return call_composed(task, [*words, *own, f"checkpoint.ignore={parts}".replace(" ", "")])
