"""Every command of the documentation runs in bash as shown, with a ``uv`` that makes it cheap."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clusters.slurm import Slurm
from tests.docs import uv
from tests.docs.blocks import REPOSITORY, Block, blocks, files, pages
from tests.support import warm
from tests.support.runs import Command, environment
from worldsize.testing.hosts import Hosts

Bash = Callable[..., None]
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]  # one test runs all blocks of a page


def of_pages(*hows: str) -> pytest.MarkDecorator:
    """Parametrize a test by the pages that have blocks of these kinds."""
    chosen = [page for page in pages() if any(block.how in hows for block in blocks(page))]
    rows = [pytest.param(page, id=str(page.relative_to(REPOSITORY))) for page in chosen]
    return pytest.mark.parametrize("page", rows)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Path:
    """Runs to substitute in pages: a complete one, and a failed one that can be resumed."""
    folder = tmp_path_factory.mktemp("documented")
    words = ("train", "logger=none", "reproducibility=elastic", "checkpoint.every=1", "log_every=1")
    ways = {"complete": ("steps=2",), "interrupted": ("steps=4", "faults=[{action: kill, step: 3}]")}
    for name, options in ways.items():
        done = command(*words, *options, f"run.name={name}", cwd=folder, environment=environment())
        assert done.returncode == (1 if name == "interrupted" else 0), done.stderr
    return folder / "runs"


@pytest.fixture
def project(page: Path, tmp_path: Path, runs: Path) -> Path:
    """A reader's folder with the page's files, and with finished runs."""
    folder = tmp_path / "project"
    shutil.copytree(runs, folder / "runs")
    for name, text in files(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def bash(project: Path, tmp_path: Path, warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Bash:
    """``bash(block)`` runs a block, and checks its exit code and its output."""
    tools, base = tmp_path / "tools", tmp_path_factory.getbasetemp()
    answers = (
        base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    ) / "said"  # shared by all processes of a test run
    tools.mkdir()
    answers.mkdir(exist_ok=True)
    uv.program(tools, os.environ[warm.ZYGOTE], warm_python)

    def run(block: Block, *, around: Sequence[str] = (), name: str | None = None, **variables: str) -> None:
        own = {
            "BROWSER": "true",
            uv.HOW: block.how if block.code == 0 else "exact",
            uv.SAID: str(answers),
            "PATH": f"{tools}:{os.environ['PATH']}",
            **variables,
        }
        done = subprocess.run(
            [*around, "bash", "-euo", "pipefail", "-c", filled(block.text, project / "runs" / "digits", name)],
            cwd=project,
            env=environment(**own),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == block.code, f"{block.place} ended with {done.returncode}:\n{done.stdout}"
        shown = ".*".join(map(re.escape, block.says.rstrip().split("...")))
        assert re.search(shown, done.stdout, re.S), f"{block.place} does not say {block.says!r}:\n{done.stdout}"

    return run


def filled(text: str, runs: Path, name: str | None) -> str:
    """Replace <run> in ``text`` by a run's name; each ``resume`` gets a separate run that can be resumed."""
    return "".join(_filled(line, runs, name) for line in text.splitlines(keepends=True))


def _filled(line: str, runs: Path, name: str | None) -> str:
    name = name or "complete"
    if " resume " in line:
        name = f"interrupted_{len(list(runs.iterdir()))}"
        shutil.copytree(runs / "interrupted", runs / name)
    line = re.sub("<run [AB]>", f"runs/digits/{name}", line).replace("runs/sweeps/<date>", "runs/digits")
    return (
        line.replace("<manifest>", f"runs/digits/{name}/run_manifest.json")
        .replace("<run>", name)
        .replace("<a>", name)
        .replace("<b>", name)
    )


@of_pages("run", "show")
def test_commands_run(page: Path, bash: Bash) -> None:
    for block in blocks(page):
        if block.how in ("run", "show"):
            bash(block)


@of_pages("slurm")
def test_commands_run_on_slurm(page: Path, bash: Bash, slurm: Slurm) -> None:
    for block in blocks(page):
        if block.how == "slurm":
            bash(block, **slurm.environment)


@of_pages("hosts")
def test_commands_run_on_two_hosts(page: Path, bash: Bash, hosts: Hosts) -> None:
    for block in blocks(page):
        if block.how == "hosts":  # a block that creates its own hosts runs outside of ours
            bash(block, around=() if "worldsize.testing.hosts" in block.text else hosts.wrap_command(1, []))


@of_pages("live")
def test_commands_run_while_a_run_is_trained(
    page: Path, bash: Bash, project: Path, command: Command, begun: Callable[..., Path]
) -> None:
    for block in blocks(page):
        if block.how == "live":
            _while_trained(block, bash, project, command, begun)


def _while_trained(block: Block, bash: Bash, project: Path, command: Command, begun: Callable[..., Path]) -> None:
    options = ("strategy=parameter_server", "cluster.processes=3", "steps=100000", "cluster.threads=1", "log_every=1")
    words = ("train", *options, "logger=none", "run.name=live", "faults=[{action: sleep, rank: null, seconds: 0.01}]")
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(command, *words, cwd=project, environment=environment())
        begun(project / "runs" / "digits" / "live", after=0)
        try:
            bash(block, name="live")
        finally:
            cancelled = command("cancel", "runs/digits/live", cwd=project, environment=environment())
        assert trained.result().returncode == 75, cancelled.stderr


@of_pages("exists")
def test_files_of_commands_that_are_not_run_are_there(page: Path) -> None:
    for block in blocks(page):
        if block.how == "exists":
            text = re.sub(r"<(\w+)>", r"\1", block.text)
            subprocess.run(["bash", "-n", "-c", text], check=True)
            scripts = [word for word in shlex.split(text, comments=True) if word.endswith(".py")]
            assert all((REPOSITORY / word).is_file() for word in scripts), f"{block.place}: {scripts}"
