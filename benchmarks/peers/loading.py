"""Print the samples per second of one loader with two workers, and the CPU microseconds per sample.

The first tenth of the samples is skipped, while workers start. Exit code 3: the loader is not installed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

BATCH, WORKERS, SHUFFLED = 64, 2, 1000
GROUP = 1000  # rows per row group
CONTEXT = 256  # tokens per sample


def main(loader: str, folder: Path) -> None:
    library, _, kind = loader.partition(":")
    try:
        batches, samples = LOADERS[library](kind, folder)
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    print(json.dumps(rate(batches, samples)))


def rate(batches: Iterator[Any], samples: int) -> tuple[float, float]:
    """Return samples per second and CPU microseconds per sample, after the first tenth of ``samples``."""
    count, begun, used, first = 0, 0.0, 0.0, 0
    for batch in batches:
        count += len(batch)
        if not first and count >= samples // 10:
            begun, used, first = time.perf_counter(), seconds_of_cores(), count
        if count >= samples - BATCH * WORKERS * 4:  # before workers exit and their CPU time is lost
            break
    seconds, cores = time.perf_counter() - begun, seconds_of_cores() - used
    return (count - first) / seconds, cores / (count - first) * 1e6


def seconds_of_cores() -> float:
    """Return the CPU seconds used so far by this process and its workers."""
    ticks = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def keep(samples: list[Any]) -> list[Any]:
    """Collate without creating tensors, so that loaders are measured instead of torch's collate."""
    return samples


def collate_of(kind: str) -> Callable[[list[Any]], Any]:
    """Return the collate function. Token windows are stacked, else workers would send each one separately."""
    import torch

    return torch.stack if kind == "tokens" else keep


def pixels(image: Any) -> Any:
    """Return an image as an array (height, width, 3)."""
    import numpy

    return numpy.asarray(image.convert("RGB"))


def ours(kind: str, folder: Path) -> tuple[Iterator[Any], int]:
    import torch

    from worldsize.data.loader import micro_batches
    from worldsize.data.order import Order
    from worldsize.data.source import Transformed
    from worldsize.data.sources.arrow import Arrow, HfDataset, Parquet
    from worldsize.data.sources.images import ImageFolder
    from worldsize.data.sources.json_lines import JsonLines
    from worldsize.data.sources.tokens import TokenWindows
    from worldsize.data.sources.webdataset import WebDataset
    from worldsize.data.storage.cache import Cache

    path, cache = str(folder / kind.removesuffix("_wide")), Cache(folder=str(folder / "cache"))
    makers: dict[str, Callable[[], Any]] = {
        "tokens": lambda: TokenWindows(path, length=CONTEXT, cache=cache),
        "jsonl": lambda: JsonLines(path, cache=cache),
        "arrow": lambda: Arrow(path, cache=cache),
        "parquet": lambda: Parquet(path, cache=cache, keep=16e6),  # a window of row groups
        "hf_dataset": lambda: HfDataset(path, cache=cache),
        "tar": lambda: WebDataset(path, cache=cache, decode=["txt", "cls"]),
        "tar_images": lambda: Transformed(WebDataset(path, cache=cache, decode=["jpg", "cls"]), as_array),
        "images": lambda: ImageFolder(path, cache=cache, transform=pixels),
    }
    source = makers[kind.removesuffix("_wide")]()
    order = Order(0, BATCH, 1, (0,), **in_blocks(kind))
    steps = micro_batches(source, order, torch.device("cpu"), workers=WORKERS, collate=collate_of(kind))
    return (batch.data for step in steps for batch in step), len(source)


def in_blocks(kind: str) -> dict[str, Any]:
    """Return options of Order: Parquet is shuffled in blocks of a row group, one or eight at a time."""
    if not kind.startswith("parquet"):
        return {}
    from worldsize.data.permutation import Shuffle

    return {"shuffle": Shuffle(block=GROUP, window=8 if kind == "parquet_wide" else 1)}


def as_array(sample: Any) -> Any:
    """Return the sample with the image converted to an array."""
    return {**sample, "jpg": pixels(sample["jpg"])}


class Tokens:
    """Hand-written reader of windows of a memory-mapped token file."""

    def __init__(self, folder: Path) -> None:
        import numpy

        self.tokens = numpy.load(folder / "0.npy", mmap_mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Any:
        import numpy
        import torch

        first = index * CONTEXT
        return torch.from_numpy(self.tokens[first : first + CONTEXT + 1].astype(numpy.int64))


class Rows:
    """Hand-written reader of rows of memory-mapped Arrow files."""

    def __init__(self, folder: Path) -> None:
        import numpy
        import pyarrow

        files = [pyarrow.ipc.open_file(pyarrow.memory_map(str(path))) for path in sorted(folder.iterdir())]
        self.batches = [file.get_batch(number) for file in files for number in range(file.num_record_batches)]
        self.stops = numpy.cumsum([len(batch) for batch in self.batches])

    def __len__(self) -> int:
        return int(self.stops[-1])

    def __getitem__(self, index: int) -> Any:
        number = int(self.stops.searchsorted(index, side="right"))
        batch = self.batches[number]
        return batch.slice(index - int(self.stops[number]) + len(batch), 1).to_pylist()[0]


class Lines:
    """Hand-written reader of JSON lines: indexes line offsets, and parses a line when it is read."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())
        self.files: list[Any] = []  # opened in each worker, since forked processes share file positions
        self.places = []
        for number, path in enumerate(self.paths):
            position = 0
            with path.open("rb") as file:
                for line in file:
                    self.places.append((number, position))
                    position += len(line)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        self.files = self.files or [path.open("rb") for path in self.paths]
        number, position = self.places[index]
        self.files[number].seek(position)
        return json.loads(self.files[number].readline())


class Pictures:
    """Hand-written reader of a folder of images."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            return {"image": pixels(image), "label": int(self.paths[index].parent.name[5:])}


def naive(kind: str, folder: Path) -> tuple[Iterator[Any], int]:
    """Return torch's DataLoader over a hand-written reader, and the number of samples."""
    if kind == "parquet":
        return loaded(row_groups(folder / kind)), rows_of(folder / kind)
    reader: Any = {"tokens": Tokens, "jsonl": Lines, "arrow": Rows, "images": Pictures}[kind]
    dataset = reader(folder / kind)
    return loaded(dataset, collate_of(kind), shuffle=True), len(dataset)


def rows_of(folder: Path) -> int:
    from pyarrow import parquet

    return sum(parquet.read_metadata(path).num_rows for path in folder.iterdir())


def row_groups(folder: Path) -> Any:
    """Return a stream of rows; workers share the shuffled row groups, and shuffle the rows within each."""
    import random

    from pyarrow import parquet
    from torch.utils.data import IterableDataset, get_worker_info

    class RowGroups(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            files = [parquet.ParquetFile(path) for path in sorted(folder.iterdir())]
            groups = [(file, number) for file in files for number in range(file.num_row_groups)]
            for file, number in random.Random(0).sample(groups, len(groups))[info.id :: info.num_workers]:
                rows = file.read_row_group(number, use_threads=False).to_pylist()
                random.shuffle(rows)
                yield from rows

    return RowGroups()


def loaded(dataset: Any, collate: Callable[[list[Any]], Any] = keep, **options: Any) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    return iter(DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate, **options))


def huggingface(kind: str, folder: Path) -> tuple[Iterator[Any], int]:
    """Return a loader of Hugging Face datasets: a table on disk, or a stream with a shuffle buffer."""
    import datasets

    datasets.disable_progress_bars()
    if kind == "hf_dataset":
        table = datasets.load_from_disk(str(folder / kind))
        return loaded(table, shuffle=True), len(table)
    name = {"jsonl": "json"}.get(kind, kind)
    files = [str(path) for path in sorted((folder / kind).iterdir())]
    stream = datasets.load_dataset(
        name, data_files=files, split="train", streaming=True, cache_dir=str(folder / "datasets")
    )
    return loaded(stream.shuffle(seed=0, buffer_size=SHUFFLED)), 100_000


def webdataset(kind: str, folder: Path) -> tuple[Iterator[Any], int]:
    import webdataset as library

    urls = [str(path) for path in sorted((folder / kind).iterdir())]
    stream = library.WebDataset(urls, shardshuffle=len(urls)).shuffle(SHUFFLED).decode("rgb8")
    return loaded(stream), 100_000 if kind == "tar" else 8_000


def texts(folder: Path) -> Iterable[Any]:
    for path in sorted((folder / "jsonl").iterdir()):
        with path.open() as lines:
            yield from map(json.loads, lines)


def streaming(kind: str, folder: Path) -> tuple[Iterator[Any], int]:
    """Return a loader of MosaicML streaming; first convert the samples to its own format."""
    from streaming import MDSWriter, StreamingDataset

    written = folder / "mds"
    if not written.exists():
        with MDSWriter(out=str(written), columns={"id": "int", "text": "str", "score": "float64"}) as writer:
            for sample in texts(folder):
                writer.write(sample)
    dataset = StreamingDataset(local=str(written), shuffle=True, batch_size=BATCH)
    return loaded(dataset), len(dataset)


def litdata(kind: str, folder: Path) -> tuple[Iterator[Any], int]:
    """Return a loader of litdata; first convert the samples to its own format."""
    import litdata as library

    written = folder / "litdata"
    if not written.exists():
        files = [str(path) for path in sorted((folder / "jsonl").iterdir())]
        library.optimize(fn=lines_of, inputs=files, output_dir=str(written), chunk_bytes="32MB", num_workers=1)
    dataset = library.StreamingDataset(str(written), shuffle=True)
    loader = library.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=keep)
    return iter(loader), len(dataset)


def lines_of(path: str) -> Iterator[Any]:
    """Yield the samples of a file."""
    with Path(path).open() as lines:
        yield from map(json.loads, lines)


LOADERS: dict[str, Callable[[str, Path], tuple[Iterator[Any], int]]] = {
    "ours": ours,
    "naive": naive,
    "datasets": huggingface,
    "webdataset": webdataset,
    "streaming": streaming,
    "litdata": litdata,
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
