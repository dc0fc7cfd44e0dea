"""The code explains itself: public names have docstrings, and a docstring opens with a sentence."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

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
CODE = tuple(path for path in WRITTEN if path.relative_to(REPOSITORY).parts[0] in ("framework", "plugins", "recipes"))
# a function returns, records, begins and continues; a peer sends a heartbeat
DIALECT = re.compile(r"(Tell whether|Say whether|Say why|Say which|Note that|Take note|Take what)\b|\bsigns? of life\b")
# a variable is named for what it holds, a function for what it does
UNNAMED = {"found", "outline", "whole", "go_on", "gone_on", "goes_on", "_found", "_outline", "_together", "_spread"}
SHAPED = 0.97  # share of public functions with tensors whose docstring has a shape
ARRAYS = re.compile(r"\b(Tensor|ndarray|NDArray)\b")
# such as (batch, sequence), (n,), (sum, count) or int64 [samples]
SHAPES = re.compile(r"shape|scalar|dimension|\([^()]*,[^()]*\)|\w+ \[\w[^\[\]]*\]")
TIMES = re.compile(r"(timeout|deadline|patience|silence|lease|grace|interval|delay|duration|now)$")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield what has a docstring in the file, and the docstring."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node, text


def is_fragment(node: ast.AST, text: str) -> bool:
    return bool(OPENERS.match(text) or (TITLES.match(text) and not isinstance(node, ast.Module)))


def test_a_docstring_opens_with_a_sentence() -> None:
    each = ((path, node, text) for path in WRITTEN for node, text in docstrings(path))
    fragments = [(path, node, text) for path, node, text in each if is_fragment(node, text)]
    assert [f"{path}:{getattr(node, 'lineno', 1)}: {text}" for path, node, text in fragments] == []


def test_code_speaks_the_language_of_its_field() -> None:
    odd = [
        f"{path}:{getattr(node, 'lineno', 1)}: {text}"
        for path in CODE
        for node, text in docstrings(path)
        if DIALECT.search(text)
    ]
    odd += [f"{path}:{line}: {name}" for path in CODE for line, name in names_in(path) if name in UNNAMED]
    assert odd == []


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, argument and function that the file defines."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "whole"
        ):  # whole(limit): a number
            yield node.lineno, node.name


def public_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yield the place, the node and the docstring of each public function; one without documents itself in a base."""

    def below(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, ast.FunctionDef, str]]:
        for child in node.body:
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from below(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
                text = ast.get_docstring(child)
                if text is not None:
                    yield f"{path.relative_to(REPOSITORY)}:{child.lineno} {prefix}{child.name}", child, text

    yield from below(tree(path), "")


def annotations_of(function: ast.FunctionDef) -> dict[str, str]:
    """Return the annotations of the arguments by name, and that of the result as "return"."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    written = [*((each.arg, each.annotation) for each in arguments), ("return", function.returns)]
    return {name: ast.unparse(annotation) for name, annotation in written if annotation is not None}


def test_functions_with_tensors_say_their_shapes() -> None:
    texts = {
        place: text
        for path in CODE
        for place, function, text in public_functions(path)
        if any(map(ARRAYS.search, annotations_of(function).values()))
    }
    silent = [place for place, text in texts.items() if not SHAPES.search(text)]
    assert len(texts) > 150
    assert len(silent) <= (1 - SHAPED) * len(texts), f"{len(silent)} of {len(texts)}:\n" + "\n".join(silent)


def test_functions_with_times_say_their_unit() -> None:
    silent = [
        f"{place}: {name}"
        for path in CODE
        for place, function, text in public_functions(path)
        for name, annotation in annotations_of(function).items()
        if TIMES.search(name) and re.search(r"\bfloat\b", annotation) and "second" not in text
    ]
    assert silent == []


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
