"""Compare the speed of our data sources and other libraries, on the same samples with two worker processes.

uv run python benchmarks/data.py 3                                    # three rounds; a minute each
uv run python benchmarks/data.py 3 /tmp/peers/.venv/bin/python        # and peers installed in a different Python
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
LOADER = str(HERE / "peers" / "loading.py")
WRITER = str(HERE / "peers" / "samples.py")


class Result(NamedTuple):
    """Samples per second, and CPU microseconds per sample, of the training process and its workers."""

    rate: float
    cores: float


@dataclass(frozen=True)
class Contest:
    """One of our sources, and the loaders of other libraries for the same samples.

    Attributes:
        ours: The argument of ``loading.py`` for our source, also its name in the table.
        peers: The arguments for the other loaders.
        elsewhere: The arguments for further loaders that are installed in the other Python only.
    """

    ours: str
    peers: Sequence[str]
    elsewhere: Sequence[str] = ()


CONTESTS: Mapping[str, Contest] = {
    "token file": Contest("ours:tokens", ("naive:tokens",)),
    "JSON lines": Contest("ours:jsonl", ("naive:jsonl", "datasets:jsonl"), ("streaming:text", "litdata:text")),
    "Parquet": Contest("ours:parquet", ("naive:parquet", "datasets:parquet", "ours:parquet_wide")),
    "Arrow": Contest("ours:arrow", ("naive:arrow", "datasets:arrow")),
    "datasets on disk": Contest("ours:hf_dataset", ("datasets:hf_dataset",)),
    "WebDataset, text": Contest("ours:tar", ("webdataset:tar",)),
    "WebDataset, JPEG": Contest("ours:tar_images", ("webdataset:tar_images",)),
    "folder of JPEG": Contest("ours:images", ("naive:images",)),
}


def main(rounds: int, other_python: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, WRITER, folder], check=True)
        title = f"2 workers, {rounds} rounds"
        drawn = Table("", "loader", "samples a second", "ours to it", "µs of cores a sample", "it to ours", title=title)
        for name, contest in CONTESTS.items():
            loaders = (contest.ours, *contest.peers, *contest.elsewhere)
            results: dict[str, list[Result]] = {loader: [] for loader in loaders}
            for _ in range(rounds):
                for loader in loaders:
                    python = other_python if loader in contest.elsewhere else sys.executable
                    results[loader] += measured(python, loader, folder)
            for loader in loaders:
                first = name if loader == contest.ours else ""
                drawn.add_row(first, loader, *cells(results[loader], results[contest.ours]))
        Console(width=120).print(drawn)


def cells(theirs: Sequence[Result], ours: Sequence[Result]) -> tuple[str, ...]:
    """Return a loader's medians, each with the median of the rounds' ratios to ours."""
    if not theirs:
        return "not installed", "", "", ""
    faster = statistics.median(mine.rate / its.rate for mine, its in zip(ours, theirs, strict=True))
    cheaper = statistics.median(its.cores / mine.cores for mine, its in zip(ours, theirs, strict=True))
    rate, cores = (statistics.median(each) for each in zip(*theirs, strict=True))
    return f"{rate:,.0f}", f"{faster:.2f} ×", f"{cores:.1f}", f"{cheaper:.2f} ×"


def measured(python: str | None, loader: str, folder: str) -> list[Result]:
    """Measure one loader in a separate process; return an empty list if it is not installed."""
    if python is None:
        return []
    print(loader, file=sys.stderr)
    done = subprocess.run([python, LOADER, loader, folder], stdout=subprocess.PIPE, text=True)
    if done.returncode == 3:
        return []
    done.check_returncode()
    return [Result(*json.loads(done.stdout.splitlines()[-1]))]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
