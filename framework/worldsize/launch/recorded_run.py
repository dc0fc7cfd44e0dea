"""Reuses a recorded run: decides on trust, enters its project folder, returns its options.

A record is the user's own if it was signed with the user's key (:func:`worldsize.record.manifest.is_own`). A foreign
record may name any code, so this code is not imported, installed or run before the user has seen it and agreed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from worldsize.config.arguments import parse_override_key
from worldsize.config.command_line import GROUPS
from worldsize.config.compose import format_override, read_group_choices
from worldsize.config.instantiate import ALLOWED, Allowed, check_targets, find_targets
from worldsize.config.search_path import (
    Plugin,
    find_installed_plugins,
    find_used_plugins,
    get_bundle_folder,
    list_root_folders,
    main_conf,
)
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import ask_for_consent, printable
from worldsize.record.inputs import check_kept, compute_plugin_digest, copy_files, get_plugin_folder, list_plugin_files
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunRecord, RunView
from worldsize.world.scratch import temporary_folder

_BUNDLED = "worldsize"  # source of plugins that are part of worldsize


def enter_project(record: RunRecord | RunView, overrides: Sequence[str], *, yes: bool) -> list[str]:
    """Change to a recorded run's project folder, so that its recipes and plugins are found.

    Args:
        record: The record of the run.
        overrides: The options typed now.
        yes: Accept a foreign run without a prompt.

    Returns:
        The run's options: the recorded ones not replaced by typed options, then the typed ones.

    Raises:
        WorldsizeError: worldsize did not write the record, the user did not agree to a foreign record, or the user
            typed an option that only a new run accepts.
    """
    check_typed(overrides)
    run, manifest, own = record.directory, record.manifest, record.is_own
    recorded = read_recorded_overrides(manifest, own=own)
    check_recorded_targets(manifest, overrides, own=own)
    has_plugins = check_kept(manifest.get("plugins", ()), run.plugins)
    project = find_project(manifest, run, own=own)
    if not own:
        _confirm_code(manifest, project, yes=yes)
        take_code(manifest, project, run)
        project = run.project
    os.chdir(project)
    if has_plugins:
        os.environ["WORLDSIZE_PLUGINS"] = str(run.plugins.resolve())  # the code that the run started with
    return [*drop_replaced(recorded, ["run.stop_after", *overrides]), *overrides]  # a resumed run continues to its end


def check_typed(overrides: Sequence[str]) -> None:
    """Raise ConfigError if a typed option is only accepted by new runs."""
    if typed := [word for word in overrides if parse_override_key(word) == "init_from"]:
        raise ConfigError(
            f"{typed[0]} is not supported when resuming: a resumed run keeps its initial weights. Remove the option, "
            "or start a new run; nothing was started."
        )


def build_run_options(record: RunRecord | RunView) -> list[str]:
    """Return the options that repeat the run's command-line flags, folder and initial weights."""
    run, begun = record.directory, record.manifest["config"].get("init_from")
    own = [format_override("init_from", begun)] if begun else []  # the checkpoint, even if init_from named a run
    flags = read_recorded_flags(record.manifest, own=record.is_own)
    return [*flags, format_override("run.root", run.path.parents[1]), format_override("run.name", run.id), *own]


def check_before_start(
    manifest: Mapping[str, Any], config: Mapping[str, Any], overrides: Sequence[str], *, yes: bool
) -> None:
    """Raise ConfigError if a foreign configuration has forbidden targets or changed plugins.

    The user must confirm targets that the record does not list.
    """
    _check_composed(config, overrides)
    _check_plugins(manifest, find_used_plugins(config, read_group_choices()))
    if others := sorted(set(target_names(config)) - set(target_names(manifest["config"]))):
        ask_for_consent({"unrecorded targets": others}, yes=yes, deed="Run these targets?")


def _confirm_code(manifest: Mapping[str, Any], project: Path, *, yes: bool) -> None:
    """Show the code that a foreign run would execute, and ask the user to agree."""
    facts = {
        "run": [manifest["run_id"]],
        "code": [f"copies of the plugins below, and the configuration in {project}"],
        "plugins": [f"{each['name']} with digest {each['sha256']}" for each in manifest.get("plugins", ())],
        "targets": target_names(manifest["config"]),
        "options": manifest["overrides"],
    }
    ask_for_consent(facts, yes=yes, deed="Run this code?")


def drop_replaced(recorded: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the recorded overrides that are not replaced by typed ones.

    Typing a strategy drops the recorded strategy's options, too; typing a cluster also drops the launcher's options.
    """
    replaced = [parse_override_key(word) for word in overrides]
    groups = tuple(f"{key}." for key in replaced if key in GROUPS) + (("launcher.",) if "cluster" in replaced else ())
    return [
        word
        for word in recorded
        if parse_override_key(word) not in replaced and not (groups and parse_override_key(word).startswith(groups))
    ]


def read_recorded_overrides(manifest: Mapping[str, Any], *, own: bool) -> list[str]:
    """Return a record's overrides; for a foreign record, drop those that widen the allow-list.

    Raises:
        WorldsizeError: an override is a command-line flag or changes Hydra's own configuration.
    """
    for word in manifest["overrides"]:
        if word.lstrip().startswith("-") or _changes_hydra(parse_override_key(word)):
            raise WorldsizeError(
                f"invalid override {printable(word)!r} in the record: not a configuration key, and not written by "
                "worldsize. Do not trust this record; nothing was started."
            )
    return [word for word in manifest["overrides"] if own or not _is_widening(word)]


def read_recorded_flags(manifest: Mapping[str, Any], *, own: bool) -> list[str]:
    """Return the recorded run's command-line flags; empty for a foreign record."""
    return [f"--config-dir={manifest['config_dir']}"] if own and "config_dir" in manifest else []


def _changes_hydra(key: str) -> bool:
    """Return whether a key or its package (``group@package``) belongs to Hydra."""
    name, _, packages = key.partition("@")
    return re.split(r"[./]", name)[0].strip() == "hydra" or "hydra" in re.findall(r"\w+", packages)


def _is_widening(word: str) -> bool:
    return re.split(r"[./@:]", parse_override_key(word))[0].strip() == "allow_targets"


def check_recorded_targets(manifest: Mapping[str, Any], typed: Sequence[str], *, own: bool) -> None:
    """Raise ConfigError if a record names a target outside the allow-list, without importing it.

    Only ``typed`` overrides, and the record if it is the user's ``own``, can widen the allow-list.
    """
    config = manifest["config"]
    recorded = [*config.get("allow_targets", ()), *config["run"].get("packages", ())] if own else []
    check_targets(config, _build_allow_list(typed, recorded))


def _check_composed(config: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Raise ConfigError if a foreign configuration has forbidden targets.

    ``config`` is the composed configuration; only ``typed`` overrides may widen the allow-list.

    This imports only launchers in the allow-list.
    """
    if others := sorted(set(config["allow_targets"]) - set(_parse_typed_prefixes(typed))):
        raise ConfigError(
            f"the configuration of another user's run extends the allow-list by {', '.join(map(printable, others))}. "
            "To trust these targets, pass allow_targets=[NAME] on the command line; nothing was started."
        )
    check_targets(config, _build_allow_list(typed, ()))


def _build_allow_list(typed: Sequence[str], recorded: Sequence[str]) -> Allowed:
    here = [plugin.module for plugin in find_installed_plugins()]
    return Allowed((*ALLOWED, *here, *recorded, *_parse_typed_prefixes(typed)))


def _parse_typed_prefixes(typed: Sequence[str]) -> list[str]:
    added = [word.partition("=")[2] for word in typed if parse_override_key(word) == "allow_targets"]
    return [prefix for words in added for prefix in re.findall(r"[\w.]+", words)]


def target_names(config: Mapping[str, Any]) -> list[str]:
    """List the distinct targets in a configuration."""
    return sorted({str(node["_target_"]) for _, node in find_targets(config)})


def find_project(manifest: Mapping[str, Any], run: RunDirectory, *, own: bool) -> Path:
    """Return the folder where the run was launched, or a fallback if that is inaccessible.

    The fallback is the working directory. A foreign record (not ``own``) first falls back to the run's copy of the
    project; :func:`take_code` compares its code with the record.
    """
    known = [*map(Path, manifest["config"]["run"]["import_path"][:1]), *([] if own else [run.project])]
    return next((folder for folder in known if _can_be_entered(folder)), Path.cwd())


def _can_be_entered(folder: Path) -> bool:
    with suppress(OSError, ValueError):  # ValueError: not a path
        return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
    return False


def _check_plugins(manifest: Mapping[str, Any], plugins: Sequence[Plugin]) -> None:
    """Check that plugins match a foreign record, before any of their code is imported.

    ``plugins`` are those that the configuration uses; bundled and installed plugins are trusted.

    Raises:
        ConfigError: a plugin is not in the record, or has a different digest.
    """
    distributions = {each.distribution for each in find_installed_plugins()}
    listed = {each["name"]: each["sha256"] for each in manifest.get("plugins", ())}
    for plugin in plugins:
        if plugin.source not in (_BUNDLED, *distributions):
            _check_digest(plugin.folder, plugin.name, listed.get(plugin.name))


def _check_digest(folder: Path, name: str, recorded: str | None) -> None:
    if recorded != compute_plugin_digest(folder):
        fact = "is not in the record" if recorded is None else "differs from the record"
        raise ConfigError(
            f"the plugin {name} in {folder} {fact}, and the record was written by another user. "
            "Review the plugin, and start your own run with it; nothing was started."
        )


def take_code(manifest: Mapping[str, Any], project: Path, run: RunDirectory) -> None:
    """Copy the code listed in a foreign record to the run's folder, replacing earlier copies.

    Compiled, hidden and unlisted files and links are not copied, so they cannot be imported from there. The YAML files
    in ``project``, the folder of the recipes and plugins, are copied as well, to compose the configuration.

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
                copy_files(get_plugin_folder(run.plugins, name), get_plugin_folder(recorded_plugins, name))
            elif plugin["source"] == "project":
                copy_files(get_plugin_folder(project, name), get_plugin_folder(copied, name))
                _check_digest(get_plugin_folder(copied, name), name, plugin["sha256"])
        has_plugins = check_kept(plugins, recorded_plugins)
        for file in _find_yaml_files(project):
            target = copied / file.relative_to(project)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        _replace_folder(run.project, copied)
        if has_plugins:
            _replace_folder(run.plugins, recorded_plugins)


def _find_yaml_files(project: Path) -> Iterator[Path]:
    """Yield a project's configuration files, except those that worldsize itself provides."""
    own = (main_conf().parent, get_bundle_folder())
    for conf in (project / "conf", *(folder / "conf" for folder in list_root_folders(project))):
        for file in list_plugin_files(conf):
            is_own = any((root / file.relative_to(project)).exists() for root in own)
            if file.suffix == ".yaml" and not file.is_symlink() and not is_own:
                yield file


def _replace_folder(folder: Path, copy: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(copy, folder)
