"""``worldsize rehearse [OPTION ...]``: what each rank of a run would hold, send and wait for; nothing is launched.

The run's own code builds each rank's replica, takes steps and evaluates; the other ranks are absent, and are taken to
have the same tensors. A rank whose collectives differ from its peers' is named, with the lines of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from worldsize.app import call_composed, exit_process
from worldsize.app.arguments import number
from worldsize.core.limits import Range
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from worldsize.config.settings import Settings
    from worldsize.planning.rehearsal.rank import Rehearsed

_FAILED = 1  # exit code of a rehearsal in which ranks part, wait for each other or fail
_SHOWN = 8  # differences


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize rehearse", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as of train, e.g. strategy=fsdp cluster.processes=64")
    parser.add_argument("--ranks", metavar="RANKS", help="e.g. 0,5,60-63 or all; all of 64 at most unless you say so")
    parser.add_argument("--steps", type=number(Range(least=1)), default=2, help="training steps (default: 2)")
    parser.add_argument("--without-evaluation", action="store_true", help="leave out two batches of each split")
    parser.add_argument(
        "--fake", action="store_true", help="tensors without memory or numbers, for what does not fit here: fsdp, hsdp"
    )
    parser.add_argument("--calls", type=int, metavar="RANK", help="list the collectives of this rank, in order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each rank did")
    exit_process(rehearse(parser.parse_intermixed_args()))


def rehearse(options: argparse.Namespace) -> int:
    """Exit code: 0, 1 if something is wrong between ranks, or that of a configuration that cannot run."""
    return call_composed(lambda cfg: _rehearse(cfg, options), options.overrides)


def _rehearse(cfg: DictConfig, options: argparse.Namespace) -> int:
    import torch  # takes seconds, as what follows

    from worldsize.driver.execute import settings_of
    from worldsize.planning.absent_peers import check_alone
    from worldsize.planning.construction import check_construction, check_trainable
    from worldsize.planning.rehearsal.rank import Part
    from worldsize.planning.rehearsal.ranks import chosen_ranks, rehearse

    torch.set_num_threads(1)  # this process forks: it must not have an OpenMP pool
    settings = settings_of(cfg)
    check_trainable(settings.recipe, settings.strategy)
    check_construction(settings.recipe, settings.strategy)
    check_alone(settings)
    size = settings.cluster.processes
    ranks = chosen_ranks(settings) if options.ranks is None else _ranks(options.ranks, size)
    part = Part(int(options.steps), options.fake, not options.without_evaluation)
    console = Console(stderr=True)
    with Progress(
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,  # no thread: this forks
    ) as progress:
        bar = progress.add_task("rehearsing", total=len(ranks))
        rehearsed = rehearse(
            settings, ranks, part, note=lambda done: progress.update(bar, completed=done, refresh=True)
        )
    if options.json:
        options.json.write_text(json.dumps([_facts(each) for each in rehearsed], indent=1))
    return _show(rehearsed, settings, options)


def _facts(rehearsed: Rehearsed) -> dict[str, Any]:
    """Return what is written of a rank: its memory, and its calls with the ranks in short."""
    from worldsize.planning.rehearsal.differences import spans

    calls = [
        {
            "step": call.step,
            "operation": call.operation,
            "form": call.form,
            "ranks": spans(call.group.ranks),
            "peer": call.peer,
            "nbytes": call.nbytes,
            "site": call.site,
        }
        for call in rehearsed.calls
    ]
    peaks = {"peak": asdict(rehearsed.peak), "evaluation": rehearsed.evaluation and asdict(rehearsed.evaluation)}
    return {"rank": rehearsed.rank, "error": rehearsed.error, **peaks, "calls": calls}


def _ranks(text: str, size: int) -> list[int]:
    """Read ranks such as "0,5,60-63"."""
    if text == "all":
        return list(range(size))
    ranks: set[int] = set()
    for word in text.split(","):
        first, _, last = word.partition("-")
        try:
            ranks |= {*range(int(first), int(last or first) + 1)}
        except ValueError:
            raise ConfigError(f"--ranks {text}: {word!r} is no rank. Write e.g. --ranks 0,5,60-63 or all.") from None
    if beyond := sorted(rank for rank in ranks if not 0 <= rank < size):
        raise ConfigError(f"--ranks {text}: there is no rank {beyond[0]} among {size}. They are 0 to {size - 1}.")
    return sorted(ranks)


# ---------------------------------------------------------------- what came out


def _show(rehearsed: Sequence[Rehearsed], settings: Settings, options: argparse.Namespace) -> int:
    from worldsize.planning.rehearsal.differences import deadlock, differences

    _print(_table(rehearsed, settings, options))
    if options.calls is not None:
        _print(_calls_table(rehearsed, options.calls))
    parted = differences(rehearsed)
    said = [str(each) for each in parted[:_SHOWN]]
    if len(parted) > _SHOWN:
        said.append(f"... and {len(parted) - _SHOWN} more groups whose calls part")
    said += [f"rank {each.rank} fails {each.error}" for each in rehearsed if each.error is not None]
    if not said and (stuck := deadlock(rehearsed)) is not None:
        said.append(str(stuck))
    for line in said:
        print(line)
    if not said:
        print(f"All {len(rehearsed)} ranks make the same calls in the same order, and none waits for ever.")
        return 0
    print("Let neither the rank, nor data, nor random numbers decide which collectives a rank calls, and with what.")
    return _FAILED


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False, markup=False)


def _table(rehearsed: Sequence[Rehearsed], settings: Settings, options: argparse.Namespace) -> Table:
    """A row for all ranks with the same figures."""
    from worldsize.planning.advice import size_text
    from worldsize.planning.rehearsal.differences import spans
    from worldsize.planning.rehearsal.storage_log import PARTS
    from worldsize.planning.rehearsal.traffic import traffic

    rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
    last = int(options.steps)
    for each in rehearsed:
        sent = traffic(each, settings.cluster.processes_per_node, step=last)
        held = [each.peak.nbytes, *(each.peak.parts.get(part, 0) for part in PARTS)]
        evaluation = size_text(each.evaluation.nbytes) if each.evaluation else "-"
        cells = [*map(size_text, held), evaluation, size_text(sent.inside), size_text(sent.across), str(sent.calls)]
        rows[tuple(cells)].append(each.rank)
    columns = ["ranks", "peak", *PARTS, "evaluation", "sent in the node", "sent across", "calls"]
    title = f"{settings.cluster.processes} processes on {settings.cluster.nodes} nodes, step {last}"
    table = Table(*columns, title=title)
    for row, ranks in rows.items():
        table.add_row(spans(ranks), *row)
    return table


def _calls_table(rehearsed: Iterable[Rehearsed], rank: int) -> Table:
    from worldsize.planning.rehearsal.differences import spans

    calls: Sequence[Any] = next((each.calls for each in rehearsed if each.rank == rank), ())
    table = Table("step", "call", "ranks", "from", title=f"collectives of rank {rank}")
    for call in calls:
        with_whom = spans(call.group.ranks) if call.peer is None else str(call.peer)
        table.add_row(str(call.step or "-"), call.described, with_whom, call.site)
    return table
