"""Altered runs that `worldsize audit` finds, compared with the probability, and the cost of an audit.

uv run python benchmarks/audits.py altered 200  # altered runs, 3 of 10 intervals audited in each
uv run python benchmarks/audits.py cost 1000    # steps of a run of which 2 % and 20 % are audited
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from tests.support import warm
from tests.support.forgery import CONF, RECIPE, forge_checkpoint, forge_loss
from tests.support.own_recipe import write_recipe
from tests.support.runs import environment
from tests.support.zygote import run_zygote

STEPS, INTERVAL, SAMPLES = 40, 4, 3
INTERVALS = STEPS // INTERVAL
KINDS = ("data", "step", "weight", "metrics", "checkpoint")
OPTIONS = ("reproducibility=elastic", "cluster.processes=1", "strategy=single", "logger=none", "log_every=2")
SAVES = (f"checkpoint.every={INTERVAL}", f"checkpoint.keep.last={INTERVALS}")


def run_command(folder: Path, *words: str, **changes: str) -> tuple[int, str]:
    """Run worldsize in a process that the zygote forks; return its exit code and output, or its errors."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, Path(os.devnull).open() as nothing:
        streams = [nothing.fileno(), output.fileno(), errors.fileno()]
        with warm.ask(
            os.environ[warm.ZYGOTE],
            ["worldsize", *words],
            cwd=str(folder),
            environment=environment(**changes),
            streams=streams,
            executable=str(folder / "python"),
        ) as line:
            code = int(line.recv(64))
        shown = output if output.tell() else errors
        shown.seek(0)
        return code, shown.read().decode()


@contextmanager
def open_project() -> Iterator[Path]:
    """Yield the folder of a project with the recipe ``audited``."""
    with run_zygote() as path, tempfile.TemporaryDirectory() as name:
        os.environ[warm.ZYGOTE] = str(path)
        folder = Path(name)
        write_recipe(folder, "audited", RECIPE, audited=CONF)
        warm.interpreter(folder, str(path))
        yield folder


def train(folder: Path, name: str, *options: str, alter: str = "none:0") -> Path:
    code, output = run_command(folder, "train", "recipe=audited", *OPTIONS, *options, f"run.name={name}", ALTER=alter)
    assert code == 0, output
    return folder / "runs" / "audited" / name


def audit(folder: Path, run: Path, *options: str) -> dict[str, object]:
    code, output = run_command(folder, "audit", str(run), "--json", *options)
    assert code in (0, 4), output
    report: dict[str, object] = json.loads(output)
    return report


@dataclass(frozen=True)
class Trial:
    """An altered run: what was altered, the share of choices that find it, and whether the audit did."""

    kind: str
    probability: float
    is_found: bool
    is_consistent: bool  # whether the record alone does not reveal the alteration


def run_trial(folder: Path, honest: Path, number: int) -> Trial:
    kind, draw = KINDS[number % len(KINDS)], random.Random(number)
    altered = 1
    if kind == "metrics":
        run = _copy(honest, f"{number}")
        forge_loss(run, 2 * draw.randint(1, STEPS // 2))
    elif kind == "checkpoint":
        run = _copy(honest, f"{number}")
        step, other = (INTERVAL * each for each in draw.sample(range(1, INTERVALS + 1), 2))
        forge_checkpoint(run, step, other)
        altered = 1 if step == STEPS else 2  # the interval before it and the one after it
    else:
        run = train(folder, f"{number}", *SAVES, alter=f"{kind}:{draw.randint(1, STEPS)}")
    report = audit(folder, run, f"--samples={SAMPLES}", f"--seed={draw.getrandbits(32)}")
    shutil.rmtree(run)
    probability = 1 - math.comb(INTERVALS - altered, SAMPLES) / math.comb(INTERVALS, SAMPLES)
    return Trial(kind, probability, bool(report["differences"]), not report["problems"])


def _copy(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.parent / name))


def show_altered(count: int) -> None:
    """Alter ``count`` runs in five ways, audit each, and print how many were found and how many are expected."""
    with open_project() as folder:
        honest = train(folder, "honest", *SAVES)
        alarms = sum(audit(folder, honest, "--samples=10", "--seed=1")["verdict"] != "nothing found" for _ in range(3))
        with ThreadPoolExecutor(2) as pool:
            trials = list(
                track(
                    pool.map(lambda number: run_trial(folder, honest, number), range(count)),
                    total=count,
                    console=Console(stderr=True),
                )
            )
    table = Table(
        "alteration", "runs", "found", "expected", "consistent records", title=f"{SAMPLES} of {INTERVALS} intervals"
    )
    for kind in (*KINDS, "all"):
        chosen = [each for each in trials if kind in (each.kind, "all")]
        expected = sum(each.probability for each in chosen)
        spread = math.sqrt(sum(each.probability * (1 - each.probability) for each in chosen))
        found, consistent = (sum(getattr(each, name) for each in chosen) for name in ("is_found", "is_consistent"))
        table.add_row(kind, str(len(chosen)), str(found), f"{expected:.1f} ± {spread:.1f}", str(consistent))
    Console().print(table)
    Console().print(f"false alarms in 3 audits of all intervals of the honest run: {alarms}")


def show_cost(steps: int) -> None:
    """Print the time of a run of ``steps``, and of audits of 2 % and of 20 % of it; their difference has no starts."""
    shares, whole = (50, 5), 0.0  # numbers of intervals
    seconds: dict[int, float] = {}
    with open_project() as folder:
        for intervals in shares:
            options = (f"steps={steps}", "batch_size=4096", "logical_ranks=4", "log_every=10")
            saves = (f"checkpoint.every={steps // intervals}", f"checkpoint.keep.last={intervals}")
            run = train(folder, f"{intervals}", *options, *saves)
            whole = json.loads((run / "result.json").read_text())["seconds"]
            for _ in range(2):  # the second time from a warm zygote
                begun = time.perf_counter()
                report = audit(folder, run, "--samples=1", "--seed=1")
                seconds[intervals] = time.perf_counter() - begun
            assert report["verdict"] == "nothing found"
    fewer, more = (1 / each for each in shares)
    slope = (seconds[5] - seconds[50]) / (more - fewer)
    table = Table("", "seconds", "of the run's time")
    table.add_row(f"run of {steps} steps", f"{whole:.1f}", "1")
    for share, intervals in zip((fewer, more), shares, strict=True):
        table.add_row(f"audit of {share:.0%}, with its starts", f"{seconds[intervals]:.1f}", "")
    table.add_row("audit of 1 %, without starts", f"{slope / 100:.2f}", f"{slope / 100 / whole:.4f}")
    Console().print(table)


COMMANDS: dict[str, Callable[[int], None]] = {"altered": show_altered, "cost": show_cost}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](int(sys.argv[2]))
