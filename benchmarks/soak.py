"""Kill one long run at random points, many times, and compare its end with that of an undisturbed one.

uv run python benchmarks/soak.py kill 100        # SIGKILL of a random rank; the run restarts by itself
uv run python benchmarks/soak.py heal 100        # SIGKILL of a random rank; the others go on, and another joins them
uv run python benchmarks/soak.py terminate 20    # SIGTERM of a random rank; the run saves, exits with 75 and is resumed
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
WORLDSIZE = (sys.executable, "-c", "from worldsize.app import main; main()")
PROCESSES = 3
PREEMPTED = 75


def options(steps: int, processes: int = PROCESSES) -> list[str]:
    own = [f"steps={steps}", f"cluster.processes={processes}", "cluster.threads=1", "log_every=1", "logger=none"]
    return ["recipe=digits", "recipe.width=8", "checkpoint.every=50", "schedule=constant", *own]


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*WORLDSIZE, *arguments], cwd=folder, env=environment, **quiet)  # type: ignore[call-overload,no-any-return]


def workers(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def last_step(folder: Path) -> int:
    """Return the newest step in the run's metrics, 0 while there is none."""
    for path in folder.rglob("metrics.jsonl"):
        lines = path.read_bytes()[-2000:].split(b"\n")[:-1]
        if lines and lines[-1].startswith(b"{"):
            return int(json.loads(lines[-1])["step"])
    return 0


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the run gets beyond ``step``; return False if it ends first."""
    while last_step(folder) <= step:
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    return True


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("result.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def undisturbed(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        start(Path(name), "train", *arguments).wait()
        return result(Path(name))


def kill(times: int, chance: random.Random) -> None:
    kill_often(times, chance, options(100 * times), [])


def heal(times: int, chance: random.Random) -> None:
    common = [*options(100 * times, processes=4), "reproducibility=elastic"]
    kill_often(times, chance, common, ["strategy.on_failure=heal"])


def kill_often(times: int, chance: random.Random, common: list[str], own: list[str]) -> None:
    steps, seconds = 100 * times, list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(folder, "train", *common, *own, f"launcher.max_restarts={2 * times}")
        wait_for_step(folder, 0, process)
        while len(seconds) < times and process.poll() is None:
            before = last_step(folder)
            wait_for_step(folder, before + chance.randrange(1, 60), process)
            before, begun = last_step(folder), time.perf_counter()
            os.kill(chance.choice(workers(process.pid)), signal.SIGKILL)
            if wait_for_step(folder, before + 1, process):  # the step in which it was killed may still be logged
                seconds.append(time.perf_counter() - begun)
            print(f"\r{len(seconds)} of {times} at step {last_step(folder)} of {steps}", end="", file=sys.stderr)
        process.wait()
        disturbed = result(folder)
    seconds.sort()
    print(f"\n{len(seconds)} kills; kill to next new step: median {statistics.median(seconds):.2f} s, "
          f"95th percentile {seconds[int(0.95 * len(seconds))]:.2f} s, largest {seconds[-1]:.2f} s")  # fmt: skip
    report(disturbed, undisturbed(common))


def terminate(times: int, chance: random.Random) -> None:
    steps, lost = 200 * (times + 1), list[int]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(folder, "train", *options(steps))
        for number in range(times):
            wait_for_step(folder, last_step(folder) + chance.randrange(1, 100), process)
            os.kill(chance.choice(workers(process.pid)), signal.SIGTERM)
            code = process.wait()
            (run,) = folder.glob("runs/*/*")
            saved = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
            done = json.loads((run / "run_manifest.json").read_text())["attempts"][-1]["steps"][1]
            lost.append(done - saved if code == PREEMPTED else -1)
            print(f"\r{number + 1} of {times}, exit code {code}, step {saved}", end="", file=sys.stderr)
            process = start(folder, "resume", str(run))
        process.wait()
        disturbed = result(folder)
    print(f"\n{sum(steps_lost == 0 for steps_lost in lost)} of {times} lost no step")
    report(disturbed, undisturbed(options(steps)))


def report(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    same = [key for key in ("state_digest", "metrics_digest") if actual[key] == expected[key]]
    print(f"equal to the undisturbed run: {', '.join(same) or 'nothing'}; goodput {actual['goodput']['fraction']:.2f}")


if __name__ == "__main__":
    {"kill": kill, "heal": heal, "terminate": terminate}[sys.argv[1]](int(sys.argv[2]), random.Random(0))
