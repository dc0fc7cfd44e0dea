"""Fixtures shared by all tests, above all real runs of train.py in a folder of their own."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.clusters import slurm as real
from worldsize.testing import hosts as namespaces
from worldsize.world.scratch import private_folder

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # many containers set it: each process would compile its imports
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported, after this file and not by the
# process that only distributes tests; threads of many small models would spin for the same few cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """A finished run of train.py."""

    code: int
    output: str
    error: str
    folder: Path | None

    def json(self, name: str) -> Any:
        assert self.folder is not None, self.error
        return json.loads((self.folder / name).read_text())

    def steps(self) -> list[dict[str, Any]]:
        assert self.folder is not None, self.error
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == "step"]


Train = Callable[..., Run]
Once = Callable[[str, Callable[[Path], None]], Path]


def environment(**changes: str) -> dict[str, str]:
    """Return the test's environment without a wandb key, so that nothing leaves the machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return {**kept, "WANDB_MODE": "offline", "COLUMNS": "120", **changes}


def folders(root: Path) -> list[Path]:
    """Return the folders of all runs below ``root``, while others may write and remove checkpoints there."""
    return sorted(Path(folder) for folder, _, files in os.walk(root) if "run_manifest.json" in files)


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command that has ended."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


def pytest_configure(config: pytest.Config) -> None:
    """Start the zygote once for all processes of a test run; it imports nothing before its first request."""
    if warm.ZYGOTE in os.environ:
        return
    folder = private_folder()
    path = folder / "socket"
    spare = "-" * 4000  # its children write their own command lines there
    zygote = subprocess.Popen([sys.executable, str(Path(__file__).with_name("zygote.py")), str(path), spare])
    while not path.exists():
        assert zygote.poll() is None
        time.sleep(0.005)
    os.environ[warm.ZYGOTE] = str(path)

    def end() -> None:
        del os.environ[warm.ZYGOTE]
        zygote.kill()
        zygote.wait()
        shutil.rmtree(folder)

    config.add_cleanup(end)


# tests that take minutes together and are run by the gate: real clusters, commands of the documentation, whole recipes,
# installations, every strategy killed on a heap in disorder, the contract of each strategy and plugin at many sizes,
# what trains under every strategy, searches, and what imports other people's large libraries in processes of its own
HEAVY = (
    "cli/test_evaluate.py",
    "cli/test_export.py",
    "cli/test_plan.py",
    "cli/test_rehearse.py",
    "cli/test_reproduce.py",
    "cli/test_scale.py",
    "launch/test_sweep.py",
    "clusters",
    "contract",
    "docs/test_commands.py",
    "train/test_averaging.py",
    "faults/test_healing_of_fsdp.py",
    "faults/test_healing_of_mesh.py",
    "faults/test_healing_of_shards.py",
    "faults/test_kills_within_steps.py",
    "faults/test_recovery.py",
    "faults/test_stream_recovery.py",
    "launch/test_own_launcher.py",
    "launch/test_torchrun.py",
    "observe/test_wandb.py",
    "optimizers/test_runs.py",
    "plan/rehearsal/test_faults.py",
    "plan/rehearsal/test_real_processes.py",
    "plan/rehearsal/test_talking.py",
    "plugins/test_agreement.py",
    "plugins/test_contract.py",
    "plugins/test_easgd.py",
    "plugins/test_hf_trainer_runs.py",
    "plugins/test_mlflow.py",
    "plugins/test_runs.py",
    "recipes",
    "strategies/parameter_server/test_runs.py",
    "strategies/parameter_server/test_standby.py",
    "strategies/parameter_server/test_tables.py",
    "strategies/parameter_server/test_update_runs.py",
    "strategies/test_frozen_parameters.py",
    "strategies/test_memberships_of_meshes.py",
    "strategies/test_mesh.py",
    "strategies/test_stdlib_lm.py",
    "strategies/test_wrapping.py",
    "test_wheel.py",
    "testing/test_importing.py",
)


# what a file says in which some test, but not each, has a mark
SAYS = {"heavy": ("mark.heavy",), "slow": ("mark.slow",), "bits": ("mark.bits", "Contract"), "gpu": ("DEVICES", "CUDA")}


@cache
def is_heavy(path: Path) -> bool:
    return any(path.is_relative_to(Path(__file__).parent.joinpath(*each.split("/"))) for each in HEAVY)


@cache
def may_have(mark: str, path: Path) -> bool:
    return (mark == "heavy" and is_heavy(path)) or any(words in path.read_text() for words in SAYS[mark])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of which ``-m`` chooses no test: each process would import all of them."""
    marks = config.getoption("markexpr")
    if not collection_path.match("test_*.py"):
        return None
    if marks == "not slow and not heavy and not gpu":
        return is_heavy(collection_path) or None
    return (marks in SAYS and not may_have(marks, collection_path)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collection, which would scan all of them again and again and find nothing."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries would say at the exit what was never freed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and put first those that may take minutes, of clusters and with a limit of their own.

    The contract's own tests of bits are marked here, since projects that use the contract do not have this mark. Those
    of a strategy that contract/test_bits.py kills and resumes too are left to that under narrower vectors.
    """
    for item in items:
        resumes, updates = (
            item.name.startswith(f"test_{name}") for name in ("a_resumed_run_ends", "several_updates_a")
        )
        if updates or (resumes and not item.get_closest_marker("killed")):
            item.add_marker(pytest.mark.bits)
        if is_heavy(item.path) and not item.get_closest_marker("slow"):  # the gate leaves those out
            item.add_marker(pytest.mark.heavy)
        for mark in SAYS:
            if item.get_closest_marker(mark) and not may_have(mark, item.path):
                raise pytest.UsageError(
                    f"{item.path} has the mark {mark} without saying {SAYS[mark]}: -m leaves it out"
                )
    items.sort(key=lambda item: not ("clusters" in item.path.parts or item.get_closest_marker("timeout")))


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """``command("train", "steps=3", cwd=..., environment=...)`` runs worldsize in a process of its own.

    Argument ``python`` is the interpreter that the command starts other processes with.
    """

    def run(
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str],
        timeout: float = 240.0,
        python: str | Path = sys.executable,
    ) -> Done:
        folder = tmp_path_factory.mktemp("command")
        output, error = folder / "stdout", folder / "stderr"
        with Path(os.devnull).open() as nothing, output.open("wb") as first, error.open("wb") as second:
            line = warm.ask(
                os.environ[warm.ZYGOTE],
                ["worldsize", *arguments],
                cwd=str(cwd),
                environment=environment,
                streams=[nothing.fileno(), first.fileno(), second.fileno()],
                executable=str(python),
            )
        with line:
            line.settimeout(timeout)
            code = int(line.recv(64))
        return Done(code, output.read_text(), error.read_text())

    return run


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has imported worldsize already, which launchers start their processes with."""
    return warm.interpreter(tmp_path_factory.mktemp("warm"), os.environ[warm.ZYGOTE])


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Slurm]:
    """Slurm with two nodes."""
    if why := real.missing():
        pytest.skip(why)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    with real.running(tmp_path_factory.mktemp("slurm"), port=17_000 + 100 * number) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[namespaces.Hosts]:
    """Two hosts with a network between them."""
    if why := namespaces.missing():
        pytest.skip(why)
    name = f"ws{os.getpid()}"
    with namespaces.running(tmp_path_factory.mktemp("hosts"), name=name, count=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[namespaces.Hosts]:
    """Four hosts with links of 1 Gbit/s."""
    if why := namespaces.missing():
        pytest.skip(why)
    with namespaces.running(tmp_path_factory.mktemp("four"), name=f"wd{os.getpid()}", count=4) as cluster:
        cluster.shape("1gbit")
        yield cluster


@pytest.fixture(scope="session")
def train_in(command: Command) -> Callable[[Path], Train]:
    """``train_in(folder)`` is a ``train`` that trains in ``folder``, for runs that several tests look at."""

    def at(folder: Path) -> Train:
        def run(*arguments: str, logger: str = "none", python: str | Path = sys.executable, **changes: str) -> Run:
            before = set(folders(folder / "runs"))
            words = ("train", f"logger={logger}", *arguments)
            done = command(*words, cwd=folder, environment=environment(**changes), python=python)
            new = [run_folder for run_folder in folders(folder / "runs") if run_folder not in before]
            return Run(done.returncode, done.stdout, done.stderr, new[0] if new else None)

        return run

    return at


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, fill)`` is a folder that ``fill(folder)`` fills, and that nobody changes then.

    It is filled once for all processes of a test run, by the one that needs it first; the others wait for it.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"

    def filled(name: str, fill: Callable[[Path], None]) -> Path:
        folder = root / hashlib.sha256(name.encode()).hexdigest()[:16]
        root.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            complete = folder.with_suffix(".complete")
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what is left if it failed
                folder.mkdir()
                fill(folder)
                complete.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def reference_run(train_in: Callable[[Path], Train], once: Once) -> Callable[..., Run]:
    """``reference_run("steps=3", ...)`` is a complete run with these options, of which there is one in a test run."""

    def run(*options: str, **changes: str) -> Run:
        def fill(folder: Path) -> None:
            trained = train_in(folder)(*options, **changes)
            assert trained.code == 0, trained.error

        (folder,) = folders(once("\n".join((*options, *changes.values())), fill))
        return Run(0, "", "", folder)

    return run


@pytest.fixture
def train(tmp_path: Path, train_in: Callable[[Path], Train]) -> Train:
    """``train("steps=3", ...)`` trains in ``tmp_path`` without wandb, and waits for the end."""
    return train_in(tmp_path)


@pytest.fixture
def environment_without_wandb() -> dict[str, str]:
    return environment()


@pytest.fixture
def change_workers(command: Command) -> Callable[..., str]:
    """``change_workers(folder, "add", "2")`` is what ``worldsize workers`` says of a running job; it must succeed."""

    def run(folder: Path, *words: str) -> str:
        done = command("workers", *words, "--run", str(folder), cwd=folder, environment=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def begun() -> Callable[..., Path]:
    """``begun(root)`` waits until a run below ``root`` has logged a step after ``after``, and returns its folder."""
    return _begun


def _begun(root: Path, after: int = 3) -> Path:
    deadline = time.monotonic() + 180
    while True:
        with suppress(FileNotFoundError):  # a folder may disappear while it is searched
            for file in root.rglob("metrics.jsonl"):
                lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
                if lines and json.loads(lines[-1])["step"] > after:
                    return file.parent
        assert time.monotonic() < deadline
        time.sleep(0.05)  # each look walks through the folders
