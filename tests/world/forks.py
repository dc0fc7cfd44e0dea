"""Fork with every recipe and optimizer and in every command that does, and print each fork that CUDA would refuse.

    python -m tests.world.forks FOLDER      # FOLDER: an empty one, for the runs

It believes in one GPU that NVML has found; nothing else of CUDA is there.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from worldsize import app
from worldsize.config.compose import compose_only
from worldsize.driver.execute import checked
from worldsize.world import fork

RUN = ("steps=1", "cluster.processes=2", "cluster.threads=1", "checkpoint.every=1", "evaluate_every=0")
LEADER = os.getpid()
SMALL = ("recipe=digits", *RUN)
PROJECT = Path(__file__).parents[2]
RECIPES = ("digits", "stdlib_lm", "hf_causal_lm", "click_through", "word2vec")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("train", *SMALL, "run.name=first"),
    ("resume", "runs/digits/first", "steps=2"),
    ("evaluate", "runs/digits/first"),
    ("plan", *SMALL, "cluster.device=cuda", "cluster.processes=1", "--compute", "1ms", "--strategies", "ddp"),
    ("rehearse", *SMALL),
    ("doctor", *SMALL),
)


def report() -> None:
    """Print who asked CUDA before this process was forked, if CUDA refuses it; a worker goes on without a GPU."""
    if torch.cuda._is_in_bad_fork():
        os.write(1, f"bad fork: {' '.join(sys.argv[1:])}: {fork._askers}\n".encode())
    if os.getppid() != LEADER:
        torch.cuda._raw_device_count_nvml = lambda: 0


def in_child(body: Callable[[], object], words: Sequence[str]) -> None:
    """Call ``body`` with ``words`` as the command line in a forked process, and print its exit code."""
    child = os.fork()
    if child == 0:
        sys.argv = ["worldsize", *words]
        try:
            body()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"ended: {code}: {' '.join(words)}", flush=True)


def build(words: Sequence[str]) -> None:
    """Build the recipe and its optimizer as ``worldsize train`` does before it forks, then fork."""
    checked(compose_only(words))
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    torch.cuda._raw_device_count_nvml = lambda: 1
    os.register_at_fork(after_in_child=report)
    for name in ("worker.process", *{words[0] for words in COMMANDS}):
        importlib.import_module(f"worldsize.{name}" if "." in name else f"worldsize.app.{name}")
    optimizers = sorted(path.stem for path in (PROJECT / "conf" / "optimizer").glob("*.yaml"))
    chosen: list[tuple[str, ...]] = [("recipe=digits", "schedule=constant", f"optimizer={name}") for name in optimizers]
    chosen += [(f"recipe={name}",) for name in RECIPES]
    for words in chosen:
        in_child(partial(build, (*words, *RUN[:3])), words)
    for words in COMMANDS:  # in the same folder, which has the runs
        in_child(app.main, words)


if __name__ == "__main__":
    main()
