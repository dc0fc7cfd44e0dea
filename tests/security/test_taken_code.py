"""From a different user's project and run folder, only copies of the recorded files can be imported."""

from __future__ import annotations

import py_compile
from pathlib import Path
from typing import Any

import pytest

from worldsize.config.compose import compose_and_call, format_override
from worldsize.errors import WorldsizeError
from worldsize.launch.recorded_run import find_project, take_code
from worldsize.record.inputs import check_kept, compute_plugin_digest, remove_compiled
from worldsize.record.manifest import is_own, write_manifest
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import open_record


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A different user's project, with a recipe and the things that can lie around it."""
    project = tmp_path / "theirs"
    recipe = project / "recipes" / "mine"
    (recipe / "conf" / "recipe").mkdir(parents=True)
    (recipe / "recipe.py").write_text("S = 1\n")
    (recipe / "conf" / "recipe" / "mine.yaml").write_text("a: 1\n")
    (project / "recipes" / "__init__.py").write_text("raise SystemExit\n")
    (project / "recipes" / "loose.py").write_text("raise SystemExit\n")
    (project / "recipes" / "unlisted" / "conf" / "data").mkdir(parents=True)
    (project / "recipes" / "unlisted" / "conf" / "data" / "theirs.yaml").write_text("a: 1\n")
    (project / "recipes" / "unlisted" / "code.py").write_text("raise SystemExit\n")
    (project / "conf" / "strategy").mkdir(parents=True)
    (project / "conf" / "strategy" / "theirs.yaml").write_text("a: 1\n")
    (project / "conf" / "strategy" / "ddp.yaml").write_text("a: 1\n")
    (project / "json.py").write_text("raise SystemExit\n")
    (recipe / ".hidden.py").write_text("raise SystemExit\n")
    (recipe / "large.py").write_bytes(bytes((1 << 20) + 1))
    (recipe / "package").symlink_to(project / "recipes" / "unlisted")
    py_compile.compile(
        str(project / "json.py"),
        str(recipe / "__pycache__" / "recipe.cpython-311.pyc"),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    return project


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    return run


def listed(folder: Path, *, kept: bool = False) -> dict[str, Any]:
    source = "project"
    return {
        "plugins": [{"name": "recipes.mine", "source": source, "sha256": compute_plugin_digest(folder), "kept": kept}]
    }


def files_below(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())


def test_of_a_project_comes_what_the_record_lists_and_the_yaml_that_is_not_ours(
    project: Path, run: RunDirectory
) -> None:
    take_code(listed(project / "recipes" / "mine"), project, run)
    assert files_below(run.project) == [
        "conf/strategy/theirs.yaml",
        "recipes/mine/conf/recipe/mine.yaml",
        "recipes/mine/recipe.py",
        "recipes/unlisted/conf/data/theirs.yaml",
    ]


def test_of_kept_plugins_come_copies_without_what_was_compiled(project: Path, run: RunDirectory) -> None:
    kept = run.plugins / "recipes" / "mine"
    kept.mkdir(parents=True)
    (kept / "recipe.py").write_text("S = 1\n")
    (kept / "__pycache__").mkdir()
    (kept / "__pycache__" / "recipe.cpython-311.pyc").touch()
    take_code(listed(kept, kept=True), run.path / "nowhere", run)
    assert files_below(run.plugins) == ["recipes/mine/recipe.py"]
    assert files_below(run.project) == []


def test_other_code_than_the_recorded_is_not_taken(project: Path, run: RunDirectory) -> None:
    manifest = listed(project / "recipes" / "mine")
    (project / "recipes" / "mine" / "recipe.py").write_text("S = 2\n")
    with pytest.raises(WorldsizeError, match=r"the plugin recipes\.mine in .* differs from the record"):
        take_code(manifest, project, run)
    assert not run.project.exists()


def test_a_linked_file_is_not_taken(project: Path, run: RunDirectory) -> None:
    (project / "recipes" / "mine" / "linked.py").symlink_to(project / "json.py")
    with pytest.raises(WorldsizeError, match="is a symbolic link"):
        take_code(listed(project / "recipes" / "mine"), project, run)


def test_a_linked_folder_of_plugins_is_refused_and_nothing_below_it_is_removed(
    tmp_path: Path, run: RunDirectory
) -> None:
    cache = tmp_path / "home" / "__pycache__"
    cache.mkdir(parents=True)
    run.plugins.symlink_to(tmp_path / "home")
    with pytest.raises(WorldsizeError, match="is a symbolic link"):
        check_kept([], run.plugins)
    assert cache.exists()


def test_code_that_was_taken_once_is_taken_from_there_again(project: Path, run: RunDirectory) -> None:
    manifest = listed(project / "recipes" / "mine")
    take_code(manifest, project, run)
    manifest |= {"config": {"run": {"import_path": ["/no/such", "/other"]}}}
    assert find_project(manifest, run, own=False) == run.project
    assert find_project(manifest, run, own=True) == Path.cwd(), "what lies in one's own run folder was not compared"
    take_code(manifest, run.project, run)
    assert "recipes/mine/recipe.py" in files_below(run.project)


def test_a_record_without_import_path_began_here(run: RunDirectory) -> None:
    for folders in ([], ["/no/such"], ["a\0b"]):
        assert find_project({"config": {"run": {"import_path": folders}}}, run, own=True) == Path.cwd()


def test_a_compiled_file_of_a_commit_goes_and_so_does_a_link_to_others(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "__pycache__").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "__pycache__").symlink_to(tmp_path / "elsewhere")
    remove_compiled(tmp_path)
    assert files_below(tmp_path) == ["elsewhere/kept"]


def test_a_manifest_that_another_user_writes_after_it_was_adopted_is_not_adopted(run: RunDirectory) -> None:
    theirs: dict[str, Any] = {"run_id": "run", "attempts": [], "results": None, "overrides": ["a=1"]}
    write_manifest(run.manifest, theirs, own=False)
    with open_record(run) as record:
        record.adopt()
        write_manifest(run.manifest, {**theirs, "overrides": ["allow_targets=[os]"]}, own=False)
        record.begin_attempt([], world_size=1)
        assert not is_own(record.manifest)


def test_any_path_can_be_the_value_of_an_override(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    for path in ("/exp(1)/runs", "/it's", "/a,b=[c]{d}", "/back\\", "/${oc.env:HOME}", '/ü "x"'):
        compose_and_call(lambda cfg: seen.append(cfg.run.root), [format_override("run.root", path)])
        assert seen.pop() == path
