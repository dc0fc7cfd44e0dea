"""Decide what of a run's record may be used.

A record is one's own if one's own key made its signature (:func:`worldsize.records.manifest.is_own`). A record of
another user may name any code; nothing that it names is imported, installed or run before its reader has seen it and
agreed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worldsize.config.catalogue import Plugin
from worldsize.config.installed import installed
from worldsize.config.instantiate import ALLOWED, Allowed, check_targets
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import printable
from worldsize.reproducibility.plugins import digest_of

_BUNDLED = "worldsize"  # the source of a plugin that came with worldsize


def key_of(word: str) -> str:
    """Return the key that an override sets, adds or deletes."""
    return word.partition("=")[0].lstrip("+~")


def recorded_overrides(manifest: Mapping[str, Any], *, own: bool) -> list[str]:
    """Return the overrides of a record; without those of the allow-list, which another user's record cannot widen.

    Raises:
        WorldsizeError: one of them is an option of the command line, or changes Hydra itself.
    """
    for word in manifest["overrides"]:
        if word.lstrip().startswith("-") or re.split(r"[./@]", key_of(word))[0].strip() == "hydra":
            raise WorldsizeError(
                f"the record has {printable(word)!r} among its overrides, which sets no key of a configuration. "
                "worldsize did not write it; nothing was started."
            )
    return [word for word in manifest["overrides"] if own or key_of(word) != "allow_targets"]


def check_recorded_targets(manifest: Mapping[str, Any], typed: Sequence[str], *, own: bool) -> None:
    """Refuse a record with a target outside the allow-list, which only ``typed`` overrides and one's own record widen.

    Raises:
        ConfigError: it names one; nothing was imported.
    """
    added = [word.partition("=")[2] for word in typed if key_of(word) == "allow_targets"]
    prefixes = [prefix for words in added for prefix in re.findall(r"[\w.]+", words)]
    here = [plugin.module for plugin in installed()]
    config = manifest["config"]
    recorded = [*config.get("allow_targets", ()), *config["run"].get("packages", ())] if own else []
    check_targets(config, Allowed((*ALLOWED, *here, *recorded, *prefixes)))


def check_plugins(manifest: Mapping[str, Any], plugins: Sequence[Plugin]) -> None:
    """Refuse code of a project or a folder of plugins that is not the recorded one, before it is imported.

    ``plugins``: those that the configuration needs. What came with worldsize or is installed is this user's own.

    Raises:
        ConfigError: the record does not list one, or lists it with another digest.
    """
    distributions = {each.distribution for each in installed()}
    listed = {each["name"]: each["sha256"] for each in manifest.get("plugins", ())}
    for plugin in plugins:
        if plugin.source in (_BUNDLED, *distributions):
            continue
        if listed.get(plugin.name) != digest_of(plugin.folder):
            raise ConfigError(
                f"{plugin.folder} is not the {plugin.name} that the record lists, and the record is of another user. "
                "Look at it, and begin a run of your own with it; nothing was started."
            )


def targets_of(config: Any) -> Iterator[str]:
    """Yield every target that a configuration names."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield str(config["_target_"])
        for child in config.values():
            yield from targets_of(child)
    elif isinstance(config, list):
        for child in config:
            yield from targets_of(child)
