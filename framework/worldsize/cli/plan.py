"""``worldsize plan [OPTION ...]``: show the rank layout, and predict the cost of a step for each strategy.

No run is started. The recipe takes a few steps on this machine, unless --model-size and --compute are given.
With a range of sizes, such as cluster.nodes=1..64, it predicts the step of one strategy for 1, 2, 4, ... nodes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from worldsize.cli import call_composed, exit_process
from worldsize.collectives.cluster_cost import crossings_text
from worldsize.config.arguments import build_number_parser
from worldsize.config.compose import read_group_choices, task_overrides, typed_overrides
from worldsize.config.explain import find_key_file
from worldsize.config.search_path import main_conf
from worldsize.core import Cluster
from worldsize.core.limits import Range
from worldsize.errors import ConfigError, WorldsizeError, neighbours
from worldsize.messages import CONFIG_ERROR, abbreviate_ranks, duration, report_error
from worldsize.plan.advice import (
    WANTED,
    assumed_link_text,
    assumed_overlap_text,
    assumed_precision_text,
    best_text,
    detect_memory_bytes,
    explain_memory_excess,
    formula_text,
    links_text,
    price_per_million,
    retuning_text,
    rule_text,
    size_text,
    time_text,
)
from worldsize.plan.curve import Curve, PayloadSweep, sizes_in
from worldsize.plan.finish import earlier_runs, mtbf_seconds, newest_like, read_restart_seconds, read_save_seconds
from worldsize.record.redaction import redact_arguments

if TYPE_CHECKING:
    from worldsize.config.schema import TrainingConfig
    from worldsize.config.settings import Settings
    from worldsize.plan.predictor import Forecast, Given, Predictor
    from worldsize.record.run_record import RunView


_MOST_ROWS = 16  # above this, ranks are shown by node, and nodes are abbreviated
_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes per element
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize plan", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", help="overrides as for train, e.g. +cluster=slurm cluster.nodes=4 strategy=mesh"
    )
    parser.add_argument(
        "--model-size",
        type=build_number_parser(Range(least=1)),
        metavar="N",
        help="number of parameters, e.g. 1e9 (default: the recipe's)",
    )
    parser.add_argument("--precision", choices=_SIZES, help="data type of all sent and stored values (fp32)")
    parser.add_argument(
        "--compute", type=_parse_seconds, metavar="TIME", help="compute time per rank and step, e.g. 250ms"
    )
    parser.add_argument(
        "--overlap",
        type=build_number_parser(Range(least=0, most=1)),
        help="fraction of compute that can overlap communication",
    )
    share = build_number_parser(Range(least=0, most=1))
    sweep = "with --compute: find the parameter bytes at which the efficiency drops to SHARE (0.5)"
    parser.add_argument("--payload", type=share, nargs="?", const=0.5, metavar="SHARE", help=sweep)
    adds = "for a curve (cluster.nodes=1..64): minimum speedup per added process, relative to one process (0.5)"
    parser.add_argument("--knee", type=share, default=0.5, metavar="SHARE", help=adds)
    parser.add_argument(
        "--study", type=Path, metavar="FOLDER", help="for a curve: write a study to FOLDER, for worldsize report FOLDER"
    )
    parser.add_argument("--ranks", action="store_true", help="list every rank, even if there are more than 16")
    parser.add_argument("--strategies", metavar="NAMES", help="compare only these strategies, e.g. ddp,fsdp,mesh")
    parser.add_argument("--save", type=_parse_seconds, metavar="TIME", help="training delay per checkpoint, e.g. 2s")
    parser.add_argument(
        "--restart", type=_parse_seconds, metavar="TIME", help="time from a failure until training resumes"
    )
    parser.add_argument("--links", type=Path, metavar="FILE", help="links measured by worldsize doctor --json FILE")
    exit_process(plan(parser.parse_intermixed_args()))


def _parse_seconds(text: str) -> float:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), None)
    if unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit. Write e.g. 250ms.")
    return build_number_parser(Range(above=0))(text.removesuffix(unit)) * _UNITS[unit]


def plan(options: argparse.Namespace) -> int:
    """Print the plan and its forecasts; return 0, or 2 if the configuration cannot run or be predicted."""
    try:
        words, sizes = sizes_in(options.overrides)
        if options.study is not None and sizes is None:
            raise ConfigError("--study requires a range. Add e.g. cluster.nodes=1..64.")
    except ConfigError as error:
        return report_error(error)
    return call_composed(lambda cfg: _show_plan(cfg, options, sizes), words)


def _show_plan(cfg: DictConfig, options: argparse.Namespace, sizes: Sequence[str] | None) -> int:
    from worldsize.config.composed import build_settings
    from worldsize.plan.predictor import Given, Predictor, read_links
    from worldsize.world.processes import will_fork

    will_fork()
    if options.model_size is not None and options.compute is None:
        raise ConfigError("--model-size requires --compute. Add e.g. --compute 250ms.")
    single = sizes is not None or options.payload is not None
    names = (
        [read_group_choices()["strategy"]]
        if single and not options.strategies
        else _select_strategies(options.strategies)
    )
    size = None if options.model_size is None else options.model_size * _SIZES[options.precision or _ASSUMED_PRECISION]
    links = read_links(options.links) if options.links else {}
    predictor = Predictor(Given(size, options.compute, options.overlap, links))
    typed = any(word.startswith("batch_size=") for word in task_overrides())
    shared = None if size is None or typed else _SAMPLES_PER_LOGICAL_RANK
    if options.payload is not None:
        return _show_payload_sweep(predictor, options, names)
    if sizes is not None:
        return _show_curve(predictor, options, sizes, names, cfg, shared)
    settings = build_settings(cfg, samples_per_logical_rank=shared)
    groups = settings.strategy.groups(settings.cluster)
    is_listed = options.ranks or settings.cluster.processes <= _MOST_ROWS
    table = rank_table(settings.cluster, groups) if is_listed else node_table(settings.cluster, groups)
    hint = "" if is_listed else "Ranks are shown by node. Pass --ranks to list each rank."
    _print_lines(table, hint, crossings_text(settings.cluster, groups))
    cluster = predictor.resolve_cluster(settings)
    memory = cluster.device_memory or detect_memory_bytes(cluster)  # before loading data
    forecasts, refused = _forecasts(predictor, shared, names)
    unfitting = {
        name: why
        for name, each in forecasts.items()
        if (why := explain_memory_excess(each, memory, processes=cluster.processes_per_node))
    }
    _print_lines(rule_text(settings.config["cluster"]) if len(names) > 1 else "")
    _print_lines(*_compare_strategies(settings, forecasts, unfitting, options, priced=not shared))
    _print_lines(*_list_assumptions(options, settings.cluster, predictor.given))
    batch, ranks = settings.training.batch_size, settings.logical_ranks
    _print_lines(
        "" if shared else f"Global batch: {batch} samples per step, {ranks} × {batch // ranks}.",
        links_text(cluster, options.links),
        "" if memory is not None else _UNKNOWN,
        formula_text(forecasts),
        *(f"{name}: {why}" for name, why in {**unfitting, **refused}.items()),
    )
    if size is None and (
        warning := _retuning_text(settings.training, settings.run.root / read_group_choices()["recipe"])
    ):
        print(warning, file=sys.stderr)
    return 0 if forecasts else CONFIG_ERROR


_ASSUMED_PRECISION = "fp32"
_ASSUMED_SAVE, _ASSUMED_RESTART = 1.0, 60.0  # seconds assumed until a run has measured them
_SAMPLES_PER_LOGICAL_RANK = 16  # placeholder with --compute, since pipelines must be able to split micro-batches
_UNKNOWN = "Device memory is unknown. Set cluster.device_memory to reject plans that do not fit."


def _list_assumptions(options: argparse.Namespace, cluster: Cluster, given: Given) -> Iterator[str]:
    """Yield a line per assumed input of the forecasts, with the option that replaces the assumption."""
    if options.overlap is None and (options.model_size is not None or options.payload is not None):
        yield assumed_overlap_text()
    if options.precision is None and options.model_size is not None:
        yield assumed_precision_text(_ASSUMED_PRECISION, _SIZES[_ASSUMED_PRECISION])
    tier = "network" if cluster.nodes > 1 else "node"
    keys = ("cluster.links", f"cluster.links.{tier}", f"cluster.links.{tier}.bandwidth")
    is_typed = not typed_overrides().keys().isdisjoint(keys)
    file = find_key_file(keys[-1])
    if cluster.processes == 1 or tier in given.links or is_typed or file is None:
        return
    if (conf := main_conf().resolve()) in file.resolve().parents and tier in cluster.links:  # worldsize's own file
        yield assumed_link_text(tier, cluster.links[tier], file.resolve().relative_to(conf.parent))


def _print_lines(*lines: Table | str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    for line in filter(None, lines):
        console.print(line, highlight=False, markup=False, soft_wrap=isinstance(line, str))


# ---------------------------------------------------------------- costs


def _select_strategies(chosen: str | None) -> list[str]:
    """Return the names of the strategies to compare, from the comma-separated ``chosen``; default: all."""
    known = GlobalHydra.instance().config_loader().get_group_options("strategy")
    for name in (names := chosen.split(",") if chosen else known):
        if name not in known:
            raise ConfigError(f"unknown strategy {name!r}{neighbours(name, known)}")
    return names


def _forecasts(
    predictor: Predictor, shared: int | None, names: Sequence[str]
) -> tuple[dict[str, Forecast], dict[str, str]]:
    """Return the forecasts by strategy, and the reasons for strategies without a forecast."""
    forecasts: dict[str, Forecast] = {}
    refused: dict[str, str] = {}
    for name, settings in _strategies(refused, shared, names):
        _show_progress(f"trying {name}")
        try:
            forecasts[name] = predictor.forecast(settings)
        except ConfigError as error:
            refused[name] = str(error)
    _show_progress("")
    return forecasts, refused


def _show_progress(text: str) -> None:
    """Overwrite the last line with ``text``; does not use a thread, because this process forks meanwhile."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _strategies(
    refused: dict[str, str], shared: int | None, names: Sequence[str], more: Sequence[str] = ()
) -> Iterator[tuple[str, Settings]]:
    """Yield each strategy with the run's settings: the user's options for the chosen strategy, defaults for others.

    ``more``: further options, which override the user's.
    """
    from worldsize.config.composed import build_settings

    typed = task_overrides()
    chosen = next((word.partition("=")[2] for word in typed if word.startswith("strategy=")), "")
    others = [word for word in typed if not word.startswith(("strategy=", "strategy.", "+strategy."))]
    others += ["cluster.scale_lr=none", "cluster.base_batch=null"]  # costs ignore lr, and most strategies refuse a rule
    for name in names:
        words = [*typed, *more] if name == chosen else [*others, *more, f"strategy={name}"]
        try:
            yield name, build_settings(compose("config", overrides=words), samples_per_logical_rank=shared)
        except WorldsizeError as error:
            refused[name] = str(error)
        except Exception as error:  # any exception, since an unused plugin may be broken
            if name == chosen:
                raise
            refused[name] = f"broken: {type(error).__name__}: {error}"


def _show_curve(
    predictor: Predictor,
    options: argparse.Namespace,
    sizes: Sequence[str],
    names: Sequence[str],
    cfg: DictConfig,
    shared: int | None,
) -> int:
    """Print the predicted step of each strategy for all sizes, and write the study if requested.

    With --compute, the samples per logical rank are constant (weak scaling): ``shared``, or the configured number.
    """
    from worldsize.config.composed import build_settings

    if (is_weak := options.compute is not None) and shared is None:
        settings = build_settings(cfg)
        shared = settings.training.batch_size // settings.logical_ranks
    what = read_group_choices()["recipe"] if options.model_size is None else f"{options.model_size:g} parameters"
    curve = Curve(what, is_weak=is_weak)
    clusters: list[Cluster] = []
    for word in sizes:
        reasons: dict[str, str] = {}
        tried = list(_strategies(reasons, shared, names, [word]))
        clusters += [settings.cluster for _, settings in tried]
        curve.add_size(word, tried, predictor, reasons)
    _show_progress("")
    _print_lines(*curve.render_curve(options.knee))
    if curve.points:
        _print_lines(*_list_assumptions(options, max(clusters, key=lambda each: each.nodes), predictor.given))
    if curve.points and options.study is not None:
        command = shlex.join(["worldsize", "plan", *redact_arguments(sys.argv[1:])])
        _print_lines(str(curve.write_study(options.study, command=command, least=options.knee)))
    return 0 if curve.points else CONFIG_ERROR


def _show_payload_sweep(predictor: Predictor, options: argparse.Namespace, names: Sequence[str]) -> int:
    """Print each strategy's efficiency by model size, and the size at which the efficiency drops to ``--payload``."""
    if options.compute is None or options.model_size is not None:
        raise ConfigError(
            "--payload requires --compute and is not supported with --model-size. Add e.g. --compute 250ms, and remove "
            "--model-size."
        )
    refused: dict[str, str] = {}
    sweep = PayloadSweep(options.payload)
    tried = list(_strategies(refused, _SAMPLES_PER_LOGICAL_RANK, names))
    sweep.add_strategies(tried, predictor, refused)
    assumed = _list_assumptions(options, tried[0][1].cluster, predictor.given) if sweep.limits else ()
    _print_lines(*sweep.render_sweep(), *assumed, *(f"{name}: {why}" for name, why in refused.items()))
    return 0 if sweep.limits else CONFIG_ERROR


def _compare_strategies(
    settings: Settings,
    forecasts: Mapping[str, Forecast],
    unfitting: Mapping[str, str],
    options: argparse.Namespace,
    *,
    priced: bool,
) -> Iterator[Table | str]:
    """Yield the costs of all strategies, the best strategy, and the predicted finish time under it."""
    if forecasts:
        yield _cost_table(forecasts, unfitting, settings.cluster, settings.training.batch_size if priced else None)
    yield best_text(forecasts, unfitting)
    cluster, fitting = settings.cluster, forecasts.keys() - unfitting.keys()
    if (cluster.mtbf_hours or cluster.spot_market) and fitting:
        step_seconds, steps = min(forecasts[name].step_seconds for name in fitting), settings.training.steps
        run = newest_like(cluster, steps, settings.run.root / read_group_choices()["recipe"])
        yield from _build_finish_table(cluster, step_seconds * steps, run, options)


def _cost_table(
    forecasts: Mapping[str, Forecast], unfitting: Mapping[str, str], cluster: Cluster, batch_size: int | None
) -> Table:
    """Build the table of forecasts; with a batch size and prices, it includes the cost per million samples."""
    price = (cluster.price_per_hour or 0.0) * cluster.all_nodes
    columns = ["memory per rank", "sent per rank", "sent off-node", "communication", "exposed", "step", "efficiency"]
    columns += [f"compute for {WANTED:.0%}", *(["per million samples"] if price and batch_size else [])]
    table = Table("strategy", *columns, title=f"{cluster.processes} processes on {cluster.nodes} nodes")
    ranked = sorted(forecasts.items(), key=lambda item: (item[0] in unfitting, item[1].step_seconds))
    for place, (name, each) in enumerate(ranked):
        cost = each.cost
        cells = [size_text(size) for size in (cost.memory_bytes, cost.sent_bytes, cost.across_bytes)]
        cells += [time_text(each) for each in (cost.communication_seconds, each.exposed_seconds, each.step_seconds)]
        cells += [f"{each.efficiency:.1%}", time_text(each.compute_seconds_for(WANTED))]
        cells += [f"{price_per_million(each, batch_size, price):.2f}"] if price and batch_size else []
        cells[0] += " *" if each.by_formula else ""
        cells[0] += " ✗" if name in unfitting else ""
        table.add_row(name, *cells, style="dim" if name in unfitting else "" if place else "bold")
    return table


def _build_finish_table(
    cluster: Cluster, work: float, run: RunView | None, options: argparse.Namespace
) -> tuple[Table, str]:
    """Build the table of predicted finish times under the best strategy, and the text of its assumptions.

    ``run``: a similar earlier run with measured saves and restarts.
    """
    from worldsize.plan.finish import simulate_runs

    save = options.save or (run and read_save_seconds(run)) or _ASSUMED_SAVE
    restart = options.restart or (run and read_restart_seconds(run)) or _ASSUMED_RESTART
    offers = {"these nodes": (cluster.price_per_hour, mtbf_seconds(cluster.mtbf_hours, cluster.nodes))}
    if spot := cluster.spot_market:
        offers["spot"] = (spot.price_per_hour, mtbf_seconds(spot.mtbf_hours, cluster.nodes))
    table = Table("nodes", "failure every", "save every", "failures", "time", "80 % of runs", "price", "80 % of runs")
    for name, (price, mtbf) in offers.items():
        end = simulate_runs(work, save, mtbf, restart)
        early, usual, late = end.seconds
        cells = [duration(mtbf), duration(end.interval), f"{end.failures:.1f}", duration(usual)]
        table.add_row(
            name, *cells, f"{duration(early)} to {duration(late)}", *_format_prices(end.seconds, cluster, price)
        )
    if run and (seconds := run.results.get("goodput", {}).get("total_seconds")):
        cells = ["", "", str(len(run.attempts) - 1), duration(seconds), ""]
        paid, _ = _format_prices([seconds] * 3, cluster, cluster.price_per_hour)
        table.add_row(f"{run.directory.path.name} took", *cells, paid, style="dim")
    return table, f"A save delays training by {duration(save)}, and a restart takes {duration(restart)}."


def _format_prices(seconds: Sequence[float], cluster: Cluster, price_per_hour: float | None) -> tuple[str, str]:
    if price_per_hour is None:
        return "", ""
    early, usual, late = (each / 3600 * cluster.all_nodes * price_per_hour for each in seconds)
    return f"{usual:,.2f}", f"{early:,.2f} to {late:,.2f}"


def _retuning_text(training: TrainingConfig, runs: Path) -> str | None:
    """Advise retuning the learning rate if the newest run in ``runs`` had a different global batch; otherwise None."""
    for run in earlier_runs(runs):
        with suppress(WorldsizeError, KeyError):
            then = int(run.manifest["config"]["batch_size"])
            return retuning_text(then, training.batch_size, training.lr, str(run.directory.path))
    return None


def rank_table(cluster: Cluster, groups: Mapping[str, Sequence[Sequence[int]]]) -> Table:
    """Build a table with one row per rank: its node and, for each axis, its coordinate and group."""
    table = Table("rank", "node", "local rank", *(f"{axis}: ranks" for axis in groups))
    places = {axis: _format_places(members) for axis, members in groups.items()}
    for rank in range(cluster.processes):
        node, local = divmod(rank, cluster.processes_per_node)
        table.add_row(*map(str, (rank, node, local)), *(places[axis].get(rank, "") for axis in groups))
    return table


def node_table(cluster: Cluster, groups: Mapping[str, Sequence[Sequence[int]]]) -> Table:
    """Build a table with one row per node: its ranks and, for each axis, their groups."""
    table = Table("ranks", "node", "local ranks", *(f"{axis}: groups" for axis in groups))
    omitted = range(_MOST_ROWS // 2, cluster.nodes - _MOST_ROWS // 2) if cluster.nodes > _MOST_ROWS else range(0)
    for node in range(cluster.nodes):
        if node in omitted:
            if node == omitted[0]:
                table.add_row("...")
            continue
        local = range(cluster.processes_per_node)
        ranks = range(node * len(local), (node + 1) * len(local))
        row = [abbreviate_ranks(ranks), str(node), abbreviate_ranks(local)]
        for members in groups.values():
            row.append(_format_groups([group for group in members if not set(ranks).isdisjoint(group)]))
        table.add_row(*row)
    return table


def _format_groups(groups: Sequence[Sequence[int]]) -> str:
    more = f" and {len(groups) - 1} more" if len(groups) > 1 else ""
    return f"{_abbreviate_ranks(groups[0])}{more}" if groups else ""


def _format_places(groups: Sequence[Sequence[int]]) -> dict[int, str]:
    shown = ((group, _abbreviate_ranks(group)) for group in groups)
    return {rank: f"{place}: {text}" for group, text in shown for place, rank in enumerate(group)}


def _abbreviate_ranks(ranks: Sequence[int]) -> str:
    """Format ranks, abbreviating equally spaced ones as "0 8 .. 56"."""
    even = len({after - before for before, after in pairwise(ranks)}) == 1
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}" if even and len(ranks) > 4 else " ".join(map(str, ranks))
