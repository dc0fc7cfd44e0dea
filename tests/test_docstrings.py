"""The code explains itself: public names have docstrings, and a docstring opens with a sentence."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
WRITTEN = [
    path
    for folder in ("framework", "plugins", "recipes", "benchmarks", "docs", "examples", "tests")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
DOCUMENTED = 0.95  # share of public classes, functions and methods
# a sentence names a thing or tells what to do; these begin half of one
OPENERS = re.compile(
    r"(Of|Its|Beside|Besides|Whose|By|As|In|Into|For|From|With|Within|To|On|At|Or|Than|Which|Who|That|Because|Also|"
    r"Where|Why|Until|Those)\b"
)
TITLES = re.compile(r"(What|How)\b")  # "What a step costs" may head a module, but names no class and no function


def docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield what has a docstring in the file, and the docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node, text


def is_fragment(node: ast.AST, text: str) -> bool:
    return bool(OPENERS.match(text) or (TITLES.match(text) and not isinstance(node, ast.Module)))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_docstring_opens_with_a_sentence(path: Path) -> None:
    assert [(getattr(node, "lineno", 1), text) for node, text in docstrings(path) if is_fragment(node, text)] == []


def modules() -> list[ModuleType]:
    """All modules of the framework but those that do something when they are imported."""
    root = REPOSITORY / "framework"
    paths = [path.relative_to(root).with_suffix("") for path in sorted((root / "worldsize").rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]
    return [importlib.import_module(name) for name in names]


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes and functions that the module defines, and their methods; what is inherited is documented there."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f"{module.__name__}.{name}", value
        if inspect.isclass(value):
            for own in vars(value):
                member = inspect.getattr_static(value, own)
                if not own.startswith("_") and isinstance(
                    member, staticmethod | classmethod | property | type(lambda: 0)
                ):
                    yield f"{module.__name__}.{name}.{own}", getattr(value, own)


def test_public_names_have_docstrings() -> None:
    names = {name: inspect.getdoc(value) for module in modules() for name, value in public(module)}
    silent = sorted(name for name, text in names.items() if not text)
    assert len(silent) <= (1 - DOCUMENTED) * len(names), f"{len(silent)} of {len(names)}: " + ", ".join(silent)
