"""Compare how fast sources are read with those of other libraries, on the same samples and with two worker processes.

uv run python benchmarks/data.py 3                                    # three rounds; a minute each
uv run python benchmarks/data.py 3 /tmp/peers/.venv/bin/python        # and peers that another Python has installed
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

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
LOADER = str(HERE / "peers" / "loading.py")
WRITER = str(HERE / "peers" / "samples.py")


@dataclass(frozen=True)
class Contest:
    """A source of ours, and the loaders of others that read the same samples.

    Attributes:
        ours: The arguments of ``loading.py`` for ours.
        peers: Those of the others, by the name that the table shows.
        elsewhere: Of those, the ones that only the other Python has.
    """

    ours: str
    peers: Sequence[str]
    elsewhere: Sequence[str] = ()


CONTESTS: Mapping[str, Contest] = {
    "JSON lines": Contest("ours:jsonl", ("naive:jsonl", "datasets:jsonl"), ("streaming:text", "litdata:text")),
    "Parquet": Contest("ours:parquet", ("naive:parquet", "datasets:parquet")),
    "datasets on disk": Contest("ours:hf_dataset", ("datasets:hf_dataset",)),
    "WebDataset, text": Contest("ours:tar", ("webdataset:tar",)),
    "WebDataset, JPEG": Contest("ours:tar_images", ("webdataset:tar_images",)),
    "folder of JPEG": Contest("ours:images", ("naive:images",)),
}


def main(rounds: int, other_python: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, WRITER, folder], check=True)
        drawn = Table("", "loader", "samples a second", "ours to it", title=f"2 workers, {rounds} rounds")
        for name, contest in CONTESTS.items():
            rates: dict[str, list[float]] = {}
            for _ in range(rounds):
                for loader in (contest.ours, *contest.peers, *contest.elsewhere):
                    python = other_python if loader in contest.elsewhere else sys.executable
                    rate = measured(python, loader, folder)
                    if rate is not None:
                        rates.setdefault(loader, []).append(rate)
            for loader in (contest.ours, *contest.peers, *contest.elsewhere):
                drawn.add_row(name if loader == contest.ours else "", loader, *cells(rates, loader, contest.ours))
        Console(width=120).print(drawn)


def cells(rates: Mapping[str, Sequence[float]], loader: str, ours: str) -> tuple[str, str]:
    """Return a loader's median rate, and the median of the rounds' ratios of our rate to it."""
    if loader not in rates:
        return "not installed", ""
    ratio = statistics.median(mine / theirs for mine, theirs in zip(rates[ours], rates[loader], strict=True))
    return f"{statistics.median(rates[loader]):,.0f}", "" if loader == ours else f"{ratio:.2f} ×"


def measured(python: str | None, loader: str, folder: str) -> float | None:
    """Return samples a second of one loader in a process of its own; None: it is not installed."""
    if python is None:
        return None
    print(loader, file=sys.stderr)
    done = subprocess.run([python, LOADER, loader, folder], stdout=subprocess.PIPE, text=True)
    if done.returncode == 3:
        return None
    done.check_returncode()
    rate: float = json.loads(done.stdout.splitlines()[-1])
    return rate


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
