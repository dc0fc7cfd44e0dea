"""Stand in for ``uv`` when the documentation's commands are tested: shorten them and run them warm.

Commands that are equal once they are shortened run only once; the others repeat the recorded output. This module
imports only the standard library plus :mod:`tests.support.warm`; the program that :func:`program` writes starts it.
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

from tests.support import warm

# environment variables: kind of the block (exact: its output depends on numbers), and folder of recorded outputs
HOW, SAID = "DOCUMENTED_HOW", "DOCUMENTED_SAID"
_GPT = ("recipe.width=16", "recipe.depth=4", "recipe.heads=4", "recipe.context=8", "recipe.test_bytes=500")
# only composed or rendered, because each would import or read data for seconds; other tests train with them
_COMPOSED = re.compile(r"^(recipe=(hf_causal_lm|word2vec|click_through)|logger\.mode=\w+)$")
_RENDERED = re.compile(r"^(strategy=(?!ddp$)\w+|compile=true)$")
_LEAST_STEPS = {"faults=": 3, "world_sizes=": 5}
_GROUP = re.compile(r"^\+(cluster|strategy)=")
_SMALLER = (  # intervals that a short run would not reach, and more processes and sweep points than needed
    (r"^(checkpoint\.every|evaluate_every|strategy\.inner_steps)=[1-9]\d*$", r"\1=1"),
    (r"^cluster\.processes=[48]$", "cluster.processes=2"),
    (r"^cluster\.processes=5$", "cluster.processes=3"),
    (r"^cluster\.timeout=.*$", "cluster.timeout=10"),
    (r"^(world_sizes|accumulations|strategies)=(\w+),.*$", r"\1=\2"),
    (r"^(\w+=[^,\[]+,[^,\[]+),[^\[]+$", r"\1"),
    (r"^hydra\.sweeper\.n_trials=\d+$", "hydra.sweeper.n_trials=2"),
    (r"^profile\.steps=.*$", "profile.steps=[1,2]"),
    (r"\bstep: \d+", "step: 2"),
)
_ON_TWO_NODES = ((r"^cluster\.nodes=.*", "cluster.nodes=2"), (r"^strategy\.servers=.*", "strategy.servers=1"))
_NOT_HERE = re.compile(r"^cluster\.(gpus_per_node|processes_per_node|time)=")
_DEFAULT = re.compile(r"^(cluster=laptop|cluster\.processes=2|recipe=digits|strategy=ddp|reproducibility=seeded)$")
_OF_NO_MATTER = re.compile(  # options that do not change which code runs
    r"^(seed=\d+|(lr|batch_size|logical_ranks|evaluate_every|model|recipe\.(context|test_bytes|width))=.*|checkpoint=none"
    r"|faults=\[\{action: sleep, rank: \d, seconds: [\d.]+\}\])$"
)


def program(folder: Path, zygote: str, python: Path) -> None:
    """Write the programs ``uv`` and ``pip`` into ``folder``."""
    root = str(Path(__file__).parents[2])
    head = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {root!r})\nfrom tests.docs import uv\n"
    (folder / "uv").write_text(f"{head}uv.main({zygote!r}, {str(python)!r})\n")
    (folder / "pip").write_text("#!/bin/sh\n")  # worldsize is already installed
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
            sys.exit(0)  # these very tests
        case ["python", "-m", "worldsize.testing.hosts", *rest]:
            sys.exit(_on_hosts(rest))
        case ["train.py", *rest]:
            words = ["train.py", *scaled(rest, how, python)]
        case ["worldsize", "plan", *rest]:  # its own tests measure steps
            chosen = next((word.partition("=")[2] for word in rest if word.lstrip("+").startswith("strategy=")), "ddp")
            given = [*(() if "--compute" in rest else ("--compute", "250ms")), "--strategies", chosen]
            words = ["worldsize", "plan", *given, *scaled(rest, "exact", python)]
        case ["worldsize", "doctor", *rest]:  # loopback is slower than declared
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
    """Shorten a command to a run of two steps on this machine, so that commands that run the same code become equal."""
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
    if how != "exact" and "recipe=lightning_module" not in kept:  # its DataLoaders have to agree with the options
        needs = ("early_stopping.metric=", "schedule_metric=")  # evaluations
        is_asked = any(word.startswith(needs) for word in kept)
        kept = [word for word in kept if is_asked or not _OF_NO_MATTER.match(word)]
    for pattern, smaller in (*_SMALLER, *(_ON_TWO_NODES if there else ())):
        kept = [re.sub(pattern, smaller, word) for word in kept]
    length = next((steps for key, steps in _LEAST_STEPS.items() if any(word.startswith(key) for word in kept)), 2)
    gpt = _GPT if "recipe=stdlib_lm" in kept else ()
    steps = [] if has_epochs(kept) else [f"steps={length}"]
    return [*kept, *steps, "log_every=1", "cluster.threads=1", "logger=none", *gpt]


def has_epochs(words: Sequence[str]) -> bool:
    """Return whether the length of a run is given in epochs, on the command line or by the recipe's YAML."""
    given = dict(word.lstrip("+").split("=", 1) for word in words)
    if given.get("epochs") == "null":
        return False
    name = given.get("recipe", "digits")
    folders = (Path(), Path("recipes", name), Path(__file__).parents[2] / "plugins" / name)
    texts = [path.read_text() for folder in folders for path in folder.glob(f"conf/recipe/{name}.yaml")]
    return "epochs" in given or any(re.search("^epochs:", text, re.M) for text in texts)


def canonical(values: Sequence[str]) -> list[str]:
    """Sort the words, keep the last value of each key, and drop defaults."""
    last = {word.partition("=")[0]: word for word in values}
    return sorted(word for word in last.values() if not _DEFAULT.match(word))


def _there(given: dict[str, str], how: str, python: str) -> list[str]:
    """Return options for where processes run, in place of the page's."""
    if how == "slurm":
        return [f"launcher.python={python}", "launcher.wait=true"]
    if given.get("cluster") == "ssh":
        return ["cluster.hosts=[h1,h2]", "cluster.folder=null", f"cluster.python={python}", "run.root=runs"]
    return []


def _on_hosts(words: Sequence[str]) -> int:
    """Run the first command of a page on two hosts, and only render the others."""
    recorded = Path("said_on_hosts")
    if recorded.exists():
        shown = subprocess.run(words[words.index("uv") :], env={**os.environ, HOW: "show"}, stdout=subprocess.PIPE)
        print(recorded.read_text())
        return shown.returncode
    command = [sys.executable, "-m", "worldsize.testing.hosts", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    recorded.write_text(done.stdout)
    print(done.stdout)
    return done.returncode


def _once(zygote: str, python: str, words: Sequence[str]) -> NoReturn:
    shown = "launch=show" in words
    pattern, same = (
        (r"\d+", "#") if shown else (r"interrupted_\d+", "interrupted")
    )  # rendered commands that differ only in numbers are run once
    key = json.dumps(["show" if shown else os.environ[HOW], *(re.sub(pattern, same, word) for word in words)])
    recorded = Path(os.environ[SAID], hashlib.sha256(key.encode()).hexdigest())
    if not recorded.exists():
        begun, texts = time.monotonic(), [recorded.with_suffix(f".{os.getpid()}{kind}") for kind in (".out", ".err")]
        with texts[0].open("wb") as out, texts[1].open("wb") as err:
            code = _run(zygote, python, words, (0, out.fileno(), err.fileno()))
        outcome = {"words": words, "seconds": time.monotonic() - begun, "code": code}
        draft = recorded.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({**outcome, "out": texts[0].read_text(), "err": texts[1].read_text()}))
        draft.rename(recorded)
    outcome = json.loads(recorded.read_text())
    sys.stdout.write(outcome["out"])
    sys.stderr.write(outcome["err"])
    sys.exit(outcome["code"])


def _run(zygote: str, python: str, words: Sequence[str], streams: Sequence[int]) -> int:
    with warm.ask(zygote, words, cwd=os.getcwd(), environment=os.environ, streams=streams, executable=python) as line:
        return int(line.recv(64) or 70)
