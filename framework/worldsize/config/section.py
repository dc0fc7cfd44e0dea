"""Derives the keys of a section from its dataclass, and builds the dataclass from the resolved section.

A frozen dataclass is the only place that lists the keys of a section: their types, defaults, limits
(:mod:`worldsize.core.limits`) and meanings. :func:`build_section_schema` derives from it a dataclass with plain
types, against which OmegaConf can check overrides. :func:`build_dataclass` converts a resolved section back to the
frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Optional, TypeVar, Union, cast, get_args, get_origin

from omegaconf import MISSING as REQUIRED

from worldsize.core.limits import NO_KEY, Key, Limit, OneOf, read_annotations

T = TypeVar("T")
_PLAIN = (bool, int, float, str)


@cache
def build_section_schema(*kinds: type) -> type:
    """Return the OmegaConf schema of a section that has the fields of these dataclasses as keys."""
    keys = [key for kind in kinds for key in build_section_keys(kind, fields(kind))]
    made = make_dataclass(f"{kinds[0].__name__}Schema", keys)
    made.__doc__ = "\n\n".join(cleandoc(kind.__doc__ or "") for kind in kinds)
    made.__module__ = __name__  # pickle by name, so that joblib's processes share the class
    globals()[made.__name__] = made
    return made


def __getattr__(name: str) -> Any:
    import_module("worldsize.config.schema")  # creates the schemas of all sections
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_section_keys(kind: type, chosen: Iterable[Field[Any]]) -> list[tuple[str, Any, Any]]:
    """Return (name, annotation, default) of the key for each of the fields ``chosen`` of ``kind``."""
    hints, keys = read_annotations(kind), []
    for each in chosen:
        hint = hints.get(each.name, Any)  # Any if the type is imported only for type checkers
        key = _find_key_annotation(hint) or Key()
        if each.init and key is not NO_KEY:
            plain = plain_type(hint if key.kind is None else key.kind)
            if key.default is None and plain is not Any:
                plain = Optional[plain]  # noqa: UP045 - of a type made at run time
            keys.append((each.name, _annotate_limits(plain, hint), _build_default(each, hint)))
    return keys


def _find_key_annotation(hint: Any) -> Key | None:
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Key)), None)


def _annotate_limits(kind: Any, hint: Any) -> Any:
    """Return ``kind`` with the limits of ``hint``: annotated limits, or the words of its Literal."""
    limits = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Limit)]
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if (words := _list_literals(bare)) and not limits:
        limits = [OneOf(*words)]
    return Annotated[kind, *limits] if limits else kind


def _list_literals(hint: Any) -> Sequence[str]:
    """Return the strings that an annotation allows; empty if it allows any string."""
    options = _list_union_types(hint)
    if str in options:
        return ()
    return [word for each in options if get_origin(each) is Literal for word in get_args(each) if isinstance(word, str)]


def _build_default(option: Field[Any], hint: Any) -> Any:
    """Return a dataclass field with the default of ``option``, copied into plain containers."""
    if (section := _find_section_type(hint)) is not None:
        return field(default_factory=build_section_schema(section))
    key = _find_key_annotation(hint)
    if key is not None and key.default is not ...:
        return field(default=key.default)
    if option.default is MISSING and option.default_factory is MISSING:
        return field(default=REQUIRED)
    value = option.default if option.default_factory is MISSING else option.default_factory()
    if isinstance(value, Mapping):
        return field(default_factory=lambda: dict(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return field(default_factory=lambda: list(value))
    return field(default=str(value) if isinstance(value, Path) else value)


def _find_section_type(hint: Any) -> type | None:
    """Return the section dataclass that an annotation names, possibly as Optional; None for other annotations."""
    if get_origin(hint) is Annotated:
        return None if (key := _find_key_annotation(hint)) and key.kind else _find_section_type(get_args(hint)[0])
    options = _list_union_types(hint)
    return options[0] if len(options) == 1 and isinstance(options[0], type) and is_dataclass(options[0]) else None


def _list_union_types(hint: Any) -> list[Any]:
    """Return the types of a union without NoneType, or the annotation itself if it is not a union."""
    if get_origin(hint) not in (Union, UnionType):
        return [hint]
    return [each for each in get_args(hint) if each is not NoneType]


def plain_type(hint: Any) -> Any:
    """Return the type that OmegaConf checks for an annotation; the rest is checked when building the object."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return plain_type(arguments[0])
    if (section := _find_section_type(hint)) is not None:
        return build_section_schema(section)
    if origin in (Union, UnionType):
        return _plain_union(arguments)
    if origin is Literal and len({type(each) for each in arguments}) == 1:
        return type(arguments[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, _annotate_limits(plain_type(arguments[1]), arguments[1])]  # type: ignore[misc]  # made at run time
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return list[_annotate_limits(plain_type(arguments[0]), arguments[0])]  # type: ignore[misc]  # made at run time
    return str if hint is Path else hint if hint in _PLAIN else Any


def _plain_union(options: Sequence[Any]) -> Any:
    others = [plain_type(each) for each in options if each is not NoneType]
    if len(others) == 1:
        return Optional[others[0]] if NoneType in options else others[0]  # noqa: UP045 - of a type made at run time
    if all(each in _PLAIN for each in others):
        return Union[(*others, *(each for each in options if each is NoneType))]
    return Any


def build_dataclass(kind: type[T], section: Mapping[str, Any], **computed: Any) -> T:
    """Build a value of the dataclass ``kind`` from a resolved section.

    Keys of the section that are not fields are ignored; fields without a key keep their defaults.

    Args:
        kind: The dataclass.
        section: Plain values by key.
        computed: Field values that override the section's.
    """
    names = [each.name for each in fields(cast("Any", kind)) if each.name in section]
    hints = read_annotations(cast("Any", kind), limits=False)
    values = {name: _convert_value(hints.get(name), section[name]) for name in names}
    return kind(**{**values, **computed})


def _convert_value(hint: Any, value: Any) -> Any:
    """Convert a plain value to the type of its annotation, such as a path, a tuple or a dataclass."""
    options = _list_union_types(hint)
    if value is None or len(options) != 1:
        return value
    (option,) = options
    origin, arguments = get_origin(option), get_args(option)
    if is_dataclass(option) and isinstance(value, Mapping):
        return build_dataclass(cast("type", option), value)
    if option is Path:
        return Path(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: _convert_value(arguments[1], each) for name, each in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return tuple(_convert_value(arguments[0], each) for each in value)
    return value
