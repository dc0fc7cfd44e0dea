"""The installed package works outside of any clone."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["uv", "build", "--wheel", "--quiet", "--out-dir", folder, REPOSITORY], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_the_configuration_the_recipes_the_plugins_and_the_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "worldsize/py.typed",
        "worldsize/record/run_manifest.schema.json",
        "worldsize/observe/report/templates/run.html.j2",
        "worldsize/observe/report/templates/style.css",
        "worldsize/conf/config.yaml",
        "worldsize/bundled/recipes/digits/recipe.py",
        "worldsize/bundled/plugins/diloco/conf/strategy/diloco.yaml",
        "worldsize/bundled/recipes/stdlib_lm/conf/recipe/stdlib_lm.yaml",
        "worldsize/cli/templates/init/dot_gitignore.j2",
        "worldsize/cli/templates/strategy/plugins/NAME/conf/strategy/NAME.yaml.j2",
    } <= names


def test_the_wheel_has_its_extras_and_needs_none_of_their_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        facts = Parser().parsestr(files.read(name).decode())
    assert {"recipes", "tensorboard", "dev"} <= set(facts.get_all("Provides-Extra", ()))
    needed = [line for line in facts.get_all("Requires-Dist", ()) if "extra ==" not in line]
    assert not [line for line in needed if line.startswith(("transformers", "tensorboard", "pytest"))]


def test_importing_worldsize_imports_neither_torch_nor_hydra() -> None:
    body = "import sys, worldsize; print(sorted({'torch', 'numpy', 'hydra', 'wandb', 'rich'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.timeout(900)  # it installs the package with all dependencies
def test_the_installed_command_trains_outside_a_clone_and_reproduces_what_it_did(
    wheel: Path, tmp_path: Path, environment_without_wandb: dict[str, str]
) -> None:
    site = tmp_path / "site"
    subprocess.run(
        ["uv", "pip", "install", "--quiet", "--no-deps", "--target", site, "--python", sys.executable, wheel],
        check=True,
    )
    work = tmp_path / "work"
    program = str(site / "bin" / "worldsize")
    environment = {**environment_without_wandb, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, program, "init", work], env=environment, check=True, capture_output=True)
    assert f'worldsize = {{ path = "{wheel}" }}' in (work / "pyproject.toml").read_text()
    command = [sys.executable, program, "train", "steps=3", "logger=none"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (manifest,) = work.rglob("run_manifest.json")
    assert json.loads(manifest.read_text())["code"]["commit"] is None
    assert (manifest.parent / "environment" / "requirements.txt").exists()
    assert str(REPOSITORY) not in (manifest.parent / "config.yaml").read_text()
    again = [sys.executable, program, "reproduce", str(manifest)]
    done = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bitwise identical" in done.stdout
