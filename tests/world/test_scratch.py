"""Temporary folders are removed with their processes, also if those are killed, and no others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worldsize.cli import remove_leftovers
from worldsize.world import scratch
from worldsize.world.scratch import leftovers, private_folder, temporary_folder

REPOSITORY = Path(__file__).parents[2]
OPTIONS = ("recipe=digits", "recipe.width=4", "cluster.threads=1", "logger=none", "log_every=1")


@pytest.fixture
def spare() -> Iterator[Path]:
    """A folder for temporary files with a short name, required by sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def own(spare: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for this process's temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    return spare


def made_by_another(spare: Path, end: str) -> subprocess.Popen[str]:
    """Start a process that makes a private folder in ``spare``, and then runs ``end``."""
    code = f"import os; from worldsize.world.scratch import private_folder; private_folder(); {end}"
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(spare)}, text=True)


def test_the_folder_of_a_killed_process_is_left_and_those_of_living_ones_are_not(own: Path) -> None:
    mine = private_folder()
    assert leftovers() == []
    with made_by_another(own, "os.kill(os.getpid(), 9)") as killed:
        assert killed.wait() == -signal.SIGKILL
    assert [folder.parent for folder in leftovers()] == [own]
    assert mine not in leftovers()
    remove_leftovers()
    assert list(own.iterdir()) == [mine]


def test_the_folder_of_a_process_that_ends_by_itself_is_removed_at_once(own: Path) -> None:
    with made_by_another(own, "pass") as ended:
        assert ended.wait() == 0
    with pytest.raises(ValueError, match="planted"), temporary_folder():
        raise ValueError("planted")
    assert list(own.iterdir()) == []


def test_a_number_that_another_process_has_now_does_not_save_a_folder(own: Path) -> None:
    space, pid, start, rest = private_folder().name.removeprefix("worldsize_").split("_", 3)
    earlier = own / f"worldsize_{space}_{pid}_{int(start) - 1}_{rest}"
    elsewhere = own / f"worldsize_{'0' * 8}_{pid}_{int(start) - 1}_{rest}"
    unmarked = own / "worldsize_abcdefgh"
    for folder in (earlier, elsewhere, unmarked):
        folder.mkdir()
    assert leftovers() == [earlier]


def test_what_is_another_users_or_a_link_is_left_alone(own: Path) -> None:
    space, pid, start, rest = private_folder().name.removeprefix("worldsize_").split("_", 3)
    names = [f"worldsize_{space}_{pid}_{int(start) - number}_{rest}" for number in (1, 2)]
    (own / "kept").mkdir()
    (own / names[0]).symlink_to(own / "kept")
    (own / names[1]).mkdir()
    if os.getuid() == 0:
        os.chown(own / names[1], 1234, 1234)
        assert leftovers() == []
    remove_leftovers()
    assert (own / "kept").is_dir()


def test_a_worktree_of_a_killed_process_leaves_its_repository_too(own: Path, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@x")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    with made_by_another(own, "os._exit(1)") as ended:
        ended.wait()
    (folder,) = leftovers()
    git("worktree", "add", "--quiet", "--detach", str(folder / "code"))
    git("worktree", "add", "--quiet", "--detach", str(own / "mine"))
    shutil.rmtree(own / "mine")  # its disk may be unmounted now, so it is not ours to forget
    remove_leftovers()
    assert not folder.exists()
    listed = [line for line in git("worktree", "list", "--porcelain").splitlines() if line.startswith("worktree ")]
    assert listed == [f"worktree {tmp_path}", f"worktree {own / 'mine'}"]


def test_the_next_command_removes_what_a_killed_run_has_left(
    tmp_path: Path,
    spare: Path,
    command: Any,
    environment_without_wandb: dict[str, str],
    begun: Any,
    warm_python: Path,
) -> None:
    environment = {**environment_without_wandb, "TMPDIR": str(spare)}
    words = ("strategy=parameter_server", "cluster.processes=3", "steps=1000")
    slow = "faults=[{action: sleep, seconds: 0.1, attempt: null}]"
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *OPTIONS, *words, slow],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    run = begun(tmp_path)
    (folder,) = spare.glob("worldsize_*")
    assert {"control", "beat_0"} < {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.glob("server-*")]
    assert command("status", cwd=tmp_path, environment=environment).returncode == 0
    assert folder.exists()
    process.kill()
    process.wait()
    assert folder.exists()
    assert "killed" in command("status", cwd=tmp_path, environment=environment).stdout
    assert list(spare.glob("worldsize_*")) == []
    assert run.exists()


@pytest.mark.parametrize("fault", ["[]", "[{action: raise, step: 2}]", "[{action: kill, step: 2}]"])
def test_a_run_leaves_nothing_however_it_ends(train: Any, spare: Path, fault: str) -> None:
    words = ("strategy=parameter_server", "cluster.processes=3", "steps=3", f"faults={fault}")
    run = train(*OPTIONS, *words, TMPDIR=str(spare))
    assert run.code == (0 if fault == "[]" else 1), run.error
    assert list(spare.glob("worldsize_*")) == []


@pytest.mark.parametrize(("error", "start"), [(None, 0), (PermissionError(), 0), (ProcessLookupError(), None)])
def test_elsewhere_than_on_linux_a_process_of_another_user_is_alive(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, start: int | None
) -> None:
    def kill(*_: int) -> None:
        if error:
            raise error

    monkeypatch.setattr("worldsize.world.scratch.sys.platform", "darwin")
    monkeypatch.setattr("worldsize.world.scratch.os.kill", kill)
    assert scratch._read_start_time(1) == start
