"""``worldsize reproduce`` shows everything that it fetches and installs for a different user's record."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from worldsize.config.search_path import get_bundle_folder
from worldsize.errors import WorldsizeError
from worldsize.launch.reproduction import _list_clones
from worldsize.record import rebuild
from worldsize.record.code import check_out_code
from worldsize.record.manifest import read_manifest, write_manifest
from worldsize.record.rebuild import Lock, build_interpreter, describe_installs, read_lock
from worldsize.record.run_record import read_run

LOCK = """
[[package]]
name = "mine"
version = "1.0"
source = { registry = "https://index.example.org/simple" }
wheels = [{ url = "https://files.example.org/mine-1.0.whl" }]
[[package]]
name = "same"
version = "2.0"
source = { registry = "https://index.example.org/simple" }
wheels = [{ url = "https://files.example.org/same-2.0.whl" }]
[[package]]
name = "evil"
version = "3.0"
source = { registry = "https://index.example.org/simple" }
sdist = { url = "https://evil.example.org/evil-3.0.tar.gz" }
[[package]]
name = "other"
version = "4.0"
source = { git = "https://evil.example.org/other" }
"""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "packages", lambda: {"mine": "1.0", "same": "2.0", "evil": "3.0", "other": "3.0"})


def lock_of(text: str, name: str = "uv.lock", project: str | None = None) -> Lock:
    return Lock(name, text.encode(), project.encode() if project else None, "3.11.7")


def test_where_packages_come_from_is_shown_of_those_too_that_are_here_in_the_same_version() -> None:
    registry = "from registry https://index.example.org/simple"
    assert describe_installs(lock_of(LOCK)) == [
        "other 4.0 from git https://evil.example.org/other",
        f"same versions as installed, {registry} (files from files.example.org): mine, same",
        f"same versions as installed, {registry} (files from evil.example.org): evil",
    ]


def test_settings_of_uv_are_shown() -> None:
    project = '[tool.uv]\nindex = [{url = "https://evil.example.org/simple"}]\n'
    assert describe_installs(lock_of("", project=project)) == [
        'uv settings: {"index": [{"url": "https://evil.example.org/simple"}]}'
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[[package]]\nversion = '1'\n",
        "package = 5\n",
        "package = [5]\n",
        "[[package]]\nname = 'a'\nsource = 5\n",
        "\0",
        "[",
    ],
)
def test_a_lock_that_uv_would_not_have_written_is_refused(text: str) -> None:
    with pytest.raises(WorldsizeError, match="cannot be read"):
        describe_installs(lock_of(text))


@pytest.mark.parametrize(
    "line", ["--index-url https://evil.example.org", "-r other.txt", "mine==1.0 --hash=sha256:0", "mine", "mine==1\\"]
)
def test_pins_are_pins_only(line: str) -> None:
    with pytest.raises(WorldsizeError, match="not a pinned package"):
        describe_installs(lock_of(f"mine==1.0\n{line}\n", "requirements.txt"))
    assert describe_installs(lock_of("mine==1.0\nmore==2\n", "requirements.txt")) == ["more==2"]


@pytest.mark.parametrize("python", ["/home/evil/python", "evil", "3", "3.11 --x", "pypy@3.10", "3.11\n"])
def test_a_recorded_python_is_a_version(python: str, tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match="invalid Python version"):
        read_lock({"python": python, "lock_sha256": None}, tmp_path)


def test_what_is_installed_is_what_was_read_and_not_what_lies_there_now(tmp_path: Path) -> None:
    files, spare = tmp_path / "environment", tmp_path / "spare"
    for folder in (files, spare):
        folder.mkdir()
    for name, text in {"uv.lock": LOCK, "pyproject.toml": "", "uv.toml": "x", ".python-version": "/evil"}.items():
        (files / name).write_text(text)
    recorded = {"python": "3.11.7", "lock_sha256": hashlib.sha256(LOCK.encode()).hexdigest()}
    lock = read_lock(recorded, files)
    (files / "uv.lock").write_text("evil")
    with patch.object(rebuild, "_run_uv"), patch("shutil.which", return_value="uv"):
        build_interpreter(lock, tmp_path, spare)
    installed = {file.name: file.read_text() for file in (spare / "environment").iterdir()}
    assert installed == {"uv.lock": LOCK, "pyproject.toml": ""}
    with pytest.raises(WorldsizeError, match="is missing or was changed"):
        read_lock(recorded, files)


@pytest.mark.parametrize("own", [True, False])
def test_git_runs_in_no_repository_that_another_users_record_names(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = {"run_id": "theirs", "attempts": [], "code": {"checkout": "/theirs"}}
    (tmp_path / "run").mkdir()
    write_manifest(tmp_path / "run" / "run_manifest.json", manifest, own=own)
    named = [Path("/theirs"), tmp_path / "run"] if own else []
    assert _list_clones(read_run(tmp_path / "run")) == [*named, tmp_path, get_bundle_folder()]


@pytest.fixture
def code(tmp_path: Path) -> dict[str, Any]:
    """Return the manifest's entry for a commit that has a folder, and a link that leads out of it."""
    root = tmp_path / "repository"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "train.py").touch()
    (root / "out").symlink_to(tmp_path)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *words], cwd=root, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
    return {"checkout": None, "folder": "sub", "remote": None, "commit": done.stdout.strip(), "patch_sha256": None}


@pytest.mark.parametrize("name", ["no/such", "out", "sub/train.py", "a\0b"])
def test_a_run_begins_in_a_folder_of_its_commit(name: str, code: dict[str, Any], tmp_path: Path) -> None:
    clones = [tmp_path / "repository"]
    with check_out_code(code, b"", tmp_path / "a", clones) as folder:
        assert folder == tmp_path / "a" / "sub"
    with (
        pytest.raises(WorldsizeError, match="the run's working directory .* is missing"),
        check_out_code({**code, "folder": name}, b"", tmp_path / "b", clones),
    ):
        pass
    assert not (tmp_path / "b").exists()


def test_a_remote_is_an_address(code: dict[str, Any], tmp_path: Path) -> None:
    with (
        pytest.raises(WorldsizeError, match="invalid remote in the manifest"),
        check_out_code({**code, "remote": "a\0b"}, b"", tmp_path / "a", []),
    ):
        pass


def test_a_checkout_that_is_no_path_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "run_manifest.json"
    write_manifest(path, {"run_id": "theirs", "code": {"checkout": 5}}, own=False)
    with pytest.raises(WorldsizeError, match=r"code\.checkout has the wrong type: '5'"):
        read_manifest(path)
