"""A project with a strategy written only from docs/plugins.md runs on a laptop and on Slurm, and is reproduced."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm import Slurm
from tests.clusters.witness import witness
from tests.docs.blocks import files

pytestmark = pytest.mark.heavy

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "plugins.md"
DETERMINISTIC = ("reproducibility=deterministic", "steps=20")


def files_of(plugin: str) -> dict[str, str]:
    """Return the files that a reader writes for ``plugin``, by path."""
    return {name: text for name, text in files(DOCUMENTATION).items() if plugin in name}


@pytest.fixture
def project(tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]) -> Path:
    """A project from ``init``, with the documentation's strategy, and further plugins from ``new``."""

    def made(*words: str, cwd: Path) -> str:
        done = command(*words, cwd=cwd, environment=environment_without_wandb)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    shown = made("init", "second", cwd=tmp_path)
    assert shown.splitlines() == ["cd second", "uv run train.py", "uv run pytest"]
    folder = tmp_path / "second"
    for kind in ("strategy", "recipe", "logger"):
        made("new", kind, f"one_{kind}", cwd=folder)
    made("new", "strategy", "rounded", cwd=folder)
    written = files_of("rounded")
    assert len(written) == 3
    for name, text in written.items():
        assert (folder / name).exists()  # made by `new`
        (folder / name).write_text(text)
    return folder


def test_a_strategy_written_from_the_documentation_trains_and_is_reproduced_on_laptop_and_slurm(
    project: Path,
    slurm: Slurm,
    command: Any,
    warm_python: Path,
    environment_without_wandb: dict[str, str],
    tmp_path: Path,
) -> None:
    def run(*words: str, **changes: str) -> str:
        environment = {**environment_without_wandb, **changes}
        done = command(*words, cwd=project, environment=environment, python=warm_python)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def trained(name: str, *words: str, logger: str = "none", **changes: str) -> Path:
        options = ("strategy=rounded", f"run.name={name}", f"logger={logger}")
        run("train", *DETERMINISTIC, *options, *words, **changes)
        return project / "runs" / "mine" / name

    def digest(folder: Path) -> Any:
        return json.loads((folder / "result.json").read_text())["state_digest"]

    shared = tmp_path / "shared"
    laptop = trained("laptop", "cluster.processes=2")
    on_slurm = ("+cluster=slurm", "cluster.nodes=2", "launcher.wait=true", f"launcher.python={warm_python}")
    there = trained("slurm", *on_slurm, logger=witness(shared), **slurm.environment, WORLDSIZE_PLUGINS=str(shared))
    assert digest(there) == digest(laptop)
    assert (there / "witness.txt").read_text() == str(there / "plugins" / "plugins" / "witness" / "logger.py")
    recorded = {plugin["name"]: plugin for plugin in json.loads((there / "run_manifest.json").read_text())["plugins"]}
    assert recorded.keys() == {"plugins.rounded", "plugins.witness", "recipes.mine"}
    assert [recorded[name]["kept"] for name in sorted(recorded)] == [False, True, False]
    for folder in (laptop, there):  # without WORLDSIZE_PLUGINS, the record has to suffice
        assert "bitwise identical" in run("reproduce", str(folder), **slurm.environment)


def test_a_project_passes_its_own_generated_tests(
    project: Path, warm_python: Path, environment_without_wandb: dict[str, str]
) -> None:
    """The generated tests include the contract of the documented strategy."""
    words = [*(f"tests/test_{name}.py" for name in ("mine", "rounded", "one_logger"))]
    words += ["tests/test_one_strategy.py::TestOneStrategy::test_the_loss_is_that_of_one_process[2]"]
    body = f"import sys, pytest; sys.executable = {str(warm_python)!r}; sys.exit(pytest.main({words}))"
    done = subprocess.run(
        [warm_python, "-c", body], cwd=project, env=environment_without_wandb, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "14 passed" in done.stdout
