"""Renders a report as HTML. Templates escape all texts, which are untrusted."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from worldsize.core import format_display_name
from worldsize.errors import WorldsizeError
from worldsize.files import is_file
from worldsize.messages import duration, format_bytes
from worldsize.observe.events import OVERFLOW
from worldsize.observe.report.curves import common_curves, get_typed_options, read_sweep, run_curves, search_charts
from worldsize.observe.report.nodes import list_axes, list_links, list_nodes, nodes_health
from worldsize.observe.report.ranks import hot_rows, list_servers, rank_charts, server_charts, waits_by_rank
from worldsize.observe.report.read import SCALING, Record, find_runs, parse_number, read_run
from worldsize.observe.report.scaling import read_study, study_charts
from worldsize.observe.report.timeline import list_hangs, timeline
from worldsize.record.json_lines import wrap_read_errors
from worldsize.record.level import read_recorded_level


def render_page(folders: Sequence[Path]) -> str:
    """Render the run, the runs or the scaling study in ``folders`` as HTML.

    Raises:
        WorldsizeError: there is nothing to report, or a record is damaged.
    """
    with wrap_read_errors(Path(os.path.commonpath(folders))):
        return _render_folders(folders)


def _render_folders(folders: Sequence[Path]) -> str:
    if len(folders) == 1 and is_file(folders[0] / SCALING):
        return study_page(folders[0])
    runs = [run for folder in folders for run in find_runs(folder)]
    if not runs:
        shown = ", ".join(map(str, folders))
        raise WorldsizeError(
            f"no runs found in {shown}. Pass the folder of a run, of several runs, or of a scaling study."
        )
    return run_page(read_run(runs[0])) if len(runs) == 1 else sweep_page(runs)


def run_page(record: Record) -> str:
    """Render the report page of one run as HTML."""
    return _render_template(
        "run.html.j2",
        run=record,
        title=format_title([record]),
        command=format_command(record),
        summary=collect_summary(record),
        curves=run_curves(record),
        rank_charts=rank_charts(record),
        timeline=timeline(record),
        hangs=list_hangs(record),
        planted=[json.dumps(fault) for fault in record.manifest["config"].get("faults") or ()],
        nodes=list_nodes(record),
        health=nodes_health(record),
        axes=list_axes(record),
        links=list_links(record),
        servers=list_servers(record),
        server_charts=server_charts(record),
        hot_rows=hot_rows(record),
        facts=collect_facts(record),
        config=json.dumps(record.manifest["config"], indent=2),
        commands=commands(record),
    )


def sweep_page(folders: Sequence[Path]) -> str:
    """Render the runs in ``folders`` side by side as HTML, with errors of unreadable ones."""
    sweep = read_sweep(folders)
    runs = list(sweep.runs.values())
    return _render_template(
        "sweep.html.j2",
        sweep=sweep,
        typed=get_typed_options,
        title=" · ".join(filter(None, [f"{len(runs)} runs", format_title(runs)])),
        searches=search_charts(sweep),
        curves=common_curves(sweep.runs),
    )


def study_page(folder: Path) -> str:
    """Render the scaling study in ``folder`` as HTML."""
    study = read_study(folder / SCALING)
    return _render_template("scaling.html.j2", study=study, plots=study_charts(study), name=folder.name)


def _render_template(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("worldsize.observe.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        figure=format_figure, duration=duration, milliseconds=milliseconds, percent=format_percent, size=format_bytes
    )
    environment.filters["spoken_name"] = format_display_name
    return environment.get_template(template).render(**values)


# ---------------------------------------------------------------- run summary as text


def format_title(records: Sequence[Record]) -> str:
    """Return a title with the recipe, strategy and process count that all runs share."""
    rows = []
    for record in records:
        options, config = record.manifest.get("options") or {}, record.manifest["config"]
        names = [
            options.get(group) or _get_target(config, group).rpartition(".")[2] for group in ("recipe", "strategy")
        ]
        processes = record.manifest["cluster"]["processes"]
        rows.append([*names, f"{processes} process" + "es" * (processes != 1)])
    common = [{*column}.pop() for column in zip(*rows, strict=True) if len({*column}) == 1]
    return " · ".join(filter(None, common))


def format_command(record: Record) -> str:
    """Return the command that started the run."""
    return shlex.join(["worldsize", "train", *record.manifest["overrides"]])


def collect_summary(record: Record) -> list[tuple[str, str]]:
    """List the run's main results as (name, text)."""
    results, last = record.results, record.steps[-1] if record.steps else {}
    goodput = results.get("goodput") or {}
    rows = [(format_display_name(name), format_figure(value)) for name, value in record.metrics.items()]
    total = record.manifest["config"].get("steps")
    rows += [("steps", f"{last.get('step', 0):,}" + f" / {total:,}" * bool(total))]
    if reason := results.get("stopped_early"):
        rows += [("ended early", str(reason))]
    if failed := sum(event["event"] == "checkpoint_failed" for event in record.events):
        rows += [("failed saves", f"{failed:,}")]
    if overflows := {event["step"] for event in record.events if event["event"] == OVERFLOW}:  # some were repeated
        rows += [("updates skipped (float16 overflow)", f"{len(overflows):,}")]
    if last:
        rows += [("loss", format_figure(last["loss"]))]
        rows += [
            (f"train {name}", format_figure(parse_number(value))) for name, value in last.get("metrics", {}).items()
        ]
    if rate := results.get("samples_per_second") or last.get("samples_per_second"):
        rows += [("samples/s", f"{rate:,.0f}")]
        latest = parse_number(last.get("samples_per_second"))
        share = rate / latest if latest > 0 else 0.0  # rate of the whole run relative to the last logged step
        for name, key, form in (("tokens/s", "tokens_per_second", ",.0f"), ("MFU", "mfu", ".1%")):
            if (value := share * parse_number(last.get(key))) > 0:
                rows += [(name, format(value, form))]
    if goodput.get("total_seconds"):
        rows += [("time", duration(goodput["total_seconds"])), ("goodput", f"{goodput['fraction']:.0%}")]
    if waits := [share for share in waits_by_rank(record).values() if share == share]:
        rows += [("waiting for data", format_percent(sum(waits) / len(waits)))]
    rows += _list_read_data(record)
    if memory := results.get("peak_memory_bytes"):
        rows += [("peak memory", format_bytes(memory))]
    return [
        *rows,
        ("processes", str(record.manifest["cluster"]["processes"])),
        ("attempts", str(len(record.attempts))),
    ]


def _list_read_data(record: Record) -> list[tuple[str, str]]:
    """List the amounts of data read by all ranks, if counted; estimated if steps were thinned."""
    counts = {
        name: sum(
            record.timing_stands_for[rank] * sum(parse_number(line.get(name, 0)) for line in lines)
            for rank, lines in record.timing.items()
        )
        for name in ("read_bytes", "fetched_bytes", "skipped_samples")
    }
    rows = [
        ("data read", format_bytes(counts["read_bytes"])),
        ("data read from other machines", format_bytes(counts["fetched_bytes"])),
    ]
    skipped = [("samples skipped", f"{counts['skipped_samples']:,.0f}")]
    known = [row for row, count in zip(rows, counts.values(), strict=False) if count]
    return known + (skipped if counts["skipped_samples"] else [])


def collect_facts(record: Record) -> list[tuple[str, str]]:
    """List facts about the run's configuration, code, environment and reproducibility."""
    manifest = record.manifest
    config, code, environment = manifest["config"], manifest["code"], manifest["environment"]
    determinism, torch, data = manifest["determinism"], environment.get("torch") or {}, manifest["data"]
    digest, level = record.results.get("state_digest"), read_recorded_level(manifest)
    shown = {
        "run": manifest["run_id"],
        "reproduces": manifest["parent_run"],
        "recipe": _get_target(config, "recipe"),
        "strategy": _get_target(config, "strategy"),
        "global batch": config.get("batch_size"),
        "logical ranks": determinism.get("logical_ranks"),
        "precision": config.get("precision"),
        "seed": determinism.get("seed"),
        "reproducibility": f"{level.level}: {level.why}",
        "commit": _format_commit(code),
        "Python": f"{environment.get('python')}, {environment.get('platform')}",
        "torch": ", ".join(f"{name} {value}" for name, value in torch.items() if value and name != "git"),
        "data": data.get("sha256") and f"{len(data['files'])} files, {data['sha256'][:16]}",
        "configuration": manifest["config_sha256"][:16],
        "state": digest and digest[:16],
        "checkpoints": ", ".join(record.results.get("checkpoints", ())),
    }
    return [(name, str(value)) for name, value in shown.items() if value not in (None, "")]


def _get_target(config: Mapping[str, Any], group: str) -> str:
    return str((config.get(group) or {}).get("_target_", ""))


def _format_commit(code: Mapping[str, Any]) -> str:
    commit = code.get("commit") or (code.get("framework") or {}).get("commit")
    changes = " with uncommitted changes (code.patch)" if code.get("dirty") else ""
    return f"{commit}{changes}" if commit else ""


def commands(record: Record) -> list[tuple[str, str]]:
    """List suggested commands, each with its purpose."""
    again = shlex.join(["worldsize", "reproduce", str(record.folder / "run_manifest.json")])
    return [("reproduce the run and compare", again), ("start command", format_command(record))]


# ---------------------------------------------------------------- number formatting


def format_figure(value: Any) -> str:
    """Format a number: integer from 1,000 to 1e12, else 4 significant digits; "–" if not finite."""
    amount = parse_number(value)
    if amount != amount:
        return "–"
    return f"{amount:,.0f}" if 1e3 <= abs(amount) < 1e12 else f"{amount:.4g}"


def format_percent(share: float) -> str:
    """Format a fraction as a percentage with one decimal; "–" for NaN."""
    return f"{share:.1%}" if share == share else "–"


def milliseconds(seconds: float) -> str:
    """Format seconds in milliseconds; "–" for NaN."""
    return f"{format_figure(1e3 * seconds)} ms" if seconds == seconds else "–"
