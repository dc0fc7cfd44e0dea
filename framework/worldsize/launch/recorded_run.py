"""Reuses a recorded run: decides which of its parts to trust, enters its project, composes its configuration.

A record is the user's own if the user's key signed it (:func:`worldsize.record.manifest.is_own`). A record of another
user may name any code; nothing that it names is imported, installed or run before the user has seen it and agreed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from worldsize.config.arguments import key_of
from worldsize.config.command_line import GROUPS
from worldsize.config.compose import assigned, choices
from worldsize.config.instantiate import ALLOWED, Allowed, check_targets, targets_of
from worldsize.config.search_path import Plugin, bundle, folders_of, installed, main_conf, used
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import ask, printable
from worldsize.record.inputs import check_kept, copy_files, digest_of, files_of, kept_folder
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunRecord, RunView
from worldsize.world.scratch import temporary_folder

_BUNDLED = "worldsize"  # the source of a plugin that came with worldsize


def enter_project(record: RunRecord | RunView, overrides: Sequence[str], *, yes: bool) -> list[str]:
    """Change to the folder in which a recorded run began, so that its recipes and plugins are found.

    Args:
        record: The run.
        overrides: The options typed now.
        yes: Use another user's run without asking.

    Returns:
        The run's options: recorded ones that no typed option replaces, then the typed ones.

    Raises:
        WorldsizeError: worldsize did not write the record, it is another user's and the user did not agree to it, or an
            option was typed that only a new run accepts.
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
        os.environ["WORLDSIZE_PLUGINS"] = str(run.plugins.resolve())  # the run resumes with the code that it began with
    return [*_not_replaced(recorded, overrides), *overrides]


def check_typed(overrides: Sequence[str]) -> None:
    """Raise ConfigError if an option was typed that only a new run accepts."""
    if typed := [word for word in overrides if key_of(word) == "init_from"]:
        raise ConfigError(
            f"{typed[0]}: a run that has begun keeps the weights that it began from. Leave it out, or begin a new run "
            "with it; nothing was started."
        )


def placed(record: RunRecord | RunView) -> list[str]:
    """Return the options for the run's folder, the folder of its groups, and its initial weights."""
    run, begun = record.directory, record.manifest["config"].get("init_from")
    own = [assigned("init_from", begun)] if begun else []  # the checkpoint, also if init_from named a run
    flags = recorded_flags(record.manifest, own=record.is_own)
    return [*flags, assigned("run.root", run.path.parents[1]), assigned("run.name", run.id), *own]


def check_before_start(
    manifest: Mapping[str, Any], config: Mapping[str, Any], overrides: Sequence[str], *, yes: bool
) -> None:
    """Raise ConfigError if another user's configuration names targets beyond the allow-list and its record.

    The user is asked about targets that were not shown before.
    """
    _check_composed(config, overrides)
    _check_plugins(manifest, used(config, choices()))
    if others := sorted(set(target_names(config)) - set(target_names(manifest["config"]))):
        ask({"targets that the record lacks": others}, yes=yes, deed="Run them?")


def _ask(manifest: Mapping[str, Any], project: Path, *, yes: bool) -> None:
    """Show the code that another user's run would execute here, and ask for agreement."""
    facts = {
        "run": [manifest["run_id"]],
        "code": [f"copies of the plugins below, and the configuration in {project}"],
        "plugins": [f"{each['name']} with digest {each['sha256']}" for each in manifest.get("plugins", ())],
        "targets": target_names(manifest["config"]),
        "options": manifest["overrides"],
    }
    ask(facts, yes=yes, deed="Run this code?")


def _not_replaced(recorded: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the recorded overrides that no typed override replaces.

    Another strategy also drops the options of the old one, and another cluster those of its launcher.
    """
    replaced = [key_of(word) for word in overrides]
    groups = tuple(f"{key}." for key in replaced if key in GROUPS) + (("launcher.",) if "cluster" in replaced else ())
    return [
        word for word in recorded if key_of(word) not in replaced and not (groups and key_of(word).startswith(groups))
    ]


def recorded_overrides(manifest: Mapping[str, Any], *, own: bool) -> list[str]:
    """Return the overrides of a record, without those that would widen the allow-list if it is another user's.

    Raises:
        WorldsizeError: an override is a command-line flag, or changes Hydra itself.
    """
    for word in manifest["overrides"]:
        if word.lstrip().startswith("-") or _changes_hydra(key_of(word)):
            raise WorldsizeError(
                f"the record has {printable(word)!r} among its overrides, which sets no key of a configuration. "
                "worldsize did not write it; nothing was started."
            )
    return [word for word in manifest["overrides"] if own or not _widens(word)]


def recorded_flags(manifest: Mapping[str, Any], *, own: bool) -> list[str]:
    """Return the command-line flags of the recorded run; none if the record is another user's."""
    return [f"--config-dir={manifest['config_dir']}"] if own and "config_dir" in manifest else []


def _changes_hydra(key: str) -> bool:
    """Return whether a key, or the package it assigns (``group@package`` or ``group@from:to``), is Hydra's."""
    name, _, packages = key.partition("@")
    return re.split(r"[./]", name)[0].strip() == "hydra" or "hydra" in re.findall(r"\w+", packages)


def _widens(word: str) -> bool:
    return re.split(r"[./@:]", key_of(word))[0].strip() == "allow_targets"


def check_recorded_targets(manifest: Mapping[str, Any], typed: Sequence[str], *, own: bool) -> None:
    """Raise ConfigError if a record names a target outside the allow-list; nothing is imported.

    Only ``typed`` overrides, and the record if it is the user's ``own``, widen the list.
    """
    config = manifest["config"]
    recorded = [*config.get("allow_targets", ()), *config["run"].get("packages", ())] if own else []
    check_targets(config, _allowed(typed, recorded))


def _check_composed(config: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Raise ConfigError if another user's configuration names targets outside the allow-list, or widens it.

    ``config``: the composed configuration, including the ``typed`` overrides, which alone widen the allow-list.

    Nothing is imported but launchers inside the allow-list.
    """
    if others := sorted(set(config["allow_targets"]) - set(_typed_prefixes(typed))):
        raise ConfigError(
            f"the configuration of another user's run widens the allow-list by {', '.join(map(printable, others))}. "
            "If you trust that, type it yourself: allow_targets=[NAME]; nothing was started."
        )
    check_targets(config, _allowed(typed, ()))


def _allowed(typed: Sequence[str], recorded: Sequence[str]) -> Allowed:
    here = [plugin.module for plugin in installed()]
    return Allowed((*ALLOWED, *here, *recorded, *_typed_prefixes(typed)))


def _typed_prefixes(typed: Sequence[str]) -> list[str]:
    added = [word.partition("=")[2] for word in typed if key_of(word) == "allow_targets"]
    return [prefix for words in added for prefix in re.findall(r"[\w.]+", words)]


def target_names(config: Mapping[str, Any]) -> list[str]:
    """List the targets that a configuration names, each once."""
    return sorted({str(node["_target_"]) for _, node in targets_of(config)})


def project_of(manifest: Mapping[str, Any], run: RunDirectory, *, own: bool) -> Path:
    """Return the folder in which the run began; if it cannot be entered, its copy or the working directory.

    The copy is only used for another user's record, whose code is compared with the record; not for one's ``own``.
    """
    known = [*map(Path, manifest["config"]["run"]["import_path"][:1]), *([] if own else [run.project])]
    return next((folder for folder in known if _can_be_entered(folder)), Path.cwd())


def _can_be_entered(folder: Path) -> bool:
    with suppress(OSError, ValueError):  # ValueError: not a path
        return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
    return False


def _check_plugins(manifest: Mapping[str, Any], plugins: Sequence[Plugin]) -> None:
    """Raise ConfigError if code of the project or of a plugin folder is not the recorded one, before it is imported.

    ``plugins``: those that the configuration needs; plugins of worldsize and installed ones are trusted.

    Raises:
        ConfigError: the record does not list a plugin, or lists it with another digest.
    """
    distributions = {each.distribution for each in installed()}
    listed = {each["name"]: each["sha256"] for each in manifest.get("plugins", ())}
    for plugin in plugins:
        if plugin.source not in (_BUNDLED, *distributions):
            _check_digest(plugin.folder, plugin.name, listed.get(plugin.name))


def _check_digest(folder: Path, name: str, recorded: str | None) -> None:
    if recorded != digest_of(folder):
        raise ConfigError(
            f"{folder} is not the {name} that the record lists, and the record is of another user. "
            "Look at it, and begin a run of your own with it; nothing was started."
        )


def take_code(manifest: Mapping[str, Any], project: Path, run: RunDirectory) -> None:
    """Copy the code that another user's record lists into the run's folder, replacing what is there.

    Compiled, hidden and unlisted files and links are not copied, so nothing else can be imported from there. The YAML
    files of ``project``, the folder of the recipes and plugins, are copied too, to compose the configuration.

    Raises:
        WorldsizeError: a copy differs from the record; nothing was replaced.
    """
    plugins = manifest.get("plugins", ())
    with temporary_folder() as scratch:
        recorded_plugins, copied = scratch / "plugins", scratch / "project"
        for each in (recorded_plugins, copied):
            each.mkdir()
        for plugin in plugins:
            name = plugin["name"]
            if plugin["kept"]:
                copy_files(kept_folder(run.plugins, name), kept_folder(recorded_plugins, name))
            elif plugin["source"] == "project":
                copy_files(kept_folder(project, name), kept_folder(copied, name))
                _check_digest(kept_folder(copied, name), name, plugin["sha256"])
        has_plugins = check_kept(plugins, recorded_plugins)
        for file in _yaml_of(project):
            target = copied / file.relative_to(project)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        _replace(run.project, copied)
        if has_plugins:
            _replace(run.plugins, recorded_plugins)


def _yaml_of(project: Path) -> Iterator[Path]:
    """List the configuration files of a project, except those that this worldsize has itself."""
    own = (main_conf().parent, bundle())
    for conf in (project / "conf", *(folder / "conf" for folder in folders_of(project))):
        for file in files_of(conf):
            is_own = any((root / file.relative_to(project)).exists() for root in own)
            if file.suffix == ".yaml" and not file.is_symlink() and not is_own:
                yield file


def _replace(folder: Path, copy: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(copy, folder)
