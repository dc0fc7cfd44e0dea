"""Interpreters for reproducing a run: this one, one built from the lock, or a container's."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from worldsize.errors import WorldsizeError
from worldsize.files import read_regular
from worldsize.record.container import Container
from worldsize.record.environment import packages
from worldsize.strict_json import LARGEST


@dataclass(frozen=True)
class Interpreter:
    """A command, import path and variables that start a Python interpreter.

    Attributes:
        command: The command that starts the interpreter.
        path: Folders to prepend to the interpreter's import path.
        variables: Environment variables to set.
    """

    command: tuple[str, ...]
    path: tuple[Path, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Lock:
    """Lock files for uv, read once so that uv installs exactly what the user was shown.

    Attributes:
        name: "uv.lock" or "requirements.txt".
        content: content of the lock file, verified by its recorded digest.
        project: content of pyproject.toml in the same folder, if it exists.
        python: recorded Python version.
    """

    name: str
    content: bytes
    project: bytes | None
    python: str

    def write_lock_files(self, folder: Path) -> None:
        """Write the lock file and the project file into ``folder``."""
        (folder / self.name).write_bytes(self.content)
        if self.project is not None:
            (folder / "pyproject.toml").write_bytes(self.project)


def read_lock(environment: Mapping[str, Any], files: Path) -> Lock:
    """Read the lock file in ``files``, the environment folder of the record.

    Raises:
        WorldsizeError: the lock file is missing or was changed, or the recorded Python version is invalid.
    """
    python = environment["python"]
    if not re.fullmatch(r"\d+(\.\d+)+\w*\+?", python, re.ASCII):
        raise WorldsizeError(f"invalid Python version {python!r} in the record. Do not trust this record.")
    lock = next((files / name for name in ("uv.lock", "requirements.txt") if (files / name).is_file()), None)
    content = read_regular(lock, at_most=LARGEST) if lock else b""
    if lock is None or hashlib.sha256(content).hexdigest() != environment["lock_sha256"]:
        raise WorldsizeError(
            f"the lock file in {files} is missing or was changed, so the environment cannot be rebuilt. Restore the "
            "file."
        )
    project = files / "pyproject.toml"
    return Lock(lock.name, content, read_regular(project, at_most=LARGEST) if project.is_file() else None, python)


def get_current_interpreter(code: Path, *, clones: Sequence[Path]) -> Interpreter:
    """Return this process's Python for the code in the checkout ``code``.

    Editable packages in ``clones`` are replaced on the import path by the same folders in ``code``.
    """
    return Interpreter((sys.executable,), tuple(_list_moved_paths(clones, code)))


def build_interpreter(lock: Lock, project: Path, spare: Path) -> Interpreter:
    """Build a Python environment from ``lock`` with uv.

    The environment is built in ``project``, the run's working directory, if the lock belongs to it, otherwise in
    ``spare``.

    Raises:
        WorldsizeError: uv is missing, or cannot build the environment.
    """
    if shutil.which("uv") is None:
        raise WorldsizeError("uv not found; it is required to rebuild the environment. Run `pip install uv`.")
    folder = spare / "environment"
    of_project = project / "uv.lock"
    if lock.name == of_project.name and of_project.exists() and of_project.read_bytes() == lock.content:
        return Interpreter((str(_sync_environment(lock.python, project)),), ())
    folder.mkdir()
    lock.write_lock_files(folder)
    if lock.name == "requirements.txt":
        return Interpreter((str(_install_pins(lock.python, folder / lock.name, spare / "venv")),), ())
    return Interpreter((str(_sync_environment(lock.python, folder, "--no-install-project")),), _framework())


@dataclass(frozen=True)
class Places:
    """Folders for reproducing a run.

    Attributes:
        folder: The working directory.
        code: The checkout that contains the working directory.
        reads: Folders with repositories and data, read-only.
        writes: Folders for runs and temporary files.
    """

    folder: Path
    code: Path
    reads: Sequence[Path]
    writes: Sequence[Path]


def get_container_interpreter(container: Container, places: Places, *, cuda: bool) -> Interpreter:
    """Return the Python in a container with access to ``places`` and optionally the GPUs."""
    path = tuple(_list_moved_paths(places.reads, places.code)) or _framework()
    repository = _repository(places.code)
    reads = [*places.reads, *path, *([repository] if repository else [])]
    command = container.build_python_command(places.folder, writes=places.writes, reads=reads, cuda=cuda)
    return Interpreter(command, path, {**container.variables, **_redirect_git_objects(repository, places.code.parent)})


def _repository(worktree: Path) -> Path | None:
    """Return the git repository of ``worktree``; None if it is not a git worktree."""
    link = worktree / ".git"
    text = link.read_text().strip() if link.is_file() else ""
    return Path(named[1]) if (named := re.fullmatch(r"gitdir: (.+)/worktrees/[^/]+", text)) else None


def _redirect_git_objects(repository: Path | None, spare: Path) -> dict[str, str]:
    """Return variables for git to write to ``spare`` instead of the read-only repository."""
    if repository is None:
        return {}
    objects = spare / "objects"
    objects.mkdir()
    return {"GIT_OBJECT_DIRECTORY": str(objects), "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(repository / "objects")}


def _sync_environment(python: str, project: Path, *options: str) -> Path:
    _run_uv(python, "sync", "--frozen", "--all-extras", *options, "--project", str(project))
    return project / ".venv" / "bin" / "python"


def _install_pins(python: str, pins: Path, venv: Path) -> Path:
    _run_uv(python, "venv", str(venv))
    _run_uv(None, "pip", "install", "--python", str(venv), "--requirement", str(pins))
    return venv / "bin" / "python"


def _run_uv(python: str | None, *arguments: str) -> None:
    """Run uv with the exact recorded Python version, or else with the same minor version."""
    wanted = [[]] if python is None else [["--python", python], ["--python", python.rpartition(".")[0]]]
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    }
    for option in wanted:
        done = subprocess.run(["uv", *arguments, *option], env=inherited, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return
    raise WorldsizeError(f"uv {arguments[0]} failed to rebuild the environment:\n{done.stderr.strip()}")


def _list_moved_paths(clones: Sequence[Path], code: Path) -> Iterator[Path]:
    for entry in map(Path, sys.path):
        for clone in clones:
            is_source = entry.is_relative_to(clone) and entry != clone and "site-packages" not in entry.parts
            if is_source and (moved := code / entry.relative_to(clone)).is_dir():
                yield moved


def _framework() -> tuple[Path, ...]:
    """Return the folder of this worldsize if it is a clone; otherwise empty.

    A lock file cannot install a clone.
    """
    source = Path(__file__).resolve().parents[2]
    return (source,) if source.name == "framework" else ()


def describe_installs(lock: Lock) -> list[str]:
    """Describe which packages ``lock`` would install, and from where.

    Packages that are already installed in the same version are omitted, or summarized in one line per source.

    Raises:
        WorldsizeError: the lock cannot be parsed, or contains an entry that worldsize would not write.
    """
    if lock.name == "requirements.txt":
        return _pins_to_be_installed(lock.content.decode(errors="replace"))
    try:
        packages_of_lock = tomllib.loads(lock.content.decode()).get("package", [])
        lines = [*_settings(lock.project), *_group_packages(packages_of_lock)]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else error
        text = f"the recorded {lock.name} cannot be read: {reason}. Restore it from a copy of the run folder."
        raise WorldsizeError(text) from error
    return lines


def _pins_to_be_installed(pins: str) -> list[str]:
    lines = pins.splitlines()
    for line in lines:
        if not re.fullmatch(r"[\w.-]+(==[\w.+!-]+| @ [^\s\\]+)", line, re.ASCII):
            raise WorldsizeError(
                f"the recorded requirements.txt has {line!r}, not a pinned package. Do not trust this record."
            )
    present = {f"{name}=={version}" for name, version in packages().items()}
    return [line for line in lines if line not in present]


def _settings(project: bytes | None) -> list[str]:
    """Return a line with uv's settings in the project file, such as other indexes, if any."""
    told = tomllib.loads(project.decode()).get("tool", {}).get("uv") if project else None
    return [f"uv settings: {json.dumps(told, default=str)}"] if told else []


def _group_packages(locked: Sequence[Mapping[str, Any]]) -> list[str]:
    here, same, others = packages(), dict[str, list[str]](), list[str]()
    for package in locked:
        name, version, source = package["name"], package.get("version"), package.get("source", {})
        kind, place = next(iter(source.items()), ("unknown", ""))
        files = sorted(
            {_get_download_host(file) for file in (*package.get("wheels", ()), package.get("sdist", {})) if file}
        )
        origin = f"from {kind} {place}" + (f" (files from {', '.join(files)})" if files else "")
        if kind == "registry" and here.get(name) == version:
            same.setdefault(origin, []).append(name)
        else:
            others.append(f"{name} {version or 'without a version'} {origin}")
    return [*others, *(f"same versions as installed, {origin}: {', '.join(same[origin])}" for origin in same)]


def _get_download_host(file: Mapping[str, Any]) -> str:
    """Return the download host of a wheel or source archive in a lock, or its path."""
    address = str(file.get("url") or file.get("path"))
    return urlsplit(address).netloc or address


def different_packages(environment: Mapping[str, Any]) -> list[str]:
    """List packages with a different version than recorded, as ``name then -> now``."""
    then = {**environment["packages"], "python": environment["python"]}
    now = {**packages(), "python": platform.python_version()}
    return [
        f"{name} {then.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
