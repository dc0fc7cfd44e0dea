"""What commands do before they use a recorded run's code again: trust it, find it, and compose its configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.config.catalogue import used
from worldsize.config.command_line import GROUPS
from worldsize.config.compose import assigned, choices
from worldsize.config.overrides import key_of
from worldsize.driver.trust import (
    check_composed,
    check_plugins,
    check_recorded_targets,
    project_of,
    recorded_flags,
    recorded_overrides,
    take_code,
    target_names,
)
from worldsize.errors import ConfigError
from worldsize.messages import ask
from worldsize.records.run_record import RunRecord, RunView
from worldsize.reproducibility.plugins import check_kept


def enter_project(record: RunRecord | RunView, overrides: Sequence[str], *, yes: bool) -> list[str]:
    """Go to the folder in which a recorded run began, so that its recipes and plugins are found from there.

    Args:
        record: The run.
        overrides: Options that were typed now.
        yes: Go on with another user's run without asking.

    Returns:
        The run's options: the recorded ones that no typed one replaces, then those.

    Raises:
        WorldsizeError: its record holds what worldsize has not written, or it is another user's and was not agreed to;
            or an option was typed that only a new run takes.
    """
    check_typed(overrides)
    run, manifest, own = record.directory, record.manifest, record.is_own
    recorded = recorded_overrides(manifest, own=own)
    check_recorded_targets(manifest, overrides, own=own)
    has_plugins = check_kept(manifest.get("plugins", ()), run.plugins)
    project = project_of(manifest, run, own=own)
    if not own:
        _ask(manifest, project, yes=yes)
        take_code(manifest, project, run)
        project = run.project
    os.chdir(project)
    if has_plugins:
        os.environ["WORLDSIZE_PLUGINS"] = str(run.plugins.resolve())  # it goes on with the code that it began with
    return [*_kept(recorded, overrides), *overrides]


def check_typed(overrides: Sequence[str]) -> None:
    """Raise ConfigError if an option was typed that only a new run takes."""
    if typed := [word for word in overrides if key_of(word) == "init_from"]:
        raise ConfigError(
            f"{typed[0]}: a run that has begun keeps the weights that it began from. Leave it out, or begin a new run "
            "with it; nothing was started."
        )


def placed(record: RunRecord | RunView) -> list[str]:
    """Return the options that say where the run's folder is, that of its groups, and the weights that it began from."""
    run, begun = record.directory, record.manifest["config"].get("init_from")
    own = [assigned("init_from", begun)] if begun else []  # of a run the checkpoint that was its newest then
    flags = recorded_flags(record.manifest, own=record.is_own)
    return [*flags, assigned("run.root", run.path.parents[1]), assigned("run.name", run.id), *own]


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
