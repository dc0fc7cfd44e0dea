"""Remembers which YAML files Hydra has read to compose a configuration, to name the one with a wrong key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

_READ: dict[Path, tuple[str, DictConfig]] = {}


def forget_files() -> None:
    """Forget those of earlier configurations."""
    _READ.clear()


def note_file(file: Path, package: str, config: DictConfig) -> None:
    """Remember that ``config``, read from ``file``, belongs below the key ``package``; "" is the root."""
    _READ[file] = package, config


def place_of(key: str) -> str:
    """Return a sentence, after a blank, that names the file in which ``key`` stands; "" if it stands in none."""
    for file, (package, config) in reversed(_READ.items()):
        inner = key if not package else key.removeprefix(f"{package}.")
        if (inner != key or not package) and _has(OmegaConf.to_container(config), inner.split(".")):
            return f" It stands in {file}."
    return ""


def _has(node: Any, names: list[str]) -> bool:
    if not names:
        return True
    return isinstance(node, dict) and names[0] in node and _has(node[names[0]], names[1:])
