"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FRAMEWORK = Path(__file__).parents[1] / "framework" / "worldsize"
CONF = Path(__file__).parents[1] / "conf"
MODULES = sorted(FRAMEWORK.rglob("*.py"))
LOWER = ("engine", "strategies", "checkpoints", "collectives", "reproducibility", "observe", "world")
UPPER = ("worldsize.app", "worldsize.launch", "worldsize.config", "worldsize.worker", "worldsize.training")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def place(path: Path) -> str:
    return path.relative_to(FRAMEWORK).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [m for m in MODULES if place(m) in LOWER], ids=str)
def test_lower_folders_do_not_import_app_launch_or_config(path: Path) -> None:
    assert [name for name in imports(path) if name.startswith(UPPER)] == []


def test_core_imports_only_torch_the_standard_library_and_our_errors() -> None:
    roots = {name.split(".")[0] for name in imports(FRAMEWORK / "core.py")}
    assert roots <= {
        "__future__",
        "abc",
        "collections",
        "contextlib",
        "dataclasses",
        "pathlib",
        "typing",
        "torch",
        "worldsize",
    }
    own = [name for name in imports(FRAMEWORK / "core.py") if name.startswith("worldsize")]
    assert all(name.startswith("worldsize.errors") for name in own)


def plugin_names() -> set[str]:
    """Every strategy, recipe and plugin that exists."""
    found = {path.stem for path in CONF.glob("strategy/*.yaml")}
    return found | {
        path.name for kind in ("recipes", "plugins") for path in (CONF.parent / kind).glob("*") if path.is_dir()
    }


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_nothing_in_the_framework_imports_a_strategy_a_plugin_or_a_recipe(path: Path) -> None:
    if place(path) == "strategies":
        return
    strategies = tuple(f"worldsize.strategies.{name}" for name in plugin_names())
    assert [name for name in imports(path) if name.startswith(("recipes", "plugins", *strategies))] == []


@pytest.mark.parametrize("path", [m for m in MODULES if place(m) not in ("strategies",)], ids=str)
def test_no_code_of_the_framework_names_a_strategy_a_plugin_or_a_recipe(path: Path) -> None:
    names = plugin_names()
    named = [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]
    assert named == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_the_environment_is_read_in_the_launching_code_and_in_world_only(path: Path) -> None:
    if place(path) in ("world", "app", "launch", "testing", "worker", "config"):
        return
    assert re.findall(r"os\.environ(\[|\.get)|getenv", path.read_text()) == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_dictconfig_stops_at_config_app_and_worker(path: Path) -> None:
    if place(path) not in ("config", "app", "worker"):
        assert [name for name in imports(path) if name.startswith(("omegaconf", "hydra"))] == []
