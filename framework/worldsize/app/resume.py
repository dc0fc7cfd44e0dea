"""``worldsize resume RUN [OVERRIDE ...]``: go on from the newest checkpoint that verifies."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from worldsize.app import ask, call_composed, exit_process, refuse
from worldsize.checkpoints.format import HYPERPARAMETERS, PARTS, complete, step_of
from worldsize.config.catalogue import used
from worldsize.config.compose import GROUPS, assigned, choices, compose_only, resolved
from worldsize.config.overrides import key_of
from worldsize.driver.trust import (
    check_composed,
    check_plugins,
    check_recorded_targets,
    project_of,
    recorded_overrides,
    take_code,
    target_names,
)
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
            code = resume(record, options.overrides, options.ignore, allow_older=options.allow_older, yes=options.yes)
    except WorldsizeError as error:
        code = refuse(error)
    exit_process(code)


def _ask(manifest: Mapping[str, Any], project: Path, *, yes: bool) -> None:
    """Show what another user's run would run here, and ask whether to go on."""
    facts = {
        "run": [manifest["run_id"]],
        "code": [f"copies of the plugins below, and the configuration in {project}"],
        "plugins": [f"{each['name']} with digest {each['sha256']}" for each in manifest.get("plugins", ())],
        "targets": target_names(manifest["config"]),
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


def resume(
    record: RunRecord, overrides: Sequence[str], ignore: Sequence[str], *, allow_older: bool, yes: bool = False
) -> int:
    """Train on as ``overrides`` say; return the exit code, as of ``worldsize train``.

    ``yes``: go on with another user's run without asking.

    Raises:
        WorldsizeError: the run is complete, its record holds what worldsize has not written, or it is another user's
            and was not agreed to.
    """
    run, manifest, own = record.directory, record.manifest, record.is_own
    if record.is_complete and not overrides:
        raise WorldsizeError(f"the run {run.path} is complete. To train it further, give a larger number: steps=...")
    recorded = recorded_overrides(manifest, own=own)
    check_recorded_targets(manifest, overrides, own=own)
    has_plugins = check_kept(manifest.get("plugins", ()), run.plugins)
    project = project_of(manifest, run, own=own)
    if not own:
        _ask(manifest, project, yes=yes)
        take_code(manifest, project, run)
        project = run.project
    os.chdir(project)  # its recipes and plugins are found from there
    if has_plugins:
        os.environ["WORLDSIZE_PLUGINS"] = str(run.plugins.resolve())  # it goes on with the code that it began with
    words = [*_kept(recorded, overrides), *overrides]
    place = [assigned("run.root", run.path.parents[1]), assigned("run.name", run.id)]
    arguments = [*words, *place, f"checkpoint.allow_older={allow_older}", *_ignored(record, ignore)]

    def task(cfg: DictConfig) -> int:
        from worldsize.driver.execute import resume_run

        return resume_run(cfg, record, words, ignore)

    if own:
        return call_composed(task, arguments)
    cfg = compose_only(arguments)
    check_before_start(manifest, resolved(cfg), overrides, yes=yes)
    record.adopt()
    return task(cfg)


def _ignored(record: RunRecord, ignore: Sequence[str]) -> list[str]:
    """Return the overrides that say which parts of the newest checkpoint are left as they are."""
    parts = [part for part in ignore if part in (*PARTS, HYPERPARAMETERS)]
    if record.manifest.get("resumed") or any(key not in (*parts, "data") for key in ignore):
        parts.append(HYPERPARAMETERS)  # those of the changed configuration, also if no checkpoint has them yet
    saved = complete(record.directory.checkpoints)
    until = [f"checkpoint.ignore_until={step_of(saved[-1])}"] if saved else []
    return [*until, f"checkpoint.ignore={parts}".replace(" ", "")]


def check_before_start(
    manifest: Mapping[str, Any], config: Mapping[str, Any], overrides: Sequence[str], *, yes: bool
) -> None:
    """Refuse what another user's configuration composes to beyond the allow-list and the record.

    Targets that were not shown are asked about.
    """
    check_composed(config, overrides)
    check_plugins(manifest, used(config, choices()))
    if others := sorted(set(target_names(config)) - set(target_names(manifest["config"]))):
        ask({"targets that the record lacks": others}, yes=yes, deed="Run them?")
