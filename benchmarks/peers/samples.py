"""Write the samples read by ``loading.py``, in all formats except those specific to a peer."""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow
from PIL import Image
from pyarrow import feather, parquet

TEXTS, IMAGES, SHARDS, GROUP = 100_000, 8_000, 4, 1000
TOKENS = 100_000 * 256
WORDS = ("a", "language", "model", "learns", "from", "words", "that", "follow", "each", "other", "in", "sentences")


def main(folder: Path) -> None:
    rows = [text(number) for number in range(TEXTS)]
    for shard in range(SHARDS):
        part = rows[shard * TEXTS // SHARDS : (shard + 1) * TEXTS // SHARDS]
        _below(folder / "jsonl" / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        table = pyarrow.Table.from_pylist(part)
        parquet.write_table(table, _below(folder / "parquet" / f"{shard}.parquet"), row_group_size=GROUP)
        feather.write_feather(
            table, str(_below(folder / "arrow" / f"{shard}.arrow")), compression="uncompressed", chunksize=GROUP
        )
        _tar(folder / "tar" / f"{shard}.tar", (_members(row) for row in part))
    tokens = numpy.random.RandomState(0).randint(0, 50_000, TOKENS + 1).astype(numpy.uint16)
    numpy.save(_below(folder / "tokens" / "0.npy"), tokens)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder / "hf_dataset")
    pictures = [picture(number) for number in range(IMAGES)]
    for number, data in enumerate(pictures):
        _below(folder / "images" / f"class{number % 10}" / f"{number:05d}.jpg").write_bytes(data)
    for shard in range(SHARDS):
        numbers = range(shard * IMAGES // SHARDS, (shard + 1) * IMAGES // SHARDS)
        samples = ((f"{number:06d}", {"jpg": pictures[number], "cls": str(number % 10).encode()}) for number in numbers)
        _tar(folder / "tar_images" / f"{shard}.tar", samples)


def text(number: int) -> dict[str, Any]:
    """Return a sample of about 600 bytes of text."""
    drawn = random.Random(number)
    return {"id": number, "text": " ".join(drawn.choices(WORDS, k=100)), "score": drawn.random()}


def picture(number: int) -> bytes:
    """Return a JPEG of 112 × 112 pixels."""
    drawn = numpy.random.RandomState(number)
    coarse = Image.fromarray(drawn.randint(0, 255, (14, 14, 3), dtype=numpy.uint8))
    written = io.BytesIO()
    coarse.resize((112, 112)).save(written, "jpeg")
    return written.getvalue()


def _members(row: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    return f"{row['id']:06d}", {"txt": row["text"].encode(), "cls": str(row["id"]).encode()}


def _tar(path: Path, samples: Iterator[tuple[str, dict[str, bytes]]]) -> None:
    with tarfile.open(_below(path), "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, parts in samples:
            for ending, data in parts.items():
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def _below(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
