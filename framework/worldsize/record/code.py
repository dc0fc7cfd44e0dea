"""Captures the user's code: the git commit, and all differences from it as one patch."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.messages import printable
from worldsize.record.private_files import why_private
from worldsize.record.redaction import without_credentials
from worldsize.world.scratch import temporary_folder

_logger = logging.getLogger(__name__)

LARGEST = 1 << 20  # bytes of an untracked file that still goes into the patch

# every option that the user's git configuration could change so that `git apply` refuses the patch
_DIFF = (
    *("diff", "--binary", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--no-relative"),
    *("--no-ext-diff", "--no-textconv", "--submodule=short", "--ignore-submodules=untracked", "HEAD"),
)


_OTHERS = ("ls-files", "--others", "--exclude-standard", "--exclude=__pycache__/", "-z")
_ADD = ("add", "--pathspec-from-file=-", "--pathspec-file-nul")

# what a run outside of git can import from its folder
_OWN = ("recipes", "plugins", "conf", "train.py")
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # known to every git


@dataclass(frozen=True)
class Code:
    """State of a checkout; ``git apply`` of ``patch`` on ``commit``, or on an empty folder, re-creates it.

    ``checkout`` is its root on the machine of the run, ``folder`` the working directory inside it. ``left_out`` lists
    untracked files that are not in the patch, since they are too large, unreadable or seem private, and other
    repositories inside this one (their names end in a slash).
    """

    checkout: str | None = None
    folder: str = "."
    remote: str | None = None
    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    patch: bytes = b""
    left_out: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Return the code's facts for the manifest, with the patch by its SHA-256."""
        digest = hashlib.sha256(self.patch).hexdigest() if self.patch else None
        facts = {key: value for key, value in asdict(self).items() if key != "patch"}
        return {**facts, "left_out": list(self.left_out), "patch_sha256": digest}


def capture_code(folder: Path, *, exclude: Path, include: Sequence[str] = ()) -> Code:
    """Capture the checkout that ``folder`` belongs to, without files below ``exclude`` (the runs).

    Outside git, or before the first commit, there is only a patch, with the folder's own recipes, plugins and
    configuration; if git is not installed, there is no patch.

    Untracked files that seem to be private are left out with a warning, unless a pattern of ``include`` names them.

    Raises:
        WorldsizeError: git cannot compare the checkout with its commit.
    """
    top = _git(folder, "rev-parse", "--show-toplevel", "HEAD")
    if top is None:
        return _capture_folder(folder, include)
    root, commit = os.fsdecode(top).rstrip("\n").rsplit("\n", 1)
    untracked, left_out = _untracked(Path(root), exclude, include)
    patch = _patch(Path(root), untracked)
    remote = _text(Path(root), "config", "--get", "remote.origin.url")
    return Code(
        checkout=root,
        folder=os.path.relpath(folder.resolve(), Path(root).resolve()),
        remote=without_credentials(remote) if remote else None,
        commit=commit,
        branch=_text(Path(root), "symbolic-ref", "--short", "-q", "HEAD"),
        dirty=bool(patch or left_out),
        patch=patch,
        left_out=left_out,
    )


def _capture_folder(folder: Path, include: Sequence[str]) -> Code:
    """Capture a folder outside git by a temporary repository."""
    with temporary_folder() as spare:
        database = spare / "git"
        if shutil.which("git") is None or not any((folder / own).exists() for own in _OWN):
            return Code()
        _needed(folder, "init", "--quiet", "--bare", str(database))
        listed = _names(_git(folder, *_OTHERS, "--", *_OWN, database=database))
        names, left_out = _kept(folder, listed, include)
        if not names:
            return Code(left_out=left_out)
        _needed(folder, *_ADD, stdin=_lines(names), database=database)
        patch = _needed(folder, *_DIFF[:-1], "--cached", _EMPTY_TREE, database=database)
        return Code(dirty=True, patch=patch, left_out=left_out)


def _untracked(root: Path, exclude: Path, include: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    listed = [name for name in _names(_git(root, *_OTHERS)) if not (root / name).is_relative_to(exclude)]
    return _kept(root, listed, include)


def _names(listed: bytes | None) -> list[str]:
    return [os.fsdecode(name) for name in (listed or b"").split(b"\0") if name]


def _kept(root: Path, names: Sequence[str], include: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Divide names into those that go into the patch, and those that do not; say which seem to be private."""
    fitting = [name for name in names if _fits(root, name)]
    reasons = {name: why_private(root / name, name, include=include) for name in fitting}
    if private := [f"{printable(name)} ({reason})" for name, reason in reasons.items() if reason]:
        _logger.warning(
            "left out of the record, as they seem to be private: %s. A run that needs them cannot be re-created "
            "from it; name those that may be kept: run.include='[PATTERN]'.",
            ", ".join(private),
        )
    kept = [name for name in fitting if reasons[name] is None]
    return kept, tuple(sorted(set(names) - set(kept)))


def _fits(root: Path, name: str) -> bool:
    path = root / name
    if path.is_symlink():
        return True
    # git cannot add another repository, and one unreadable file would fail the whole patch
    return path.is_file() and os.access(path, os.R_OK) and path.stat().st_size <= LARGEST


def _patch(root: Path, untracked: list[str]) -> bytes:
    """Return the staged, unstaged and untracked differences from HEAD, by a copy of the index."""
    with temporary_folder() as spare:
        index = spare / "index"
        own = _text(root, "rev-parse", "--path-format=absolute", "--git-path", "index")
        if own and Path(own).exists():
            shutil.copy2(own, index)  # with its time: by it git knows which files may have changed since
        if untracked:
            _needed(root, *_ADD, "--intent-to-add", index=index, stdin=_lines(untracked))
        return _needed(root, *_DIFF, index=index)


def _lines(names: list[str]) -> bytes:
    return b"\0".join(map(os.fsencode, names))


def _git(folder: Path, *arguments: str, database: Path | None = None) -> bytes | None:
    """Return the output of git, or None if it fails or is not installed."""
    try:
        done = _run(folder, *arguments, database=database)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _needed(
    root: Path, *arguments: str, index: Path | None = None, database: Path | None = None, stdin: bytes = b""
) -> bytes:
    """Return the output of git; raise WorldsizeError if it fails, since no output would mean a clean checkout."""
    done = _run(root, *arguments, index=index, database=database, stdin=stdin)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()
        raise WorldsizeError(f"git cannot compare {root} with its last commit: {reason}. Repair that.")
    return done.stdout


def _run(
    folder: Path, *arguments: str, index: Path | None = None, database: Path | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_LITERAL_PATHSPECS": "1"}
    if index:
        environment["GIT_INDEX_FILE"] = str(index)
    if database:
        environment |= {"GIT_DIR": str(database), "GIT_WORK_TREE": str(folder)}
    return subprocess.run(["git", *arguments], cwd=folder, env=environment, input=stdin, capture_output=True)


def _text(root: Path, *arguments: str) -> str | None:
    output = _git(root, *arguments)
    return output.decode().strip() or None if output else None
