"""Reads what ``worldsize prepare`` says of a folder of token shards in its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, final

from worldsize.data.storage.byte_files import ByteFile
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.open_files import open_files
from worldsize.errors import ConfigError
from worldsize.strict_json import LARGEST, parse

MANIFEST = "manifest.json"
_HEADER = 128  # bytes that numpy.save writes before numbers in one dimension
_BOUNDARY = 8  # bytes of the place in the tokens where a document begins
_UNFINISHED = "/.pieces/"


@final
@dataclass(frozen=True)
class Prepared:
    """The facts about shards that their manifest states.

    Attributes:
        vocabulary: The number of different tokens.
        tokenizer: Its name and its digest.
        sha256: A digest of all shards.
    """

    vocabulary: int
    tokenizer: Mapping[str, Any]
    sha256: str


def prepared(path: str, files: Sequence[ByteFile], cache: Cache) -> Prepared | None:
    """Read the manifest in the folder ``path``; return None if there is none.

    Args:
        path: a folder, here or at a URL.
        files: those of the data, some of which may be in the folder.
        cache: keeps what is read of URLs.

    Raises:
        ConfigError: the manifest is damaged, or of other shards, or the folder has not been finished.
    """
    if unfinished := next((file for file in files if _UNFINISHED in file.name), None):
        folder = unfinished.name.partition(_UNFINISHED)[0]
        raise ConfigError(f"the preparation of {folder} has not ended. Start the same worldsize prepare again.")
    manifests: list[ByteFile] = []
    with suppress(ConfigError):
        manifests = open_files(f"{path.rstrip('/')}/{MANIFEST}", cache)
    if len(manifests) != 1:  # a pattern may name several folders
        return None
    (manifest,) = manifests
    try:
        content = parse(manifest.read(0, min(manifest.size, LARGEST + 1)))
        tokenizer, listed = content["tokenizer"], listed_sizes(content)
        maker = {"name": tokenizer["name"], "sha256": tokenizer["sha256"]}
        facts = Prepared(int(tokenizer["vocabulary"]), maker, str(content["sha256"]))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{manifest.name} is no manifest of worldsize prepare, or is damaged. Prepare the folder anew."
        ) from None
    folder = manifest.name.rpartition("/")[0]
    sizes = {PurePosixPath(file.name).name: file.size for file in files if file.name.rpartition("/")[0] == folder}
    for name in sorted(listed.keys() | {name for name in sizes if name.startswith(("tokens_", "documents_"))}):
        then, now = listed.get(name), sizes.get(name)
        if then != now:
            raise ConfigError(
                f"{folder}/{name}: {MANIFEST} beside it says {_bytes(then)}, and there are {_bytes(now)}. Bring the "
                "shards of one preparation, or prepare the folder anew."
            )
    return facts


def listed_sizes(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each file that a manifest lists, by its name.

    Raises:
        ValueError, KeyError, TypeError: it is no manifest.
    """
    sizes = {}
    for shard in content["shards"]:
        sizes[str(shard["file"])] = int(shard["bytes"])
        sizes[str(shard["documents_file"])] = _HEADER + _BOUNDARY * (int(shard["documents"]) + 1)
    return sizes


def _bytes(count: int | None) -> str:
    return "no bytes" if count is None else f"{count:,} bytes"
