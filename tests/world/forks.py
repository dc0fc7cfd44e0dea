"""Fork with every recipe and optimizer and in every command that forks, and print forks that CUDA would refuse.

    python -m tests.world.forks      # in an empty folder, for the runs

It simulates one GPU found by NVML; the rest of CUDA is absent.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from worldsize import cli
from worldsize.config.compose import compose_only
from worldsize.launch.execute import build_checked_settings
from worldsize.world import processes

RUN = ("cluster.processes=2", "cluster.threads=1", "logger=none")
SMALL = ("recipe=digits", *RUN)
PROJECT = Path(__file__).parents[2]
LIGHTNING = (
    "module=tests.plugins.lightning_programs.Classifier",
    "datamodule=tests.plugins.lightning_programs.Points",
)
HF = (
    "recipe.trainer=tests.plugins.hf_programs.make_classifier",
    *("epochs=null", "steps=20", "batch_size=8", "lr=0.001", "clip_norm=0.5"),
)
BUILDS: tuple[tuple[tuple[str, ...], ...], ...] = (  # each row in one process
    (
        *(
            ("recipe=digits", "schedule=constant", f"optimizer={path.stem}")
            for path in sorted((PROJECT / "conf" / "optimizer").glob("*.yaml"))
        ),
        ("recipe=click_through",),
        ("recipe=word2vec",),
        ("recipe=stdlib_lm",),
        ("recipe=lightning_module", *(f"recipe.{key}" for key in LIGHTNING), "batch_size=24"),
    ),
    (  # transformers imports torchao's kernels, and they make the process unfit to fork
        ("recipe=hf_causal_lm",),
        ("recipe=hf_trainer", *HF),
    ),
)
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("train", "--multirun", *SMALL, "steps=1", "run.name=at_${seed}", "seed=1,2"),
    ("train", *SMALL, "steps=1", "run.name=written", "launch=write"),
    ("agent", "runs/digits/written"),
    ("resume", "runs/digits/written", "steps=2"),
    ("evaluate", "runs/digits/written"),
    ("reproduce", "runs/digits/at_1"),
    ("scale", *SMALL, "steps=5", "world_sizes=2"),
    ("plan", *SMALL, "cluster.device=cuda", "cluster.processes=1", "--compute", "1ms", "--strategies", "ddp"),
    ("rehearse", *SMALL, "steps=1"),
    ("doctor", *SMALL),
)
OTHERS = {  # commands that do not fork a process that may use a GPU
    **dict.fromkeys(("init", "new", "list", "image", "status", "logs"), "starts no Python process"),
    **dict.fromkeys(("cancel", "compare", "export", "report", "watch", "workers"), "starts no Python process"),
    **dict.fromkeys(("completion", "schema"), "starts no Python process"),
    "audit": "repeats parts of a run as reproduce does, by the commands train and resume",
    "prepare": "its processes cut text into tokens",
}
# for reproduce's Python
SITE = "import os\nfrom tests.world.forks import believe\nbelieve(os.getppid())\n"


def believe(leader: int) -> None:
    """Simulate a GPU, except in grandchildren of ``leader``, and print the caller of CUDA before a bad fork."""

    def report() -> None:
        if torch.cuda._is_in_bad_fork():
            os.write(1, f"bad fork: {' '.join(sys.argv[1:])}: {processes._askers}\n".encode())
        if os.getppid() != leader:
            torch.cuda._raw_device_count_nvml = lambda: 0

    torch.cuda._raw_device_count_nvml = lambda: 1
    # a driver that reports the GPU's properties, since imports read them
    torch._C._cuda_init = torch._C._cuda_getDeviceCount  # type: ignore[assignment]
    torch._C._cuda_getDevice = lambda: 0
    facts = SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
    torch.cuda._get_device_properties = lambda _: facts  # type: ignore[attr-defined]
    torch.cuda._queued_calls.clear()  # they check its properties, too
    os.register_at_fork(after_in_child=report)


def in_child(body: Callable[[], object], words: Sequence[str]) -> None:
    """Call ``body`` in a forked process with ``words`` as its command line, and print its exit code."""
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


def build(row: Sequence[Sequence[str]]) -> None:
    """Build recipes and their optimizers like ``worldsize train`` before it forks, and fork after each."""
    for words in row:
        sys.argv[1:] = words
        build_checked_settings(compose_only([*words, *RUN]))
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        print(f"built: {' '.join(words)}", flush=True)


def main() -> None:
    believe(os.getpid())
    for name in ("worker.process", *{words[0] for words in COMMANDS}):
        importlib.import_module(f"worldsize.{name}" if "." in name else f"worldsize.cli.{name}")
    with processes.ready_to_fork():  # its imports, once for all
        pass
    for row in BUILDS:
        in_child(partial(build, row), ["build"])
    (site := Path("site")).mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    os.environ["PYTHONPATH"] = f"{site.absolute()}{os.pathsep}{os.environ['PYTHONPATH']}"
    for words in COMMANDS:  # in the same folder, with the runs
        in_child(cli.main, words)


if __name__ == "__main__":
    main()
