"""A project's tests import its plugins, and worldsize's own, by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY
from worldsize.cli.init import init

pytestmark = pytest.mark.heavy

TESTS = """
from plugins.diloco.strategy import DiLoCo
from plugins.mine.rule import RULE
from recipes.digits.recipe import Digits
from shared_rule import SHARED


def test_they_are_there():
    assert (RULE, SHARED, DiLoCo.__name__, Digits.__name__) == ("mine", "shared", "DiLoCo", "Digits")
"""


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    put(folder / "plugins" / "mine" / "rule.py", "RULE = 'mine'\n")
    put(folder / "tests" / "test_mine.py", TESTS)
    put(tmp_path / "shared" / "shared_rule.py", "SHARED = 'shared'\n")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with worldsize as installed from a wheel, outside of any clone."""
    folder = tmp_path / "site" / "worldsize"
    ignored = shutil.ignore_patterns("__pycache__")
    for source, target in (("framework/worldsize", "."), ("conf", "conf"), ("plugins", "bundled/plugins")):
        shutil.copytree(REPOSITORY / source, folder / target, ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(REPOSITORY / "recipes", folder / "bundled" / "recipes", ignore=ignored)
    return folder.parent


def pytest_in(project: Path, *options: str, installed: Path) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(installed), "WORLDSIZE_PLUGINS": str(project.parent / "shared")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests", *options]
    return subprocess.run(words, cwd=project, env={**os.environ, **own}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("place", ["clone", "site"])
def test_plugins_of_the_project_and_of_worldsize_are_imported_in_tests(
    project: Path, place: str, request: pytest.FixtureRequest
) -> None:
    installed = REPOSITORY / "framework" if place == "clone" else request.getfixturevalue("site")
    put(project / "pyproject.toml", "[tool.pytest.ini_options]\n")
    assert "No module named 'plugins" in pytest_in(project, "--import-mode=importlib", installed=installed).stdout
    put(project / "pyproject.toml", "[tool.pytest.ini_options]\naddopts = '-p worldsize.testing.importing'\n")
    done = pytest_in(project, installed=installed)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


def test_a_conftest_may_name_the_plugin_and_import_by_itself(project: Path) -> None:
    text = "pytest_plugins = ['worldsize.testing.importing']\n"
    put(project / "conftest.py", text)
    done = pytest_in(project, installed=REPOSITORY / "framework")
    assert done.returncode == 0, done.stdout
    text = "from worldsize.testing.importing import import_plugins\n\nimport_plugins()\n"
    put(project / "conftest.py", f"{text}from plugins.diloco.strategy import DiLoCo\n")
    done = pytest_in(project, installed=REPOSITORY / "framework")
    assert done.returncode == 0, done.stdout


def test_a_new_project_has_it(tmp_path: Path) -> None:
    init(tmp_path / "fresh")
    text = (tmp_path / "fresh" / "pyproject.toml").read_text()
    assert "-p worldsize.testing.importing" in text
