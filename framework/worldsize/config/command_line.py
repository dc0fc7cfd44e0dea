"""Rewrites the command line for Hydra, and refuses flags that worldsize handles differently."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from worldsize.config.arguments import key_of
from worldsize.config.schema import Schema
from worldsize.config.search_path import main_conf, options_in, searched
from worldsize.config.values import readable
from worldsize.errors import ConfigError, neighbours

GROUPS = (
    *("cluster", "strategy", "reproducibility", "optimizer", "schedule", "data", "logger", "checkpoint", "recipe"),
    "autoscale",
)
_OPTIONS = re.compile(
    r"[^\[]*|\[(?!.*\bnull\b)\s*[A-Za-z_][\w/-]*(\s*,\s*[A-Za-z_][\w/-]*)*\s*\]", re.DOTALL
)  # one, or a list
_FOLDER = "worldsize makes a run's folder itself, and stays in the working directory. Set run.root and run.name."
REFUSED: Mapping[str, str] = {
    "hydra.run.dir": _FOLDER,
    "hydra.sweep.subdir": _FOLDER,
    "hydra.job.chdir": _FOLDER,
    "hydra.output_subdir": "the folder of a run has config.yaml, overrides.yaml and hydra's choices already.",
}
"""Keys of Hydra that a run does not follow, and what it does instead."""
REFUSED_FLAGS = ("--config-path", "--experimental-rerun")
"""Flags of Hydra that worldsize answers with a sentence."""


def normalised(arguments: Sequence[str]) -> list[str]:
    """Rewrite choices of groups for Hydra, and move overrides after the flags for argparse.

    ``+group=option`` and ``group=option`` mean the same: the option replaces the group's present one, or is added if
    the configuration has none.

    Raises:
        ConfigError: a flag or a key of Hydra that worldsize does not support.
    """
    words = sorted(readable(arguments), key=lambda word: "=" in word and not word.startswith("--"))
    flags = get_args_parser().parse_args(words)
    _check_flags(flags)
    for key in map(key_of, flags.overrides):
        if key in REFUSED:
            raise ConfigError(f"{key} is not followed: {REFUSED[key]}")
    for word in flags.overrides:
        _check_kept(word)
        group, _, option = word.lstrip("+").partition("=")
        if group in GROUPS and (option == "null" or "=" not in word or not _OPTIONS.fullmatch(option)):
            raise ConfigError(_null_option(flags, word))
    if flags.hydra_help:  # this is only about Hydra, which does not know our keys there
        return [word for word in words if word not in flags.overrides or key_of(word).startswith("hydra")]
    signs = _signs(flags)
    return [signs[_choice(word)] + word.lstrip("+") if _choice(word) in signs else word for word in words]


def _check_flags(flags: Namespace) -> None:
    if flags.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun would unpickle a configuration, which can call anything. "
            "Run worldsize reproduce RUN, or worldsize resume RUN."
        )
    if flags.config_path is not None:
        raise ConfigError(
            "--config-path would replace the configuration of worldsize itself. Put options into conf/GROUP/NAME.yaml "
            "of the working directory, or name a folder of groups with --config-dir."
        )
    if flags.resolve and not (flags.cfg or flags.help):
        raise ConfigError("--resolve goes with --cfg or --help alone. Write e.g. --cfg job --resolve.")
    modes = {"--run": flags.run, "--multirun": flags.multirun, "--cfg": flags.cfg, "--info": flags.info}
    given = [name for name, value in {**modes, "--shell-completion": flags.shell_completion}.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other. Give one of them.")


def _check_kept(word: str) -> None:
    """Raise ConfigError if ``word``, such as ``~lr``, deletes a key that every run has."""
    key = key_of(word)
    if word.startswith("~") and key not in GROUPS and key in {field.name for field in fields(Schema)}:
        raise ConfigError(f"{word}: every run has the key {key}. Set {key}=null for none, or leave the word out.")


def _choice(word: str) -> str | None:
    """Return the key of a word that may choose an option of a group, as ``+group@package=option``, else None."""
    match = re.fullmatch(r"\+?([a-zA-Z_][\w/-]*(@[\w.]+)?)=.+", word, re.DOTALL)
    return match[1] if match else None


def _signs(flags: Namespace) -> dict[str | None, str]:
    """Map the key of each choice of a group to Hydra's prefix for it: "+" if the group has no option yet."""
    groups = {group for conf in _places(flags) for group, _, _ in options_in(conf)}
    groups -= {field.name for field in fields(Schema)}
    chosen = {key: word.lstrip("+") for word in flags.overrides if (key := _choice(word))}
    words = {key: word for key, word in chosen.items() if key in GROUPS or not word.endswith("=null")}
    usual = [word for key, word in words.items() if key in GROUPS]
    added = {key: word for key, word in words.items() if key.partition("@")[0] in groups and key not in GROUPS}
    if added:
        taken = _chosen(flags, usual)
        added = {key: word for key, word in added.items() if key not in taken}
    inner: set[str] = set()  # groups that an added option brings along, such as the recipe of an experiment
    if len(added) > 1:
        for key, word in added.items():
            inner |= _chosen(flags, [*usual, f"+{word}"]) - {key}
    signs: dict[str | None, str] = {key: "+" if key in added and key not in inner else "" for key in words}
    return {key: sign for key, sign in signs.items() if key in GROUPS or str(key).partition("@")[0] in groups}


def _places(flags: Namespace) -> list[Path]:
    """Return the folders that offer options of groups."""
    return [*searched(), *([folder] if (folder := folder_of_flags(flags)) else [])]


def folder_of_flags(flags: Namespace) -> Path | None:
    """Return the folder of groups that ``--config-dir`` names, if it exists."""
    folder = Path(flags.config_dir).resolve() if flags.config_dir else None
    return folder if folder and folder.is_dir() else None


def _null_option(flags: Namespace, word: str) -> str:
    """Return a sentence about ``word``, such as ``logger=null``, which names no option; it has those of the group."""
    group, _, given = word.lstrip("+").partition("=")
    options = {option for conf in _places(flags) for name, option, _ in options_in(conf) if name == group}
    fact = f"{word}: {given or 'null'} is no option of the group {group}"
    return f"{fact}. Set {group}=none." if "none" in options else f"{fact}{neighbours('null', options)}"


def _chosen(flags: Namespace, words: Sequence[str]) -> set[str]:
    """Return the groups with an option in the configuration composed from ``words``, or from a sweep's first point.

    Return none if the words cannot be composed; the error is reported when everything is composed.
    """
    own = hydra_of_first_point(flags, words)
    return set() if own is None else {str(group) for group in own.runtime.choices}


def hydra_of_first_point(flags: Namespace, words: Sequence[str]) -> DictConfig | None:
    """Compose ``words``, or a sweep's first point; return Hydra's own part, or None if that fails."""
    GlobalHydra.instance().clear()
    first = [re.sub(r"^([^=,]*=[^,()\[\]]*),.*", r"\1", word, flags=re.DOTALL) for word in words]
    try:
        with initialize_config_dir(str(main_conf()), version_base="1.3"):
            own: DictConfig = compose(flags.config_name or "config", overrides=first, return_hydra_config=True).hydra
    except (HydraException, OmegaConfBaseException, ConfigError):
        return None
    return own


def brings_files(arguments: Sequence[str]) -> bool:
    """Return whether the words choose an option that may configure Hydra itself, as an experiment's file can."""
    flags, _ = get_args_parser().parse_known_args(list(arguments))
    keys = [key for word in flags.overrides if (key := _choice(word)) is not None]
    groups = {group for conf in _places(flags) for group, _, _ in options_in(conf)} - {*GROUPS}
    return any(key.partition("@")[0] in groups for key in keys)
