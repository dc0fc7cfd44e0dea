"""The Python of a run's record: the present one where it is identical, else one rebuilt from the recorded lock."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.reproducibility.environment import packages


@dataclass(frozen=True)
class Interpreter:
    """A Python, and the folders that it must find before its own."""

    python: Path
    path: tuple[Path, ...]


def present(code: Path, *, clones: Sequence[Path]) -> Interpreter:
    """This Python for the code in the checkout ``code``.

    What this Python imports from one of ``clones`` as an editable package, it must find in ``code``.
    """
    return Interpreter(Path(sys.executable), tuple(_moved(clones, code)))


def rebuilt(environment: Mapping[str, Any], files: Path, project: Path, spare: Path) -> Interpreter:
    """A Python made by uv from the lock in ``files``, the record's environment folder.

    ``project`` is the run's working directory; where the lock is not its own, all is built in ``spare``.

    Raises:
        WorldsizeError: the lock is lost or not the recorded one, uv is missing, or it cannot build.
    """
    lock = next((files / name for name in ("uv.lock", "requirements.txt") if (files / name).exists()), None)
    if lock is None or hashlib.sha256(lock.read_bytes()).hexdigest() != environment["lock_sha256"]:
        raise WorldsizeError(
            f"the lock in {files} is lost or changed, so the environment cannot be rebuilt. Restore it."
        )
    if shutil.which("uv") is None:
        raise WorldsizeError("uv is needed to rebuild the environment, and is not installed. pip install uv")
    if lock.name == "requirements.txt":
        return Interpreter(_from_pins(environment["python"], lock, spare / "venv"), ())
    if (project / "uv.lock").exists() and (project / "uv.lock").read_bytes() == lock.read_bytes():
        return Interpreter(_synced(environment["python"], project), ())
    shutil.copytree(files, spare / "environment")
    return Interpreter(_synced(environment["python"], spare / "environment", "--no-install-project"), _framework())


def _synced(python: str, project: Path, *options: str) -> Path:
    _uv(python, "sync", "--frozen", "--all-extras", *options, "--project", str(project))
    return project / ".venv" / "bin" / "python"


def _from_pins(python: str, pins: Path, venv: Path) -> Path:
    _uv(python, "venv", str(venv))
    _uv(None, "pip", "install", "--python", str(venv), "--requirement", str(pins))
    return venv / "bin" / "python"


def _uv(python: str | None, *arguments: str) -> None:
    """Run uv with the exact Python of the record, else with its minor version, which downgrades the level."""
    wanted = [[]] if python is None else [["--python", python], ["--python", python.rpartition(".")[0]]]
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    }
    for option in wanted:
        done = subprocess.run(["uv", *arguments, *option], env=inherited, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return
    raise WorldsizeError(f"uv {arguments[0]} cannot rebuild the environment:\n{done.stderr.strip()}")


def _moved(clones: Sequence[Path], code: Path) -> Iterator[Path]:
    for entry in map(Path, sys.path):
        for clone in clones:
            is_source = entry.is_relative_to(clone) and entry != clone and "site-packages" not in entry.parts
            if is_source and (moved := code / entry.relative_to(clone)).is_dir():
                yield moved


def _framework() -> tuple[Path, ...]:
    """Return the folder that this worldsize is imported from, if that is a clone: no lock can install it."""
    source = Path(__file__).resolve().parents[2]
    return (source,) if source.name == "framework" else ()


def to_be_installed(files: Path) -> list[str]:
    """Return what the lock in ``files`` would install that is not here already in the same version, with its source.

    What comes from elsewhere than an index of packages is always named.
    """
    here, lock = packages(), files / "uv.lock"
    if not lock.exists():
        pins = files / "requirements.txt"
        lines = pins.read_text().splitlines() if pins.exists() else []
        present = {f"{name}=={version}" for name, version in here.items()}
        return [line for line in lines if line not in present]
    try:
        locked = tomllib.loads(lock.read_text()).get("package", [])
        return [text for package in locked if (text := _described(package, here))]
    except (ValueError, TypeError, AttributeError) as error:
        raise WorldsizeError(f"{lock} cannot be read: {error}. Restore it from a copy of the run folder.") from error


def _described(package: Mapping[str, Any], here: Mapping[str, str]) -> str | None:
    name, version, source = package["name"], package.get("version"), package.get("source", {})
    kind, place = next(iter(source.items()), ("unknown", ""))
    if kind == "registry" and here.get(name) == version:
        return None
    return f"{name} {version or 'without a version'} from {kind} {place}"


def different_packages(environment: Mapping[str, Any]) -> list[str]:
    """List the packages that differ from the record's, as ``name then -> now``."""
    then = {**environment["packages"], "python": environment["python"]}
    now = {**packages(), "python": platform.python_version()}
    return [
        f"{name} {then.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
