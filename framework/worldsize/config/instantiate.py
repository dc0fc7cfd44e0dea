"""Builds objects from ``_target_`` nodes, with an allow-list that is checked before and after the import."""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import hydra.utils
from hydra.errors import InstantiationException

from worldsize.config.explain import describe_key_source
from worldsize.config.search_path import find_installed_plugins, get_bundle_folder, list_root_folders, main_conf
from worldsize.core.limits import check_limits, read_annotations
from worldsize.errors import ConfigError, WorldsizeError, neighbours
from worldsize.moved import find_current_name, rename_targets
from worldsize.optimizers.arguments import check_tuples

T = TypeVar("T")

_LIBRARIES = ("torch.nn", "torch.optim")  # configurations may use their public classes
ALLOWED = ("recipes", "plugins", *_LIBRARIES)
_TARGET = re.compile(r"^[^#\n]*\b_target_: *([\w.]+)", re.MULTILINE)
_NUMERICS = "worldsize.core.Numerics"  # a default of the schema that no file mentions
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Allowed:
    """Allow-list of the callables that a configuration may use.

    Allowed are the targets of the bundled YAML files, and public names in modules that start with one of ``prefixes``
    (in torch, only classes). A prefix may also be the full name of a target, which is then allowed unconditionally.
    """

    prefixes: tuple[str, ...] = ALLOWED

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefixes", tuple(map(find_current_name, self.prefixes)))

    def admits_path(self, path: str) -> bool:
        """Return whether ``path`` may be imported; the imported object must then pass :meth:`admits_object`."""
        path = find_current_name(path)
        if path in find_bundled_targets() or path in self.prefixes:
            return True
        return any("._" not in path.removeprefix(prefix) for prefix in self._find_prefixes(path))

    def admits_object(self, path: str, located: Any) -> bool:
        """Return whether ``located``, imported from an admitted ``path``, is not an alias of a forbidden object."""
        path = find_current_name(path)
        if path in find_bundled_targets() or path in self.prefixes:
            return True
        origin = get_object_path(located)
        if any(origin.startswith(prefix + ".") for prefix in _LIBRARIES):
            return inspect.isclass(located) and not located.__name__.startswith("_")
        # a public name may refer to an object defined in a private module
        return origin in find_bundled_targets() or origin in self.prefixes or bool(self._find_prefixes(origin))

    def _find_prefixes(self, path: str) -> list[str]:
        return [prefix for prefix in self.prefixes if path.startswith(prefix + ".")]

    def format_remedy(self, path: str) -> str:
        """Return the remedy for an error about the forbidden target ``path``."""
        near = neighbours(path, find_bundled_targets()) if path.partition(".")[0] == __name__.partition(".")[0] else "."
        return (
            f"{near} Allowed: targets in worldsize's YAML files and public names in {', '.join(self.prefixes)} "
            "(in torch, only classes). Extend the allow-list with allow_targets=[your.module]."
        )


def get_object_path(located: Any) -> str:
    """Return the dotted path where ``located`` is defined."""
    return f"{getattr(located, '__module__', '')}.{getattr(located, '__qualname__', '')}"


@cache
def find_bundled_targets() -> frozenset[str]:
    """Return the targets used in the YAML files of worldsize and of installed plugins."""
    plugins = [
        *list_root_folders(get_bundle_folder()),
        *(plugin.folder for plugin in find_installed_plugins() if plugin.folder),
    ]
    files = [file for folder in (main_conf(), *(each / "conf" for each in plugins)) for file in folder.rglob("*.yaml")]
    named = {target for file in files for target in _TARGET.findall(file.read_text(errors="replace"))}
    return frozenset(named | {_NUMERICS})


def build_object(node: Any, kind: type[T], *, allowed: Allowed, key: str) -> T:
    """Build the object described by ``node``, which consists of plain containers.

    Raises:
        ConfigError: the target is missing, not callable, outside the allow-list, does not accept the arguments, or
            raises an error; or the object is not a ``kind``. A target whose import fails raises its own error.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(
            f"{key}={'null' if node is None else node} must be a mapping with a _target_. Remove the override."
        )
    node = deepcopy(dict(node))
    rename_targets(node)
    _check_texts(node, key)
    check_node(node, allowed=allowed, key=key)
    try:
        built = hydra.utils.instantiate(wrap_grouped_optimizers(node, _locate_target, key), _convert_="all")
    except TypeError as error:  # an invalid value for one of Hydra's keys, such as _partial_
        fact = str(error).splitlines()[0].removeprefix("Instantiation: ").partition(", got <")[0].rstrip(".")
        raise ConfigError(f"{key}: {fact}. Remove the override.") from error
    except InstantiationException as error:
        cause = error.__cause__ or error  # the error raised by the target itself
        if isinstance(cause, WorldsizeError | ImportError):
            raise cause from None
        raise ConfigError(f"{key}: failed to build {node['_target_']}: {describe_failure(cause)}.") from cause
    if not isinstance(built, kind):
        raise ConfigError(f"{key}: {node.get('_target_')} must return {kind.__name__}, got {type(built).__name__}.")
    return built


def _check_texts(node: Any, key: str) -> None:
    """Raise ConfigError for strings in ``node`` that Hydra would resolve, perhaps to an unchecked target."""
    if isinstance(node, str) and "${" in node:
        raise ConfigError(f"{key}: arguments must not contain ${{. Remove the interpolation.")
    if isinstance(node, Mapping):
        for name, value in node.items():
            _check_texts(name, f"{key}.{name}")
            _check_texts(value, f"{key}.{name}")
    elif isinstance(node, Sequence) and not isinstance(node, str | bytes):
        for place, value in enumerate(node):
            _check_texts(value, f"{key}.{place}")


def check_node(node: Any, *, allowed: Allowed, key: str) -> None:
    """Raise ConfigError if a target in ``node`` is not allowed, or does not accept its arguments."""
    for path, target in find_targets(node, key):
        check_arguments(resolve_target(target["_target_"], allowed, path), target, path)


def describe_failure(error: BaseException) -> str:
    """Describe an error of user code in one line: type, message and location."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in frame.filename]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def check_targets(config: Any, allowed: Allowed) -> None:
    """Raise ConfigError if a configuration names a target outside the allow-list, without importing anything."""
    for path, node in find_targets(config):
        _check_prefix(node["_target_"], allowed, path)


def resolve_target(target: str, allowed: Allowed, key: str) -> Any:
    """Return the callable named ``target``; aliases of objects outside the allow-list are also refused."""
    _check_prefix(target, allowed, key)
    located = _locate_target(target, key)
    if not allowed.admits_object(target, located):
        origin = get_object_path(located)
        raise ConfigError(f"{key}: {target} is {origin}, outside the allow-list{allowed.format_remedy(origin)}")
    return located


def _check_prefix(target: Any, allowed: Allowed, key: str) -> None:
    if not isinstance(target, str) or not allowed.admits_path(target):
        raise ConfigError(f"{key}: _target_ {target!r} is outside the allow-list{allowed.format_remedy(str(target))}")


def _locate_target(target: str, key: str) -> Any:
    """Import the longest module prefix of ``target``, then walk its attributes."""
    module, attributes = _import_module(target, key)
    located: Any = module
    for attribute in attributes:
        if not hasattr(located, attribute):
            raise ConfigError(
                f"{key}: {target} does not exist: {_get_object_name(located)} has no {attribute!r}"
                f"{neighbours(attribute, _list_own_names(located))}"
            )
        located = getattr(located, attribute)
    if not callable(located) or not attributes:
        raise ConfigError(f"{key}: {target} is not callable. Name a class or a function.")
    return located


def _import_module(target: str, key: str) -> tuple[Any, list[str]]:
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise  # the module exists, but one of its imports does not
    raise ConfigError(
        f"{key}: {target} does not exist: no module {parts[0]!r} on the import path. Run in the folder that "
        "contains it, or add that folder to PYTHONPATH."
    )


def _list_own_names(located: Any) -> list[str]:
    """Return the names that a module defines itself, without imported names; all names if it defines none."""
    module = _get_object_name(located)
    own = [
        name
        for name in dir(located)
        if f"{getattr(getattr(located, name), '__module__', '')}.".startswith(f"{module}.")
    ]
    return own or dir(located)


def _get_object_name(located: Any) -> str:
    return str(getattr(located, "__name__", located))


def find_targets(node: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the key and the mapping of every ``_target_`` in ``node``."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from find_targets(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from find_targets(child, f"{key}[{index}]")


def check_arguments(target: Any, node: Mapping[str, Any], key: str) -> None:
    """Check the arguments in ``node`` against the parameters of ``target``, their limits and plain types."""
    parameters = inspect.signature(target).parameters
    given = [name for name in node if name not in ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")]
    if makes_optimizer(target):
        check_tuples(target, node, key=key)
        if "groups" in given:
            check_groups(target, node["groups"], key=f"{key}.groups")
            given.remove("groups")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in given:
            if name not in parameters:
                raise ConfigError(
                    f"unknown key '{key}.{name}'{neighbours(name, parameters)}{describe_key_source(f'{key}.{name}')}"
                )
    _check_types(target, node, given, key)
    check_limits(target, node, key=key)


def _check_types(target: Any, node: Mapping[str, Any], given: Iterable[str], key: str) -> None:
    hints = _plain_hints(target)
    for name in given:
        if name in hints and not _can_match_hint(node[name], hints[name]):
            fact = f"{key}.{name}={node[name]!r} has the wrong type: expected {_format_hint(hints[name])}."
            raise ConfigError(f"{fact}{_suggest_integer(f'{key}.{name}', node[name], hints[name])}")


def _suggest_integer(key: str, value: Any, hint: Any) -> str:
    """Return how to write a value such as 1e2 for an integer argument; empty for other values.

    The command line reads 1e2 as 100 only for keys of the schema; other types are unknown until the target is imported.
    """
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return f" Write {key}={int(value)}." if is_whole and _can_match_hint(int(value), hint) else ""


def _plain_hints(target: Any) -> Mapping[str, Any]:
    """Return the annotations to check: all fields of a dataclass, and for other targets only those with limits."""
    plain = read_annotations(target, limits=False)
    if is_dataclass(target):
        return {field.name: plain[field.name] for field in fields(target) if field.name in plain}
    return {name: plain[name] for name, hint in read_annotations(target).items() if get_origin(hint) is Annotated}


def _can_match_hint(value: Any, hint: Any) -> bool:
    """Return whether a plain value matches an annotation; True if only the object itself can check it."""
    if get_origin(hint) in (Union, UnionType):
        return any(_can_match_hint(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    origin = get_origin(hint)
    if origin is Callable:
        return isinstance(value, Mapping)  # a mapping with a target
    if isinstance(origin, type) and issubclass(origin, Mapping | Sequence):
        return isinstance(value, Mapping if issubclass(origin, Mapping) else list)
    if hint not in _SCALARS:
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _format_hint(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "")


def makes_optimizer(target: Any) -> bool:
    """Return whether ``target`` is an optimizer class, or a function annotated to return an optimizer."""
    from torch.optim import Optimizer  # slow, and not needed to compose or show help

    if isinstance(target, type):
        return issubclass(target, Optimizer)
    return inspect.signature(target).return_annotation in (Optimizer, "Optimizer")


def check_groups(target: Any, groups: Any, *, key: str) -> None:
    """Raise ConfigError unless ``groups`` is null or maps names to parameter groups of ``target`` with patterns."""
    if groups is None:
        return
    if not isinstance(groups, Mapping):
        raise ConfigError(f'{key}={groups!r} is not a mapping. Write {key}={{no_decay: {{match: ["*.bias"]}}}}.')
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not group.get("match"):
            raise ConfigError(f'{key}.{name} requires patterns of parameter names. Set {key}.{name}.match=["*.bias"].')
        check_tuples(target, group, key=f"{key}.{name}")


def wrap_grouped_optimizers(node: Any, locate: Callable[[str, str], Any], key: str) -> Any:
    """Replace optimizers in ``node`` that have the key ``groups`` with calls to :func:`create_grouped_optimizer`."""
    if isinstance(node, list):
        return [wrap_grouped_optimizers(child, locate, key) for child in node]
    if not isinstance(node, Mapping):
        return node
    if "groups" not in node or "_target_" not in node or not makes_optimizer(locate(node["_target_"], key)):
        return {name: wrap_grouped_optimizers(child, locate, key) for name, child in node.items()}
    from worldsize.optimizers.groups import create_grouped_optimizer  # imports torch

    make = {name: value for name, value in node.items() if name != "groups"}
    target = f"{create_grouped_optimizer.__module__}.{create_grouped_optimizer.__qualname__}"
    return {"_target_": target, "_partial_": True, "make": make, "groups": node["groups"] or {}}
