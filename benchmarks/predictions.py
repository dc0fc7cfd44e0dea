"""Compare step times predicted by ``worldsize plan`` with measured ones: four hosts of two processes, shaped links.

uv run python benchmarks/predictions.py 200 large 64     # Mbit/s, model (small, large), tokens per process (root)

Each round predicts from links and steps measured at its start. Results are averaged over three rounds, or the number
in a fourth argument, since timings on a shared machine vary by a fifth.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from links import examined, trained_on, warm_python
from worldsize.config.compose import compose_and_call
from worldsize.config.composed import build_settings
from worldsize.core import Link
from worldsize.plan.advice import time_text
from worldsize.plan.predictor import Forecast, Given, Predictor
from worldsize.plan.scaling import compute_spread
from worldsize.testing.hosts import run_hosts

EACH, STEPS, WARM_UP, BATCH = 2, 50, 2, 8
MODELS = {"small": ("recipe.width=128",), "large": ("recipe.width=256",)}  # 3.3 and 12.9 MB of parameters
OPTIONS = ("recipe=stdlib_lm", "recipe.depth=4", "clip_norm=null", f"batch_size={BATCH}")
WAYS = {
    "ddp": ("strategy=ddp",),
    "ddp, hierarchical": ("strategy=ddp", "strategy.reduce=hierarchical"),
    "ddp, bf16": ("strategy=ddp", "strategy.compress=bf16"),
    "ddp, int8": ("strategy=ddp", "strategy.compress=int8"),
    "fsdp": ("strategy=fsdp",),
    "parameter_server": ("strategy=parameter_server", "strategy.servers=4"),
}


def main(megabits: int, model: str, tokens: int, rounds: int = 3) -> None:
    torch.set_num_threads(1)
    shape = (*OPTIONS, *MODELS[model], f"recipe.context={tokens}")
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    predicted: dict[str, list[Forecast]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name, warm_python(Path(name)) as python:
        folder = Path(name)
        with run_hosts(folder, name="plan", count=4) as hosts:
            hosts.shape_links(f"{megabits}mbit")
            for _ in range(rounds):
                links = examined(hosts, *shape, f"cluster.processes_per_node={EACH}", python=python)
                _show(links)
                for way, forecast in forecasts(Predictor(Given(links=links, one_machine=True)), shape).items():
                    predicted[way].append(forecast)
                for way, options in WAYS.items():
                    words = (*shape, *options, f"cluster.processes_per_node={EACH}", f"steps={STEPS}")
                    logged = trained_on(hosts, *words, python=python)
                    measured[way] += [BATCH / line["samples_per_second"] for line in logged[WARM_UP:]]
    _draw(f"{model}, {tokens} tokens a process, {megabits} Mbit/s, {rounds} rounds", measured, predicted)


def _show(links: Mapping[str, Link]) -> None:
    for tier, link in links.items():
        micro = f"{1e6 * link.latency:.0f} µs, gap {1e6 * link.gap:.0f} µs"
        print(f"{tier}: {link.bandwidth / 1e6:.1f} MB/s, {micro}, incast {link.incast:.2f}")


def _draw(title: str, measured: Mapping[str, list[float]], predicted: Mapping[str, list[Forecast]]) -> None:
    drawn = Table("", "step", "spread", "predicted", "of each round", "error", "computes", "waits", title=title)
    steps = {way: statistics.median(seconds) for way, seconds in measured.items()}
    forecasts = {way: statistics.fmean(forecast.step_seconds for forecast in rows) for way, rows in predicted.items()}
    for way, rows in predicted.items():
        waits = statistics.fmean(forecast.exposed_seconds for forecast in rows)
        cells = (time_text(steps[way]), f"± {time_text(compute_spread(measured[way]) / 2)}", time_text(forecasts[way]))
        rounds = ", ".join(f"{1e3 * forecast.step_seconds:.0f}" for forecast in rows)
        parts = (time_text(forecasts[way] - waits), time_text(waits))
        drawn.add_row(way, *cells, rounds, f"{forecasts[way] / steps[way] - 1:+.0%}", *parts)
    Console(width=120).print(drawn)
    _judge(steps, forecasts)


def forecasts(predictor: Predictor, shape: tuple[str, ...]) -> dict[str, Forecast]:
    """Predict the step of each strategy, before any of them runs."""
    predicted: dict[str, Forecast] = {}
    for way, options in WAYS.items():

        def task(cfg: DictConfig, way: str = way) -> None:
            predicted[way] = predictor.forecast(build_settings(cfg))

        cluster = ("cluster=ssh", "cluster.hosts=[h1,h2,h3,h4]", f"cluster.processes_per_node={EACH}")
        words = ("cluster.threads=1", "optimizer=sgd", "recipe.test_bytes=1000", *shape, *options)
        compose_and_call(task, [*cluster, *words])
    return predicted


def _judge(measured: Mapping[str, float], predicted: Mapping[str, float]) -> None:
    errors = sorted(abs(predicted[way] / measured[way] - 1) for way in measured)
    print(f"errors: median {statistics.median(errors):.0%}, largest {errors[-1]:.0%}")
    for one, two in combinations(sorted(measured, key=lambda way: measured[way]), 2):
        if measured[two] > 1.1 * measured[one] and predicted[two] <= predicted[one]:
            print(f"{one} is measured faster than {two} by more than 10 %, and not predicted to be")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
