"""Derives the keys of a launcher from its dataclass, the only place that lists its options.

The YAML of a cluster names the class (``launcher._target_``) and values that differ from the defaults. When Hydra loads
the file, each field becomes a typed key: ``launcher.NAME``, or ``cluster.NAME`` if the field is declared with
:func:`~worldsize.core.launcher.cluster_option`.
"""

from __future__ import annotations

import logging
import re
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from worldsize.config.command_line import REFUSED
from worldsize.config.explain import note_file
from worldsize.config.instantiate import Allowed, resolve_target
from worldsize.config.schema import ClusterSchema
from worldsize.config.search_path import find_installed_plugins, list_search_roots, main_conf, make_importable
from worldsize.config.section import build_section_keys
from worldsize.core.launcher import OF_CLUSTER
from worldsize.errors import ConfigError, neighbours

_logger = logging.getLogger(__name__)
_PLAIN = (bool, int, float, str)


class LauncherSource(FileConfigSource):
    """Reads YAML files like Hydra's own source, and adds the launcher's typed keys to files that name a launcher."""

    @staticmethod
    def scheme() -> str:
        return "worldsize"

    def load_config(self, config_path: str) -> ConfigResult:
        result: ConfigResult = super().load_config(config_path)
        file = Path(self.path, self._normalize_file_name(config_path))
        _warn_of_late_header(file)
        _check_folders(result, file)
        _record_config_file(result, file, group=config_path.rpartition("/")[0])
        if result.header["package"] == "_global_" and isinstance(result.config, DictConfig):
            target = OmegaConf.select(result.config, "launcher._target_")
            if target is not None:
                _add_keys(result.config, str(target), Path(self.path, f"{config_path}.yaml"))
        return result


def _record_config_file(result: ConfigResult, file: Path, *, group: str) -> None:
    package = result.header["package"] or group.replace("/", ".")
    if isinstance(result.config, DictConfig):
        note_file(file, "" if package == "_global_" else package, result.config)


def _check_folders(result: ConfigResult, file: Path) -> None:
    """Raise ConfigError if a file sets Hydra's run folders."""
    if result.header["package"] != "_global_" or not isinstance(result.config, DictConfig):
        return
    for key, why in REFUSED.items():
        if file.parent != main_conf() and OmegaConf.select(result.config, key, throw_on_missing=False) is not None:
            raise ConfigError(f"{file}: {key} is not supported: {why}")


@cache
def _warn_of_late_header(file: Path) -> None:
    """Warn once if a ``# @package`` line of ``file`` has no effect because it is not at the top."""
    lines = file.read_text(errors="replace").splitlines()
    below = dropwhile(lambda line: not line[1].strip() or re.match(r"\s*#\s*@", line[1]), enumerate(lines, 1))
    for number, line in below:
        if re.match(r"\s*#\s*@package\b", line):
            _logger.warning(
                "%s, line %d: %r has no effect below the top of the file. Move it to the first line.",
                file,
                number,
                line.strip(),
            )


def _add_keys(config: DictConfig, target: str, file: Path) -> None:
    """Add the launcher's typed keys to ``cluster`` and ``launcher`` in ``config``, which was read from ``file``.

    The keys remain untyped if only ``allow_targets`` permits the target, which is then imported after the checks.
    """
    allowed = Allowed((*Allowed().prefixes, *(each.module for each in find_installed_plugins())))
    if not allowed.admits_path(target):
        return
    make_importable(list_search_roots())
    launcher = resolve_target(target, allowed, f"{file}: launcher")
    if is_dataclass(launcher) and isinstance(launcher, type):
        config.cluster = _merge_defaults("cluster", cluster_schema(launcher), config.get("cluster"), file)
        config.launcher = _merge_defaults("launcher", launcher_schema(launcher), config.get("launcher"), file)


def _merge_defaults(key: str, schema: type, given: DictConfig | None, file: Path) -> Any:
    """Return the defaults of ``schema``, updated with the values in the file.

    Raises:
        ConfigError: the file has an unknown key, or a value of the wrong type.
    """
    try:
        return OmegaConf.merge(OmegaConf.structured(schema), given or {})
    except ConfigKeyError as error:
        name, known = str(error.key), [each.name for each in fields(schema)]
        raise ConfigError(f"{file}: unknown key '{key}.{name}'{neighbours(name, known)}") from error
    except ValidationError as error:
        raise ConfigError(f"{file}: {key}.{error.full_key}: {str(error.msg or error).splitlines()[0]}.") from error


@cache
def cluster_schema(launcher: type) -> type:
    """Return the schema of ``cluster``: the keys common to all clusters, and the launcher's cluster options."""
    every = {each.name for each in fields(ClusterSchema)}
    own = [each for each in _list_launcher_fields(launcher) if each.metadata.get(OF_CLUSTER) and each.name not in every]
    return make_dataclass(f"{launcher.__name__}Cluster", build_section_keys(launcher, own), bases=(ClusterSchema,))


@cache
def launcher_schema(launcher: type) -> type:
    """Return the schema of ``launcher``: all dataclass fields; cluster options refer to ``cluster``."""
    target = ("_target_", str, field(default=f"{launcher.__module__}.{launcher.__qualname__}"))
    own = [each for each in _list_launcher_fields(launcher) if not each.metadata.get(OF_CLUSTER)]
    of_cluster = [each.name for each in _list_launcher_fields(launcher) if each.metadata.get(OF_CLUSTER)]
    references = [(name, Any, field(default=f"${{cluster.{name}}}")) for name in of_cluster]
    return make_dataclass(launcher.__name__, [target, *references, *build_section_keys(launcher, own)])


def _list_launcher_fields(launcher: type) -> list[Field[Any]]:
    return [each for each in fields(launcher) if each.init]
