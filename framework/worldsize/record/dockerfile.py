"""Writes a Dockerfile whose image has the environment of a lock, and the code of a project without what is private."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, final

from jinja2 import Environment, PackageLoader, StrictUndefined

from worldsize.errors import WorldsizeError
from worldsize.record.private_files import PRIVATE_NAMES, why_private
from worldsize.record.redaction import without_credentials

NAME = "Dockerfile"
IGNORE = f"{NAME}.dockerignore"
_IGNORE_HEADER = "# What the image does not get, as `worldsize image` wrote it."
_OURS = re.compile(r"# .* as `worldsize image` wrote it\.")  # the first line of both files
_LEFT_OUT = (".git", ".venv", "runs", "wandb", "__pycache__", "node_modules", NAME, IGNORE)
_LOCKS = ("uv.lock", "requirements.txt")
_FILES = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
_IGNORED = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")


@final
@dataclass(frozen=True)
class Dockerfile:
    """The parts of an image.

    Attributes:
        folder: The project, which has a uv.lock or a requirements.txt; its code goes into the image.
        base: The image to begin with, which has Python and, for git, apt; best by digest.
        python: Version of Python that the environment is made for, of which the base has any third number.
        uv: Version of uv that makes it.
        extras: Optional dependencies of the project; None: all.
        has_project: Whether the project's code goes into the image, besides what it needs.
    """

    folder: Path
    base: str
    python: str
    uv: str
    extras: Sequence[str] | None = ()
    has_project: bool = True

    def write(self) -> Path:
        """Write the Dockerfile, and beside it the list of what the image must not get; return the Dockerfile's path.

        Raises:
            WorldsizeError: there is no lock, it holds credentials or packages that the image cannot get, or there is a
                Dockerfile that somebody else wrote.
        """
        self._check_names()
        lock = next((self.folder / name for name in _LOCKS if (self.folder / name).is_file()), None)
        if lock is None:
            raise WorldsizeError(f"{self.folder} has no uv.lock and no requirements.txt. Run `uv lock` there first.")
        self._check(lock)
        environment = Environment(
            loader=PackageLoader("worldsize.record", "."), undefined=StrictUndefined, trim_blocks=True
        )
        environment.keep_trailing_newline = True
        every = [f" --extra {name}" for name in self.extras or ()]
        text = environment.get_template("Dockerfile.j2").render(
            digest=hashlib.sha256(lock.read_bytes()).hexdigest(),
            base=self.base,
            python=".".join(self.python.split(".")[:2]),  # the base has the exact one
            uv=self.uv,
            lock=lock.name,
            has_project=self.has_project,
            extras=" --all-extras" if self.extras is None else "".join(every),
        )
        lines = (_IGNORE_HEADER, *self._left_out())
        (self.folder / IGNORE).write_text("".join(f"{line}\n" for line in lines))
        (self.folder / NAME).write_text(text)
        return self.folder / NAME

    def _check_names(self) -> None:
        """Raise WorldsizeError if one of the files would take the place of the project's own."""
        for file in (self.folder / NAME, self.folder / IGNORE):
            if file.is_symlink() or (file.exists() and not _is_ours(file)):
                raise WorldsizeError(
                    f"{file} is not one that `worldsize image` wrote, and would be lost. Give it another name, which "
                    "the engine's own build takes with --file; nothing was written."
                )

    def _check(self, lock: Path) -> None:
        """Raise WorldsizeError for a lock whose environment the folder alone cannot build, or not without a secret."""
        for file in (lock, self.folder / "pyproject.toml"):
            if file.is_file() and without_credentials(text := file.read_text()) != text:
                raise WorldsizeError(
                    f"{file} has credentials in an address, and an image keeps what is copied into it. "
                    "Take them out, and build with --secret id=netrc,src=$HOME/.netrc; nothing was written."
                )
        if lock.name == "uv.lock" and (outside := sorted(_outside(tomllib.loads(lock.read_text())))):
            raise WorldsizeError(
                f"{lock} installs {', '.join(outside)} from outside of {self.folder}, which the build does not see. "
                "Take it from git or a package index, or move it into the project; nothing was written."
            )

    def _left_out(self) -> Iterator[str]:
        """List what the image must not get: names, then what git ignores, then files that seem to be private."""
        yield from ("**/" + re.sub(r"\[.*?\]", "?", name) for name in PRIVATE_NAMES)  # engines read no [-_]
        yield "!**/*.py"  # of Python's sources no name shows anything; the last line that fits counts
        yield from (f"**/{name}" for name in _LEFT_OUT)
        ignored, files = _listed(self.folder, _IGNORED), _listed(self.folder, _FILES)
        if files is None:  # not in a git repository
            files = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")]
        yield from (_escaped(name.rstrip("/")) for name in ignored or ())
        for name in files:
            is_left_out = any(part in _LEFT_OUT for part in PurePosixPath(name).parts)
            if not is_left_out and (self.folder / name).is_file() and why_private(self.folder / name, name):
                yield _escaped(name)


def _is_ours(file: Path) -> bool:
    """Return whether `worldsize image` wrote the file; an empty one holds nothing that could be lost."""
    if not file.is_file():
        return False
    lines = file.read_text(errors="replace").splitlines()
    return not lines or _OURS.fullmatch(lines[0]) is not None


def usual_base() -> str:
    """Return the base image whose Python is this one."""
    return f"python:{platform.python_version()}-slim"


def version_of_uv() -> str:
    """Return the version of this machine's uv; raise WorldsizeError if it has none."""
    try:
        said = subprocess.run(["uv", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorldsizeError("uv is not found, whose version the image gets. pip install uv") from error
    match = re.search(r"\d+(\.\d+)+\w*", said)
    if match is None:
        raise WorldsizeError(f"uv --version says {said.strip()!r}, which is no version. Install uv anew.")
    return match[0]


def _outside(lock: Mapping[str, Any]) -> Iterator[str]:
    for package in lock.get("package", ()):
        for kind in ("path", "directory", "editable", "virtual"):
            place = package.get("source", {}).get(kind)
            if place is not None and (PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts):
                yield f"{package['name']} ({place})"


def _listed(folder: Path, command: Sequence[str]) -> list[str] | None:
    """Return names that git lists, relative to ``folder``; None: it is in no repository, or there is no git."""
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]


def _escaped(name: str) -> str:
    """Return a pattern that matches one name alone."""
    return re.sub(r"([*?\[\]\\!#])", r"\\\1", name)
