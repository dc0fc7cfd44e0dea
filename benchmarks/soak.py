"""Kill one long run at random points many times, and compare its result with an undisturbed run.

uv run python benchmarks/soak.py kill 100        # SIGKILL a random rank; the run restarts itself
uv run python benchmarks/soak.py heal 100        # SIGKILL a random rank every 2 s; the others continue, a new one joins
uv run python benchmarks/soak.py spare 20        # the same kills; a waiting spare replaces the rank
uv run python benchmarks/soak.py restart 20      # the same kills; all restart from the last checkpoint
uv run python benchmarks/soak.py cost 5          # overhead of healing per step, without failures
uv run python benchmarks/soak.py intervals 3     # checkpoint.every=auto and fixed intervals, with the same kills
uv run python benchmarks/soak.py simulated 5     # the same on a simulated clock, at three failure rates
uv run python benchmarks/soak.py heal 20 zero    # a different strategy; also for restart and cost
uv run python benchmarks/soak.py heal 20 fsdp strategy.shard=2  # and further options
uv run python benchmarks/soak.py terminate 20    # SIGTERM a random rank; the run saves, exits with 75, and is resumed
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
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
WORLDSIZE = (sys.executable, "-c", "from worldsize.cli import main; main()")
PROCESSES = 3
PREEMPTED = 75
HEAL = "strategy.on_failure=heal"
STRATEGY: list[str] = []  # from the command line


def options(steps: int, processes: int = PROCESSES) -> list[str]:
    own = [f"steps={steps}", f"cluster.processes={processes}", "cluster.threads=1", "log_every=1", "logger=none"]
    return ["recipe=digits", "recipe.width=8", "checkpoint.every=50", "schedule=constant", *own, *STRATEGY]


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*WORLDSIZE, *arguments], cwd=folder, env=environment, **quiet)  # type: ignore[call-overload,no-any-return]


def workers(launcher: int) -> list[int]:
    """Return the ids of the training processes, without the health monitor."""
    children = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return [pid for pid in children if name_of(pid).startswith("rank ")]


def name_of(pid: int) -> str:
    with suppress(OSError):  # the process has exited
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def last_step(folder: Path) -> int:
    """Return the last logged step of the run; 0 if there is none."""
    with suppress(FileNotFoundError), metrics_of(folder).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        lines = file.read().split(b"\n")[:-1]
        if lines and lines[-1].startswith(b"{"):
            return int(json.loads(lines[-1])["step"])
    return 0


@cache
def metrics_of(folder: Path) -> Path:
    """Return the metrics file of the run in ``folder``; cached, since searching repeatedly would slow down the run.

    Raises:
        FileNotFoundError: it does not exist yet.
    """
    for path in folder.rglob("metrics.jsonl"):
        return path
    raise FileNotFoundError(folder)


def wait_for_step(folder: Path, process: subprocess.Popen[bytes], more: int) -> bool:
    """Wait until the run has logged more than ``more`` new steps; return False if it ends first."""
    step = last_step(folder) + more
    while last_step(folder) <= step:
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    return True


def losses(folder: Path) -> int:
    """Return how many times the run has continued after losing a process."""
    with suppress(FileNotFoundError):
        return metrics_of(folder).with_name("events.jsonl").read_bytes().count(b'"lost": {"')
    return 0


def wait_for_next_step(folder: Path, process: subprocess.Popen[bytes], before: int) -> bool:
    """Wait until there are more than ``before`` losses, then for a new step; return False if the run ends."""
    while losses(folder) <= before:  # the interrupted step may still be logged before that
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    return wait_for_step(folder, process, 0)


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("result.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def undisturbed(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        start(Path(name), "train", *arguments).wait()
        return result(Path(name))


def kill(times: int, chance: random.Random) -> None:
    common = options(100 * times)
    kill_often(times, common, [], lambda now: wait_for_step(*now, chance.randrange(1, 60)), chance)


def every_two_seconds(own: list[str]) -> Callable[[int, random.Random], None]:
    def run(times: int, chance: random.Random) -> None:
        """Train 4 processes long enough for ``times`` kills at random points."""
        common = [*options(300 * times, processes=4), "reproducibility=elastic"]
        kill_often(times, common, own, lambda now: time.sleep(chance.uniform(1.5, 2.5)), chance)

    return run


def kill_often(
    times: int,
    common: list[str],
    own: list[str],
    pause: Callable[[tuple[Path, subprocess.Popen[bytes]]], Any],
    chance: random.Random,
) -> None:
    """Kill random processes of one run, and compare it with undisturbed runs.

    Goodput is the undisturbed time of the steps between the first and the last kill, divided by the time that they
    took. The undisturbed time is the mean of a run before and a run after, to average out other load on the machine.
    """
    expected = undisturbed(common)
    seconds, marks = list[float](), list[tuple[float, int]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(folder, "train", *common, *own, f"launcher.max_restarts={4 * times}")
        wait_for_step(folder, process, 0)
        while len(seconds) < times and process.poll() is None:
            pause((folder, process))
            step, before, begun = last_step(folder), losses(folder), time.perf_counter()
            marks.append((begun, step))
            try:
                os.kill(chance.choice(workers(process.pid)), signal.SIGKILL)
            except (IndexError, ProcessLookupError):
                continue
            goes_on = wait_for_next_step(folder, process, before) if HEAL in own else wait_for_step(folder, process, 1)
            if goes_on:
                seconds.append(time.perf_counter() - begun)
            print(f"\r{len(seconds)} of {times} at step {last_step(folder)}", end="", file=sys.stderr)
        process.wait()
        disturbed, code = result(folder), process.returncode
    (first, from_step), (last, to_step) = marks[0], marks[-1]
    seconds.sort()
    print(f"\n{len(seconds)} kills, exit {code}; from kill to next step: median {statistics.median(seconds):.2f} s, "
          f"95th percentile {seconds[int(0.95 * len(seconds))]:.2f} s, largest {seconds[-1]:.2f} s")  # fmt: skip
    took = (last - first) / (to_step - from_step)
    steps = [step_time(expected), step_time(undisturbed(common))]
    print(f"goodput by the clock: {statistics.mean(steps) / took:.3f} (a step took {1e3 * took:.2f} ms; undisturbed "
          f"{1e3 * steps[0]:.2f} ms before and {1e3 * steps[1]:.2f} ms after)")  # fmt: skip
    report(disturbed, expected)


def step_time(result_: dict[str, Any]) -> float:
    """Return the mean seconds per step of a run, including evaluations and saves."""
    return float(result_["samples"] / result_["samples_per_second"] / result_["steps"])


def terminate(times: int, chance: random.Random) -> None:
    steps, lost = 200 * (times + 1), list[int]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(folder, "train", *options(steps))
        for number in range(times):
            wait_for_step(folder, process, chance.randrange(1, 100))
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


def cost(times: int, chance: random.Random) -> None:
    """Compare the step time with healing and with restarts, in pairs of consecutive runs, 10 M parameters."""
    lm = ["recipe=stdlib_lm", "recipe.width=384", "recipe.depth=5", "recipe.context=64", "recipe.test_bytes=2000"]
    common = [*lm, "cluster.processes=2", "cluster.threads=1", "batch_size=8", "steps=60", "reproducibility=elastic"]
    ratios = []
    for _ in range(times):
        pair = [step_seconds([*common, "logger=none", "checkpoint=none", *STRATEGY, *own]) for own in ([], [HEAL])]
        ratios.append(pair[1] / pair[0])
        print(f"restart {1e3 * pair[0]:.1f} ms, heal {1e3 * pair[1]:.1f} ms, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")


def step_seconds(arguments: list[str]) -> float:
    """Return the median seconds per step of a run with these options, without the first ten steps."""
    with tempfile.TemporaryDirectory() as name:
        start(Path(name), "train", *arguments).wait()
        (path,) = Path(name).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [row for row in rows if row["event"] == "step" and row["step"] > 10]
        return float(statistics.median(max(row["step_seconds"]) for row in steps))


def intervals(times: int, chance: random.Random) -> None:
    """Compare checkpoint intervals under the same kills, one per 5 s on average."""
    declared = f"cluster.mtbf_hours={5 / 3600:.6f}"  # otherwise the run estimates the rate from its first failures
    choices = {"auto": ["checkpoint.every=auto"], "auto, rate declared": ["checkpoint.every=auto", declared]}
    fixed = {every: [f"checkpoint.every={every}"] for every in ("10", "40", "160")}
    ends: dict[str, list[tuple[float, float, int]]] = {choice: [] for choice in (*choices, *fixed)}
    for _ in range(times):
        pauses = [chance.expovariate(1 / 5) for _ in range(100)]
        for choice, own in {**choices, **fixed}.items():
            ends[choice].append(under_kills(own, pauses))
            seconds, goodput, kills = ends[choice][-1]
            print(f"{choice}: {seconds:.1f} s, goodput {goodput:.3f}, {kills} kills", file=sys.stderr, flush=True)
    best = min(sum(each[0] for each in ends[choice]) for choice in fixed)
    for choice, each in ends.items():
        seconds, goodput, kills = (statistics.mean(values) for values in zip(*each, strict=True))
        print(f"every {choice}: {seconds:.1f} s a run, {seconds * times / best:.3f} x the best fixed; "
              f"goodput {goodput:.3f}, {kills:.1f} kills")  # fmt: skip


def simulated(times: int, chance: random.Random) -> None:
    """Compare automatic and fixed intervals on a simulated clock, at three failure rates, with ``times`` seeds."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.worker.test_save_interval import Fixed, automatic, goodput

    seeds = [chance.randrange(1 << 30) for _ in range(times)]
    for mtbf in (600.0, 3600.0, 20_000.0):
        auto = statistics.mean(goodput(partial(automatic, declared=mtbf / 3600), mtbf, seed) for seed in seeds)
        fixed = {
            every: statistics.mean(goodput(lambda *_, every=every: Fixed(every), mtbf, seed) for seed in seeds)
            for every in (30, 60, 120, 240, 480, 960, 1920)
        }
        every = max(fixed, key=lambda each: fixed[each])
        print(f"a failure every {mtbf:.0f} s: auto {auto:.4f}, best fixed {fixed[every]:.4f} (every {every} steps), "
              f"ratio {auto / fixed[every]:.4f}, worst fixed {min(fixed.values()):.4f}")  # fmt: skip


def under_kills(chosen: list[str], pauses: list[float]) -> tuple[float, float, int]:
    """Train, and kill a worker ``pauses`` seconds after each restart; return seconds, goodput and number of kills.

    A run that fails twice at the same step ends, so each kill waits until the run is past the previous one's step.
    """
    own = ["recipe=digits", "recipe.width=32", "steps=4000", "cluster.processes=2", "cluster.threads=1"]
    options_ = [*own, "logger=none", "log_every=1", "launcher.max_restarts=1000", *chosen]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(folder, "train", *options_)
        wait_for_step(folder, process, 0)
        begun, kills, step = time.perf_counter(), 0, 0
        while has_trained(folder, process) and is_alive_after(process, pauses[kills]):
            while abs(last_step(folder) - step) < 3 and process.poll() is None:
                time.sleep(0.005)
            if alive := workers(process.pid):
                kills, step = kills + 1, last_step(folder)
                os.kill(alive[0], signal.SIGKILL)
                wait_for_others(process, alive)
        if code := process.wait():
            sys.exit(f"{' '.join(chosen)}: the run ended with exit code {code} after {kills} kills")
        return time.perf_counter() - begun, float(result(folder)["goodput"]["fraction"]), kills


def has_trained(folder: Path, process: subprocess.Popen[bytes]) -> bool:
    """Wait until three steps were logged after a restart, perhaps from a checkpoint; return False if the run ended."""
    seen = {last_step(folder)}
    while len(seen) < 5 and process.poll() is None:  # 3 new steps, the last step before, and the checkpoint's
        seen.add(last_step(folder))
        time.sleep(0.005)
    return process.poll() is None


def is_alive_after(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is None


def wait_for_others(process: subprocess.Popen[bytes], dead: list[int]) -> None:
    """Wait until a run has replaced all processes in ``dead``, or has ended."""
    while process.poll() is None and (not (now := workers(process.pid)) or {*now} & {*dead}):
        time.sleep(0.005)


def report(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    same = [key for key in ("state_digest", "metrics_digest") if actual[key] == expected[key]]
    print(f"equal to the undisturbed run: {', '.join(same) or 'nothing'}; goodput {actual['goodput']['fraction']:.2f}")


if __name__ == "__main__":
    modes = {
        "kill": kill,
        "heal": every_two_seconds([HEAL]),
        "spare": every_two_seconds([HEAL, "cluster.spares=1"]),
        "restart": every_two_seconds([]),
        "cost": cost,
        "intervals": intervals,
        "simulated": simulated,
        "terminate": terminate,
    }
    STRATEGY.extend(word if "=" in word else f"strategy={word}" for word in sys.argv[3:])
    modes[sys.argv[1]](int(sys.argv[2]), random.Random(0))
