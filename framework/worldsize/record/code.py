"""Capture the user's code, and recreate it elsewhere; the user's tree is not modified.

Code is recorded as a git commit and a single patch with all differences from it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.files import is_folder, read_regular
from worldsize.messages import printable
from worldsize.record.redaction import remove_credentials, why_private
from worldsize.world.scratch import temporary_folder

_logger = logging.getLogger(__name__)

LARGEST = 1 << 20  # maximum bytes of an untracked file in the patch

# overrides all settings in the user's git configuration that could make the patch unusable for `git apply`
_DIFF = (
    *("diff", "--binary", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--no-relative"),
    *("--no-ext-diff", "--no-textconv", "--submodule=short", "--ignore-submodules=untracked", "HEAD"),
)


_OTHERS = ("ls-files", "--others", "--exclude-standard", "--exclude=__pycache__/", "-z")
_ADD = ("add", "--pathspec-from-file=-", "--pathspec-file-nul")

# parts of a folder outside of git that a run can import or compose
_OWN = ("recipes", "plugins", "conf", "train.py")
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # hash of the empty tree, known to every git


@dataclass(frozen=True)
class Code:
    """State of a checkout, recreated by applying ``patch`` to ``commit`` or an empty folder.

    ``checkout`` is the root of the checkout on the run's machine, and ``folder`` the working directory within it.
    ``left_out`` lists untracked files that are not in the patch, since they are too large, unreadable or possibly
    private, and nested repositories (with names that end in a slash).
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
        """Return all fields for the manifest, with the SHA-256 of the patch in place of its content."""
        digest = hashlib.sha256(self.patch).hexdigest() if self.patch else None
        facts = {key: value for key, value in asdict(self).items() if key != "patch"}
        return {**facts, "left_out": list(self.left_out), "patch_sha256": digest}


def capture_code(folder: Path, *, exclude: Path, include: Sequence[str] = ()) -> Code:
    """Capture the checkout that contains ``folder``, without untracked files in ``exclude``.

    Outside of git, or before the first commit, only a patch with the folder's own recipes, plugins and configuration is
    captured. Nothing is captured if git is not installed.

    Untracked files that seem private are omitted with a warning, unless they match a pattern in ``include``.

    Raises:
        WorldsizeError: git cannot compare the checkout with its commit.
    """
    top = _try_git(folder, "rev-parse", "--show-toplevel", "HEAD")
    if top is None:
        return _capture_folder(folder, include)
    root, commit = os.fsdecode(top).rstrip("\n").rsplit("\n", 1)
    untracked, left_out = _list_untracked(Path(root), exclude, include)
    patch = _create_patch(Path(root), untracked)
    remote = _read_git_text(Path(root), "config", "--get", "remote.origin.url")
    return Code(
        checkout=root,
        folder=os.path.relpath(folder.resolve(), Path(root).resolve()),
        remote=remove_credentials(remote) if remote else None,
        commit=commit,
        branch=_read_git_text(Path(root), "symbolic-ref", "--short", "-q", "HEAD"),
        dirty=bool(patch or left_out),
        patch=patch,
        left_out=left_out,
    )


def _capture_folder(folder: Path, include: Sequence[str]) -> Code:
    """Capture a folder outside of git by means of a temporary repository."""
    with temporary_folder() as spare:
        database = spare / "git"
        if shutil.which("git") is None or not any((folder / own).exists() for own in _OWN):
            return Code()
        _require_git(folder, "init", "--quiet", "--bare", str(database))
        listed = _split_names(_try_git(folder, *_OTHERS, "--", *_OWN, database=database))
        names, left_out = _filter_names(folder, listed, include)
        if not names:
            return Code(left_out=left_out)
        _require_git(folder, *_ADD, stdin=_join_names(names), database=database)
        patch = _require_git(folder, *_DIFF[:-1], "--cached", _EMPTY_TREE, database=database)
        return Code(dirty=True, patch=patch, left_out=left_out)


def _list_untracked(root: Path, exclude: Path, include: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    listed = [name for name in _split_names(_try_git(root, *_OTHERS)) if not (root / name).is_relative_to(exclude)]
    return _filter_names(root, listed, include)


def _split_names(listed: bytes | None) -> list[str]:
    return [os.fsdecode(name) for name in (listed or b"").split(b"\0") if name]


def _filter_names(root: Path, names: Sequence[str], include: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split names into files for the patch and omitted ones; warn about private-looking files."""
    fitting = [name for name in names if _can_include(root, name)]
    reasons = {name: why_private(root / name, name, include=include) for name in fitting}
    if private := [f"{printable(name)} ({reason})" for name, reason in reasons.items() if reason]:
        _logger.warning(
            "files not recorded, since they may be private: %s. A run that requires these files cannot be re-created. "
            "To record them, set run.include='[PATTERN]'.",
            ", ".join(private),
        )
    kept = [name for name in fitting if reasons[name] is None]
    return kept, tuple(sorted(set(names) - set(kept)))


def _can_include(root: Path, name: str) -> bool:
    path = root / name
    if path.is_symlink():
        return True
    # git cannot add nested repositories, and a single unreadable file would make it fail
    return path.is_file() and os.access(path, os.R_OK) and path.stat().st_size <= LARGEST


def _create_patch(root: Path, untracked: list[str]) -> bytes:
    """Return the staged, unstaged and untracked differences from HEAD; uses a copy of the index."""
    with temporary_folder() as spare:
        index = spare / "index"
        own = _read_git_text(root, "rev-parse", "--path-format=absolute", "--git-path", "index")
        if own and Path(own).exists():
            shutil.copy2(own, index)  # keeps its mtime, which git uses to detect changes
        if untracked:
            _require_git(root, *_ADD, "--intent-to-add", index=index, stdin=_join_names(untracked))
        return _require_git(root, *_DIFF, index=index)


def _join_names(names: list[str]) -> bytes:
    return b"\0".join(map(os.fsencode, names))


def _try_git(folder: Path, *arguments: str, database: Path | None = None) -> bytes | None:
    """Return git's output, or None if the command fails or git is not installed."""
    try:
        done = _run_git(folder, *arguments, database=database)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _require_git(
    root: Path, *arguments: str, index: Path | None = None, database: Path | None = None, stdin: bytes = b""
) -> bytes:
    """Return git's output; raise WorldsizeError if it fails (empty output means no changes)."""
    done = _run_git(root, *arguments, index=index, database=database, stdin=stdin)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()
        raise WorldsizeError(f"git failed to compare {root} with its last commit: {reason}. Repair the repository.")
    return done.stdout


def _run_git(
    folder: Path, *arguments: str, index: Path | None = None, database: Path | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_LITERAL_PATHSPECS": "1"}
    if index:
        environment["GIT_INDEX_FILE"] = str(index)
    if database:
        environment |= {"GIT_DIR": str(database), "GIT_WORK_TREE": str(folder)}
    return subprocess.run(["git", *arguments], cwd=folder, env=environment, input=stdin, capture_output=True)


def _read_git_text(root: Path, *arguments: str) -> str | None:
    output = _try_git(root, *arguments)
    return output.decode().strip() or None if output else None


_LARGEST_PATCH = 1 << 30  # maximum bytes
_ALL = "+refs/*:refs/*"
# disables hooks and helpers configured in a repository, and password prompts
_OPTIONS = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.ext.allow=never")
_NO_PROMPT = {"GIT_TERMINAL_PROMPT": "0"}


@contextmanager
def check_out_code(code: Mapping[str, Any], patch: bytes, folder: Path, candidates: Sequence[Path]) -> Iterator[Path]:
    """Yield the run's working directory in ``folder``, a temporary git worktree.

    The commit is searched for in the repositories at ``candidates`` before it is fetched from the remote.

    Raises:
        WorldsizeError: the commit cannot be found or fetched, or the patch does not apply to it.
    """
    _check_code_record(code)
    if code["commit"] is None:
        folder.mkdir(parents=True)
        _apply_patch(patch, folder)
        yield folder
        return
    repository = _repository(code, candidates, folder.with_name("repository.git"))
    _git_needed(repository, "worktree", "add", "--quiet", "--detach", "--force", str(folder), code["commit"])
    try:
        _apply_patch(patch, folder)
        yield _working_directory(folder, code["folder"])
    finally:
        _git_succeeds(repository, "worktree", "remove", "--force", str(folder))


def _working_directory(folder: Path, name: str) -> Path:
    """Return the folder ``name`` in the worktree; raise WorldsizeError unless it is inside."""
    directory = folder / name
    if not directory.is_dir() or not directory.resolve().is_relative_to(folder.resolve()):
        raise WorldsizeError(
            f"the run's working directory {name!r} is missing from the recorded commit, or links outside of it."
        )
    return directory


def remove_worktree(folder: Path) -> None:
    """Remove a worktree left behind by a killed process, and its entry in the repository."""
    _git_succeeds(folder, "worktree", "remove", "--force", str(folder))


def _check_code_record(code: Mapping[str, Any]) -> None:
    """Check that an untrusted manifest cannot leave the worktree or pass options to git."""
    folder = PurePosixPath(code["folder"])
    if folder.is_absolute() or ".." in folder.parts:
        raise WorldsizeError(
            f"the manifest has a folder outside of the checkout: {folder}. Do not trust this manifest."
        )
    if code["commit"] is not None and not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", code["commit"]):
        raise WorldsizeError(f"invalid commit in the manifest: {code['commit']!r}. Do not trust this manifest.")
    if "\0" in (code["remote"] or ""):
        raise WorldsizeError(f"invalid remote in the manifest: {code['remote']!r}. Do not trust this manifest.")


def read_patch(path: Path, digest: str | None, *, approximate: bool) -> bytes:
    """Read and verify the recorded patch; with ``approximate``, treat a lost one as empty.

    Raises:
        WorldsizeError: the patch cannot be read, or its digest differs from the manifest's.
    """
    if digest is None:
        return b""
    try:
        patch = read_regular(path, at_most=_LARGEST_PATCH)
    except OSError as error:
        if approximate:
            return b""
        why = "missing" if isinstance(error, FileNotFoundError) else f"unreadable ({error.strerror})"
        raise WorldsizeError(
            f"{path} is {why}: the run had uncommitted changes with SHA-256 {digest}. "
            "Restore the file, or omit the changes with --approximate."
        ) from None
    if (actual := hashlib.sha256(patch).hexdigest()) != digest:
        raise WorldsizeError(f"{path} was changed: expected SHA-256 {digest}, got {actual}. Restore the original file.")
    return patch


def list_patched_files(patch: bytes) -> list[str]:
    """Return the names of the files that ``git apply`` would change for ``patch``."""
    done = _run_without_prompts(Path("/"), "apply", "--numstat", "-z", "-", stdin=patch)
    rows = os.fsdecode(done.stdout).split("\0")
    return [row.split("\t", 2)[-1] for row in rows if row]


def _repository(code: Mapping[str, Any], candidates: Sequence[Path], spare: Path) -> Path:
    commit, remote = code["commit"], code["remote"]
    for folder in candidates:
        if is_folder(folder) and _git_succeeds(folder, "cat-file", "-e", f"{commit}^{{commit}}"):
            return folder
    if remote is not None:
        spare.mkdir(parents=True)
        _git_needed(spare, "init", "--quiet", "--bare")
        # a server may refuse to send a commit by its hash; fetch everything in that case
        _ = _git_succeeds(spare, "fetch", "--quiet", "--", remote, commit) or _git_succeeds(
            spare, "fetch", "--quiet", "--", remote, _ALL
        )
        if _git_succeeds(spare, "cat-file", "-e", f"{commit}^{{commit}}"):
            return spare
    where = f"could not be fetched from {remote}" if remote else "the run's repository had no remote"
    looked_in = ", ".join(dict.fromkeys(map(str, candidates)))
    raise WorldsizeError(
        f"commit {commit} not found in {looked_in}, and {where}. Run the command inside a clone that contains the "
        "commit."
    )


def _apply_patch(patch: bytes, folder: Path) -> None:
    if patch:
        # also works outside of a repository; git itself refuses paths outside of the folder
        _git_needed(folder, "apply", "--whitespace=nowarn", "--binary", "-", stdin=patch)


def _git_succeeds(folder: Path, *arguments: str) -> bool:
    return _run_without_prompts(folder, *arguments).returncode == 0


def _git_needed(folder: Path, *arguments: str, stdin: bytes = b"") -> None:
    done = _run_without_prompts(folder, *arguments, stdin=stdin)
    if done.returncode != 0:
        raise WorldsizeError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}.")


def _run_without_prompts(folder: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command, environment = ["git", *_OPTIONS, *arguments], {**os.environ, **_NO_PROMPT}
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, env=environment)
