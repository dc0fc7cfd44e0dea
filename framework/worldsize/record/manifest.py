"""The format of ``run_manifest.json``: canonical JSON with a digest and a signature.

Types and bounds of fields are checked against a JSON Schema.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from worldsize.errors import WorldsizeError
from worldsize.files import read_regular, replace_file
from worldsize.moved import rename_targets
from worldsize.strict_json import LARGEST, parse_strict_json, sanitize_json

SCHEMA_VERSION = 1
_LONGEST_KEY = 1 << 10  # maximum bytes
_SEALS = re.compile(r'\n  "(digest|signature)": (?:"([0-9a-f]*)"|null),?(?=\n)')


def write_manifest(path: Path, manifest: Mapping[str, Any], *, own: bool = True) -> dict[str, Any]:
    """Write the manifest atomically with sorted keys, and return it as written.

    ``digest`` is the SHA-256 of the text without ``digest`` and ``signature``. The manifest is only signed if it is
    this user's ``own``, so that a change to another user's record does not change its owner.
    """
    facts = sanitize_json({**manifest, "schema_version": SCHEMA_VERSION})
    digest = _compute_digest(facts)
    written = {**facts, "digest": digest, "signature": _signature(digest) if own else None}
    replace_file(path, _serialize_manifest(written).encode())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return written


def _serialize_manifest(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _compute_digest(manifest: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in manifest.items() if key not in ("digest", "signature")}
    return hashlib.sha256(_serialize_manifest(facts).encode()).hexdigest()


def _digest_of_text(text: str) -> str:
    """Return the digest of a manifest's text without the lines ``digest`` and ``signature``.

    Serializing the parsed manifest again would take several milliseconds, too slow for listing many runs.
    """
    rest = _SEALS.sub("", text)
    if rest.endswith(",\n}\n"):  # the last line was removed
        rest = f"{rest[:-4]}\n}}\n"
    return hashlib.sha256(rest.encode()).hexdigest()


class _Fields(dict[str, Any]):
    """A mapping in a manifest; access to a missing key raises WorldsizeError."""

    def __missing__(self, key: str) -> NoReturn:
        raise WorldsizeError(
            f"the record is damaged: missing field {key!r}. Restore the record from a copy of the run."
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest, and check its digest and the types of its fields.

    Access to a missing field in the result raises WorldsizeError.

    Raises:
        WorldsizeError: the manifest is missing, not JSON, of a newer schema, or was edited.
    """
    try:
        text = read_regular(path, at_most=LARGEST).decode()
        if (own := _parse_own_manifest(text)) is not None:
            rename_targets(own.get("config"))
            return own
        manifest: dict[str, Any] = parse_strict_json(text, mapping=_Fields)
        version = int(manifest["schema_version"])
        if version <= SCHEMA_VERSION:
            check_against_schema(manifest, _load_schema())
    except OSError as error:
        raise WorldsizeError(f"{path} cannot be read: {error.strerror}. Pass a run folder.") from None
    except (ValueError, KeyError, TypeError, WorldsizeError) as error:
        raise WorldsizeError(f"{path} is not a run manifest, or was edited: {error}.") from None
    if version > SCHEMA_VERSION:
        raise WorldsizeError(
            f"{path} has schema version {version}; this version of worldsize supports up to {SCHEMA_VERSION}. "
            "Upgrade worldsize."
        )
    if manifest.get("digest") != (digest := _digest_of_text(text)):
        raise WorldsizeError(
            f"{path} was edited: expected digest {manifest.get('digest')}, got {digest}. "
            "Restore the original from a copy of the run."
        )
    rename_targets(manifest.get("config"))
    return manifest


def _parse_own_manifest(text: str) -> dict[str, Any] | None:
    """Parse a manifest of this schema version, signed by this user; return None for others.

    A signed manifest is not validated further, since validation takes several times as long as parsing.
    """
    lines = _SEALS.findall(text)
    seals = dict(lines)
    digest, signature = seals.get("digest"), seals.get("signature")
    if len(lines) != 2 or not digest or not signature:
        return None
    if digest != _digest_of_text(text) or not _is_signature(signature, digest):
        return None
    manifest: dict[str, Any] = json.loads(text, object_hook=_Fields)
    is_whole = (manifest.get("digest"), manifest.get("signature")) == (digest, signature)  # both are top-level keys
    return manifest if is_whole and manifest.get("schema_version") == SCHEMA_VERSION else None


@cache
def _load_schema() -> Mapping[str, Any]:
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("run_manifest.schema.json").read_text())
    return schema


def is_own(manifest: Mapping[str, Any]) -> bool:
    """Return whether this user wrote the manifest, i.e. signed it with a key only they can read."""
    signature = manifest.get("signature")
    return isinstance(signature, str) and _is_signature(signature, manifest["digest"])


def _is_signature(signature: str, digest: str) -> bool:
    expected = _signature(digest)
    return expected is not None and hmac.compare_digest(expected.encode(), signature.encode())


def _signature(digest: str) -> str | None:
    """Return the HMAC-SHA-256 (RFC 2104) of a digest; None if the key cannot be read or created."""
    key = _read_key()
    return hmac.new(key, digest.encode(), hashlib.sha256).hexdigest() if key else None


def _read_key() -> bytes | None:
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home folder
        path = find_key("manifest.key")
        if not path.exists():
            create_key_file(path, secrets.token_bytes(32))
        return read_regular(path, at_most=_LONGEST_KEY)
    return None


def find_key(name: str) -> Path:
    """Return the path of one of the user's keys. Raises RuntimeError if the user has no home folder."""
    return Path.home() / ".config" / "worldsize" / name


def create_key_file(path: Path, content: bytes) -> None:
    """Create a key file atomically; if two runs start simultaneously, both use the same key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": NoneType,
}


def check_against_schema(value: Any, schema: Mapping[str, Any], name: str = "") -> None:
    """Check a value against a JSON Schema, except for patterns and required fields.

    Args:
        value: the decoded JSON value.
        schema: the schema; may use type, enum, const, anyOf, properties, additionalProperties, items, minItems,
            maxItems, minimum and maximum.
        name: dotted key of the value, for messages; empty at the top level.

    Raises:
        ValueError: a field is invalid; the message contains its key.
    """
    if not _is_of_type(value, schema):
        raise ValueError(f"{name or 'the manifest'} has the wrong type: {str(value)[:40]!r}")
    if not _is_within(value, schema):
        raise ValueError(f"{name or 'the manifest'} is out of range: {str(value)[:40]!r}")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, child in value.items():
            rule = known.get(key, others)
            if type(child) is str and rule.get("type") == "string" and "enum" not in rule and "const" not in rule:
                continue  # fast path for most fields, such as package versions, which need no other check
            if rule:
                check_against_schema(child, rule, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and (rule := schema.get("items")):
        for number, child in enumerate(value):
            check_against_schema(child, rule, f"{name}[{number}]")


def _is_of_type(value: Any, schema: Mapping[str, Any]) -> bool:
    if options := schema.get("anyOf"):
        return any(_is_of_type(value, option) for option in options)
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    named = schema.get("type", list(_TYPES))
    names = [named] if isinstance(named, str) else named
    return any(isinstance(value, _TYPES[each]) and (each == "boolean" or not isinstance(value, bool)) for each in names)


def _is_within(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        return bool(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
    if isinstance(value, int | float):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True
