"""Compare the results of runs with a second commit: digests of state and metrics, or the reason of a refusal.

uv run python tests/same_bits.py main                # a covering set, about five minutes on two idle cores
uv run python tests/same_bits.py main --all          # every strategy, mode and world size with every recipe: hours
uv run python tests/same_bits.py main -k zero        # only those with this word

Results of the second commit are cached in ``.same_bits``. Golden configurations are compared, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
KEPT = REPOSITORY / ".same_bits"

GAN = """# @package _global_
# gan
recipe: {_target_: worldsize.testing.recipes.TwoPlayers}
"""
RECIPES = {
    "digits": ("recipe=digits", "steps=12", "batch_size=48", "evaluate_every=6"),
    "stdlib_lm": ("recipe=stdlib_lm", "steps=4", "batch_size=16"),
    "click_through": ("recipe=click_through", "steps=6", "batch_size=64"),
    "gan": ("recipe=gan", "allow_targets=[worldsize.testing.recipes]", "steps=6", "batch_size=16"),
    "word2vec": ("recipe=word2vec", "steps=6", "batch_size=64"),
}
STRATEGIES = {
    "single": ("strategy=single",),
    "ddp": ("strategy=ddp",),
    "ddp_compressed": ("strategy=ddp", "strategy.compress=int8"),
    "zero": ("strategy=zero",),
    "fsdp": ("strategy=fsdp", "strategy.wrap=size", "strategy.wrap_parameters=1000"),
    "hsdp": ("strategy=hsdp", "strategy.shard=2"),
    "pipeline": ("strategy=mesh", "strategy.pipeline=2"),
    "tensor": ("strategy=mesh", "strategy.tensor=2"),  # in elastic: refused without logical_tensor
    "parameter_server": ("strategy=parameter_server",),
    "hybrid": ("strategy=hybrid_parameter_server",),
    "local_sgd": ("strategy=local_sgd",),
    "diloco": ("strategy=diloco",),
    "streaming_diloco": ("strategy=streaming_diloco",),
    "easgd": ("strategy=easgd",),
}
MODES = ("seeded", "deterministic", "elastic")
SIZES = (1, 2, 4)
ONLY_AT_ONE_SIZE = ("ddp_compressed", "local_sgd", "diloco", "streaming_diloco", "easgd")
SIZES_OF = {
    "single": (1,),
    "parameter_server": (2, 4),
    "hybrid": (2, 4),
    "hsdp": (4,),
    "pipeline": (2, 4),
    "tensor": (2, 4),
}
EXTRAS = {
    "plain": (),
    "accumulated": ("logical_ranks=8", "clip_norm=0.5"),
    "clipped": ("clip_norm=0.5", "ema.decay=0.9"),
    "bf16": ("precision=bf16",),
}
KILLED = ("launcher.max_restarts=1", "checkpoint.every=2", "faults=[{action: kill, rank: 0, step: 4}]")
HEALED = ("reproducibility=elastic", "strategy.on_failure=heal", "faults=[{action: kill, rank: 1, step: 3}]")
RESUMED = ("reproducibility=elastic", "steps=3")
RESUMES = ("steps=6", "cluster.processes=2")
COMMON = ("logger=none", "cluster.threads=1", "log_every=2")
Words = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A run by the words of its command; with ``then``, it is resumed with these after its end."""

    name: str
    words: Words
    then: Words = ()


def cases(all_: bool) -> Iterator[Case]:
    """Yield all cases; without ``all_``, a subset that covers every pair of choices."""
    grid = [row for row in product(RECIPES, STRATEGIES, MODES, SIZES, EXTRAS) if _trains(*row)]
    for recipe, strategy, mode, size, extra in grid if all_ else covering(grid):
        words = (*RECIPES[recipe], *STRATEGIES[strategy], f"reproducibility={mode}", f"cluster.processes={size}")
        yield Case(f"{recipe} {strategy} {mode} {size} {extra}", (*words, *EXTRAS[extra]))
    for strategy, own in STRATEGIES.items():
        recipe = "stdlib_lm" if strategy in ("pipeline", "tensor") else "digits"
        size = 1 if strategy == "single" else 4
        words = (*RECIPES[recipe], *own, "steps=6", f"cluster.processes={size}")
        yield Case(f"{recipe} {strategy} killed", (*words, *KILLED))
        yield Case(f"{recipe} {strategy} healed", (*words, *HEALED))
        yield Case(f"{recipe} {strategy} resumed", (*words, *RESUMED), RESUMES[: 1 if strategy == "single" else 2])


def _trains(recipe: str, strategy: str, mode: str, size: int, extra: str) -> bool:
    """Return whether such a run trains; the others are refused before the start."""
    if size not in SIZES_OF.get(strategy, SIZES) or (mode == "elastic" and strategy in ONLY_AT_ONE_SIZE):
        return False
    if recipe == "gan":
        return strategy not in ("pipeline", "tensor", "hybrid", "ddp_compressed")
    return recipe != "word2vec" or strategy in ("single", "parameter_server", "hybrid")


def covering(grid: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return rows of ``grid`` that cover every pair of values found in two of its columns."""

    def pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
        return {(i, row[i], j, row[j]) for i in range(len(row)) for j in range(i)}

    missing = set().union(*map(pairs, grid))
    chosen = []
    while missing:
        best = max(grid, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def end_of(tree: Path, case: Case) -> str:
    """Train with the code in ``tree``; return the result's digests, or the command's last line."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "WORLDSIZE"))}
    paths = os.pathsep.join([str(tree / "framework"), str(tree)])
    environment = {**kept, "PYTHONPATH": paths, "COLUMNS": "500", "PYTHONSAFEPATH": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "worldsize", *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "recipes/gan/conf/recipe/gan.yaml"
        own.parent.mkdir(parents=True)
        own.write_text(GAN)
        done = run("train", *case.words, *COMMON)
        results = list(Path(folder).rglob("result.json"))
        if results and case.then:
            done = run("resume", str(results[0].parent), *case.then)
        if done.returncode or not results:
            last = done.stderr.strip().splitlines()[-1:] or [""]
            said = re.sub(r"[0-9-]{10}_[0-9a-f_]+", "RUN", last[0].replace(folder, "FOLDER"))
            return f"exit code {done.returncode}: {said}"
        result = json.loads(results[0].read_text())
        return f"{result['state_digest'][:16]} {result['metrics_digest'][:16]} {result['samples']} samples"


def before(revision: str, chosen: Sequence[Case]) -> dict[str, str]:
    """Return each case's result in ``revision``, from this machine's cache where available."""
    commit = git("rev-parse", revision)
    file = KEPT / f"{commit[:12]}-{platform.node()}.json"
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    if all(case.name in known for case in chosen):
        return known
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            known |= ends(tree, [case for case in chosen if case.name not in known])
        finally:
            git("worktree", "remove", "--force", str(tree))
    KEPT.mkdir(exist_ok=True)
    file.write_text(json.dumps(known, indent=1, sort_keys=True))
    return known


def ends(tree: Path, chosen: Sequence[Case]) -> dict[str, str]:
    """Return each case's result in ``tree``, two at a time."""
    with ThreadPoolExecutor(2) as threads:
        found: dict[str, str] = {}
        for case, end in zip(chosen, threads.map(partial(end_of, tree), chosen), strict=True):
            found[case.name] = end
            print(f"\r{tree.name}: {len(found)} of {len(chosen)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Compare, print the differences, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("-k", default="", help="only cases with this word")
    asked = parser.parse_args()
    chosen = [case for case in cases(asked.all) if asked.k in case.name]
    expected = before(asked.revision, chosen)
    found = ends(REPOSITORY, chosen)
    others = [name for name in found if found[name] != expected[name]]
    for name in others:
        print(f"{name}\n  before {expected[name]}\n  now    {found[name]}")
    golden = git("diff", "--stat", asked.revision, "--", "tests/config/golden")
    refused = sum(end.startswith("exit") for end in found.values())
    print(f"{len(found)} cases ({refused} refused): {len(others)} end otherwise{golden and f'; golden: {golden}'}")
    sys.exit(bool(others or golden))


if __name__ == "__main__":
    main()
