"""Use a recorded run again: decide what of its record may be used, enter its project, compose its configuration.

A record is one's own if one's own key made its signature (:func:`worldsize.records.manifest.is_own`). A record of
another user may name any code; nothing that it names is imported, installed or run before its reader has seen it and
agreed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from worldsize.config.catalogue import Plugin, used
from worldsize.config.command_line import GROUPS
from worldsize.config.compose import assigned, choices
from worldsize.config.installed import installed
from worldsize.config.instantiate import ALLOWED, Allowed, check_targets, targets_of
from worldsize.config.overrides import key_of
from worldsize.config.search_path import bundle, folders_of, main_conf
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import ask, printable
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import RunRecord, RunView
from worldsize.reproducibility.plugins import check_kept, copy_files, digest_of, files_of, kept_folder
from worldsize.world.scratch import temporary_folder

_BUNDLED = "worldsize"  # the source of a plugin that came with worldsize


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
    _check_composed(config, overrides)
    _check_plugins(manifest, used(config, choices()))
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


def recorded_overrides(manifest: Mapping[str, Any], *, own: bool) -> list[str]:
    """Return the overrides of a record; without those of the allow-list, which another user's record cannot widen.

    Raises:
        WorldsizeError: one of them is an option of the command line, or changes Hydra itself.
    """
    for word in manifest["overrides"]:
        if word.lstrip().startswith("-") or _changes_hydra(key_of(word)):
            raise WorldsizeError(
                f"the record has {printable(word)!r} among its overrides, which sets no key of a configuration. "
                "worldsize did not write it; nothing was started."
            )
    return [word for word in manifest["overrides"] if own or not _widens(word)]


def recorded_flags(manifest: Mapping[str, Any], *, own: bool) -> list[str]:
    """Return the flags of the command line that a record of one's own was made with."""
    return [f"--config-dir={manifest['config_dir']}"] if own and "config_dir" in manifest else []


def _changes_hydra(key: str) -> bool:
    """Whether a key, or a package that it puts a group into (``group@package`` or ``group@from:to``), is Hydra's."""
    name, _, packages = key.partition("@")
    return re.split(r"[./]", name)[0].strip() == "hydra" or "hydra" in re.findall(r"\w+", packages)


def _widens(word: str) -> bool:
    return re.split(r"[./@:]", key_of(word))[0].strip() == "allow_targets"


def check_recorded_targets(manifest: Mapping[str, Any], typed: Sequence[str], *, own: bool) -> None:
    """Refuse a record with a target outside the allow-list, which only ``typed`` overrides and one's own record widen.

    Raises:
        ConfigError: it names one; nothing was imported.
    """
    config = manifest["config"]
    recorded = [*config.get("allow_targets", ()), *config["run"].get("packages", ())] if own else []
    check_targets(config, _allowed(typed, recorded))


def _check_composed(config: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Refuse what the configuration files of another user put outside the allow-list, or into it.

    ``config``: what they compose to, with the ``typed`` overrides, which alone widen the allow-list.

    Raises:
        ConfigError: nothing was imported but launchers inside the allow-list.
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
    """Return the folder in which the run began; where it cannot be entered, its copy, or the working directory.

    The copy is only where what lies there will be compared with the record: where that is not one's ``own``.
    """
    known = [*map(Path, manifest["config"]["run"]["import_path"][:1]), *([] if own else [run.project])]
    return next((folder for folder in known if _can_be_entered(folder)), Path.cwd())


def _can_be_entered(folder: Path) -> bool:
    with suppress(OSError, ValueError):  # ValueError: no path at all
        return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
    return False


def _check_plugins(manifest: Mapping[str, Any], plugins: Sequence[Plugin]) -> None:
    """Refuse code of a project or a folder of plugins that is not the recorded one, before it is imported.

    ``plugins``: those that the configuration needs. What came with worldsize or is installed is this user's own.

    Raises:
        ConfigError: the record does not list one, or lists it with another digest.
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
    """Put copies of the code that another user's record lists into the run's folder, in place of what lies there.

    Nothing else can be imported from there: no compiled file, link, hidden or unlisted file. Of ``project``, the
    folder of its recipes and plugins, comes also the YAML that a configuration is composed of.

    Raises:
        WorldsizeError: a copy is not what the record lists; nothing was replaced.
    """
    plugins = manifest.get("plugins", ())
    with temporary_folder() as scratch:
        kept, copied = scratch / "plugins", scratch / "project"
        for each in (kept, copied):
            each.mkdir()
        for plugin in plugins:
            name = plugin["name"]
            if plugin["kept"]:
                copy_files(kept_folder(run.plugins, name), kept_folder(kept, name))
            elif plugin["source"] == "project":
                copy_files(kept_folder(project, name), kept_folder(copied, name))
                _check_digest(kept_folder(copied, name), name, plugin["sha256"])
        has_kept = check_kept(plugins, kept)
        for file in _yaml_of(project):
            target = copied / file.relative_to(project)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        _replace(run.project, copied)
        if has_kept:
            _replace(run.plugins, kept)


def _yaml_of(project: Path) -> Iterator[Path]:
    """List the configuration files of a project, but those that this worldsize has itself."""
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
