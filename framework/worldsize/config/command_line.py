"""Rewrites the command line for Hydra, and refuses flags that worldsize handles differently.

Values are quoted as Hydra's grammar requires, depending on the types of their keys.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, IntegerNode, ListConfig, OmegaConf, StringNode, UnionNode
from omegaconf.errors import OmegaConfBaseException

from worldsize.config.arguments import parse_override_key
from worldsize.config.schema import Schema
from worldsize.config.search_path import list_conf_folders, main_conf, options_in
from worldsize.errors import ConfigError, neighbours

GROUPS = (
    *("cluster", "strategy", "reproducibility", "optimizer", "schedule", "data", "logger", "checkpoint", "recipe"),
    "autoscale",
)
_OPTIONS = re.compile(
    r"[^\[]*|\[(?!.*\bnull\b)\s*[A-Za-z_][\w/-]*(\s*,\s*[A-Za-z_][\w/-]*)*\s*\]", re.DOTALL
)  # one option, or a list of options
_FOLDER = "worldsize creates the run folder and does not change the working directory. Set run.root and run.name."
REFUSED: Mapping[str, str] = {
    "hydra.run.dir": _FOLDER,
    "hydra.sweep.subdir": _FOLDER,
    "hydra.job.chdir": _FOLDER,
    "hydra.output_subdir": "the run folder already has config.yaml, overrides.yaml and Hydra's choices.",
}
"""Hydra keys that runs ignore, with an explanation of what to use instead."""
REFUSED_FLAGS = ("--config-path", "--experimental-rerun")
"""Hydra flags that worldsize refuses with an explanation."""

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d[\d_]*)?|[+-]?(inf|nan)", re.IGNORECASE)
_UNREADABLE = re.compile(r"[^\w/\-\\+.$%*@?| \t:]|[^\x00-\x7f]")  # characters that Hydra only accepts in quotes
_ITEM = re.compile(r"\s*([^,\[\]]+)")
_ITEM_OF_MAPPING = re.compile(r"\s*([^,\[\]{}:]+)")
_DIGITS = 20  # maximum length of an integer; no key accepts a longer one


def normalize_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrite group choices for Hydra, and move overrides after the flags for argparse.

    ``+group=option`` and ``group=option`` are equivalent: the option replaces the group's current option, or is added
    if there is none.

    Raises:
        ConfigError: worldsize does not support a given Hydra flag or key.
    """
    if {"--help", "-h"} & {*arguments}:  # the word all selects conf/hydra/help/all.yaml
        arguments = ["hydra/help=all" if word == "all" else word for word in arguments]
    words = sorted(readable(arguments), key=lambda word: "=" in word and not word.startswith("--"))
    flags = get_args_parser().parse_args(words)
    _check_flags(flags)
    for key in map(parse_override_key, flags.overrides):
        if key in REFUSED:
            raise ConfigError(f"{key} is not supported: {REFUSED[key]}")
    for word in flags.overrides:
        _check_kept(word)
        group, _, option = word.lstrip("+").partition("=")
        if group in GROUPS and (option == "null" or "=" not in word or not _OPTIONS.fullmatch(option)):
            raise ConfigError(_null_option(flags, word))
    if flags.hydra_help:  # Hydra's own help, where our keys do not exist
        return [word for word in words if word not in flags.overrides or parse_override_key(word).startswith("hydra")]
    signs = _choose_prefixes(flags)
    return [
        signs[_parse_choice_key(word)] + word.lstrip("+") if _parse_choice_key(word) in signs else word
        for word in words
    ]


def _check_flags(flags: Namespace) -> None:
    if flags.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun is not supported: unpickling a configuration can run arbitrary code. "
            "Use worldsize reproduce RUN or worldsize resume RUN."
        )
    if flags.config_path is not None:
        raise ConfigError(
            "--config-path is not supported: it would replace worldsize's own configuration. Put options into "
            "conf/GROUP/NAME.yaml in the working directory, or pass a folder of groups with --config-dir."
        )
    if flags.resolve and not (flags.cfg or flags.help):
        raise ConfigError("--resolve requires --cfg or --help. Pass e.g. --cfg job --resolve.")
    modes = {"--run": flags.run, "--multirun": flags.multirun, "--cfg": flags.cfg, "--info": flags.info}
    given = [name for name, value in {**modes, "--shell-completion": flags.shell_completion}.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are mutually exclusive; pass one of them.")


def _check_kept(word: str) -> None:
    """Raise ConfigError if ``word``, such as ``~lr``, deletes a mandatory key."""
    key = parse_override_key(word)
    if word.startswith("~") and key not in GROUPS and key in {field.name for field in fields(Schema)}:
        raise ConfigError(f"{word}: the key {key} is mandatory. Set {key}=null, or remove the override.")


def _parse_choice_key(word: str) -> str | None:
    """Return the key of a word that may choose an option, such as ``+group@package=option``; None for other words."""
    match = re.fullmatch(r"\+?([a-zA-Z_][\w/-]*(@[\w.]+)?)=.+", word, re.DOTALL)
    return match[1] if match else None


def _choose_prefixes(flags: Namespace) -> dict[str | None, str]:
    """Map the key of each group choice to Hydra's prefix: "+" if the group has no option yet, otherwise ""."""
    groups = {group for conf in _list_option_folders(flags) for group, _, _ in options_in(conf)}
    groups -= {field.name for field in fields(Schema)}
    chosen = {key: word.lstrip("+") for word in flags.overrides if (key := _parse_choice_key(word))}
    words = {key: word for key, word in chosen.items() if key in GROUPS or not word.endswith("=null")}
    usual = [word for key, word in words.items() if key in GROUPS]
    added = {key: word for key, word in words.items() if key.partition("@")[0] in groups and key not in GROUPS}
    if added:
        taken = _find_chosen_groups(flags, usual)
        added = {key: word for key, word in added.items() if key not in taken}
    inner: set[str] = set()  # groups set by an added option, such as the recipe of an experiment
    if len(added) > 1:
        for key, word in added.items():
            inner |= _find_chosen_groups(flags, [*usual, f"+{word}"]) - {key}
    signs: dict[str | None, str] = {key: "+" if key in added and key not in inner else "" for key in words}
    return {key: sign for key, sign in signs.items() if key in GROUPS or str(key).partition("@")[0] in groups}


def _list_option_folders(flags: Namespace) -> list[Path]:
    """Return all ``conf`` folders with options of configuration groups, including the folder of ``--config-dir``."""
    return [*list_conf_folders(), *([folder] if (folder := folder_of_flags(flags)) else [])]


def folder_of_flags(flags: Namespace) -> Path | None:
    """Return the folder given by ``--config-dir``, if it exists."""
    folder = Path(flags.config_dir).resolve() if flags.config_dir else None
    return folder if folder and folder.is_dir() else None


def _null_option(flags: Namespace, word: str) -> str:
    """Explain that ``word``, such as ``logger=null``, does not name an option, and list the group's options."""
    group, _, given = word.lstrip("+").partition("=")
    options = {option for conf in _list_option_folders(flags) for name, option, _ in options_in(conf) if name == group}
    fact = f"{word}: {given or 'null'} is not an option of the group {group}"
    return f"{fact}. Set {group}=none." if "none" in options else f"{fact}{neighbours('null', options)}"


def _find_chosen_groups(flags: Namespace, words: Sequence[str]) -> set[str]:
    """Return the groups that have an option in the configuration composed from ``words`` (a sweep's first point).

    The result is empty if the words cannot be composed; the error is reported when everything is composed.
    """
    own = hydra_of_first_point(flags, words)
    return set() if own is None else {str(group) for group in own.runtime.choices}


def hydra_of_first_point(flags: Namespace, words: Sequence[str]) -> DictConfig | None:
    """Compose ``words``, or a sweep's first point, and return Hydra's own section; None if that fails."""
    GlobalHydra.instance().clear()
    first = [re.sub(r"^([^=,]*=[^,()\[\]]*),.*", r"\1", word, flags=re.DOTALL) for word in words]
    try:
        with initialize_config_dir(str(main_conf()), version_base="1.3"):
            own: DictConfig = compose(flags.config_name or "config", overrides=first, return_hydra_config=True).hydra
    except (HydraException, OmegaConfBaseException, ConfigError):
        return None
    return own


def brings_files(arguments: Sequence[str]) -> bool:
    """Return whether the words choose an option that may configure Hydra itself, such as an experiment file."""
    flags, _ = get_args_parser().parse_known_args(list(arguments))
    keys = [key for word in flags.overrides if (key := _parse_choice_key(word)) is not None]
    groups = {group for conf in _list_option_folders(flags) for group, _, _ in options_in(conf)} - {*GROUPS}
    return any(key.partition("@")[0] in groups for key in keys)


def readable(words: Sequence[str]) -> list[str]:
    """Rewrite ``key=value`` words so that Hydra reads each value as the key's type.

    A text value may look like a number, as in ``run.name=1e3``, and may contain characters such as ``~`` and ``é``
    without quotes. An integer may be written as ``1e3``.
    """
    types = _Types(words)
    return [_readable(word, types) if "=" in word and not word.startswith("-") else word for word in words]


def _readable(word: str, types: _Types) -> str:
    name, _, value = word.partition("=")
    if any(each in value for each in "'\"()\\"):
        return word
    if "${" in value:
        return f"{name}={_quote_text(value)}" if _UNREADABLE.search(re.sub(r"\$\{[^}]*\}", "", value)) else word
    is_mapping = "{" in value

    def rewritten(match: re.Match[str]) -> str:
        item = text = match[1].rstrip()
        if _UNREADABLE.search(item):
            item = _quote_text(text)
        elif not is_mapping and (_NUMBER.fullmatch(text) or text.lower() in ("true", "false")):
            kind = types.find_key_type(parse_override_key(word))
            item = _quote_text(text) if kind is str else _format_integer(text) if kind is int else text
        return match[0].replace(text, item)

    return f"{name}={(_ITEM_OF_MAPPING if is_mapping else _ITEM).sub(rewritten, value)}"


def _quote_text(text: str) -> str:
    quoted: str = QuotedString(text, Quote.single).with_quotes()
    return quoted


def _format_integer(text: str) -> str:
    """Return an integer such as 1e3 in digits, and other text unchanged."""
    if text.lower() in ("true", "false"):
        return text
    number = Decimal(text.replace("_", ""))
    is_whole = number.is_finite() and number.adjusted() < _DIGITS and number == number.to_integral_value()
    return str(int(number)) if is_whole else text


@cache
def register_schema() -> DictConfig:
    """Register the schema with Hydra, and return its node, which must not be modified."""
    ConfigStore.instance().store("schema", node=Schema)
    schema: DictConfig = ConfigStore.instance().repo["schema.yaml"].node
    return schema


class _Types:
    """Types of configuration keys, for quoting their values on the command line."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._schema = register_schema()
        self._composed: DictConfig | None = None

    def find_key_type(self, key: str) -> type | None:
        """Return str or int if ``key`` has this type or is a list of it, otherwise None."""
        node, section = _find_node(self._schema, key), key.partition(".")[0]
        if node is None and section in ("cluster", "launcher", "logger"):  # keys of the chosen options
            node = _find_node(self._compose_chosen(), key)
            if node is None and key.startswith("cluster.options."):  # scheduler options, passed on unchanged
                return str
            if section == "logger" and isinstance(node, AnyNode):
                return str if isinstance(node._value(), str | None) else None
        if isinstance(node, ListConfig):
            return next((kind for kind in (str, int) if node._metadata.element_type is kind), None)
        if isinstance(node, StringNode | AnyNode | DictConfig):
            return str  # for a section or group, the value is the name of an option
        is_number = isinstance(node, IntegerNode) or (isinstance(node, UnionNode) and int in _list_union_types(node))
        return int if is_number else None

    def _compose_chosen(self) -> DictConfig:
        """Compose the chosen cluster, including its launcher, and logger."""
        if self._composed is None:
            GlobalHydra.instance().clear()
            chosen = [word.lstrip("+") for word in self._words if re.fullmatch(r"\+?(cluster|logger)=\w+", word)]
            try:
                with initialize_config_dir(str(main_conf()), version_base="1.3"):
                    self._composed = compose("config", overrides=chosen)
            except (HydraException, OmegaConfBaseException, ConfigError):
                self._composed = OmegaConf.create()  # the error is reported when everything is composed
        return self._composed


def _list_union_types(node: UnionNode) -> Sequence[Any]:
    hint = node._metadata.ref_type
    return get_args(hint) if get_origin(hint) else ()


def _find_node(cfg: Any, key: str) -> Any:
    """Return the node at a dotted key without resolving it; None if it does not exist."""
    for name in key.split("."):
        if not isinstance(cfg, DictConfig) or cfg._is_none() or cfg._is_missing():
            return None
        cfg = cfg._get_node(name, validate_access=False)
    return cfg
