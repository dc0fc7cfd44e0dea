"""``worldsize resume RUN [OVERRIDE ...]``: go on from the newest checkpoint that verifies."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from worldsize.app import ask, call_composed, exit_process, refuse
from worldsize.checkpoints.format import HYPERPARAMETERS, PARTS, complete, step_of
from worldsize.config.catalogue import used
from worldsize.config.compose import GROUPS, choices, resolved
from worldsize.driver.trust import check_plugins, check_recorded_targets, key_of, recorded_overrides, targets_of
from worldsize.errors import WorldsizeError
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import RunRecord, opened
from worldsize.reproducibility.plugins import check_kept


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize resume", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("overrides", nargs="*", help="changes, e.g. cluster.processes=2 or steps=2000")
    parser.add_argument("--yes", action="store_true", help="go on with another user's run without asking")
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
            if not record.is_own:
                _ask(record, yes=options.yes)
            code = resume(record, options.overrides, options.ignore, allow_older=options.allow_older)
    except WorldsizeError as error:
        code = refuse(error)
    exit_process(code)


def _ask(record: RunRecord, *, yes: bool) -> None:
    """Show what another user's run would run here, and ask whether to go on."""
    manifest = record.manifest
    facts = {
        "run": [manifest["run_id"]],
        "code": [f"what lies in {manifest['config']['run']['import_path'][0]}"],
        "plugins": [f"{each['name']} with digest {each['sha256']}" for each in manifest.get("plugins", ())],
        "targets": sorted(set(targets_of(manifest["config"]))),
        "options": manifest["overrides"],
    }
    ask(facts, yes=yes, deed="Run this code?")


def _kept(recorded: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the recorded words that no override replaces.

    With another strategy goes what was said of the old one, and with another cluster what was said of its launcher.
    """
    replaced = [key_of(word) for word in overrides]
    groups = tuple(f"{key}." for key in replaced if key in GROUPS) + (("launcher.",) if "cluster" in replaced else ())
    return [
        word for word in recorded if key_of(word) not in replaced and not (groups and key_of(word).startswith(groups))
    ]


def resume(record: RunRecord, overrides: Sequence[str], ignore: Sequence[str], *, allow_older: bool) -> int:
    """Train on as ``overrides`` say; return the exit code, as of ``worldsize train``.

    Raises:
        WorldsizeError: the run is complete, or its record holds what worldsize has not written.
    """
    run, manifest = record.directory, record.manifest
    if record.is_complete and not overrides:
        raise WorldsizeError(f"the run {run.path} is complete. To train it further, give a larger number: steps=...")
    recorded = recorded_overrides(manifest, own=record.is_own)
    check_recorded_targets(manifest, overrides, own=record.is_own)
    has_plugins = check_kept(manifest.get("plugins", ()), run.plugins)
    folder = Path(manifest["config"]["run"]["import_path"][0])
    if folder.is_dir():
        os.chdir(folder)  # its recipes and plugins are found from there
    if has_plugins:
        os.environ["WORLDSIZE_PLUGINS"] = str(run.plugins.resolve())  # it goes on with the code that it began with
    words = [*_kept(recorded, overrides), *overrides]
    own = [f"run.root={run.path.parents[1]}", f"run.name={run.id}", f"checkpoint.allow_older={allow_older}"]
    parts = [part for part in ignore if part in (*PARTS, HYPERPARAMETERS)]
    if manifest.get("resumed") or any(key not in (*parts, "data") for key in ignore):
        parts.append(HYPERPARAMETERS)  # those of the changed configuration, also if no checkpoint has them yet
    if saved := complete(run.checkpoints):
        own.append(f"checkpoint.ignore_until={step_of(saved[-1])}")

    def task(cfg: DictConfig) -> int:
        from worldsize.driver.execute import resume_run

        if not record.is_own:
            check_plugins(manifest, used(resolved(cfg), choices()))
            record.adopt()
        return resume_run(cfg, record, words, ignore)

    return call_composed(task, [*words, *own, f"checkpoint.ignore={parts}".replace(" ", "")])
