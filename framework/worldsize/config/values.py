"""Rewrites values of a command line as Hydra's grammar needs them, by the types of their keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Any, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, IntegerNode, ListConfig, OmegaConf, StringNode, UnionNode
from omegaconf.errors import OmegaConfBaseException

from worldsize.config.arguments import key_of
from worldsize.config.schema import Schema
from worldsize.config.search_path import main_conf
from worldsize.errors import ConfigError

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d[\d_]*)?|[+-]?(inf|nan)", re.IGNORECASE)
_UNREADABLE = re.compile(r"[^\w/\-\\+.$%*@?| \t:]|[^\x00-\x7f]")  # what Hydra takes only in quotes
_ITEM = re.compile(r"\s*([^,\[\]]+)")
_ITEM_OF_MAPPING = re.compile(r"\s*([^,\[\]{}:]+)")
_DIGITS = 20  # of a whole number: no key takes a longer one


def readable(words: Sequence[str]) -> list[str]:
    """Rewrite ``key=value`` words so that Hydra reads each value as the key's type.

    Text stays text although it looks like a number, as in ``run.name=1e3``, and needs no quotes for characters such as
    ``~`` and ``é``. A whole number may be written as ``1e3``.
    """
    types = _Types(words)
    return [_readable(word, types) if "=" in word and not word.startswith("-") else word for word in words]


def _readable(word: str, types: _Types) -> str:
    name, _, value = word.partition("=")
    if any(each in value for each in "'\"()\\"):
        return word
    if "${" in value:
        return f"{name}={_quoted(value)}" if _UNREADABLE.search(re.sub(r"\$\{[^}]*\}", "", value)) else word
    is_mapping = "{" in value

    def rewritten(match: re.Match[str]) -> str:
        item = text = match[1].rstrip()
        if _UNREADABLE.search(item):
            item = _quoted(text)
        elif not is_mapping and (_NUMBER.fullmatch(text) or text.lower() in ("true", "false")):
            kind = types.of(key_of(word))
            item = _quoted(text) if kind is str else _whole(text) if kind is int else text
        return match[0].replace(text, item)

    return f"{name}={(_ITEM_OF_MAPPING if is_mapping else _ITEM).sub(rewritten, value)}"


def _quoted(text: str) -> str:
    quoted: str = QuotedString(text, Quote.single).with_quotes()
    return quoted


def _whole(text: str) -> str:
    """Return a whole number such as 1e3 in digits; another text unchanged."""
    if text.lower() in ("true", "false"):
        return text
    number = Decimal(text.replace("_", ""))
    is_whole = number.is_finite() and number.adjusted() < _DIGITS and number == number.to_integral_value()
    return str(int(number)) if is_whole else text


@cache
def registered() -> DictConfig:
    """Make the schema known to Hydra, and return it with the types of its keys, to be read only."""
    ConfigStore.instance().store("schema", node=Schema)
    schema: DictConfig = ConfigStore.instance().repo["schema.yaml"].node
    return schema


class _Types:
    """The types of a configuration's keys."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._schema = registered()
        self._composed: DictConfig | None = None

    def of(self, key: str) -> type | None:
        """Return str or int for a key of this type or of a list of it, else None."""
        node = _node(self._schema, key)
        if node is None and key.partition(".")[0] in ("cluster", "launcher"):  # the launcher's own keys
            node = _node(self._chosen(), key)
        if isinstance(node, ListConfig):
            return next((kind for kind in (str, int) if node._metadata.element_type is kind), None)
        if isinstance(node, StringNode | AnyNode | DictConfig):
            return str  # of a section or a group: the name of an option
        is_number = isinstance(node, IntegerNode) or (isinstance(node, UnionNode) and int in _options(node))
        return int if is_number else None

    def _chosen(self) -> DictConfig:
        """Compose the cluster that the words choose, with its launcher."""
        if self._composed is None:
            GlobalHydra.instance().clear()
            chosen = [word.lstrip("+") for word in self._words if re.fullmatch(r"\+?cluster=\w+", word)]
            try:
                with initialize_config_dir(str(main_conf()), version_base="1.3"):
                    self._composed = compose("config", overrides=chosen)
            except (HydraException, OmegaConfBaseException, ConfigError):
                self._composed = OmegaConf.create()  # reported when everything is composed
        return self._composed


def _options(node: UnionNode) -> Sequence[Any]:
    hint = node._metadata.ref_type
    return get_args(hint) if get_origin(hint) else ()


def _node(cfg: Any, key: str) -> Any:
    """Return the node of a dotted key without resolving it; None: there is none."""
    for name in key.split("."):
        if not isinstance(cfg, DictConfig) or cfg._is_none() or cfg._is_missing():
            return None
        cfg = cfg._get_node(name, validate_access=False)
    return cfg
