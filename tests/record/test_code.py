"""Patches re-create a checkout with any git configuration of the user."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from worldsize.errors import WorldsizeError
from worldsize.record.code import Code, capture_code

Git = Callable[..., str]
NOBODY = 65534


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, Git]:
    """A repository with one commit, in a folder whose name has a space."""
    root = tmp_path / "my project"
    root.mkdir()

    def git(*arguments: str, cwd: Path = root) -> str:
        options = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *options, *arguments], cwd=cwd, capture_output=True, text=True, check=True)
        return done.stdout

    git("init")
    for name in ("kept.py", "changed.py", "staged.py", "deleted.py"):
        (root / name).write_text(f"{name}\n")
    (root / "long.py").write_text("".join(f"{number}\n" for number in range(30)))
    (root / "image.bin").write_bytes(bytes(range(256)))
    git("add", "-A")
    git("commit", "-m", "first")
    return root, git


def tree(root: Path) -> dict[str, bytes]:
    """Return each file's content or link target, and its executable bit."""
    paths = (path for path in root.rglob("*") if ".git" not in path.parts)
    return {path.relative_to(root).as_posix(): content(path) for path in paths if path.is_symlink() or path.is_file()}


def content(path: Path) -> bytes:
    if path.is_symlink():
        return os.fsencode(path.readlink())
    return b"%d" % os.access(path, os.X_OK) + path.read_bytes()


def recreated(root: Path, code: Code, clone: Path) -> dict[str, bytes]:
    subprocess.run(["git", "clone", "-q", root, clone], check=True)
    subprocess.run(["git", "checkout", "-q", str(code.commit)], cwd=clone, check=True)
    subprocess.run(["git", "apply", "-"], input=code.patch, cwd=clone, check=True)
    return tree(clone)


def change(root: Path) -> None:
    (root / "long.py").write_text((root / "long.py").read_text().replace("15\n", "fifteen\n"))
    (root / "new.py").write_text("new\n")


@pytest.mark.parametrize(
    "option",
    [
        "diff.noprefix=true",
        "diff.mnemonicPrefix=true",
        "diff.context=0",
        "diff.renames=copies",
        "color.ui=always",
    ],
)
def test_the_patch_applies_whatever_the_user_has_configured(
    repository: tuple[Path, Git], tmp_path: Path, option: str
) -> None:
    root, git = repository
    git("config", *option.split("="))
    change(root)
    assert recreated(root, capture_code(root, exclude=root / "runs"), tmp_path / "clone") == tree(root)


def test_the_patch_holds_bytes_and_not_the_output_of_a_text_filter(
    repository: tuple[Path, Git], tmp_path: Path
) -> None:
    root, git = repository
    (root / ".git" / "info" / "attributes").write_text("*.bin diff=hidden\n")
    git("config", "diff.hidden.textconv", "true")
    (root / "image.bin").write_bytes(bytes(reversed(range(256))))
    assert recreated(root, capture_code(root, exclude=root / "runs"), tmp_path / "clone") == tree(root)


def test_links_modes_renames_and_odd_names_are_recreated(repository: tuple[Path, Git], tmp_path: Path) -> None:
    root, git = repository
    git("mv", "long.py", "renamed.py")
    (root / "image.bin").chmod(0o755)
    (root / "link").symlink_to("nowhere")
    (root / "empty").touch()
    (root / "without newline").write_bytes(b"x")
    (root / "-option").write_text("x\n")
    (root / ":(top)").write_text("x\n")
    (root / "two\nlines").write_text("x\n")
    assert recreated(root, capture_code(root, exclude=root / "runs"), tmp_path / "clone") == tree(root)


def test_a_file_taken_out_of_the_index_alone_is_still_in_the_patched_tree(
    repository: tuple[Path, Git], tmp_path: Path
) -> None:
    root, git = repository
    git("rm", "--cached", "long.py")
    change(root)
    assert recreated(root, capture_code(root, exclude=root / "runs"), tmp_path / "clone") == tree(root)


@pytest.mark.parametrize("commits", [0, 1])
def test_a_nested_repository_is_named_and_all_other_files_are_recorded(
    repository: tuple[Path, Git], commits: int
) -> None:
    root, git = repository
    change(root)
    (root / "inner").mkdir()
    git("init", cwd=root / "inner")
    (root / "inner" / "file").write_text("x")
    for _ in range(commits):
        git("add", "-A", cwd=root / "inner")
        git("commit", "-m", "inner", cwd=root / "inner")
    code = capture_code(root, exclude=root / "runs")
    assert code.left_out == ("inner/",)
    assert b"b/new.py" in code.patch
    assert b"inner" not in code.patch


def test_an_unreadable_file_is_named_and_all_other_files_are_recorded(repository: tuple[Path, Git]) -> None:
    root, _ = repository
    change(root)
    capture_code(root, exclude=root / "runs")  # imports modules that an ordinary user may not be able to read
    (root / "closed").touch(mode=0)
    with tempfile.TemporaryDirectory() as place:  # other users cannot enter pytest's folder
        moved = Path(shutil.move(root, place))
        code = as_ordinary_user(Path(place), lambda: capture_code(moved, exclude=moved / "runs"))
    assert (code.left_out, b"b/new.py" in code.patch) == (("closed",), True)


def as_ordinary_user(folder: Path, call: Callable[[], Code]) -> Code:
    """Call ``call()`` in a process of an ordinary user that owns ``folder``, since root can read every file."""
    if os.geteuid() != 0:
        return call()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.environ["HOME"] = str(folder)
            os.write(writer, pickle.dumps(call()))
        finally:
            os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader, "rb") as answer:
        code: Code = pickle.loads(answer.read())
    return code


def test_a_checkout_that_git_cannot_compare_is_never_called_clean(repository: tuple[Path, Git]) -> None:
    root, git = repository
    change(root)
    name = git("rev-parse", "HEAD:long.py").strip()
    (root / ".git" / "objects" / name[:2] / name[2:]).unlink()
    with pytest.raises(WorldsizeError, match=f"git failed to compare .*{name}.* Repair the repository"):
        capture_code(root, exclude=root / "runs")


def test_a_detached_checkout_has_a_commit_and_no_branch(repository: tuple[Path, Git]) -> None:
    root, git = repository
    git("checkout", "--detach")
    code = capture_code(root, exclude=root / "runs")
    assert (code.commit, code.branch, code.dirty) == (git("rev-parse", "HEAD").strip(), None, False)


def test_without_git_no_code_is_recorded(
    repository: tuple[Path, Git], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert capture_code(repository[0], exclude=tmp_path / "runs") == Code()


def test_a_changed_submodule_makes_the_checkout_dirty_and_the_patch_still_applies(
    repository: tuple[Path, Git], tmp_path: Path
) -> None:
    root, git = repository
    git("-c", "protocol.file.allow=always", "submodule", "add", str(root), "library")
    git("commit", "-m", "library")
    git("config", "diff.ignoreSubmodules", "all")
    (root / "library" / "long.py").write_text("changed\n")
    code = capture_code(root, exclude=root / "runs")
    assert code.dirty
    recreated(root, code, tmp_path / "clone")


def test_the_patch_recreates_every_kind_of_change(repository: tuple[Path, Git], tmp_path: Path) -> None:
    root, git = repository
    (root / "changed.py").write_text("changed\n")
    (root / "staged.py").write_text("staged\n")
    git("add", "staged.py")
    (root / "deleted.py").unlink()
    (root / "weights.bin").write_bytes(bytes(range(256)))
    (root / "sub dir").mkdir()
    (root / "sub dir" / "né*w.py").write_text("untracked\n")
    (root / "runs").mkdir()
    (root / "runs" / "log").write_text("not code")
    status = git("status", "--porcelain")

    code = capture_code(root / "sub dir", exclude=root / "runs")
    assert git("status", "--porcelain") == status, "the user's index was touched"
    assert (code.commit, code.branch, code.dirty) == (git("rev-parse", "HEAD").strip(), "main", True)
    assert code.describe()["patch_sha256"] == hashlib.sha256(code.patch).hexdigest()

    git("clone", str(root), str(tmp_path / "clone"))
    subprocess.run(["git", "apply", "-"], input=code.patch, cwd=tmp_path / "clone", check=True)
    expected = {name: content for name, content in tree(root).items() if not name.startswith("runs/")}
    assert tree(tmp_path / "clone") == expected


def test_a_clean_checkout_has_no_patch(repository: tuple[Path, Git]) -> None:
    root, git = repository
    git("remote", "add", "origin", "https://user:s3cret@example.org/a/b.git")
    code = capture_code(root, exclude=root / "runs")
    assert (code.dirty, code.patch) == (False, b"")
    assert code.remote == "https://example.org/a/b.git"


def test_a_large_untracked_file_is_named_and_left_out(repository: tuple[Path, Git]) -> None:
    root, _ = repository
    (root / "big.bin").write_bytes(bytes(2 << 20))
    code = capture_code(root, exclude=root / "runs")
    assert (code.left_out, code.dirty, code.patch) == (("big.bin",), True, b"")


def test_outside_git_and_before_the_first_commit_no_code_is_recorded(tmp_path: Path) -> None:
    assert capture_code(tmp_path, exclude=tmp_path / "runs") == Code()
    subprocess.run(["git", "init"], cwd=tmp_path, capture_output=True, check=True)
    assert capture_code(tmp_path, exclude=tmp_path / "runs") == Code()


def test_a_change_of_equal_size_in_the_same_second_as_the_commit_is_detected(repository: tuple[Path, Git]) -> None:
    """Git compares whole seconds, but rereads files as recent as its index."""
    root, git = repository
    second = (10**9, 10**9)
    git("config", "core.trustctime", "false")
    os.utime(root / "kept.py", second)
    git("update-index", "--refresh")
    (root / "kept.py").write_text("kept.pz\n")
    for path in (root / "kept.py", root / ".git" / "index"):
        os.utime(path, second)
    assert b"+kept.pz" in capture_code(root, exclude=root / "runs").patch
