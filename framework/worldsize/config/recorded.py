"""Builds the settings, or only the launcher or the recipe, of a recorded run."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from worldsize.config.instantiate import Allowed, check_arguments, resolve_target
from worldsize.config.search_path import make_importable
from worldsize.config.settings import Objects, Settings, load_launcher, load_settings
from worldsize.core import BatchLauncher, LaunchMethod, Recipe
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.files import read_regular
from worldsize.messages import printable
from worldsize.record.inputs import check_kept
from worldsize.record.redaction import find_redacted_keys, restore_secrets
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunView
from worldsize.strict_json import LARGEST
from worldsize.world.environments import withheld_secrets


def read_settings(run: RunDirectory) -> Settings:
    """Read the run's settings from its ``config.yaml``, and its secrets from the environment.

    Raises:
        ConfigError: a secret is not in the file and was not passed to this process.
    """
    config = _read_config(run.config)
    restore_secrets(config, withheld_secrets(os.environ))
    if withheld := find_redacted_keys(config):
        names = ", ".join(".".join(map(str, keys)) for keys in withheld)
        raise ConfigError(
            f"{names}: secrets are not stored in the run folder. Start the run with `worldsize resume` or train.py."
        )
    make_importable([run.plugins, *map(Path, config["run"]["import_path"])])
    return load_settings(Objects(config))


def preload_config(run: RunDirectory) -> None:
    """Parse the run's ``config.yaml`` in this process, which saves each forked process 40 ms."""
    with suppress(ConfigError):  # reported by the first process that reads it
        _read_config(run.config)


@lru_cache(maxsize=1)
def _parse_config(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = deepcopy(_parse_config(read_regular(path, at_most=LARGEST).decode()))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"failed to read {path}: {error}. Restore the file from a copy of the run.") from None
    run = config.get("run") if isinstance(config, dict) else None
    folders = run.get("import_path") if isinstance(run, dict) else None
    if not isinstance(config, dict) or not isinstance(folders, list) or not all(isinstance(e, str) for e in folders):
        raise ConfigError(f"{path} is not a run configuration. Restore it from a copy of the run.")
    return {str(key): value for key, value in config.items()}


def override_recorded(run: RunDirectory, values: Mapping[str, object]) -> tuple[dict[str, Any], str]:
    """Return the run's configuration with other ``values``, without secrets, and its text for ``config.yaml``."""
    config = {**_read_config(run.config), **values}
    return config, format_config(config)


def format_config(config: Mapping[str, object]) -> str:
    """Render ``config.yaml``, which the processes read; ``config`` must not contain secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


def compute_config_digest(config: Mapping[str, object]) -> str:
    """Return the SHA-256 of a configuration, as in the manifest."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def format_words(words: Sequence[str]) -> str:
    """Return the text of ``overrides.yaml`` for these overrides."""
    return OmegaConf.to_yaml(OmegaConf.create(list(words)))


def read_launcher(view: RunView) -> BatchLauncher | None:
    """Build the launcher of a recorded run, to query its scheduler; return None if it submits no jobs.

    Another user's record may only select a bundled launcher and names that find its job, not commands or code.

    Raises:
        ConfigError: another user's record names a launcher that does not exist or is not part of worldsize.
        WorldsizeError: the plugins in the run folder differ from the record.
    """
    config = view.manifest["config"]
    node = config["launcher"]
    if not view.is_own:
        return _build_bundled_launcher(node)
    check_kept(view.manifest.get("plugins", ()), view.directory.plugins)
    make_importable([view.directory.plugins, *map(Path, config["run"]["import_path"])])
    launcher = load_launcher(Objects(config))
    return launcher if isinstance(launcher, BatchLauncher) else None


def read_recipe(view: RunView) -> Recipe:
    """Build the recipe of the user's own run from its signed manifest, not from ``config.yaml``.

    Raises:
        ConfigError: the recipe needs a secret that is not in the run's files, or it cannot be built.
        WorldsizeError: the record is another user's, or the plugins in the run folder differ from the record.
    """
    if not view.is_own:
        raise WorldsizeError("building the recipe of another user's record is not supported.")
    config = view.manifest["config"]
    if withheld := find_redacted_keys(config["recipe"], ("recipe",)):
        raise ConfigError(f"{'.'.join(map(str, withheld[0]))}: secrets are not stored in the run folder.")
    check_kept(view.manifest.get("plugins", ()), view.directory.plugins)
    make_importable([view.directory.plugins, *map(Path, config["run"]["import_path"])])
    return Objects(config).build_cached_object("recipe", config["recipe"], Recipe)  # type: ignore[type-abstract]


def _build_bundled_launcher(node: Mapping[str, Any]) -> BatchLauncher | None:
    target = str(node.get("_target_"))
    if not re.fullmatch(r"worldsize\.launch\.[a-z_]+\.[A-Za-z]+", target):
        raise ConfigError(
            f"another user's run has the launcher {printable(target)}, but only worldsize's launchers are imported. "
            "Query the scheduler directly."
        )
    kind = resolve_target(target, Allowed(), "launcher")
    if not (inspect.isclass(kind) and issubclass(kind, LaunchMethod) and not inspect.isabstract(kind)):
        raise ConfigError(f"the launcher of another user's run, {target}, is not a launcher class.")
    if not issubclass(kind, BatchLauncher):
        return None
    given = {name: node[name] for name in kind.finds_job_by if name in node}
    for name, value in given.items():
        if not isinstance(value, bool) and not re.fullmatch(r"\w[\w.-]*", str(value), re.ASCII):
            raise ConfigError(f"another user's run has the invalid name launcher.{name}={value!r}.")
    check_arguments(kind, given, "launcher")
    launcher: BatchLauncher = kind(**given)
    return launcher
