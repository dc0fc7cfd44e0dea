"""Measure rehearsals: how they grow with the world, and how soon planted faults are named.

uv run python benchmarks/rehearse.py worlds 64,512,4096     # seconds, calls, memory and open files of a rank
uv run python benchmarks/rehearse.py faults 64 ddp,fsdp     # six planted faults under each strategy
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))
from tests.planning.rehearsal.faulty import FAULTS, Faulty, line
from worldsize.config.compose import compose_and_call
from worldsize.config.settings import Settings
from worldsize.driver.execute import settings_of
from worldsize.planning.rehearsal.differences import differences
from worldsize.planning.rehearsal.exchange import Said
from worldsize.planning.rehearsal.rank import Part, data_of, rehearse_rank
from worldsize.planning.rehearsal.ranks import rehearse

PER_NODE, FAULTY = 8, 5
MODEL = ("recipe=stdlib_lm", "recipe.width=64", "recipe.depth=4", "recipe.context=16")
STRATEGIES = ("ddp", "zero", "fsdp", "hsdp", "mesh", "diloco")


def composed(work: Callable[[Settings], Any], *options: str) -> Any:
    """Call ``work`` with the settings of ``options``, in a process of its own."""
    context = get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def body() -> None:
        torch.set_num_threads(1)
        compose_and_call(lambda cfg: theirs.send(_worked(cfg, work)), ["logger=none", "cluster.threads=1", *options])

    process = context.Process(target=body)
    process.start()
    theirs.close()
    result = mine.recv()
    process.join()
    return result


def _worked(cfg: DictConfig, work: Callable[[Settings], Any]) -> Any:
    return work(settings_of(cfg))


# ---------------------------------------------------------------- how it grows


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def one_rank(settings: Settings) -> list[float]:
    """Rehearse the last rank: seconds of processor time, calls of a step, peak bytes, growth in memory, open files."""
    part = Part()
    data, files = data_of(settings, part), _open_files()
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rehearsed = rehearse_rank(settings.cluster.processes - 1, settings, part, data, Said())
    seconds, after = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert rehearsed.error is None, rehearsed.error
    calls = sum(call.step == part.steps for call in rehearsed.calls)
    return [seconds, calls, rehearsed.peak.nbytes, (after - before) * 1024, _open_files() - files]


def worlds(sizes: Sequence[int]) -> None:
    """Draw what one rank of each world costs."""
    table = Table("strategy", "ranks", "processor s", "calls a step", "peak MB", "process grew MB", "more open files")
    for strategy in STRATEGIES:
        for size in sizes:
            shape = (f"cluster.processes={size}", f"cluster.nodes={size // PER_NODE}", f"batch_size={size}")
            seconds, calls, peak, grew, files = composed(one_rank, *MODEL, f"strategy={strategy}", *shape)
            cells = (f"{seconds:.2f}", f"{calls:.0f}", f"{peak / 1e6:.2f}", f"{grew / 1e6:.0f}", f"{files:.0f}")
            table.add_row(strategy, f"{size:,}", *cells)
    Console(width=120).print(table)


# ---------------------------------------------------------------- planted faults


def named(settings: Settings, fault: str) -> tuple[float, str]:
    """Return the seconds until a planted fault is named, and the sentence."""
    begun = time.perf_counter()
    faulty = replace(settings, recipe=Faulty(fault, FAULTY))
    found = differences(rehearse(faulty, range(settings.cluster.processes), Part()))
    return time.perf_counter() - begun, "\n".join(map(str, found))


def faults(size: int, strategies: Sequence[str]) -> None:
    """Draw how soon each fault is named, and whether with its rank and line."""
    table = Table("strategy", *FAULTS, title=f"seconds until one of {size} ranks is named with its line")
    for strategy in strategies:
        cells = []
        for fault in FAULTS:
            shape = (f"cluster.processes={size}", f"cluster.nodes={size // PER_NODE}", f"batch_size={size}")
            seconds, text = composed(partial(named, fault=fault), "recipe=digits", f"strategy={strategy}", *shape)
            own = line({"skip": "one"}.get(fault, fault))
            rank = "rank " if fault == "branch" else f"rank {FAULTY}:"
            cells.append(f"{seconds:.0f}" if own in text and text.startswith(rank) else f"{seconds:.0f}, not named")
        table.add_row(strategy, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worlds", sizes]:
            worlds([int(size) for size in sizes.split(",")])
        case ["faults", size, strategies]:
            faults(int(size), strategies.split(","))
        case _:
            sys.exit(__doc__)
