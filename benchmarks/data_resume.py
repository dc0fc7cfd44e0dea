"""Measure time and memory until the first batch, at the start and after a resume, and samples lost by a resume.

    uv run python benchmarks/data_resume.py reading 1000000000      # sources with this many samples, at two steps
    uv run python benchmarks/data_resume.py runs 1000000000         # commands, compared with 64 samples
    uv run python benchmarks/data_resume.py peers PYTHON 24000 240000   # PYTHON: an interpreter with the peers

The samples of the first two are windows of 1,025 tokens in sparse files, which take no space. Each measurement runs in
a separate process; figures are medians of three rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table

from data_readers import PEERS, STEP, megabytes
from worldsize.checkpoint.format import Retention, read_checkpoint
from worldsize.checkpoint.load import read_tensors
from worldsize.checkpoint.manifest_tree import join_tensors
from worldsize.checkpoint.save import Saver
from worldsize.core import World
from worldsize.data.loader import micro_batches
from worldsize.data.mixture import Mixture, Part
from worldsize.data.order import Order
from worldsize.data.permutation import Shuffle
from worldsize.data.source import Source
from worldsize.data.sources.tokens import TokenWindows
from worldsize.data.splits import HeldOut

HERE = Path(__file__).parent
LENGTH, BATCH, FILES = 1024, 64, 1000
FAR = 10**6  # step of the resume
ROUNDS = 3
Figures = dict[str, float]


def sparse(folder: Path, samples: int, files: int) -> Path:
    """Create sparse files of zeros for ``samples`` windows."""
    folder.mkdir()
    for number in range(files):
        tokens = samples // files * LENGTH + 1
        with (folder / f"tokens_{number:05d}.npy").open("wb") as file:
            header = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
            numpy.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * tokens)
    return folder


def _mixed(source: Source) -> Source:
    return Mixture({"a": Part(source, weight=0.3), "b": Part(source, weight=0.7)})


SOURCES: dict[str, tuple[Callable[[Source], Source], Shuffle]] = {
    "tokens": (lambda source: source, Shuffle()),
    "in blocks of 1,024": (lambda source: source, Shuffle(block=1024)),
    "a tenth held out": (lambda source: HeldOut(source, 0.1, held_out=False), Shuffle()),
    "mixture of two": (_mixed, Shuffle()),
}


def reading_once(name: str, path: str, first: str) -> None:
    """Print the seconds until the first batch after step ``first``, and this process's peak memory, as JSON."""
    make, shuffle = SOURCES[name]
    begun = time.perf_counter()
    order = Order(seed=7, batch_size=BATCH, logical_ranks=1, mine=(0,), shuffle=shuffle)
    next(micro_batches(make(TokenWindows(path, length=LENGTH)), order, torch.device("cpu"), first=int(first)))
    print(json.dumps({"seconds": time.perf_counter() - begun, "megabytes": megabytes("VmHWM")}))


def output_of(*command: str, folder: Path, **environment: str) -> str:
    """Run a command in ``folder`` and return its output. Raises RuntimeError if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    own = {"WORLDSIZE_PLUGINS": str(HERE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=folder, env={**kept, **own, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def medians(measure: dict[Any, Callable[[], Figures]]) -> dict[Any, Figures]:
    """Run each measurement once per round, and return the medians by name."""
    rows: dict[Any, list[Figures]] = {name: [] for name in measure}
    for number in range(ROUNDS):
        for name, each in measure.items():
            print(f"round {number + 1} of {ROUNDS}: {name}", file=sys.stderr)
            rows[name].append(each())
    return {
        name: {key: statistics.median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }


def reading(samples: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {"few": sparse(folder / "few", 64, 1), "all": sparse(folder / "all", samples, FILES)}

        def measure(source: str, size: str, first: int) -> Callable[[], Figures]:
            words = (sys.executable, str(HERE / "data_resume.py"), "reading_once", source, str(paths[size]), str(first))
            return lambda: dict(json.loads(output_of(*words, folder=folder)))

        places = [("few", 0), ("all", 0), ("all", FAR)]
        found = medians({(source, *place): measure(source, *place) for source in SOURCES for place in places})
    table = Table("", "first batch, s", f"at step {FAR:,}, s", "MB above 64 samples", title=f"{samples:,} samples")
    for source in SOURCES:
        few, start, far = (found[source, *place] for place in places)
        above = max(start["megabytes"], far["megabytes"]) - few["megabytes"]
        table.add_row(source, f"{start['seconds']:.2f}", f"{far['seconds']:.2f}", str(round(above)))
    Console(width=110).print(table)


def move(run: Path, step: int) -> None:
    """Rewrite a run's only checkpoint as a checkpoint of ``step``."""
    (folder,) = (run / "checkpoints").glob("step_*")
    checkpoint = read_checkpoint(folder)
    tensors = {
        f"{part}/{name}": tensor
        for part in checkpoint.values
        for name, tensor in read_tensors(checkpoint, part).items()
    }
    world = World("worker", 0, 1, 0, 1, 0, 0, torch.device("cpu"))
    saver = Saver(folder.parent, world, None, keep=Retention(last=1))
    saver.save(join_tensors(checkpoint.values, tensors), step=step, facts={**checkpoint.facts, "samples": step * BATCH})
    saver.finish()
    saver.close()


def run_once(path: Path, folder: Path) -> tuple[Figures, Figures]:
    """Train a few steps, then resume from the checkpoint moved to step 10⁶; return the figures of both."""
    worldsize = (sys.executable, "-c", "from worldsize.cli import main; main()")
    options = ("recipe=windows", f"data.path={path}", f"data.length={LENGTH}", "logger=none", "cluster.processes=1")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here, found = Path(name), []
        begun = time.time()
        output_of(*worldsize, "train", *options, "log_every=1", folder=here)
        (run,) = here.glob("runs/*/*")
        found.append(figures_of(run, 1, begun))
        move(run, FAR)
        begun = time.time()
        output_of(*worldsize, "resume", str(run), f"steps={FAR + 10}", folder=here)
        return found[0], figures_of(run, FAR + 1, begun)


def figures_of(run: Path, step: int, begun: float) -> Figures:
    """Return the figures of a run's last attempt, whose first step was ``step``."""
    attempt = json.loads((run / "run_manifest.json").read_text())["attempts"][-1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (first,) = (line for line in lines if line["event"] == "step" and line["step"] == step)
    return {
        "to the first step, s": attempt["first_step_at"] - begun,
        "of it waiting for data, s": first["data_seconds"],
        "peak MB": json.loads((run / "result.json").read_text())["peak_memory_bytes"] / 2**20,
    }


def runs(samples: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {"64": sparse(folder / "few", 64, 1), f"{samples:,}": sparse(folder / "all", samples, FILES)}

        def measure(path: Path) -> Callable[[], Figures]:
            def both() -> Figures:
                start, far = run_once(path, folder)
                return {
                    f"{key} {place}": figures[key] for place, figures in (("0", start), ("far", far)) for key in figures
                }

            return both

        found = medians({size: measure(path) for size, path in paths.items()})
    table = Table("samples", "", "to the first step, s", "of it waiting for data, s", "peak MB", title="runs")
    for size, row in found.items():
        for place, words in (("0", "at the start"), ("far", f"resumed at step {FAR:,}")):
            figures = {key.rsplit(" ", 1)[0]: value for key, value in row.items() if key.endswith(f" {place}")}
            time_, wait, peak = figures.values()
            table.add_row(size, words, f"{time_:.2f}", f"{wait:.3f}", f"{peak:.0f}")
    Console(width=110).print(table)


class Contender:
    """A library to measure, and the Python interpreter in which it is installed."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name, self.python, self.folder = name, python, folder

    def command(self, action: str, *words: object, processes: int = 1) -> None:
        launch = [self.python]
        if processes > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        program = (str(HERE / "data_readers.py"), action, self.name, *map(str, words))
        output_of(*launch, *program, folder=self.folder, PYTHONPATH="", PYTHONWARNINGS="ignore")

    def write(self, count: int) -> Path:
        """Write ``count`` samples, and return their folder."""
        data = self.folder / f"{self.name.split()[0]}_{count}"
        data.mkdir()
        self.command("write", "--folder", data, "--count", count)
        return data

    def read(self, data: Path, *, steps: int | None, states: Path | None = None, processes: int = 1) -> Path:
        """Read ``steps`` steps, or to the end of the epoch; return the folder of the results and states."""
        out = Path(tempfile.mkdtemp(dir=self.folder))
        words = ["--folder", data, "--out", out]
        words += ["--steps", steps] if steps is not None else []
        words += ["--states", states] if states is not None else []
        self.command("read", *words, processes=processes)
        return out


def contenders(python: str, folder: Path) -> list[Contender]:
    """Return the libraries that this Python or ``python`` has; print the missing ones."""
    found = []
    for name in PEERS:
        for each in (sys.executable, python):
            contender = Contender(name, each, folder)
            try:
                contender.command("has")
            except RuntimeError:
                continue
            found.append(contender)
            break
        else:
            print(f"{name} is left out: neither Python has it", file=sys.stderr)
    return found


def outcomes(contender: Contender, data: Path, count: int) -> tuple[str, str, str]:
    """Read a sixth of an epoch with one process, a sixth with four, and the rest with two.

    Return the numbers of repeated and of missing samples, or the error. A sixth is less than the share of one of four
    processes; litdata refuses a state beyond that share.
    """
    sixth, seen, states = count // STEP // 6, Counter[int](), None
    for processes, steps in ((1, sixth), (4, sixth), (2, None)):
        try:
            out = contender.read(data, steps=steps, states=states, processes=processes)
        except RuntimeError as error:
            reasons = [line for line in str(error).splitlines() if "Error:" in line]
            print(f"{contender.name} at {processes} processes: {error}", file=sys.stderr)
            return "", "", f"P = {processes}: {reasons[0].split(']: ')[-1].strip() if reasons else 'it fails'}"
        for part in out.glob("*.json"):
            seen.update(json.loads(part.read_text())["samples"])
        states = out
    again = sum(times - 1 for times in seen.values())
    return f"{again:,}", f"{count - len(seen):,}", ""


def peers(python: str, *sizes: int) -> None:
    figures, lost = (
        Table("", title="first batch after a resume in the middle of an epoch"),
        Table("", "again", "never", "", title=f"{sizes[0]:,} samples, P = 1, 4, 2"),
    )
    for size in sizes:
        figures.add_column(f"{size:,} samples: s")
        figures.add_column("MB")
    with tempfile.TemporaryDirectory() as name:
        found = contenders(python, Path(name))
        folders, middles = {}, {}
        for contender in found:
            for size in sizes:
                begun = time.monotonic()
                data = folders[contender.name, size] = contender.write(size)
                print(f"{contender.name}: {size:,} samples in {time.monotonic() - begun:.0f} s", file=sys.stderr)
                middles[contender.name, size] = contender.read(data, steps=size // STEP // 2)

        def measure(contender: Contender, size: int) -> Callable[[], Figures]:
            def resumed() -> Figures:
                states = middles[contender.name, size]
                out = contender.read(folders[contender.name, size], steps=1, states=states)
                row = json.loads((out / "0.json").read_text())
                return {"seconds": row["seconds"], "megabytes": row["megabytes"]}

            return resumed

        rows = medians({(each.name, size): measure(each, size) for each in found for size in sizes})
        for each in found:
            cells = [(rows[each.name, size]["seconds"], rows[each.name, size]["megabytes"]) for size in sizes]
            figures.add_row(each.name, *(text for time_, size in cells for text in (f"{time_:.3f}", f"{size:.0f}")))
            lost.add_row(each.name, *outcomes(each, folders[each.name, sizes[0]], sizes[0]))
    Console(width=110).print(figures, lost)


def main(action: str, *words: str) -> None:
    match action:
        case "reading_once":
            reading_once(*words)
        case "peers":
            peers(words[0], *map(int, words[1:]))
        case _:
            {"reading": reading, "runs": runs}[action](*map(int, words))


if __name__ == "__main__":
    main(*sys.argv[1:])
