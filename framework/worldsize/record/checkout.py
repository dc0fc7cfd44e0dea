"""Re-creates a run's code in a separate folder from its manifest; the user's tree is not touched."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.files import is_folder, read_regular

_LARGEST_PATCH = 1 << 30  # bytes
_ALL = "+refs/*:refs/*"
# no hook or helper that a repository names, and no prompt for a password
_OPTIONS = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.ext.allow=never")
_NO_PROMPT = {"GIT_TERMINAL_PROMPT": "0"}


@contextmanager
def checked_out(code: Mapping[str, Any], patch: bytes, folder: Path, candidates: Sequence[Path]) -> Iterator[Path]:
    """Yield the run's working directory in ``folder``, a git worktree that is removed after the context.

    ``candidates`` are folders whose repositories are searched for the commit before it is fetched.

    Raises:
        WorldsizeError: the commit cannot be found or fetched, or the patch does not apply to it.
    """
    _check(code)
    if code["commit"] is None:
        folder.mkdir(parents=True)
        _apply(patch, folder)
        yield folder
        return
    repository = _repository(code, candidates, folder.with_name("repository.git"))
    _needed(repository, "worktree", "add", "--quiet", "--detach", "--force", str(folder), code["commit"])
    try:
        _apply(patch, folder)
        yield _working_directory(folder, code["folder"])
    finally:
        _git(repository, "worktree", "remove", "--force", str(folder))


def _working_directory(folder: Path, name: str) -> Path:
    """Return the folder ``name`` of the worktree; raise WorldsizeError if a link leads out of it."""
    directory = folder / name
    if not directory.is_dir() or not directory.resolve().is_relative_to(folder.resolve()):
        raise WorldsizeError(f"the recorded commit has no folder {name!r}, in which the run is said to have begun.")
    return directory


def remove_worktree(folder: Path) -> None:
    """Remove a worktree left by a killed process, and its entry in the repository."""
    _git(folder, "worktree", "remove", "--force", str(folder))


def _check(code: Mapping[str, Any]) -> None:
    """Check that an untrusted manifest neither reaches outside the worktree nor passes options to git."""
    folder = PurePosixPath(code["folder"])
    if folder.is_absolute() or ".." in folder.parts:
        raise WorldsizeError(f"the manifest names a folder outside of the checkout: {folder}. It is not to be trusted.")
    if code["commit"] is not None and not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", code["commit"]):
        raise WorldsizeError(f"the manifest names {code['commit']!r}, which is no commit. It is not to be trusted.")
    if "\0" in (code["remote"] or ""):
        raise WorldsizeError(f"the manifest names the remote {code['remote']!r}. It is not to be trusted.")


def read_patch(path: Path, digest: str | None, *, approximate: bool) -> bytes:
    """Return the recorded changes, verified; with ``approximate``, missing ones are ignored.

    Raises:
        WorldsizeError: the patch is missing, or is not the one of the manifest.
    """
    if digest is None:
        return b""
    try:
        patch = read_regular(path, at_most=_LARGEST_PATCH)
    except OSError as error:
        if approximate:
            return b""
        why = "lost" if isinstance(error, FileNotFoundError) else f"not to be read ({error.strerror})"
        raise WorldsizeError(
            f"{path} is {why}: the run had uncommitted changes with SHA-256 {digest}. "
            "Bring it back, or go on without them with --approximate."
        ) from None
    if (actual := hashlib.sha256(patch).hexdigest()) != digest:
        raise WorldsizeError(f"{path} was changed: its SHA-256 is {actual}, the manifest says {digest}. Bring it back.")
    return patch


def patched_files(patch: bytes) -> list[str]:
    """Return the names of the files that git would change if it applied ``patch``."""
    done = _run(Path("/"), "apply", "--numstat", "-z", "-", stdin=patch)
    rows = os.fsdecode(done.stdout).split("\0")
    return [row.split("\t", 2)[-1] for row in rows if row]


def _repository(code: Mapping[str, Any], candidates: Sequence[Path], spare: Path) -> Path:
    commit, remote = code["commit"], code["remote"]
    for folder in candidates:
        if is_folder(folder) and _git(folder, "cat-file", "-e", f"{commit}^{{commit}}"):
            return folder
    if remote is not None:
        spare.mkdir(parents=True)
        _needed(spare, "init", "--quiet", "--bare")
        # a server may refuse to give a commit by its hash; then everything is fetched
        _ = _git(spare, "fetch", "--quiet", "--", remote, commit) or _git(spare, "fetch", "--quiet", "--", remote, _ALL)
        if _git(spare, "cat-file", "-e", f"{commit}^{{commit}}"):
            return spare
    where = f"nor could it be fetched from {remote}" if remote else "and the run's repository had no remote"
    looked_in = ", ".join(dict.fromkeys(map(str, candidates)))
    raise WorldsizeError(
        f"commit {commit} is in no repository here ({looked_in}), {where}. Run the command inside a clone that has it."
    )


def _apply(patch: bytes, folder: Path) -> None:
    if patch:
        # outside of a repository too; never a path outside of the folder (git refuses those by itself)
        _needed(folder, "apply", "--whitespace=nowarn", "--binary", "-", stdin=patch)


def _git(folder: Path, *arguments: str) -> bool:
    return _run(folder, *arguments).returncode == 0


def _needed(folder: Path, *arguments: str, stdin: bytes = b"") -> None:
    done = _run(folder, *arguments, stdin=stdin)
    if done.returncode != 0:
        raise WorldsizeError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}.")


def _run(folder: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command, environment = ["git", *_OPTIONS, *arguments], {**os.environ, **_NO_PROMPT}
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, env=environment)
