"""Plugins are found in projects, folders and packages, and recorded with a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from worldsize.config import search_path as module
from worldsize.config.compose import compose_and_call
from worldsize.config.instantiate import Allowed, find_bundled_targets, resolve_target
from worldsize.config.search_path import (
    check_unique,
    config_folders,
    find_installed_plugins,
    find_used_plugins,
    list_options,
    list_plugins,
)
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.record.inputs import check_kept, compute_plugin_digest, copy_plugin

YAML = "# What it does\n_target_: {target}\n"


def put(folder: Path, option: str, target: str, source: str = "") -> Path:
    """Write a plugin's folder with one strategy."""
    (folder / "conf" / "strategy").mkdir(parents=True)
    (folder / "conf" / "strategy" / f"{option}.yaml").write_text(YAML.format(target=target))
    (folder / "strategy.py").write_text(source)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project as the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """``install("worldsize_x")`` installs a package that must not be imported, and returns its folder."""
    site = tmp_path / "site"

    def package(name: str, option: str = "made_up", *, conf: bool = True) -> Path:
        facts = site / f"{name}-1.2.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (facts / "entry_points.txt").write_text(f"[worldsize.plugins]\nx = {name}\n")
        folder = site / name
        put(folder, option, f"{name}.strategy.S") if conf else folder.mkdir()
        (folder / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
        monkeypatch.syspath_prepend(str(site))
        find_installed_plugins.cache_clear()
        find_bundled_targets.cache_clear()
        return folder

    yield package
    find_installed_plugins.cache_clear()
    find_bundled_targets.cache_clear()


def test_an_installed_package_offers_its_options_and_is_not_imported(
    project: Path, install: Callable[..., Path]
) -> None:
    folder = install("worldsize_made_up")
    assert folder / "conf" in config_folders()
    (plugin,) = [plugin for plugin in list_plugins() if plugin.folder == folder]
    assert (plugin.name, plugin.source, plugin.version) == ("worldsize_made_up", "worldsize_made_up", "1.2")
    assert [(option.name, option.about) for option in plugin.options] == [("made_up", "What it does")]
    check_unique()
    assert "worldsize_made_up" not in sys.modules


def test_an_installed_package_may_be_built_as_its_files_name_it_and_in_no_other_way(
    project: Path, install: Callable[..., Path]
) -> None:
    allowed = Allowed()
    assert not allowed.admits_path("worldsize_imported.strategy.S")
    folder = install("worldsize_imported")
    others = [f"worldsize_imported.strategy.{name}" for name in ("_run", "Other", "S._run", "os.system")]
    assert [allowed.admits_path(each) for each in ("worldsize_imported.strategy.S", *others)] == [True] + [False] * 4
    (folder / "__init__.py").write_text("")
    (folder / "strategy.py").write_text(
        "import os\nclass S:\n  def _run(self): ...\nclass Other: ...\ndef _run(): ...\n"
    )
    assert isinstance(resolve_target("worldsize_imported.strategy.S", allowed, "strategy")(), object)
    for each in others:
        with pytest.raises(ConfigError, match="outside the allow-list"):
            resolve_target(each, allowed, "strategy")


def test_an_installed_package_without_options_is_named_when_an_option_is_missing(
    project: Path, install: Callable[..., Path]
) -> None:
    install("worldsize_empty", conf=False)
    with pytest.raises(ConfigError, match=r"unknown strategy 'made_up'.*worldsize_empty is broken: .* has no conf/"):
        compose_and_call(lambda cfg: None, ["strategy=made_up"])


def test_an_entry_point_inside_a_package_is_found_without_importing_that(
    tmp_path: Path, install: Callable[..., Path]
) -> None:
    folder = install("worldsize_outer", conf=False)
    put(folder / "inner", "deep", "worldsize_outer.inner.strategy.S")
    assert module._find_module_folders("worldsize_outer.inner") == [folder / "inner"]


def test_one_option_in_two_places_is_an_error_that_shows_both(
    project: Path, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = install("worldsize_made_up") / "conf" / "strategy" / "made_up.yaml"
    here = put(project / "plugins" / "made_up", "made_up", "plugins.made_up.strategy.S")
    with pytest.raises(ConfigError) as refused:
        compose_and_call(lambda cfg: None, [])
    assert f"strategy=made_up is defined twice: {here / 'conf/strategy/made_up.yaml'} and {there}" in str(refused.value)


def test_two_folders_of_one_module_are_an_error_though_their_options_differ(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLDSIZE_PLUGINS", str(tmp_path / "shared"))
    put(project / "plugins" / "same", "one", "plugins.same.strategy.S")
    put(tmp_path / "shared" / "plugins" / "same", "two", "plugins.same.strategy.S")
    with pytest.raises(ConfigError, match=r"plugins\.same is defined twice: .*project.* and .*shared"):
        check_unique()


def test_a_run_uses_the_plugins_that_its_config_names_and_those_that_they_import(project: Path) -> None:
    put(project / "plugins" / "first", "first", "plugins.first.strategy.S", "from plugins.second import strategy\n")
    put(project / "plugins" / "second", "second", "plugins.second.strategy.S", "from plugins import third\n")
    put(project / "plugins" / "third", "third", "plugins.third.strategy.S")
    put(project / "plugins" / "fourth", "fourth", "plugins.fourth.strategy.S", "# plugins.fifth\n")
    put(project / "plugins" / "fifth", "fifth", "plugins.fifth.strategy.S", "import plugins.first_aid\n")
    config = {"strategy": {"_target_": "plugins.first.strategy.S"}, "path": str(project / "plugins" / "fifth")}
    assert [plugin.name for plugin in find_used_plugins(config, {})] == [
        "plugins.first",
        "plugins.second",
        "plugins.third",
    ]
    assert [plugin.name for plugin in find_used_plugins({}, {"strategy": "fifth", "recipe": "first"})] == [
        "plugins.fifth"
    ]


def test_a_copy_has_the_digest_of_its_original_until_a_byte_changes(project: Path) -> None:
    folder = put(project / "plugins" / "mine", "mine", "plugins.mine.strategy.S", "S = 1\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "strategy.pyc").write_bytes(b"\0")
    (folder / "large").write_bytes(bytes((1 << 20) + 1))
    record = [{"name": "plugins.mine", "sha256": compute_plugin_digest(folder), "kept": True}]
    copies = project / "run" / "plugins"
    copy_plugin(folder, copies / "plugins" / "mine", str)
    check_kept(record, copies)
    copied = sorted(file.name for file in copies.rglob("*") if file.is_file())
    assert copied == ["mine.yaml", "strategy.py"]
    (copies / "plugins" / "mine" / "strategy.py").write_text("S = 2\n")
    with pytest.raises(WorldsizeError, match="mine is missing or was changed"):
        check_kept(record, copies)


def test_a_plugin_that_holds_a_secret_is_not_copied(project: Path) -> None:
    folder = put(project / "plugins" / "mine", "mine", "plugins.mine.strategy.S", "KEY = 'abcdef'\n")
    with pytest.raises(WorldsizeError, match=r"strategy.py contains a secret"):
        copy_plugin(folder, project / "copy", lambda text: text.replace("abcdef", "<redacted>"))


def test_every_bundled_option_says_what_it_does() -> None:
    bundled = [
        option for option in list_options() if not option.file.is_relative_to(Path.cwd() / "conf" / "experiment")
    ]
    assert [f"{option.group}={option.name}" for option in bundled if len(option.about) < 10] == []


def test_list_shows_where_an_option_comes_from_and_refuses_unknown_kinds(
    command: Any, project: Path, environment_without_wandb: dict[str, str]
) -> None:
    put(project / "plugins" / "mine", "made_up", "plugins.mine.strategy.S")
    shown = command("list", "strategies", cwd=project, environment=environment_without_wandb)
    lines = {line.split()[0]: line for line in shown.stdout.splitlines()}
    assert (
        lines["strategy=made_up"].split(maxsplit=1)[1]
        == "plugins.mine (project)" + lines["strategy=made_up"].partition("(project)")[2]
    )
    assert lines["strategy=made_up"].endswith("What it does")
    assert "plugins.diloco" in lines["strategy=diloco"]
    refused = command("list", "strategie", cwd=project, environment=environment_without_wandb)
    assert (refused.returncode, "did you mean 'strategy'" in refused.stderr) == (2, True)


def test_new_refuses_names_that_are_taken_or_invalid(
    command: Any, project: Path, environment_without_wandb: dict[str, str]
) -> None:
    refusals = {
        ("strategy", "ddp"): "strategy=ddp already exists in",
        ("logger", "diloco"): "plugins.diloco already exists in",
        ("recipe", "My-Recipe"): "is not a valid module name",
        ("recipe", "class"): "is not a valid module name",
        ("strategy", "world"): "would create the class World, whose name is already used",
    }
    for words, message in refusals.items():
        done = command("new", *words, cwd=project, environment=environment_without_wandb)
        assert done.returncode == 2
        assert message in done.stderr
    assert not list(project.iterdir())


def test_a_broken_plugin_breaks_the_runs_that_choose_it_and_no_other(
    command: Any, project: Path, environment_without_wandb: dict[str, str]
) -> None:
    put(project / "plugins" / "bad", "bad", "plugins.bad.strategy.S", "import torch\nraise ValueError('line two')\n")

    def planned(*words: str) -> Any:
        size = ("--model-size", "1e9", "--precision", "fp16", "--compute", "250ms")
        return command("plan", *size, "cluster.processes=2", *words, cwd=project, environment=environment_without_wandb)

    chosen = planned("strategy=bad")
    assert chosen.returncode == 1
    assert 'bad/strategy.py", line 2' in chosen.stderr
    other = planned("strategy=ddp")
    assert other.returncode == 0, other.stderr
    assert "bad: broken: ValueError: line two" in " ".join(other.stdout.split())
