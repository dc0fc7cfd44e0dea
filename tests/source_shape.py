"""Measure the shape of the sources: their number, and the distance a reader covers to follow a call.

uv run python tests/source_shape.py          # print the figures, and lower their bounds in tests/source_shape.toml
"""

from __future__ import annotations

import ast
import math
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ROOTS = ("framework", "plugins/parameter_server")
FILE = Path(__file__).with_name("source_shape.toml")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[Path, str]  # a file, and the qualified name of a function in it


@dataclass(frozen=True)
class Sources:
    """The text and syntax tree of each source file."""

    texts: Mapping[Path, str]

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        return {path: ast.parse(text) for path, text in self.texts.items()}

    @cached_property
    def nodes(self) -> list[tuple[Path, ast.AST]]:
        return [(path, node) for path, tree in self.trees.items() for node in ast.walk(tree)]

    @cached_property
    def lines(self) -> int:
        return sum(text.count("\n") for text in self.texts.values())


def sources(repository: Path = REPOSITORY) -> Sources:
    """Read the framework and the parameter server."""
    paths = [path for root in ROOTS for path in sorted((repository / root).rglob("*.py"))]
    return Sources({path: path.read_text() for path in paths if "templates" not in path.parts})


def figures(of: Sources) -> dict[str, float]:
    """Return each figure that must not rise, by name."""
    reached = list(reached_by_entry_points(of.trees))
    imports = [node for _, node in of.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    mappings = sum(text.count("Mapping[str, Any]") + text.count("dict[str, Any]") for text in of.texts.values())
    return {
        "files": len(of.texts),
        "lines": of.lines,
        "functions_reached": statistics.mean(functions for functions, _ in reached),
        "files_reached": statistics.mean(files for _, files in reached),
        "import_lines": 100 * sum(map(_length, imports)) / of.lines,
        "mappings_of_any": 1000 * mappings / of.lines,
        "private_names_of_others": 1000 * sum(1 for _ in private_names(of.nodes)) / of.lines,
        "classes_named_twice": len(classes_named_twice(of.nodes)),
    }


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def private_names(nodes: Sequence[tuple[Path, ast.AST]]) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and name of each private name that is read from an object other than self."""
    for path, node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from ((path, node.lineno, each.name) for each in node.names if _is_private(each.name))
            yield from ((path, node.lineno, part) for part in (node.module or "").split(".") if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            yield path, node.lineno, node.attr


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def classes_named_twice(nodes: Sequence[tuple[Path, ast.AST]]) -> list[str]:
    """Return the class names that occur in several packages."""
    named = {(node.name, path.parent) for path, node in nodes if isinstance(node, ast.ClassDef)}
    counts = Counter(name for name, _ in named)
    return sorted(name for name, count in counts.items() if count > 1)


def reached_by_entry_points(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[int, int]]:
    """Yield how many own functions in how many files each entry point reaches.

    An entry point calls functions of the sources, and none of them calls it. Calls are followed by name: a private one
    within its file first, any other if only one function has that name.
    """
    functions = dict(_functions(trees))
    by_name = defaultdict[str, list[Key]](list)
    for key in functions:
        by_name[key[1].rpartition(".")[2]].append(key)
    calls = {key: _called(key, node, by_name) for key, node in functions.items()}
    called = set[Key]().union(*calls.values())
    for entry in (key for key in calls if key not in called and calls[key]):
        seen, rest = set[Key](), [entry]
        while rest:
            new = calls[rest.pop()] - seen
            seen |= new
            rest.extend(new)
        yield len(seen), len({entry[0], *(path for path, _ in seen)})


def _functions(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[Key, Function]]:
    def below(path: Path, body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[Key, Function]]:
        for node in body:
            if isinstance(node, Function):
                yield (path, prefix + node.name), node
            elif isinstance(node, ast.ClassDef):
                yield from below(path, node.body, f"{prefix}{node.name}.")

    for path, tree in trees.items():
        yield from below(path, tree.body, "")


def _called(caller: Key, node: Function, by_name: Mapping[str, Sequence[Key]]) -> set[Key]:
    called = {_callee(caller, each, by_name) for each in ast.walk(node) if isinstance(each, ast.Call)}
    return {each for each in called if each is not None} - {caller}


def _callee(caller: Key, call: ast.Call, by_name: Mapping[str, Sequence[Key]]) -> Key | None:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    candidates = by_name.get(name, ())
    here = [each for each in candidates if each[0] == caller[0]]
    if name.startswith("_") and here:
        owner = caller[1].rpartition(".")[0]
        return next((each for each in here if each[1].rpartition(".")[0] == owner), here[0])
    if len(candidates) == 1:
        return candidates[0]
    return here[0] if here and isinstance(call.func, ast.Name) else None


def bounds() -> dict[str, float]:
    """Read the bound of each figure."""
    recorded = tomllib.loads(FILE.read_text())
    return {
        name: figure + sum(each["by"] for each in recorded["reasons"].get(name, ()))
        for name, figure in recorded["figures"].items()
    }


def main() -> None:
    """Print each figure and its bound; lower the bounds of figures that have fallen."""
    before, now = bounds(), figures(sources())
    lines = FILE.read_text().splitlines()
    for number, line in enumerate(lines[: lines.index("[reasons]")]):
        name, _, recorded = line.partition(" = ")
        if name in now:
            print(f"{name:24} {now[name]:10,.2f}   at most {before[name]:10,.2f}")
            fallen = max(0, before[name] - _rounded(now[name]))
            lines[number] = f"{name} = {_rounded(float(recorded) - fallen)}"
    FILE.write_text("\n".join(lines) + "\n")


def _rounded(figure: float) -> float:
    """Round up to two digits."""
    return int(figure) if figure == int(figure) else math.ceil(figure * 100 - 1e-6) / 100


if __name__ == "__main__":
    main()
