"""Plays ``uv`` where a block of the documentation is tried: commands are made short and cheap, and are run warm.

What several pages show is run once: a command whose words, made short, were seen before says what it said then.
Imports the standard library only; it is started as a program of its own, by what :func:`program` writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests import warm

# variables: of what kind the block is (exact: what it says depends on numbers), and the folder of what was said
HOW, SAID = "DOCUMENTED_HOW", "DOCUMENTED_SAID"
_GPT = ("recipe.width=16", "recipe.depth=4", "recipe.heads=4", "recipe.context=8", "recipe.test_bytes=500")
# seconds of imports or of data for each: the tests of these recipes, of strategies and of wandb train them
_COMPOSED = re.compile(r"^(recipe=(hf_causal_lm|word2vec|click_through)|logger\.mode=\w+)$")
_RENDERED = re.compile(r"^strategy=(?!ddp$)\w+$")
_LEAST_STEPS = {"faults=": 3, "world_sizes=": 5}
_GROUP = re.compile(r"^\+(cluster|strategy)=")
_SMALLER = (  # counts that a short run would not reach, and processes and points of a sweep that need not be so many
    (r"^(checkpoint\.every|evaluate_every|strategy\.inner_steps)=[1-9]\d*$", r"\1=1"),
    (r"^cluster\.processes=[48]$", "cluster.processes=2"),
    (r"^cluster\.processes=5$", "cluster.processes=3"),
    (r"^cluster\.timeout=.*$", "cluster.timeout=10"),
    (r"^(world_sizes|accumulations|strategies)=(\w+),.*$", r"\1=\2"),
    (r"^(\w+=[^,\[]+,[^,\[]+),[^\[]+$", r"\1"),
    (r"\bstep: \d+", "step: 2"),
)
_ON_TWO_NODES = ((r"^cluster\.nodes=.*", "cluster.nodes=2"), (r"^strategy\.servers=.*", "strategy.servers=1"))
_NOT_HERE = re.compile(r"^cluster\.(gpus_per_node|processes_per_node|time)=")
_DEFAULT = re.compile(r"^(cluster=laptop|cluster\.processes=2|recipe=digits|strategy=ddp|reproducibility=seeded)$")
_OF_NO_MATTER = re.compile(  # for what code is run
    r"^(seed=\d+|(lr|batch_size|logical_ranks|evaluate_every|model|recipe\.(context|test_bytes|width))=.*|checkpoint=none"
    r"|faults=\[\{action: sleep, rank: \d, seconds: [\d.]+\}\])$"
)


def program(folder: Path, zygote: str, python: Path) -> None:
    """Write programs ``uv`` and ``pip`` into ``folder``."""
    root = str(Path(__file__).parents[2])
    head = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {root!r})\nfrom tests.docs import uv\n"
    (folder / "uv").write_text(f"{head}uv.main({zygote!r}, {str(python)!r})\n")
    (folder / "pip").write_text("#!/bin/sh\n")  # it is installed
    for name in ("uv", "pip"):
        (folder / name).chmod(0o755)


def main(zygote: str, python: str) -> NoReturn:
    how, words = os.environ[HOW], sys.argv[1:]
    if words[:1] != ["run"]:
        sys.exit(f"uv {words[0]} is not for a test: mark the block")
    words = words[1:]
    while words[0].startswith("--"):  # --extra NAME, --group NAME
        words = words[2:]
    match words:
        case ["pytest", *_]:
            sys.exit(0)  # it is these tests
        case ["python", "-m", "worldsize.testing.hosts", *rest]:
            sys.exit(_on_hosts(rest))
        case ["train.py", *rest]:
            words = ["train.py", *scaled(rest, how, python)]
        case ["worldsize", "plan", *rest]:  # whose own tests take the steps
            chosen = next((word.partition("=")[2] for word in rest if word.lstrip("+").startswith("strategy=")), "ddp")
            given = [*(() if "--compute" in rest else ("--compute", "250ms")), "--strategies", chosen]
            words = ["worldsize", "plan", *given, *scaled(rest, "exact", python)]
        case ["worldsize", "doctor", *rest]:  # which would complain of the loopback's speed
            words = ["worldsize", "doctor", *scaled([*rest, "cluster.links.network.bandwidth=1e6"], how, python)]
        case ["worldsize", ("train" | "scale") as name, *rest]:
            words = ["worldsize", name, *scaled(rest, how, python)]
        case ["worldsize", *_]:
            pass
        case _:
            sys.exit(f"{words[0]} is not for a test: mark the block")
    if words[1] in ("status", "logs", "compare", "workers", "cancel"):
        sys.exit(_run(zygote, python, words, (0, 1, 2)))
    _once(zygote, python, words)


def scaled(words: Sequence[str], how: str, python: str) -> list[str]:
    """The command's words, for a run of two steps on what there is; the same for commands that run the same code."""
    flags = [word for word in words if "=" not in word or word.startswith("-")]
    values = [_GROUP.sub(r"\1=", word) for word in words if word not in flags]
    if "--cfg" in flags or "--help" in flags:
        return list(words)
    given = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in values}
    if any(map(_COMPOSED.match, values)):
        return [*flags, "--cfg", "job", *sorted(values)]
    if how == "show" or any(map(_RENDERED.match, values)):
        gpus = ["cluster.processes=8"] if given.get("cluster") == "node" else []
        shown = [] if "launch" in given else ["launch=show"]
        return [*flags, *sorted([*values, *gpus, *shown, "logger=none"])]
    return [*flags, *canonical([*_smaller(values, how), *_there(given, how, python)])]


def _smaller(values: Sequence[str], how: str) -> list[str]:
    there = how in ("slurm", "hosts")
    kept = [word for word in values if not (there and _NOT_HERE.match(word))]
    if how != "exact":
        kept = [word for word in kept if not _OF_NO_MATTER.match(word)]
    for pattern, smaller in (*_SMALLER, *(_ON_TWO_NODES if there else ())):
        kept = [re.sub(pattern, smaller, word) for word in kept]
    length = next((steps for key, steps in _LEAST_STEPS.items() if any(word.startswith(key) for word in kept)), 2)
    gpt = _GPT if "recipe=stdlib_lm" in kept else ()
    return [*kept, f"steps={length}", "log_every=1", "cluster.threads=1", "logger=none", *gpt]


def canonical(values: Sequence[str]) -> list[str]:
    """In order, the last of each key, without defaults."""
    last = {word.partition("=")[0]: word for word in values}
    return sorted(word for word in last.values() if not _DEFAULT.match(word))


def _there(given: dict[str, str], how: str, python: str) -> list[str]:
    """Where the processes are, in place of what the page says."""
    if how == "slurm":
        return [f"launcher.python={python}", "launcher.wait=true"]
    if given.get("cluster") == "ssh":
        return ["cluster.hosts=[h1,h2]", "cluster.folder=null", f"cluster.python={python}", "run.root=runs"]
    return []


def _on_hosts(words: Sequence[str]) -> int:
    """Two hosts for the first command of a page; the others of that page are rendered."""
    said = Path("said_on_hosts")
    if said.exists():
        shown = subprocess.run(words[words.index("uv") :], env={**os.environ, HOW: "show"}, stdout=subprocess.PIPE)
        print(said.read_text())
        return shown.returncode
    command = [sys.executable, "-m", "worldsize.testing.hosts", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    said.write_text(done.stdout)
    print(done.stdout)
    return done.returncode


def _once(zygote: str, python: str, words: Sequence[str]) -> NoReturn:
    shown = "launch=show" in words
    pattern, same = (
        (r"\d+", "#") if shown else (r"interrupted_\d+", "interrupted")
    )  # rendered once, whatever the numbers
    key = json.dumps(["show" if shown else os.environ[HOW], *(re.sub(pattern, same, word) for word in words)])
    said = Path(os.environ[SAID], hashlib.sha256(key.encode()).hexdigest())
    if not said.exists():
        begun, texts = time.monotonic(), [said.with_suffix(f".{os.getpid()}{kind}") for kind in (".out", ".err")]
        with texts[0].open("wb") as out, texts[1].open("wb") as err:
            code = _run(zygote, python, words, (0, out.fileno(), err.fileno()))
        found = {"words": words, "seconds": time.monotonic() - begun, "code": code}
        draft = said.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({**found, "out": texts[0].read_text(), "err": texts[1].read_text()}))
        draft.rename(said)
    found = json.loads(said.read_text())
    sys.stdout.write(found["out"])
    sys.stderr.write(found["err"])
    sys.exit(found["code"])


def _run(zygote: str, python: str, words: Sequence[str], streams: Sequence[int]) -> int:
    with warm.ask(zygote, words, cwd=os.getcwd(), environment=os.environ, streams=streams, executable=python) as line:
        return int(line.recv(64) or 70)
