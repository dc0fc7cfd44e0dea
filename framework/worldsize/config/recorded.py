"""The settings of a run that has a folder already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from worldsize.config.search_path import make_importable
from worldsize.config.settings import Settings, load_settings
from worldsize.errors import ConfigError
from worldsize.records.redaction import missing, restore
from worldsize.records.run_directory import RunDirectory
from worldsize.world.environments import withheld_secrets


def read_settings(run: RunDirectory) -> Settings:
    """The run's settings from its ``config.yaml``, which is all that a process is told, secrets apart.

    Raises:
        ConfigError: a value was withheld from the file as a secret, and this process was not told it.
    """
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(run.config))  # type: ignore[assignment]
    restore(config, withheld_secrets(os.environ))
    if lost := missing(config):
        names = ", ".join(".".join(map(str, keys)) for keys in lost)
        raise ConfigError(f"{names}: the value is in no file of the run. Start it with `worldsize resume` or train.py.")
    make_importable([run.plugins, *map(Path, config["run"]["import_path"])])
    return load_settings(config)
