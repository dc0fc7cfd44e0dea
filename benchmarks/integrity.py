"""Flipped bits that audits find, false alarms, and the cost of audits.

uv run python benchmarks/integrity.py flips 250      # flips per recipe and strategy, each in a step of its own
uv run python benchmarks/integrity.py share 400      # flips while a quarter of the steps is audited
uv run python benchmarks/integrity.py healthy 20000  # audited steps without flips, in each of five processes
uv run python benchmarks/integrity.py cost 30        # a step with and without an audit; medians of alternating steps
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from recipes.digits.recipe import Digits
from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.core import FlipTarget, Numerics, Recipe, Strategy, World
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.flips import FlipCase, FlipResult, FlipTrial, draw_flips, run_flips
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds
from worldsize.worker.replica_check import ReplicaCheck

PROCESSES, BATCH = 3, 24
PASSES: tuple[FlipTarget, ...] = ("batch", "activation", "product", "gradient")
_ADAMW = partial(torch.optim.AdamW, lr=0.001)
RECIPES: Mapping[str, Recipe] = {
    "digits": Digits(4, 0.1, _ADAMW),
    "stdlib_lm": StdlibLM(32, 2, 2, 32, 0.1, test_bytes=1000, make_optimizer=_ADAMW),
}
STRATEGIES: Mapping[str, tuple[Strategy, Sequence[FlipTarget]]] = {
    "ddp": (DDP(reduce="ordered"), (*PASSES, "weight")),
    "fsdp": (FSDP(reduce="ordered"), PASSES),  # all processes gather a wrong shard alike
}


def show_flips(count: int) -> None:
    """Print how many of ``count`` flips for each recipe and strategy were found, and whose process was named."""
    title = f"{count} flips each in {PROCESSES} processes"
    table = Table("recipe", "strategy", "changed bits", "found", "right process", "masked", "false alarms", title=title)
    for recipe_name, recipe in RECIPES.items():
        for name, (strategy, targets) in STRATEGIES.items():
            bits = 8 if recipe_name == "stdlib_lm" else 32  # other tokens would be out of range
            cases = draw_flips(count, PROCESSES, targets, values=60, seed=count, batch_bits=bits)
            results = run_in_worlds(partial(_run_flips, strategy, recipe, cases), PROCESSES, timeout=36_000)[0]
            changed = [each for each in results if each.is_changed]
            found = [each for each in changed if None not in each.found]
            right = [each for each in found if all(event and event.ranks == (each.case.rank,) for event in each.found)]
            alarms = sum(each.is_false_alarm for each in results)
            masked = len(results) - len(changed)
            table.add_row(recipe_name, name, *map(str, (len(changed), len(found), len(right), masked, alarms)))
            kinds = Counter(each.case.flip.target for each in changed)
            Console(stderr=True).print(f"{recipe_name} {name}: {dict(kinds)}")
    Console().print(table)


def _run_flips(strategy: Strategy, recipe: Recipe, cases: Sequence[FlipCase], world: World) -> list[FlipResult]:
    return run_flips(strategy, recipe, world, cases, batch_size=BATCH)


def show_share(count: int) -> None:
    """Print the share of ``count`` flips that were found while a quarter of the steps is audited."""
    cases = draw_flips(count, PROCESSES, ("gradient",), values=12, seed=count)
    results = run_in_worlds(partial(_run_at_a_quarter, cases), PROCESSES, timeout=36_000)[0]
    changed = [each for each in results if each.is_changed]
    share = sum(each.found[0] is not None for each in changed) / len(changed)
    error = math.sqrt(0.25 * 0.75 / len(changed))
    print(f"{len(changed)} flips that changed a gradient: {share:.1%} found, expected 25 % ± {error:.1%}")


def _run_at_a_quarter(cases: Sequence[FlipCase], world: World) -> list[FlipResult]:
    return list(FlipTrial(DDP(reduce="ordered"), Chain(1), world, batch_size=BATCH, audit=0.25).run(cases))


def show_healthy(steps: int) -> None:
    """Print the number of alarms in audited ``steps`` without flips."""
    processes = 5
    alarms = run_in_worlds(partial(_run_healthy, steps), processes, timeout=36_000)
    print(f"{steps * processes:,} audits of a process in {steps:,} healthy steps: {sum(alarms)} alarms")


def _run_healthy(steps: int, world: World) -> int:
    trial = FlipTrial(DDP(reduce="ordered"), Chain(1), world, batch_size=2 * BATCH + 2, logical_ranks=world.size)
    for step in track(range(2, steps + 2), disable=world.rank > 0, console=Console(stderr=True)):
        trial.run_step(step)
    return len(trial.events)


def show_cost(steps: int) -> None:
    """Print the time of a step with an audit in each step, and of a comparison of replicas."""
    table = Table(
        "strategy", "processes", "plain", "audited", "comparison of replicas", title="ms, stdlib_lm width 128"
    )
    variants: Mapping[str, tuple[Strategy, int]] = {
        "ddp": (DDP(reduce="ordered"), 2),
        "zero": (ZeRO(reduce="ordered"), 2),
        "fsdp": (FSDP(reduce="ordered"), 2),
        "mesh data 2 × tensor 2": (Mesh(reduce="ordered", data=2, tensor=2), 4),
    }
    for name, (strategy, size) in variants.items():
        plain, audited, compared = run_in_worlds(partial(_time_steps, strategy, steps), size, timeout=3600)[0]
        ratios = (f"{audited * 1e3:.0f} ({audited / plain:.2f} ×)", f"{compared * 1e3:.1f} ({compared / plain:.2f} ×)")
        table.add_row(name, str(size), f"{plain * 1e3:.0f}", *ratios)
    Console().print(table)


def _time_steps(strategy: Strategy, steps: int, world: World) -> tuple[float, float, float]:
    """Return the median seconds of a plain step, an audited one, and a comparison of replicas."""
    recipe = StdlibLM(128, 4, 4, 64, 0.1, test_bytes=1000, make_optimizer=_ADAMW)
    numerics = Numerics(logical_tensor=2 if isinstance(strategy, Mesh) else 1)
    plain, audited = (
        FlipTrial(strategy, recipe, world, batch_size=32, numerics=numerics, audit=audit) for audit in (0.0, 1.0)
    )
    check = ReplicaCheck(plain.replica, plain.context)
    times: list[list[float]] = [[], [], []]
    for step in range(2, steps + 2):
        works: Sequence[Callable[[], object]] = (
            partial(plain.run_step, step),
            partial(audited.run_step, step),
            partial(check.compare, step),
        )
        for measured, work in zip(times, works, strict=True):
            began = time.perf_counter()
            work()
            measured.append(time.perf_counter() - began)
    first, second, third = map(statistics.median, times)
    return first, second, third


if __name__ == "__main__":
    shows = {"flips": show_flips, "share": show_share, "healthy": show_healthy, "cost": show_cost}
    shows[sys.argv[1]](int(sys.argv[2]))
