"""Read a ``.wandb`` file: a LevelDB-style log (github.com/google/leveldb, doc/log_format.md) of protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER, _BLOCK, _CHUNK_HEADER = 7, 32 * 1024, 7
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2  # slow import

    messages: Any = wandb_internal_pb2  # generated code is untyped
    data, place, whole = path.read_bytes(), _FILE_HEADER, b""
    while place + _CHUNK_HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _CHUNK_HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + _CHUNK_HEADER : place + _CHUNK_HEADER + length]
        place += _CHUNK_HEADER + length
        if kind in (_FULL, _LAST):
            record: Any = messages.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def histories(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged rows one at a time, with decoded values."""
    for record in records(file):
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
