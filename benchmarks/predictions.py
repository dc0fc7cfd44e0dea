"""What plan predicts for a step next to what it takes: four hosts of two processes, links of so many Mbit/s.

uv run python benchmarks/predictions.py 200 large 64     # or small; 1000; tokens a process (root; network namespaces)
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
from worldsize.app.execute import settings_of
from worldsize.app.predict import Given, Predictor
from worldsize.config.compose import compose_and_call
from worldsize.planning.advice import time_text
from worldsize.planning.forecast import Forecast
from worldsize.planning.scaling import spread
from worldsize.testing.hosts import running

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


def main(megabits: int, model: str, tokens: int) -> None:
    torch.set_num_threads(1)
    title = f"{model}, {tokens} tokens a process, {megabits} Mbit/s"
    drawn = Table("", "step", "spread", "predicted", "error", "computes", "waits", title=title)
    shape = (*OPTIONS, *MODELS[model], f"recipe.context={tokens}")
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, warm_python(Path(name)) as python:
        folder = Path(name)
        with running(folder, name="plan", count=4) as hosts:
            hosts.shape(f"{megabits}mbit")
            links = examined(hosts, *shape, f"cluster.processes_per_node={EACH}", python=python)
            predicted = forecasts(Predictor(Given(links=links, one_machine=True)), shape)
            for way, options in WAYS.items():
                words = (*shape, *options, f"cluster.processes_per_node={EACH}", f"steps={STEPS}")
                logged = trained_on(hosts, *words, python=python)
                steps = [BATCH / each["samples_per_second"] for each in logged[WARM_UP:]]
                measured[way], found = statistics.median(steps), predicted[way]
                cells = (time_text(measured[way]), f"± {time_text(spread(steps) / 2)}", time_text(found.step_seconds))
                error = found.step_seconds / measured[way] - 1
                parts = (time_text(found.step_seconds - found.exposed_seconds), time_text(found.exposed_seconds))
                drawn.add_row(way, *cells, f"{error:+.0%}", *parts)
    Console(width=120).print(drawn)
    for tier, link in links.items():
        micro = f"{1e6 * link.latency:.0f} µs, gap {1e6 * link.gap:.0f} µs"
        print(f"{tier}: {link.bandwidth / 1e6:.1f} MB/s, {micro}, incast {link.incast:.2f}")
    _judge(measured, {way: each.step_seconds for way, each in predicted.items()})


def forecasts(predictor: Predictor, shape: tuple[str, ...]) -> dict[str, Forecast]:
    """By way, before anything runs."""
    found: dict[str, Forecast] = {}
    for way, options in WAYS.items():

        def task(cfg: DictConfig, way: str = way) -> None:
            found[way] = predictor.forecast(settings_of(cfg))

        cluster = ("cluster=ssh", "cluster.hosts=[h1,h2,h3,h4]", f"cluster.processes_per_node={EACH}")
        words = ("cluster.threads=1", "optimizer=sgd", "recipe.test_bytes=1000", *shape, *options)
        compose_and_call(task, [*cluster, *words])
    return found


def _judge(measured: Mapping[str, float], predicted: Mapping[str, float]) -> None:
    errors = sorted(abs(predicted[way] / measured[way] - 1) for way in measured)
    print(f"errors: median {statistics.median(errors):.0%}, largest {errors[-1]:.0%}")
    for one, two in combinations(sorted(measured, key=lambda way: measured[way]), 2):
        if measured[two] > 1.1 * measured[one] and predicted[two] <= predicted[one]:
            print(f"{one} is measured faster than {two} by more than 10 %, and not predicted to be")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
