"""Rewrites errors of Hydra and OmegaConf as short messages: the fact, the remedy and similar names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from worldsize.config.schema import Schema
from worldsize.config.search_path import config_folders, find_installed_plugins, main_conf, options_in
from worldsize.core.limits import ReservedNames, read_annotations
from worldsize.errors import ConfigError, neighbours


def explain_error(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Convert ``error`` to a ConfigError that explains it; ``overrides`` are the user's."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError(_unknown_option(error))
    text = f"{error}\n{error.__cause__}"
    unknown = re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in ", text)
    if unknown:
        full = re.search(r"full_key: (\S+)", text)
        key = unknown[1] or (full[1] if full else unknown[2])
        if full and full[1].startswith(f"{key}."):  # the unknown key is inside a mapping given as the value
            key = full[1]
        place = describe_key_source(key)  # before _unknown_key() composes other configurations
        return ConfigError(f"{_unknown_key(key, overrides)}{place}")
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    merged = re.match(r"Error merging override \+*([\w.]+)=", str(error))
    if merged and isinstance(cause, OmegaConfBaseException) and merged[1].startswith(f"{cause.full_key}."):
        return ConfigError(
            f"unknown key {merged[1]!r}: {cause.full_key} is a value, not a section. Set {cause.full_key}=VALUE."
        )
    if isinstance(cause, ValidationError):
        return ConfigError(_wrong_type(cause, merged[1] if merged else cause.full_key))
    if isinstance(cause, InterpolationResolutionError | UnsupportedInterpolationType | GrammarParseError):
        return ConfigError(_explain_interpolation(cause))
    if isinstance(error, OverrideParseException):
        key, equals, _ = str(error.override).partition("=")
        if not re.fullmatch(r"[+~]*[\w$-]+([./][\w$-]+)*(@[\w.:]*)?", key, re.ASCII):
            return ConfigError(f"{error.override!r}: {key!r} is not a valid key. Write KEY=VALUE or SECTION.KEY=VALUE.")
        remedy = f"To pass a string, quote it: {key}='\"VALUE\"'." if equals else "Write key=value."
        return ConfigError(f"failed to parse {error.override!r}: {_first_line(error)}. {remedy}")
    return ConfigError(_rewrite_message(f"{_first_line(error)}."))


def _rewrite_message(text: str) -> str:
    """Rewrite a known Hydra message with a remedy for the command line; return other messages unchanged."""
    for pattern, sentence in _SENTENCES.items():
        if match := re.match(pattern, text, re.DOTALL):
            return match.expand(sentence)
    return text


def _explain_interpolation(error: OmegaConfBaseException) -> str:
    """Explain why an interpolation cannot be resolved."""
    text, key = _first_line(error), f"{error.full_key}: " if error.full_key else ""
    if "GrammarParseError" in text or isinstance(error, GrammarParseError):
        return f"{key}invalid interpolation ${{...}}. Write e.g. ${{seed}} or ${{oc.env:NAME}}, or remove ${{."
    if variable := re.search(r"Environment variable '(.*?)' not found", text):
        return (
            f"{key}the environment variable {variable[1]!r} is not set. Set it, or provide a default: "
            f"${{oc.env:{variable[1]},DEFAULT}}."
        )
    if unknown := re.match(r"Interpolation key '(.*?)' not found", text):
        return f"{key}unknown key {unknown[1]!r} in ${{{unknown[1]}}}. Refer to an existing key, or write a value."
    text = text.rpartition("raised while resolving interpolation: ")[2]
    return f"{key}failed to resolve an interpolation: {text}. Write a value, or remove ${{."


_SEVERAL = "\\1 has several values. Add --multirun to sweep over them, or quote a string: \\1='\"a,b\"'."
_SENTENCES = {
    r"Could not append to config\. An item is already at '(.+)'": r"\1 already exists. Write \1=VALUE, without the +.",
    r"Sweep parameters '\+*([^=]+)=.*' requires --multirun": _SEVERAL,
    r"Ambiguous value for argument '\+*([^=]+)=": _SEVERAL,
    r"Could not delete '([^=]+?)(=.*)?'\. No match in the defaults list": (
        r"~\1: this option of \1 is not selected. Remove the override."
    ),
    r"Could not delete from config\. '(.+)' does not exist": r"~\1: unknown key \1. Remove the override.",
    r"Could not delete from config\. The value of '(.+?)' is .* and not (.*)\.$": (
        r"~\1=\2: \1 has a different value. Write ~\1, or remove the override."
    ),
    r"force-add of config groups is not supported: '\++([^=]+)=": r"\1 is a group. Select an option with \1=NAME.",
    r"Error resolving interpolation '(.+?)', possible interpolation keys: (.*)\.": (
        r"\1 does not select an option: a choice can only refer to the groups \2. Name the option."
    ),
    r"Override (.+)=.* looks like a config group override, but config group '(.+)' does not exist": (
        r"\1: unknown group \2. Write \2=VALUE, without the @package."
    ),
    r"Error merging override ~([\w.]*\w)": r"~\1: the key \1 is mandatory. Set \1=VALUE, or remove the override.",
    r"Error merging override (\+*)([^=]+)=": r"invalid value for \2. Show its current value with --cfg job.",
}


def _first_line(error: Exception) -> str:
    """Return the first informative line of a message, without Hydra's exception name."""
    lines = [line.strip() for line in str(error).splitlines()]
    useful = [
        line for line in lines if line.strip("^ ") and not line.startswith(("See http", "Error parsing override"))
    ]
    if not useful:
        return type(error).__name__
    return " ".join(re.sub(r"^\w+Exception: | expecting \{.*", "", useful[0]).rstrip(".").split())


def _unknown_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    broken = [
        f" The plugin {each.distribution} is broken: {each.broken}." for each in find_installed_plugins() if each.broken
    ]
    known = error.options or {
        name for conf in (main_conf(), *config_folders()) for name in _list_group_options(conf, group)
    }
    return f"unknown {group or 'configuration'} {option!r}{neighbours(option, known)}{''.join(broken)}"


def _list_group_options(conf: Path, group: str) -> list[str]:
    return [option for name, option, _ in options_in(conf) if name == group]


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    words = [word for word in overrides if word.partition("=")[0] != key]  # key may be a group unused by this recipe
    composed = _compose_choices(words)
    parent, name, known = _first_unknown(key, OmegaConf.to_container(composed))
    if not parent and name in known:
        return (
            f"{name}=... is not supported with this recipe. To support it, add a line such as '- /{name}: null' to "
            "`defaults:` in the recipe's YAML file."
        )
    is_misspelt = _is_misspelt(name, known)
    if parent == "cluster" and not is_misspelt and (having := _clusters_with(name)):
        return (
            f"cluster.{name} requires cluster={' or '.join(having)}. Set e.g. +cluster={having[-1]}, or remove "
            f"cluster.{name}."
        )
    # a node accepts all arguments of its target, even those missing from the YAML
    shown = f"{parent}.{name}" if parent else key
    if scheduler := scheduler_option(parent, name, OmegaConf.get_type(composed, "cluster")):
        return f"unknown key {shown!r}. {scheduler}"
    is_open = shown == key and (not known or "_target_" in known)
    more = f" If its _target_ accepts {name!r}, add it with +{key}=VALUE." if "_target_" in known else ""
    more = (more or f" If {parent} accepts arbitrary keys, add it with +{key}=VALUE.") if is_open else ""
    return f"unknown key {shown!r}{neighbours(name, known)}{more}{_suggest_run_key(name) if parent else ''}"


def _is_misspelt(name: str, known: Iterable[str]) -> bool:
    return bool(get_close_matches(name, known, n=1, cutoff=0.8))


def scheduler_option(parent: str, name: str, section: Any) -> str:
    """Suggest how to set the unknown key ``parent.name`` as a scheduler option; empty if it cannot be one.

    ``section`` is the schema of ``cluster``.
    """
    is_typed = parent == "cluster" and isinstance(section, type) and is_dataclass(section)
    hints = read_annotations(cast("type", section)) if is_typed else {}
    if "options" not in hints:
        return ""
    for limit in getattr(hints["options"], "__metadata__", ()):
        if isinstance(limit, ReservedNames) and (remedy := limit.find_remedy(name)) is not None:
            return f"{remedy} instead."
    if _is_misspelt(name, hints):
        return ""
    return f"If the scheduler has such an option, set +cluster.options.{name.replace('_', '-')}=VALUE."


def _clusters_with(name: str) -> list[str]:
    """Return the names of the cluster options that have the key ``name``."""
    places = (main_conf(), *config_folders())
    kinds = sorted({option for conf in places for group, option, _ in options_in(conf) if group == "cluster"})
    having = []
    for kind in kinds:
        with suppress(HydraException, OmegaConfBaseException, ConfigError):  # a plugin may be broken
            having += [kind] if name in _compose_choices([f"cluster={kind}"])["cluster"] else []
    return having


def _suggest_run_key(name: str) -> str:
    """Suggest the top-level key that the user may have meant by ``name`` in a section."""
    close = get_close_matches(name, [field.name for field in fields(Schema)], n=1, cutoff=0.8)
    return f" The top-level key is {close[0]!r}: set {close[0]}=VALUE." if close else ""


def _first_unknown(key: str, node: Any) -> tuple[str, str, list[str]]:
    """Return the first part of ``key`` that is not in ``node``: its parent, its name, and its siblings' names."""
    parts = key.split(".")
    for number, name in enumerate(parts):
        known = [str(each) for each in node] if isinstance(node, Mapping) else []
        if name not in known or number == len(parts) - 1:
            break
        node = node[name]
    return ".".join(parts[:number]), name, known


def _compose_choices(overrides: Sequence[str]) -> Any:
    """Compose only the group choices among ``overrides``, including those with ``@package``."""
    GlobalHydra.instance().clear()
    groups = {group.name for conf in (main_conf(), *config_folders()) for group in conf.iterdir() if group.is_dir()}
    chosen = [
        word
        for word in overrides
        if (choice := re.fullmatch(r"\+?(\w+)(@[\w.]+)?=[\w-]+", word)) and choice[1] in groups
    ]
    with initialize_config_dir(str(main_conf()), version_base="1.3"):
        try:
            return compose("config", overrides=chosen)
        except (HydraException, OmegaConfBaseException):  # the unknown key is in a file of an added group
            usual = [word for word in chosen if not word.startswith("+")]
            return compose("config", overrides=usual)


def _wrong_type(error: ValidationError, key: str | None) -> str:
    """Explain a value of the wrong type; ``key`` is the key given by the user."""
    message = str(error.msg or error).splitlines()[0]
    place = error.full_key if error.full_key and str(error.full_key).startswith(key or "") else key
    if place and message.endswith("is not Optional"):
        return f"{place} must not be null. Set {place}=VALUE, or remove the override."
    if place and (match := _CONVERSION.match(message)):
        return f"{place}={match[1]} has the wrong type: expected {_KINDS[match[2] or match[3] or match[4]]}."
    for pattern, kind in _CONTAINERS.items():
        if place and re.match(pattern, message):
            return f"{place} must be {kind.format(key=place)}."
    return f"{place}: {message[:1].lower()}{message[1:]}. Show its value with --cfg job." if place else message


_CONTAINERS = {
    r"Cannot convert '\w+' to string": "a string, e.g. {key}=NAME",
    r"Invalid value assigned: \w+ is not a ListConfig": "a list, e.g. {key}=[a,b]",
    r"Invalid type assigned: \w+ is not a subclass": "a section, e.g. {key}.KEY=VALUE",
    r"Cannot assign \w+ to Dict": "a mapping, e.g. {key}={{NAME:VALUE}}",
}
_CONVERSION = re.compile(
    r"Value (.+?) (?:of type '\w+' could not be converted to (Integer|Float)|is not a valid (bool) |"
    r"of type '\w+' is incompatible with type hint '(?:Optional\[)?(Union)\[int, str\])",
    re.DOTALL,
)
_KINDS = {
    "Integer": "an integer",
    "Float": "a number",
    "bool": "true or false",
    "Union": "an integer or a string",
}


_READ: dict[Path, tuple[str, DictConfig]] = {}


def forget_files() -> None:
    """Clear the files recorded by :func:`note_file`."""
    _READ.clear()


def note_file(file: Path, package: str, config: DictConfig) -> None:
    """Record that ``config``, read from ``file``, is placed under the key ``package``; "" is the root."""
    _READ[file] = package, config


def describe_key_source(key: str) -> str:
    """Return a sentence with a leading space that names the file that sets ``key``; "" if none does."""
    file = find_key_file(key)
    return f" The key is set in {file}." if file else ""


def find_key_file(key: str) -> Path | None:
    """Return the file that sets ``key``, the last one read if there are several; None if there is none."""
    for file, (package, config) in reversed(_READ.items()):
        inner = key if not package else key.removeprefix(f"{package}.")
        if (inner != key or not package) and _has_key_path(OmegaConf.to_container(config), inner.split(".")):
            return file
    return None


def _has_key_path(node: Any, names: list[str]) -> bool:
    if not names:
        return True
    return isinstance(node, dict) and names[0] in node and _has_key_path(node[names[0]], names[1:])
