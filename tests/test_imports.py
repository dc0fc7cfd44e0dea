"""The sources import each other only in the order of the architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from worldsize.cli import COMMANDS

FRAMEWORK = Path(__file__).parents[1] / "framework" / "worldsize"
CONF = Path(__file__).parents[1] / "conf"
MODULES = sorted(FRAMEWORK.rglob("*.py"))
FLOORS = (  # bottom up: a package imports only from earlier ones
    "moved",
    "errors",
    "devices",
    "seeds",
    "messages",
    "files",
    "strict_json",
    "core",
    "world",
    "collectives",
    "metrics",
    "net",
    "checkpoint",
    "record",
    "data",
    "optimizers",
    "strategies",
    "loop",
    "config",
    "healing",
    "observe",
    "plan",
    "worker",
    "launch",
    "cli",
    "api",
    "testing",
)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def place(path: Path) -> str:
    return path.relative_to(FRAMEWORK).parts[0].removesuffix(".py")


def test_every_package_has_a_floor() -> None:
    assert {place(module) for module in MODULES} - {"__init__", "__main__"} == set(FLOORS)


def offences(paths: Iterable[Path], pattern: str) -> dict[str, list[str]]:
    """Return the names matching ``pattern`` among each file's imports, for files with any."""
    named = {path: [name for name in imports(path) if re.match(pattern, name)] for path in paths}
    return {str(path): names for path, names in named.items() if names}


def test_a_package_imports_only_from_floors_below_its_own() -> None:
    """Imports inside functions and only for types count, too, so that packages never form a cycle."""
    for floor, package in enumerate(FLOORS):
        others = "|".join(name for name in FLOORS[floor:] if name != package)
        modules = [module for module in MODULES if place(module) == package]
        assert modules
        assert offences(modules, rf"worldsize\.({others})\b" if others else "$") == {}


def test_files_import_each_other_in_no_circle() -> None:
    """Imports inside functions and only for types count, too."""
    files = {".".join(path.relative_to(FRAMEWORK.parent).with_suffix("").parts): path for path in MODULES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    del files["worldsize"]  # it imports its names on first use
    imported = {name: {_file_of(each, files) for each in imports(path)} - {name, ""} for name, path in files.items()}
    while free := {name for name in imported if not imported[name] & imported.keys()}:
        imported = {name: others for name, others in imported.items() if name not in free}
    assert imported == {}


def _file_of(name: str, files: Mapping[str, Path]) -> str:
    """Return the module of ours that holds ``name``, possibly ``name`` itself; empty if there is none."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


def test_core_imports_only_torch_the_standard_library_and_our_errors() -> None:
    allowed = "|".join([*sorted(sys.stdlib_module_names), "torch", r"worldsize\.errors", r"worldsize\.core"])
    assert offences((FRAMEWORK / "core").glob("*.py"), rf"(?!({allowed})(\.|$))") == {}


def test_a_module_of_cli_is_a_command() -> None:
    assert {path.stem for path in (FRAMEWORK / "cli").glob("*.py")} - {"__init__"} == COMMANDS.keys()


PRINTS = (
    "messages",
    *("cli", "launch/execute.py", "api/subprocesses.py"),  # a command's own output
)


SILENT = [module for module in MODULES if not str(module.relative_to(FRAMEWORK)).startswith(PRINTS)]
PLUGINS = sorted(path for kind in ("recipes", "plugins") for path in (CONF.parent / kind).rglob("*.py"))


def test_modules_log_and_only_commands_print() -> None:
    printed = [
        f"{path}:{node.lineno}"
        for path in (*SILENT, *PLUGINS)
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printed == []


def plugin_names() -> set[str]:
    """Return the names of all strategies, recipes and plugins."""
    strategies = {path.stem for path in CONF.glob("strategy/*.yaml")}
    return strategies | {
        path.name for kind in ("recipes", "plugins") for path in (CONF.parent / kind).glob("*") if path.is_dir()
    }


def outside(*packages: str) -> list[Path]:
    """Return the framework's modules outside of these packages."""
    return [module for module in MODULES if place(module) not in packages]


def test_nothing_in_the_framework_imports_a_strategy_a_plugin_or_a_recipe() -> None:
    strategies = "|".join(rf"worldsize\.strategies\.{name}" for name in sorted(plugin_names()))
    assert offences(outside("strategies", "__init__"), rf"recipes|plugins|{strategies}") == {}


def test_no_code_of_the_framework_names_a_strategy_a_plugin_or_a_recipe() -> None:
    names = plugin_names()
    named = [
        f"{path}:{node.lineno}: {node.value}"
        for path in outside("strategies")
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]
    assert named == []


def test_the_environment_is_read_in_the_launching_code_and_in_world_only() -> None:
    modules = outside("world", "cli", "api", "launch", "testing", "worker", "config", "record")
    read = {str(path): re.findall(r"os\.environ(?:\[|\.get)|getenv", path.read_text()) for path in modules}
    assert {path: calls for path, calls in read.items() if calls} == {}


def test_dictconfig_stops_at_config_cli_and_worker() -> None:
    assert offences(outside("config", "cli", "launch", "worker", "api"), "omegaconf|hydra") == {}


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "watch", "report"])
def test_commands_that_only_read_records_do_not_wait_for_torch(command: str) -> None:
    """Torch takes seconds and hundreds of megabytes, wasted on a list of runs or the page of one."""
    modules = f"import sys, worldsize.cli.{command}"
    if command == "report":
        modules += ", worldsize.observe.report.page"
    words = [sys.executable, "-c", f"{modules}; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(words, check=False).returncode == 0
