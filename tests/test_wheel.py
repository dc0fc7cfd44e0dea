"""The installed package, outside of any clone."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
        "worldsize/reproducibility/run_manifest.schema.json",
        "worldsize/observe/report/templates/run.html.j2",
        "worldsize/observe/report/templates/style.css",
        "worldsize/conf/config.yaml",
        "worldsize/bundled/recipes/digits/recipe.py",
        "worldsize/bundled/plugins/diloco/conf/strategy/diloco.yaml",
        "worldsize/bundled/recipes/stdlib_lm/conf/recipe/stdlib_lm.yaml",
    } <= names


def test_the_installed_command_trains_outside_a_clone_and_reproduces_what_it_did(
    wheel: Path, tmp_path: Path, environment_without_wandb: dict[str, str]
) -> None:
    site = tmp_path / "site"
    subprocess.run(
        ["uv", "pip", "install", "--quiet", "--no-deps", "--target", site, "--python", sys.executable, wheel],
        check=True,
    )
    work = tmp_path / "work"
    work.mkdir()
    program = str(site / "bin" / "worldsize")
    command = [sys.executable, program, "train", "recipe=digits", "steps=3", "logger=none"]
    environment = {**environment_without_wandb, "PYTHONPATH": str(site)}
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
