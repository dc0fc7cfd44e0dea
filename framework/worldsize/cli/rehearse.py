"""``worldsize rehearse [OPTION ...]``: show each rank's memory, messages and waits without launching the run.

The run's own code builds each rank's replica, takes steps and evaluates. The other ranks are absent, and are assumed to
have the same tensors. If a rank's collectives differ from its peers', both lines of code are shown.
"""

from __future__ import annotations

import argparse
import json
import os
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

from worldsize.cli import call_composed, exit_process
from worldsize.config.arguments import build_integer_parser
from worldsize.core.limits import Range
from worldsize.errors import ConfigError
from worldsize.messages import abbreviate_ranks, format_ranks

if TYPE_CHECKING:
    from worldsize.core import Cluster
    from worldsize.plan.rehearsal.calls import Call
    from worldsize.plan.rehearsal.rank import Rehearsed

_FAILED = 1  # exit code if ranks make different calls, deadlock or fail
_SHOWN = 8  # maximum number of differences to show


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize rehearse", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="overrides as for train, e.g. strategy=fsdp cluster.processes=64")
    parser.add_argument(
        "--ranks", metavar="RANKS", help="ranks to rehearse, e.g. 0,5,60-63 or all (default: all, up to 64)"
    )
    parser.add_argument(
        "--steps", type=build_integer_parser(Range(least=1)), default=2, help="training steps (default: 2)"
    )
    parser.add_argument(
        "--without-evaluation", action="store_true", help="skip the evaluation (two batches of each split)"
    )
    parser.add_argument(
        "--fake",
        action="store_true",
        help="use fake tensors, for models that do not fit on this machine (fsdp, hsdp, mesh)",
    )
    parser.add_argument("--calls", type=int, metavar="RANK", help="list the collectives of this rank, in order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of all ranks to FILE")
    exit_process(rehearse(parser.parse_intermixed_args()))


def rehearse(options: argparse.Namespace) -> int:
    """Rehearse the ranks and print the outcome; return 0, 1 if ranks disagree or fail, 2 if the run cannot start."""
    return call_composed(lambda cfg: _rehearse(cfg, options), options.overrides)


def _rehearse(cfg: DictConfig, options: argparse.Namespace) -> int:
    from worldsize.config.composed import build_settings
    from worldsize.plan.construction import check_construction, check_trainable
    from worldsize.plan.dry_run import check_alone
    from worldsize.plan.rehearsal.rank import RehearsedPart
    from worldsize.plan.rehearsal.ranks import choose_ranks, rehearse
    from worldsize.world.processes import will_fork

    will_fork()
    settings = build_settings(cfg)
    check_trainable(settings.recipe, settings.strategy)
    check_construction(
        settings.recipe,
        settings.strategy,
        settings.numerics,
        settings.cluster,
        schedule_metric=settings.training.schedule_metric,
    )
    check_alone(settings)
    size = settings.cluster.processes
    ranks = choose_ranks(settings.cluster) if options.ranks is None else _parse_ranks(options.ranks, size)
    _check_output(options, ranks)
    part = RehearsedPart(options.steps, options.fake, not options.without_evaluation)
    console = Console(stderr=True)
    with Progress(
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,  # avoids a thread, because this process forks
    ) as progress:
        bar = progress.add_task("rehearsing", total=len(ranks))
        rehearsed = rehearse(
            settings, ranks, part, note=lambda done: progress.update(bar, completed=done, refresh=True)
        )
    if options.json:
        _write_result(options.json, rehearsed)
    if (refusal := _common_refusal(rehearsed)) is not None:
        raise ConfigError(refusal)
    return _show_outcome(rehearsed, settings.cluster, options)


def _check_output(options: argparse.Namespace, ranks: Sequence[int]) -> None:
    """Raise ConfigError early if the output cannot be written or shown."""
    if options.calls is not None and options.calls not in ranks:
        raise ConfigError(
            f"--calls {options.calls}: rank {options.calls} is not rehearsed. Use one of {abbreviate_ranks(ranks)}, "
            f"or add rank {options.calls} to --ranks."
        )
    file: Path | None = options.json
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ConfigError(f"--json {file} is not writable. Use a file in an existing, writable folder.")


def _write_result(file: Path, rehearsed: Sequence[Rehearsed]) -> None:
    try:
        file.write_text(json.dumps([_describe_rank(each) for each in rehearsed], indent=1))
    except OSError as error:
        raise ConfigError(f"--json {file}: failed to write: {error.strerror}. Pass a different file.") from None


def _common_refusal(rehearsed: Sequence[Rehearsed]) -> str | None:
    """Return the configuration error that all ranks raise; None if some ranks do not."""
    refusals = {each.refusal for each in rehearsed}
    return refusals.pop() if len(refusals) == 1 else None


def _describe_rank(rehearsed: Rehearsed) -> dict[str, Any]:
    """Return a rank's memory and calls for the JSON file, with abbreviated lists of ranks."""
    calls = [
        {
            "step": call.step,
            "phase": call.phase,
            "operation": call.operation,
            "form": call.form,
            "ranks": abbreviate_ranks(call.group.ranks),
            "peer": call.peer,
            "nbytes": call.nbytes,
            "site": call.site,
        }
        for call in rehearsed.calls
    ]
    peaks: dict[str, Any] = {"building": asdict(rehearsed.building), "peak": asdict(rehearsed.peak)}
    peaks["evaluation"] = rehearsed.evaluation and asdict(rehearsed.evaluation)
    return {"rank": rehearsed.rank, "error": rehearsed.error, **peaks, "calls": calls}


def _parse_ranks(text: str, size: int) -> list[int]:
    """Parse ranks such as "0,5,60-63"."""
    if text == "all":
        return list(range(size))
    ranks: set[int] = set()
    for word in text.split(","):
        first, _, last = word.partition("-")
        try:
            some = range(int(first), int(last or first) + 1)
        except ValueError:
            raise ConfigError(f"--ranks {text}: {word!r} is not a rank. Write e.g. --ranks 0,5,60-63 or all.") from None
        if not some:
            raise ConfigError(
                f"--ranks {text}: {word!r} is an empty range. Write the smaller rank first: {last}-{first}."
            )
        if beyond := sorted(rank for rank in (some[0], some[-1]) if not 0 <= rank < size):
            raise ConfigError(f"--ranks {text}: rank {beyond[0]} does not exist. The {size} ranks are 0 to {size - 1}.")
        ranks |= {*some}
    return sorted(ranks)


# ---------------------------------------------------------------- the outcome


def _show_outcome(rehearsed: Sequence[Rehearsed], cluster: Cluster, options: argparse.Namespace) -> int:
    _print_table(_build_rank_table(rehearsed, cluster, options))
    if options.calls is not None:
        _print_table(_calls_table(rehearsed, options.calls))
    if restless := [each.rank for each in rehearsed if not each.is_settled]:
        print(_UNSETTLED.format(format_ranks(restless)))
        return _FAILED
    wrong, failed = _find_problems(rehearsed), _failures(rehearsed)
    for line in [*wrong, *failed]:
        print(line)
    if wrong:
        print("Do not make collectives or their arguments depend on the rank, the data or random numbers.")
    elif not failed and len(rehearsed) == 1:
        print(f"Only rank {rehearsed[0].rank} was rehearsed, so its calls were not compared with other ranks.")
    elif not failed:
        print(f"All {len(rehearsed)} ranks make the same calls in the same order, without a deadlock.")
    return _FAILED if wrong or failed else 0


_UNSETTLED = (
    "The collectives of {} depend on objects exchanged between ranks, and kept changing in repeated rehearsals, so "
    "the rank that differs cannot be found. Exchange fewer objects that determine collectives, or set a smaller "
    "--steps."
)


def _find_problems(rehearsed: Sequence[Rehearsed]) -> list[str]:
    """Describe differing calls and mismatched messages, or if there are none, a deadlock."""
    from worldsize.plan.rehearsal.waiting import deadlock, differences, mismatches

    parted = differences(rehearsed)
    problems = [str(each) for each in parted[:_SHOWN]]
    if len(parted) > _SHOWN:
        problems.append(f"... and {len(parted) - _SHOWN} more groups with differing calls")
    problems += mismatches(rehearsed)[:_SHOWN]
    if not problems and all(each.error is None for each in rehearsed) and (stuck := deadlock(rehearsed)) is not None:
        problems.append(str(stuck))
    return problems


def _failures(rehearsed: Sequence[Rehearsed]) -> list[str]:
    """Describe the ranks' errors, grouping ranks with the same error."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for each in rehearsed:
        if each.error is not None:
            by_text[each.error].append(each.rank)
    problems = [f"{format_ranks(ranks)} fail{'s' if len(ranks) == 1 else ''} {text}" for text, ranks in by_text.items()]
    if absent := sorted(_absent_roots(rehearsed)):
        problems.append(
            f"The objects sent by {format_ranks(absent)} are unknown. Add {abbreviate_ranks(absent)} to --ranks."
        )
    return problems


def _absent_roots(rehearsed: Sequence[Rehearsed]) -> set[int]:
    """Return the ranks that were not rehearsed, but from which failed ranks expected objects."""
    last = [each.calls[-1].form for each in rehearsed if each.error is not None and each.calls]
    roots = {int(form.removeprefix(_FROM)) for form in last if form.startswith(_FROM)}
    return roots - {each.rank for each in rehearsed}


_FROM = "objects, root "


def _print_table(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False, markup=False)


def _build_rank_table(rehearsed: Sequence[Rehearsed], cluster: Cluster, options: argparse.Namespace) -> Table:
    """Build a table with one row per group of ranks with identical values."""
    from worldsize.plan.advice import size_text
    from worldsize.plan.rehearsal.memory import PARTS
    from worldsize.plan.rehearsal.ranks import compute_traffic

    rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
    last: int = options.steps
    for each in rehearsed:
        sent = compute_traffic(each, cluster.processes_per_node, step=last)
        held = [each.peak.nbytes, *(each.peak.parts.get(part, 0) for part in PARTS)]
        evaluation = size_text(each.evaluation.nbytes) if each.evaluation else "-"
        cells = [
            *map(size_text, held),
            size_text(each.building.nbytes),
            evaluation,
            size_text(sent.inside),
            size_text(sent.across),
            str(sent.calls),
        ]
        rows[tuple(cells)].append(each.rank)
    columns = ["ranks", "peak", *PARTS, "building", "evaluation", "sent within node", "sent off-node", "calls"]
    title = f"{cluster.processes} processes on {cluster.nodes} nodes, step {last}"
    table = Table(*columns, title=title)
    for row, ranks in rows.items():
        table.add_row(abbreviate_ranks(ranks), *row)
    return table


def _calls_table(rehearsed: Iterable[Rehearsed], rank: int) -> Table:
    calls: Sequence[Any] = next((each.calls for each in rehearsed if each.rank == rank), ())
    table = Table("step", "call", "ranks", "from", title=f"collectives of rank {rank}")
    for call in calls:
        peer = "any" if call.peer is None else str(call.peer)
        with_whom = peer if call.is_message else abbreviate_ranks(call.group.ranks)
        table.add_row(_format_step(call), call.described, with_whom, call.site)
    return table


def _format_step(call: Call) -> str:
    """Format the step of a call; add the phase unless the call belongs to the step itself."""
    if not call.step:
        return "-"
    return f"{call.step}" if call.phase == "step" else f"{call.step} {call.phase}"
