"""The ports of from-a-script.md and from-accelerate.md pass their tests, and are as small as the pages claim."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY, files

SCRIPTS, ACCELERATE = (REPOSITORY / "docs" / "howto" / name for name in ("from-a-script.md", "from-accelerate.md"))
FILES = files(SCRIPTS) | files(ACCELERATE)
NAMES = [Path(name).stem for name in FILES if name.startswith("scripts/")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder, on the import path."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "tests")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize("name", [*NAMES[:-1], pytest.param(NAMES[-1], marks=pytest.mark.heavy)])
def test_a_port_passes_its_own_tests(name: str, project: Path) -> None:
    module = importlib.import_module(f"test_{name}")
    own = [value for key, value in vars(module).items() if key.startswith("test_")]
    assert own
    for test in own:
        test()


@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs(name: str, project: Path) -> None:
    exec(compile(FILES[f"scripts/{name}.py"], name, "exec"), {"__name__": "__main__", "print": lambda *_: None})


def test_the_page_says_how_large_the_differences_are() -> None:
    rows = re.findall(r"^\| \[.*\]\(#.*\) \| (\d+) \| (\d+) \| (\d+) \|$", SCRIPTS.read_text(), re.M)
    names = [Path(name).stem for name in files(SCRIPTS) if name.startswith("scripts/")]
    assert [tuple(map(int, row)) for row in rows] == [_sizes(name) for name in names]


def test_the_page_on_accelerate_shows_the_whole_difference() -> None:
    script, recipe = (FILES[name].splitlines() for name in ("scripts/waves.py", "recipes/waves/recipe.py"))
    difference = list(difflib.unified_diff(script, recipe, n=0, lineterm=""))[2:]
    (shown,) = re.findall(r"^```diff\n(.*?)\n```", ACCELERATE.read_text(), re.M | re.S)
    assert shown.splitlines() == [line for line in difference if not line.startswith("@@")]


def _sizes(name: str) -> tuple[int, int, int]:
    """Count the lines of a script, those that its recipe has too wherever they stand, and those that only it has."""
    script, recipe = (_lines(FILES[path]) for path in (f"scripts/{name}.py", f"recipes/{name}/recipe.py"))
    return script.total(), (script & recipe).total(), (recipe - script).total()


def _lines(text: str) -> Counter[str]:
    return Counter(line.strip() for line in text.splitlines() if line.strip())
