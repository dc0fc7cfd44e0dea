"""A plugin depends only on the framework: it can be copied out of this repository, or left out of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PLUGINS = sorted((REPOSITORY / "plugins").glob("*/*.py"))
STRATEGIES = {path.stem for path in REPOSITORY.glob("conf/strategy/*.yaml")}


def imported(path: Path) -> Iterator[str]:
    """Yield the full names that the module at ``path`` imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def is_framework_or_own(name: str, plugin: str) -> bool:
    """Return whether ``plugin`` may import ``name``, for names in this repository."""
    parts = name.split(".")
    if parts[0] == "plugins":
        return parts[1] == plugin
    return parts[:2] != ["worldsize", "strategies"] or parts[2] not in STRATEGIES


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_plugin_imports_no_other_plugin_and_no_strategy_of_the_framework(path: Path) -> None:
    assert [name for name in imported(path) if not is_framework_or_own(name, path.parent.name)] == []


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_plugin_imports_nothing_private_of_the_framework(path: Path) -> None:
    ours = [name for name in imported(path) if name.startswith(("worldsize.", "plugins."))]
    assert [name for name in ours if any(part.startswith("_") for part in name.split("."))] == []
