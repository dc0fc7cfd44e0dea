"""Composes the configuration with Hydra, once, in the launching process."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from types import FunctionType
from typing import Any, ClassVar, cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, Node, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from worldsize.config.arguments import parse_override_key
from worldsize.config.command_line import (
    brings_files,
    folder_of_flags,
    hydra_of_first_point,
    normalize_arguments,
    register_schema,
)
from worldsize.config.explain import describe_key_source, explain_error, forget_files, scheduler_option
from worldsize.config.launcher_schema import LauncherSource
from worldsize.config.learning_rate import fill_missing_lr
from worldsize.config.objective import SweepEnded
from worldsize.config.schema import Schema
from worldsize.config.search_path import check_unique, list_conf_folders, main_conf
from worldsize.core.limits import FilePath, check_limits, read_annotations
from worldsize.errors import ConfigError, neighbours
from worldsize.messages import printable

_logger = logging.getLogger(__name__)

_FEW = 4  # largest number of runs in a sweep that is checked without a message
_NAME = re.compile(r"[\w./-]+", re.ASCII)  # text that may name an option of a group
_LONG_NUMBER = re.compile(r"\d{1001}")  # Python itself raises an error at 4,300 digits


class _Folders(SearchPathPlugin):
    """Adds every ``conf/`` of the working directory, plugins and recipes, and the folder of ``--config-dir``.

    Hydra also adds the folder of ``--config-dir``, but would skip the checks of :class:`LauncherSource`.
    """

    additional: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in reversed(list_conf_folders()):
            search_path.prepend(provider="worldsize", path=f"{LauncherSource.scheme()}://{folder}")
        if self.additional is not None:
            search_path.append(provider="command-line", path=f"{LauncherSource.scheme()}://{self.additional}")


def format_override(key: str, value: object) -> str:
    """Return the override that sets ``key`` to the text of ``value``, quoted and escaped."""
    text = str(value).replace("${", r"\${")
    return f"{key}={QuotedString(text, Quote.single).with_quotes()}"


def format_keywords(values: Mapping[str, object]) -> list[str]:
    """Return the overrides that set keys to Python values.

    Raises:
        ConfigError: a value has a type that no key accepts.
    """
    return [f"{key}={_format_value(key, value)}" for key, value in values.items()]


def _format_value(key: str, value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Real():
            return str(value)
        case str() | Path():
            text = str(value)  # names of options must not be quoted
            return text if _NAME.fullmatch(text) else format_override("", text).removeprefix("=")
        case list() | tuple():
            return f"[{','.join(_format_value(key, item) for item in value)}]"
        case Mapping():
            return f"{{{','.join(f'{name}:{_format_value(key, item)}' for name, item in value.items())}}}"
    raise ConfigError(
        f"{key}: a value of type {type(value).__name__} is not supported. Pass a number, a string, a list, a dict or "
        "None."
    )


def compose_and_call(task: Callable[[DictConfig], Any], arguments: Sequence[str]) -> None:
    """Run Hydra's command line with ``arguments``, and call ``task`` once for each composed configuration.

    Raises:
        ConfigError: Hydra or OmegaConf rejects the arguments (suggesting similar names), two folders define the same
            option, a search lacks a metric, or the folder of a sweep cannot be created.
    """
    _prepare_hydra(arguments)
    sys.argv[1:] = words = normalize_arguments(arguments)
    try:
        with _initialize_hydra():
            if cfg := _single_run(words):
                task(_expand_home(_register_config(cfg)))
                return
        program = hydra.main(version_base="1.3", config_path=str(main_conf()), config_name="config")
        program(lambda cfg: task(_expand_home(cfg)))()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_error(error, sys.argv[1:]) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        code = cast("FunctionType", task).__code__
        if error.__cause__ or any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__)):
            raise  # raised by the task, perhaps in a child process, not by Hydra
        if isinstance(error, OSError) and error.filename is None:
            raise  # an output error, such as a closed pipe
        if isinstance(error, OSError):
            raise ConfigError(
                f"failed to write {error.filename}: {error.strerror}. "
                "Set run.root or hydra.sweep.dir to a writable folder; nothing was started."
            ) from error
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"Hydra failed to parse the arguments: {why}.") from error
    except SweepEnded as end:
        if end.error is not None:
            raise end.error from None


def wants_sweep(arguments: Sequence[str]) -> bool:
    """Return whether the arguments, or a file that they select, request a sweep instead of one run."""
    flags, _ = get_args_parser().parse_known_args(list(arguments))
    if flags.multirun or any(word.startswith("hydra.mode=") for word in arguments):
        return True
    own = _hydra_by_files(arguments)
    return own is not None and str(own.mode).endswith("MULTIRUN")


def is_side_by_side(arguments: Sequence[str]) -> bool:
    """Return whether the arguments, or a file, select Hydra's joblib launcher, which runs in child processes."""
    if "hydra/launcher=joblib" in (word.lstrip("+") for word in arguments):
        return True
    own = _hydra_by_files(arguments)
    return own is not None and own.runtime.choices.get("hydra/launcher") == "joblib"


def sweep_points(arguments: Sequence[str]) -> Iterator[DictConfig]:
    """Compose each run of a sweep over listed values; a search yields none, since it selects runs as it proceeds.

    Raises:
        ConfigError: see :func:`compose_and_call`.
    """
    _prepare_hydra(arguments)
    flags = get_args_parser().parse_args(normalize_arguments(arguments))
    own = hydra_of_first_point(flags, flags.overrides)
    if own is None or flags.config_name or own.runtime.choices["hydra/sweeper"] != "basic":
        return
    words = [*(f"{key}={value}" for key, value in (own.sweeper.params or {}).items()), *flags.overrides]
    try:
        with _initialize_hydra():
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            (points,) = BasicSweeper.split_arguments(parser.parse_overrides(words), None)
        if len(points) > _FEW:
            _logger.info("checking %d runs", len(points))
        for number, point in enumerate(points):
            with _initialize_hydra():
                cfg = _compose_config([*point, "hydra.mode=MULTIRUN"])
            OmegaConf.update(cfg, "hydra.job", {"id": number, "num": number})  # as Hydra's launcher does
            yield _expand_home(_register_config(cfg))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_error(error, arguments) from error


def _hydra_by_files(arguments: Sequence[str]) -> DictConfig | None:
    """Return Hydra's own configuration if a selected file may change it; None if not, or if arguments are invalid."""
    if not brings_files(arguments):
        return None
    try:
        _prepare_hydra(arguments)
        flags = get_args_parser().parse_args(normalize_arguments(arguments))
    except ConfigError:
        return None
    return hydra_of_first_point(flags, flags.overrides)


def compose_only(arguments: Sequence[str]) -> DictConfig:
    """Compose another user's configuration, without the code that Hydra's command line would run.

    Raises:
        ConfigError: see :func:`compose_and_call`; or the configuration changes Hydra itself.
    """
    _prepare_hydra(arguments)
    words = normalize_arguments(arguments)
    try:
        with _initialize_hydra():
            usual, cfg = _compose_config([]), _compose_config(words)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_error(error, arguments) from error
    before, after = _extract_hydra_config(usual), _extract_hydra_config(cfg)
    if changed := sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)):
        raise ConfigError(
            f"changing hydra.{changed[0]} is not supported in another user's record. "
            "Inspect the record, and start your own run from it; nothing was started."
        )
    return _expand_home(_register_config(cfg))


def _single_run(words: Sequence[str]) -> DictConfig | None:
    """Compose a single run once, instead of twice as Hydra's command line does.

    Return None if Hydra's command line is needed: for flags, a sweep, callbacks, logging or environment variables.
    """
    if any(word.startswith("-") for word in words):
        return None
    try:
        cfg = _compose_config(words)
    except (HydraException, OmegaConfBaseException):
        if any(word.startswith("hydra.mode=") for word in words) or brings_files(words):  # it may be a sweep
            return None
        raise
    own, chosen = cfg.hydra, cfg.hydra.runtime.choices
    if own.verbose or own.job.env_set or str(own.mode).endswith("MULTIRUN") or set(own.callbacks) != {"objective"}:
        return None
    if {chosen["hydra/job_logging"], chosen["hydra/hydra_logging"]} != {"none"}:
        return None
    OmegaConf.update(cfg, "hydra.runtime.output_dir", str(Path(own.run.dir).absolute()))
    return cfg


def _initialize_hydra() -> AbstractContextManager[None]:
    return hydra.initialize_config_dir(str(main_conf()), version_base="1.3")


def _compose_config(words: Sequence[str]) -> DictConfig:
    return hydra.compose("config", list(words), return_hydra_config=True)


def _register_config(cfg: DictConfig) -> DictConfig:
    """Register ``cfg`` with :class:`HydraConfig` as the current run; return it without Hydra's own section."""
    HydraConfig.instance().set_config(cfg)
    own = deepcopy(cfg)
    with open_dict(own):
        del own["hydra"]
    return own


def _expand_home(cfg: DictConfig) -> DictConfig:
    """Return the configuration with ``~`` expanded in all keys that the schema declares as paths."""
    for key in _list_path_keys(Schema):
        value = OmegaConf.select(cfg, key)
        if isinstance(value, str) and value.startswith("~"):
            with suppress(RuntimeError):  # unknown user; reading the path will fail
                OmegaConf.update(cfg, key, str(Path(value).expanduser()))
    return cfg


def _list_path_keys(section: type, above: str = "") -> Iterator[str]:
    """Yield the keys of all paths in a section of the schema, including its subsections."""
    for name, hint in read_annotations(section).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _list_path_keys(hint, f"{above}{name}.")
        elif any(isinstance(limit, FilePath) for limit in getattr(hint, "__metadata__", ())):
            yield f"{above}{name}"


def _extract_hydra_config(cfg: DictConfig) -> dict[str, Any]:
    """Return Hydra's own configuration, without information about the arguments and this process."""
    plain = cast("dict[str, Any]", OmegaConf.to_container(cfg.hydra))
    plain["job"].pop("override_dirname", None)
    return {key: value for key, value in plain.items() if key not in ("runtime", "overrides")}


def _prepare_hydra(arguments: Sequence[str]) -> None:
    """Register our configuration with Hydra; raise ConfigError for arguments that Hydra would wrongly accept."""
    for word in arguments:
        if _LONG_NUMBER.search(word):
            raise ConfigError(f"{parse_override_key(word)[:80]} has more than 1,000 digits. Set a smaller number.")
    forget_files()
    _Folders.additional = folder_of_flags(get_args_parser().parse_known_args(list(arguments))[0])
    check_unique([_Folders.additional] if _Folders.additional else [])
    if chosen := [word for word in arguments if word.lstrip("+").startswith("launcher=")]:
        raise ConfigError(f"{chosen[0]}: the cluster determines the launcher. Set cluster=NAME.")
    register_schema()
    Plugins.instance().register(LauncherSource)
    Plugins.instance().register(_Folders)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # make Hydra raise errors instead of printing them


def resolve_config(cfg: DictConfig) -> dict[str, Any]:
    """Convert the configuration to plain containers with every interpolation resolved.

    Raises:
        ConfigError: a key does not exist, a value is missing or violates the schema's annotations, or an interpolation
            cannot be resolved.
    """
    cfg = fill_missing_lr(cfg)
    _check_keys(cfg, "")
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise explain_error(error, []) from error
    assert isinstance(plain, dict)
    _check_values(cfg, plain, "")
    return {str(key): value for key, value in plain.items()}


def _check_values(node: DictConfig, plain: Mapping[Any, Any], path: str, *, is_checked: bool = False) -> None:
    """Check ``plain``, the resolved ``node``, against the annotations of the section and its subsections.

    ``is_checked``: whether the annotation of the parent section already covers this section.
    """
    kind = OmegaConf.get_type(node)
    hints = read_annotations(kind) if is_dataclass(kind) else {}
    if hints and not is_checked:
        check_limits(kind, plain, key=path)
    for name in plain:
        if OmegaConf.is_dict(child := node._get_node(name)) and isinstance(plain[name], Mapping):
            place = f"{path}.{name}" if path else str(name)
            is_named = OmegaConf.get_type(child) is hints.get(str(name))
            _check_values(cast("DictConfig", child), plain[name], place, is_checked=is_named)


def find_env_variables(cfg: DictConfig) -> set[str]:
    """Return the names of environment variables that a configuration refers to as ``${oc.env:NAME}``."""
    return set(re.findall(r"\$\{oc\.env:\s*(\w+)", OmegaConf.to_yaml(cfg, resolve=False)))


def _check_keys(node: DictConfig, path: str) -> None:
    """Raise ConfigError if a key added by ``+key=value`` is not in the schema, or a required key has no value."""
    kind = OmegaConf.get_type(node)
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set(map(str, node))
    for key in map(str, node):
        if key not in known:
            scheduler = scheduler_option(path.rstrip("."), key, kind)
            more = f". {scheduler}" if scheduler else neighbours(key, known)
            raise ConfigError(f"unknown key '{path}{key}'{more}{describe_key_source(f'{path}{key}')}")
        child = cast("Node", node._get_node(key))
        if child._is_missing():
            example = "[a,b]" if OmegaConf.is_list(child) else "VALUE"
            raise ConfigError(f"{path}{key} is missing, and has no default. Set {path}{key}={example}.")
        if isinstance(child, DictConfig):
            _check_keys(child, f"{path}{key}.")


def read_group_choices() -> dict[str, str]:
    """Return the option chosen in each group of the current configuration."""
    chosen = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    assert isinstance(chosen, dict)
    return {str(group): str(option) for group, option in chosen.items() if not str(group).startswith("hydra/")}


def task_overrides() -> list[str]:
    """Return the user's overrides for this run, or in a sweep, for this point."""
    return list(HydraConfig.get().overrides.task)


def typed_overrides() -> dict[str, str]:
    """Return the user's overrides that set a value, by key, in printable characters for messages."""
    return {parse_override_key(word): printable(word) for word in task_overrides() if not word.startswith("~")}


def additional_folder() -> str | None:
    """Return the absolute path of the folder given by ``--config-dir``, or None."""
    sources = HydraConfig.get().runtime.config_sources
    return next((str(source.path) for source in sources if source.provider == "command-line"), None)


def is_sweep() -> bool:
    return str(HydraConfig.get().mode).endswith("MULTIRUN")


def sweep_folder() -> str:
    return str(HydraConfig.get().sweep.dir)
