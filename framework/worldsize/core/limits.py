"""Allowed values of settings, declared in each field's annotation and checked in one place.

A field ``keep: Annotated[float, Range(least=0, most=1)] = 1.0`` rejects other values with a one-sentence error before a
run exists, whether the field belongs to the schema, a strategy, a launcher, a recipe or a plugin.
"""

from __future__ import annotations

import builtins
import inspect
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin, get_type_hints

from worldsize.errors import ConfigError, neighbours

_INFINITE = (math.inf, -math.inf)
JsonSchema = dict[str, object]
"""Keywords of JSON Schema."""


class Limit(ABC):
    """Base of constraints on a value, for use inside ``Annotated``. Null is always allowed."""

    @abstractmethod
    def describe_violation(self, value: Any) -> str | None:
        """Return the end of an error message that begins with ``value``; None if allowed."""

    def build_json_schema(self) -> JsonSchema:
        """Return this limit as JSON Schema keywords, for checks in editors; empty by default."""
        return {}


@final
class Range(Limit):
    """Numbers within bounds. NaN is always rejected, and infinity is rejected if ``finite``.

    Args:
        least: inclusive lower bound.
        above: exclusive lower bound.
        most: inclusive upper bound.
        below: exclusive upper bound.
        finite: whether infinity is rejected.
        hint: end of the error message, e.g. "the unit is seconds".
    """

    def __init__(
        self,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
        below: float | None = None,
        finite: bool = True,
        hint: str = "",
    ) -> None:
        self._least, self._above, self._most, self._below = least, above, most, below
        self._finite, self._hint = finite, hint

    def describe_violation(self, value: Any) -> str | None:
        if not isinstance(value, int | float) or isinstance(value, bool) or self._is_in_range(value):
            return None
        return f"must be {self._format_bounds(value)}{self._hint and f'; {self._hint}'}."

    def build_json_schema(self) -> JsonSchema:
        bounds = {
            "minimum": self._least,
            "exclusiveMinimum": self._above,
            "maximum": self._most,
            "exclusiveMaximum": self._below,
        }
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def _is_in_range(self, value: float) -> bool:
        return (
            value == value  # rejects NaN
            and not (self._finite and value in _INFINITE)
            and (self._least is None or value >= self._least)
            and (self._above is None or value > self._above)
            and (self._most is None or value <= self._most)
            and (self._below is None or value < self._below)
        )

    def _format_bounds(self, value: float) -> str:
        if self._most is None and self._below is None:
            lower = "positive" if self._above == 0 else f"above {self._above}"
            number = (
                "" if value == value and value not in _INFINITE else " and finite" if self._finite else " and not NaN"
            )
            return (lower if self._least is None else f"{self._least} or more") + number
        upper = f"at most {self._most:,}" if self._below is None else f"below {self._below}"
        if self._least is None and self._above is None:
            return upper
        if self._least is not None and self._below is None:
            return f"between {self._least} and {self._most:,}"
        lower = f"at least {self._least}" if self._above is None else f"above {self._above}"
        return f"{lower} and {upper}"


@final
class OneOf(Limit):
    """One of the ``known`` strings.

    The error message suggests the closest one. Values of other types are not checked.

    Args:
        known: the allowed strings.
        hint: a sentence about other accepted values, to end the error message.
    """

    def __init__(self, *known: str, hint: str = "") -> None:
        self._known, self._hint = known, hint

    def describe_violation(self, value: Any) -> str | None:
        is_taken = value in self._known or not isinstance(value, str)
        return None if is_taken else f"is unknown{neighbours(value, self._known)}{self._hint and f' {self._hint}'}"

    def build_json_schema(self) -> JsonSchema:
        return {"enum": [*self._known]}


@final
class Form(Limit):
    """A value whose whole text matches a regular expression.

    Args:
        pattern: the regular expression.
        hint: end of the error message, e.g. "must be a time such as 02:00:00".
    """

    def __init__(self, pattern: str, *, hint: str) -> None:
        self._pattern, self._hint = pattern, hint

    def describe_violation(self, value: Any) -> str | None:
        return None if re.fullmatch(self._pattern, str(value), re.ASCII) else f"{self._hint}."

    def build_json_schema(self) -> JsonSchema:
        return {"pattern": f"^(?:{self._pattern})$"}


@final
class FolderName(Limit):
    """A folder name that cannot be mistaken for a path or a command-line option."""

    def describe_violation(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        is_safe = value.isprintable() and not any(each in value for each in "/\\") and not value.startswith("-")
        if value in ("", ".", "..") or not is_safe:
            return "is not a valid folder name. Use letters, digits, '_', '-' and '.', and do not start with '-'."
        return None

    def build_json_schema(self) -> JsonSchema:
        return {"pattern": r"^(?!-|\.{1,2}$)[^/\\]+$"}


@final
class FilePath(Limit):
    """A path that the operating system accepts."""

    def describe_violation(self, value: Any) -> str | None:
        if value == "":
            return "is empty; an environment variable may be unset. Set a path, or remove the key."
        return "contains a NUL character. Set a valid path." if "\0" in str(value) else None

    def build_json_schema(self) -> JsonSchema:
        return {"minLength": 1}


@final
class ReservedNames(Limit):
    """A mapping without reserved names.

    ``_`` equals ``-``, and prefixes of 3 or more letters are reserved too.

    Args:
        remedies: the reserved names, each with an imperative for the error message, e.g. "Set cluster.nodes".
        setter: owner of the conflicting settings, for the error message, e.g. "the job script".
    """

    def __init__(self, remedies: Mapping[str, str], *, setter: str) -> None:
        self._remedies = {_normalize_name(name): remedy for name, remedy in remedies.items()}
        self._setter = setter

    def describe_violation(self, value: Any) -> str | None:
        for name in value if isinstance(value, Mapping) else ():
            if (remedy := self.find_remedy(name) or self._find_abbreviated(_normalize_name(name))) is not None:
                return f"is not supported: {name} conflicts with {self._setter}'s own settings. {remedy} instead."
        return None

    def find_remedy(self, name: str) -> str | None:
        """Return what to do instead of setting ``name``; None if it is not reserved."""
        return self._remedies.get(_normalize_name(name))

    def _find_abbreviated(self, start: str) -> str | None:
        long = (remedy for name, remedy in self._remedies.items() if name.startswith(start))
        return next(long, None) if len(start) > 2 else None


def _normalize_name(name: str) -> str:
    return str(name).lstrip("-").replace("_", "-")


@final
class Key:
    """Describes a configuration key whose type or default differs from its field's.

    Needed if the field is computed from the key.

    Args:
        kind: type of the key; None: the field's type.
        default: default of the key; ``...``: the field's default.
    """

    def __init__(self, kind: Any = None, *, default: Any = ...) -> None:
        self.kind, self.default = kind, default


NO_KEY = Key()
"""Marks a computed field, which is not a configuration key."""

COUNT = Range(least=1)
LARGEST = Range(most=2**63 - 1)  # fits int64, as in tensors and other languages
SHARE = Range(above=0, most=1)
SECONDS = Range(above=0, most=10**9, hint="the unit is seconds")
GRACE = Range(least=0, most=10**9, hint="the unit is seconds")
MEBIBYTES = Range(above=0, most=2**20, hint="the unit is MiB")
PORT = Range(least=1, most=65535)


def check_limits(target: Any, values: Mapping[str, Any], *, key: str) -> None:
    """Check the values of fields or arguments against the limits in their annotations.

    Args:
        target: a class or function whose annotations hold the limits.
        values: plain values by name; names unknown to ``target`` are ignored.
        key: the dotted key of the values in the configuration, such as "strategy"; empty for the top level.

    Raises:
        ConfigError: a value is NaN or outside the limits of its annotation.
    """
    for name, hint in read_annotations(target).items():
        if name in values:
            _check_value(f"{key}.{name}" if key else name, values[name], hint)


@cache
def read_annotations(target: Any, *, limits: bool = True) -> Mapping[str, Any]:
    """Read the annotations of a dataclass's fields, or of the arguments of a class or function.

    An annotation without limits is omitted if it refers to a name that is imported only for type checkers. An alias
    of an annotation with limits must not be imported in that way, since its limits would be ignored.

    Args:
        target: a class or function.
        limits: whether to keep ``Annotated[kind, ...]`` instead of reducing it to ``kind``.

    Raises:
        ConfigError: an annotation with limits cannot be evaluated.
    """
    annotated = target if is_dataclass(target) or not isinstance(target, type) else target.__init__  # type: ignore[misc]
    try:
        return get_type_hints(annotated, include_extras=limits)
    except _UNRESOLVED:
        return dict(_resolvable(annotated, limits=limits))


_UNRESOLVED = (NameError, TypeError, AttributeError)


def _resolvable(annotated: Any, *, limits: bool) -> Iterator[tuple[str, Any]]:
    limit_names = {kind.__name__ for kind in Limit.__subclasses__()}
    for owner in reversed(annotated.__mro__) if isinstance(annotated, type) else [inspect.unwrap(annotated)]:
        space = getattr(owner, "__globals__", None) or vars(sys.modules.get(owner.__module__, builtins))
        own = vars(owner) if isinstance(owner, type) else None
        for name, annotation in inspect.get_annotations(owner).items():
            alone = SimpleNamespace(__annotations__={name: annotation})
            try:
                yield from get_type_hints(alone, space, own, include_extras=limits).items()
            except _UNRESOLVED as error:
                words = () if name == "return" else re.findall(r"\w+", str(annotation))
                if any(word in limit_names or get_origin(space.get(word)) is Annotated for word in words):
                    raise ConfigError(
                        f"{owner.__qualname__}: failed to evaluate the annotation {name}: {annotation}: {error}. "
                        "Import its names outside of `if TYPE_CHECKING`."
                    ) from None


def _check_value(key: str, value: Any, hint: Any) -> None:
    """Check a value and, recursively, its items, mapping values or section fields."""
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return
    if origin is Annotated:
        for limit in hint.__metadata__:
            if isinstance(limit, Limit) and (refusal := limit.describe_violation(value)) is not None:
                raise ConfigError(f"{key}={value!r} {refusal}")
        _check_value(key, value, arguments[0])
    elif origin in (Union, UnionType):
        _check_union(key, value, arguments)
    elif origin is Literal and value not in arguments:
        raise ConfigError(f"{key}={value!r} is unknown. Available: {', '.join(map(str, arguments))}.")
    elif isinstance(value, Mapping):
        _check_mapping(key, value, hint)
    elif isinstance(value, Sequence) and isinstance(origin, type) and issubclass(origin, Sequence):
        for place, item in enumerate(value):
            _check_value(f"{key}[{place}]", item, arguments[0])
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key}=nan must not be NaN.")


def _check_union(key: str, value: Any, options: Sequence[Any]) -> None:
    """Check every option; Literals are checked only if all options are Literals."""
    others = [option for option in options if get_origin(option) is not Literal and option is not NoneType]
    for option in others or options:
        _check_value(key, value, option)


def _check_mapping(key: str, values: Mapping[str, Any], hint: Any) -> None:
    if is_dataclass(hint):
        check_limits(hint, values, key=key)
    elif len(arguments := get_args(hint)) == 2:
        for name, value in values.items():
            _check_value(f"{key}.{name}", value, arguments[1])
