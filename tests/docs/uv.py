"""Plays ``uv`` where a block of the documentation is tried: commands are made short and cheap, and are run warm.

``uv run train.py`` with words that were seen before is not run again: it says what it said then. Imports the standard
library only; started as a program of its own by what :func:`program` writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests import warm

HOW, SAID = "DOCUMENTED_HOW", "DOCUMENTED_SAID"  # variables: of what kind the block is, and the folder of what was said
_CHEAP = {
    "digits": (),
    "stdlib_lm": ("recipe.width=16", "recipe.depth=4", "recipe.heads=4", "recipe.context=8", "recipe.test_bytes=500"),
    "hf_causal_lm": ("recipe.config.hidden_size=16", "recipe.config.intermediate_size=16", "recipe.test_tokens=300"),
    "word2vec": ("recipe.dim=4",),
    "click_through": ("data.rows=2000", "data.test_rows=200", "recipe.dim=4", "recipe.rows=100"),
}
_SHORT = ("log_every=1", "cluster.threads=1")
_RENDERED = {"recipe=hf_causal_lm", "strategy=mesh"}  # seconds of imports in each process; their own tests train them
_SMALLER = (  # counts that a short run would not reach, and processes that need not be so many
    (r"^(checkpoint\.every|evaluate_every|strategy\.inner_steps)=[1-9]\d*$", r"\1=1"),
    (r"^cluster\.processes=[48]$", "cluster.processes=2"),
    (r"^(faults=.*)$", lambda found: re.sub(r"(step|seconds): [\d.]+", _sooner, found[1])),
)
_ON_SLURM = (r"^cluster\.nodes=.*", "cluster.nodes=2"), (r"^strategy\.servers=.*", "strategy.servers=1")
_NOT_HERE = re.compile(r"^cluster\.(gpus_per_node|time|partition|account|cpus_per_task|memory|setup)=")


def _sooner(found: re.Match[str]) -> str:
    return f"step: {min(int(found[2]), 2)}" if found[1] == "step" else f"seconds: {min(float(found[2]), 0.01):g}"


def program(folder: Path, zygote: str, python: Path) -> None:
    """Write programs ``uv``, ``pip`` and what else the blocks call into ``folder``."""
    root = str(Path(__file__).parents[2])
    head = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {root!r})\nfrom tests.docs import uv\n"
    (folder / "uv").write_text(f"{head}uv.main({zygote!r}, {str(python)!r})\n")
    (folder / "pip").write_text("#!/bin/sh\n")  # it is installed
    for name in ("uv", "pip"):
        (folder / name).chmod(0o755)


def main(zygote: str, python: str) -> NoReturn:
    words = sys.argv[1:]
    if words[:1] != ["run"]:
        sys.exit(f"uv {words[0]} is not for a test: mark the block")
    words = words[1:]
    while words[0].startswith("--"):  # --extra NAME, --group NAME
        words = words[2:]
    match words:
        case ["pytest", *_]:
            sys.exit(0)  # it is these tests
        case ["python", "-m", module, *rest]:
            os.execv(sys.executable, [sys.executable, "-m", module, *rest])
        case ["train.py", *rest]:
            _once(zygote, python, ["train.py", *scaled(rest, os.environ[HOW], python)])
        case ["worldsize", ("train" | "plan" | "scale") as name, *rest]:
            _once(zygote, python, ["worldsize", name, *scaled(rest, os.environ[HOW], python)])
        case ["worldsize", *_]:
            sys.exit(_run(zygote, python, words, (0, 1, 2)))
    sys.exit(f"{words[0]} is not for a test: mark the block")


def scaled(words: Sequence[str], how: str, python: str) -> list[str]:
    """The command's words, for a run of two steps on what there is."""
    if "--cfg" in words or "--help" in words:
        return list(words)
    given = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in words}
    if how == "show" or _RENDERED & set(words):
        gpus = ["cluster.processes=8"] if given.get("cluster") == "node" else []
        return [*words, *gpus, *([] if "launch" in given else ["launch=show"])]
    kept = [word for word in words if not _NOT_HERE.match(word)] if how in ("slurm", "hosts") else list(words)
    for pattern, smaller in (*_SMALLER, *(_ON_SLURM if how == "slurm" else ())):
        kept = [re.sub(pattern, smaller, word) for word in kept]
    length = ["epochs=0.1"] if "epochs" in given else [f"steps={3 if 'faults' in given else 2}"]
    cheap = [word for word in (*_SHORT, *_CHEAP.get(given.get("recipe", "digits"), ()))]
    return [*kept, *length, *cheap, *_silent(given), *_there(given, how, python)]


def _silent(given: dict[str, str]) -> list[str]:
    return [] if any(key.startswith("logger") for key in given) else ["logger=none"]


def _there(given: dict[str, str], how: str, python: str) -> list[str]:
    """Where the processes are, in place of what the page says."""
    if how == "slurm":
        return [f"launcher.python={python}", "launcher.wait=true"]
    if given.get("cluster") == "ssh":
        return ["cluster.hosts=[h1,h2]", "cluster.folder=null", f"cluster.python={python}", "run.root=runs"]
    return []


def _once(zygote: str, python: str, words: Sequence[str]) -> NoReturn:
    key = json.dumps([os.environ[HOW], *words])
    said = Path(os.environ[SAID], hashlib.sha256(key.encode()).hexdigest())
    if not said.exists():
        begun = time.monotonic()
        with Path(f"{said}.{os.getpid()}.out").open("w+b") as out, Path(f"{said}.{os.getpid()}.err").open("w+b") as err:
            code = _run(zygote, python, words, (0, out.fileno(), err.fileno()))
            facts = {"words": words, "seconds": time.monotonic() - begun, "code": code}
            texts = {"out": Path(out.name).read_text(), "err": Path(err.name).read_text()}
        temporary = said.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**facts, **texts}))
        temporary.rename(said)
    found = json.loads(said.read_text())
    sys.stdout.write(found["out"])
    sys.stderr.write(found["err"])
    sys.exit(found["code"])


def _run(zygote: str, python: str, words: Sequence[str], streams: Sequence[int]) -> int:
    with warm.ask(zygote, words, cwd=os.getcwd(), environment=os.environ, streams=streams, executable=python) as line:
        return int(line.recv(64) or 70)
