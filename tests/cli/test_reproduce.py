"""Run ``worldsize reproduce`` and ``compare`` as a user would, from a shell in a different folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.own_recipe import write_recipe
from worldsize.record import manifest as manifest_module
from worldsize.record.manifest import read_manifest, write_manifest

pytestmark = pytest.mark.heavy

QUICK = ("steps=6", "logger=none", "cluster.processes=2")

# a recipe that reads its data from a file
RECIPE = """
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from worldsize.core import Recipe

FILE = Path.home() / "numbers.txt"

class Mine(Recipe):
    def __init__(self, scale: float = 1.0, api_token: str = "", extra: dict = {}) -> None:
        assert "redacted" not in f"{api_token} {extra}"
        self.scale = scale
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)
    def data(self, split):
        return TensorDataset(torch.tensor([float(n) / 7 for n in FILE.read_text().split()]).view(-1, 2))
    def loss(self, model, batch):
        return (model(*batch) * self.scale - batch[0].sum(1, keepdim=True)).square().mean()
    def evaluate(self, model, batch):
        return {"error": (model(*batch).double().sum(), torch.tensor(len(batch[0])))}
    def files(self):
        return {"numbers": FILE}
"""
CONF = """# @package _global_
steps: 6
batch_size: 8
lr: 0.1
recipe:
  _target_: recipes.mine.recipe.Mine
"""


class Project:
    """A user's project with a data file, a home folder and a shell in a different folder."""

    def __init__(self, root: Path, environment: dict[str, str], command: Any, python: Path) -> None:
        self.command, self.python = command, python
        self.folder, self.home, self.elsewhere = root / "project", root / "home", root / "elsewhere"
        for folder in (self.folder, self.home, self.elsewhere):
            folder.mkdir()
        (self.home / "numbers.txt").write_text(" ".join(str(n % 7) for n in range(64)))
        self.environment = {**environment, "HOME": str(self.home), "XDG_CACHE_HOME": str(Path.home() / ".cache")}

    def add_recipe(self) -> None:
        write_recipe(self.folder, "mine", RECIPE, mine=CONF)

    def git(self, *arguments: str) -> str:
        options = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", *options, *arguments], cwd=self.folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("init", "--quiet")
        (self.folder / ".gitignore").write_text("runs/\n__pycache__/\n")
        self.git("add", "-A")
        self.git("commit", "--quiet", "-m", "first")
        return self.git("rev-parse", "HEAD")

    def worldsize(self, *arguments: str, cwd: Path, python: str | Path = sys.executable, **changes: str) -> Any:
        environment = {**self.environment, **changes}
        return self.command(*arguments, cwd=cwd, environment=environment, timeout=600, python=python)

    def train(self, *arguments: str, **changes: str) -> Path:
        """Train, and return the new run's manifest."""
        before = set(self.folder.rglob("run_manifest.json"))
        done = self.worldsize("train", *QUICK, *arguments, cwd=self.folder, **changes)
        assert done.returncode == 0, done.stderr
        (manifest,) = set(self.folder.rglob("run_manifest.json")) - before
        return manifest

    def reproduce(self, manifest: Path, *arguments: str, **changes: str) -> Any:
        """Reproduce a run in the warm interpreter, or in ``python`` if given in ``changes``."""
        words = ("reproduce", str(manifest), *arguments)
        return self.worldsize(*words, cwd=self.elsewhere, **{"python": str(self.python), **changes})


@pytest.fixture
def project(tmp_path: Path, environment_without_wandb: dict[str, str], command: Any, warm_python: Path) -> Project:
    return Project(tmp_path, environment_without_wandb, command, warm_python)


@pytest.fixture
def committed(project: Project) -> Project:
    project.add_recipe()
    project.commit()
    return project


def report(done: Any) -> dict[str, Any]:
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_clean_run_is_recorded_by_the_schema_and_reproduced_bit_for_bit_from_another_folder(
    committed: Project,
) -> None:
    manifest = committed.train("recipe=mine")
    assert_the_published_schema_describes(json.loads(manifest.read_text()))
    done = committed.reproduce(manifest, "--json", python=sys.executable)
    assert done.returncode == 0, done.stderr
    comparison = report(done)
    assert comparison["verdict"] == "bitwise identical"
    new = json.loads((Path(comparison["run"]) / "run_manifest.json").read_text())
    assert new["parent_run"] == manifest.parent.name
    assert new["code"]["commit"] == json.loads(manifest.read_text())["code"]["commit"]
    assert committed.git("worktree", "list").count("\n") == 0
    assert committed.git("status", "--porcelain") == ""


def assert_the_published_schema_describes(manifest: dict[str, Any]) -> None:
    import jsonschema

    schema = json.loads(Path(manifest_module.__file__).with_name("run_manifest.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(manifest)) == []
    assert set(schema["required"]) == set(manifest) - {"options"}  # which older records lack
    del manifest["determinism"]["seed"]
    assert [re.search("'seed' is a required property", error.message) for error in validator.iter_errors(manifest)]


def test_uncommitted_changes_and_an_untracked_recipe_are_part_of_the_record(project: Project) -> None:
    (project.folder / "helper.py").write_text("SCALE = 1.0\n")
    project.commit()
    (project.folder / "helper.py").write_text("SCALE = 3.0\n")
    project.add_recipe()
    source = project.folder / "recipes" / "mine" / "recipe.py"
    source.write_text(source.read_text().replace("self.scale = scale", "from helper import SCALE; self.scale = SCALE"))
    manifest = project.train("recipe=mine")
    shutil.rmtree(project.folder / "recipes")
    project.git("checkout", "helper.py")
    done = project.reproduce(manifest)
    assert done.returncode == 0, done.stderr
    assert "bitwise identical" in done.stdout
    assert project.git("status", "--porcelain") == ""


def test_data_that_git_ignores_are_found_where_they_lay_when_the_run_was_launched(project: Project) -> None:
    project.add_recipe()
    source = project.folder / "recipes" / "mine" / "recipe.py"
    source.write_text(f"{source.read_text()}\n    def files(self):\n        return {{'text': Path('data/text.bin')}}\n")
    project.commit()
    (project.folder / ".git" / "info" / "exclude").write_text("data\n")
    (project.folder / "data").mkdir()
    (project.folder / "data" / "text.bin").write_bytes(b"learned from")
    manifest = project.train("recipe=mine")
    done = project.reproduce(manifest)
    assert done.returncode == 0, done.stderr
    (project.folder / "data" / "text.bin").write_bytes(b"another text")
    refused = project.reproduce(manifest)
    assert refused.returncode == 2
    assert "failed to read the data file 'text' from data/text.bin" in refused.stderr


def test_a_run_outside_of_any_repository_is_reproduced_with_its_own_recipe(project: Project) -> None:
    project.add_recipe()
    manifest = project.train("recipe=mine")
    assert json.loads(manifest.read_text())["code"]["commit"] is None
    shutil.rmtree(project.folder / "recipes")
    done = project.reproduce(manifest)
    assert done.returncode == 0, done.stderr


def test_an_elastic_run_is_bitwise_at_another_world_size_and_keeps_its_level(
    committed: Project,
) -> None:
    manifest = committed.train("recipe=mine", "reproducibility=elastic")
    done = committed.reproduce(manifest, "cluster.processes=4", "--json")
    assert done.returncode == 0, done.stderr
    assert report(done)["reproducibility"]["level"] == "bitwise"


def test_other_runs_at_another_world_size_downgrade_the_level_and_strict_refuses(
    committed: Project,
) -> None:
    manifest = committed.train("recipe=mine", "reproducibility=deterministic", "logical_ranks=4")
    done = committed.reproduce(manifest, "cluster.processes=4", "--json")
    comparison = report(done)
    assert comparison["reproducibility"]["level"] == "tolerance"
    assert "processes: 2 -> 4" in comparison["reproducibility"]["why"]
    assert done.returncode in (0, 3)
    refused = committed.reproduce(manifest, "cluster.processes=4", "--strict")
    assert refused.returncode == 2
    assert "nothing was started" in refused.stderr


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no vector instructions")
def test_other_vector_instructions_downgrade_the_level(committed: Project) -> None:
    manifest = committed.train("recipe=mine", "reproducibility=elastic")
    then = json.loads(manifest.read_text())["environment"]["vector_instructions"]
    assert then == torch.backends.cpu.get_cpu_capability()
    done = committed.reproduce(manifest, "--json", python=sys.executable, ATEN_CPU_CAPABILITY="default")
    comparison = report(done)
    assert comparison["reproducibility"]["level"] == "tolerance"
    assert f"vector instructions: {then} -> DEFAULT" in comparison["reproducibility"]["why"]


def test_another_configuration_is_another_experiment_and_compare_shows_where_they_part(committed: Project) -> None:
    manifest = committed.train("recipe=mine")
    done = committed.reproduce(manifest, "+recipe.scale=2.0", "--json")
    assert done.returncode == 4
    comparison = report(done)
    assert comparison["reproducibility"]["level"] == "none"
    losses = next(row for row in comparison["metrics"] if row["name"] == "loss")
    assert losses["first_step"] == 1
    assert losses["ulp"] > 0
    compared = committed.worldsize("compare", str(manifest.parent), comparison["run"], cwd=committed.elsewhere)
    assert compared.returncode == 4
    assert "different" in compared.stdout


def changed_data(project: Project, _: Path) -> str:
    (project.home / "numbers.txt").write_text("1 " * 64)
    return "the data file 'numbers' has changed"


def lost_commit(project: Project, _: Path) -> str:
    shutil.rmtree(project.folder / ".git")
    return "not found in"


def edited_manifest(_: Project, manifest: Path) -> str:
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1', 1))
    return "was edited: expected digest"


def newer_schema(_: Project, manifest: Path) -> str:
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    return "has schema version 99"


def lost_patch(_: Project, manifest: Path) -> str:
    manifest.with_name("code.patch").unlink()
    return "--approximate"


def edited_patch(_: Project, manifest: Path) -> str:
    patch = manifest.with_name("code.patch")
    patch.write_text(patch.read_text().replace("new", "old"))
    return "was changed: expected SHA-256"


def foreign_target(_: Project, manifest: Path) -> str:
    record = read_manifest(manifest)
    record["config"]["recipe"]["_target_"] = "os.system"
    write_manifest(manifest, record)
    return "outside the allow-list"


def git_option(_: Project, manifest: Path) -> str:
    record = read_manifest(manifest)
    record["code"]["commit"] = "--upload-pack=touch"
    write_manifest(manifest, record)
    return "invalid commit in the manifest"


DAMAGES: tuple[Callable[[Project, Path], str], ...] = (
    changed_data,
    edited_manifest,
    newer_schema,
    lost_patch,
    edited_patch,
    foreign_target,
    git_option,
    lost_commit,
)


def test_a_record_that_does_not_hold_is_refused_and_nothing_is_started(committed: Project, tmp_path: Path) -> None:
    (committed.folder / "note.txt").write_text("new\n")
    manifest = committed.train("recipe=mine")
    whole = {folder: tmp_path / f"whole {folder.name}" for folder in (committed.folder, committed.home)}
    for folder, copy in whole.items():
        shutil.copytree(folder, copy, symlinks=True)
    for damage in DAMAGES:
        # this process signs the damaged manifest with a key missing from the project's home
        expected = damage(committed, manifest)
        done = committed.reproduce(manifest, "--yes")
        assert done.returncode == 2, (damage, done.stdout)
        assert expected in done.stderr, damage
        assert len(list(committed.folder.rglob("run_manifest.json"))) == 1, damage
        for folder, copy in whole.items():
            shutil.rmtree(folder)
            shutil.copytree(copy, folder, symlinks=True)


def test_a_run_whose_data_changed_is_resumed_only_if_the_user_accepts_that(committed: Project) -> None:
    run = committed.train("recipe=mine").parent
    (committed.home / "numbers.txt").write_text("1 " * 64)
    refused = committed.worldsize("resume", str(run), "steps=9", cwd=committed.elsewhere)
    assert refused.returncode == 2
    assert "the data file 'numbers' has changed" in refused.stderr
    assert "or accept the change with --ignore data; nothing was started" in refused.stderr
    done = committed.worldsize("resume", str(run), "steps=9", "--ignore", "data", cwd=committed.elsewhere)
    assert done.returncode == 0, done.stderr


def test_a_lost_commit_is_fetched_from_the_remote(committed: Project, tmp_path: Path) -> None:
    server = tmp_path / "server.git"
    committed.git("clone", "--quiet", "--bare", str(committed.folder), str(server))
    committed.git("remote", "add", "origin", f"file://{server}")
    manifest = committed.train("recipe=mine")
    shutil.rmtree(committed.folder / ".git")
    done = committed.reproduce(manifest)
    assert done.returncode == 0, done.stderr


def test_a_strangers_manifest_is_shown_and_not_run_without_consent(committed: Project, tmp_path: Path) -> None:
    manifest = committed.train("recipe=mine")
    other = tmp_path / "other home"
    shutil.copytree(committed.home, other)
    shutil.rmtree(other / ".config")
    refused = committed.reproduce(manifest, HOME=str(other))
    assert refused.returncode == 2
    assert json.loads(manifest.read_text())["code"]["commit"] in refused.stderr
    assert "--yes" in refused.stderr
    words = ("reproduce", str(manifest), "--yes")
    elsewhere = committed.reproduce(manifest, "--yes", HOME=str(other))
    assert "not found in" in elsewhere.stderr, "git is not run in a folder that the record names"
    done = committed.worldsize(*words, cwd=committed.folder, HOME=str(other), python=committed.python)
    assert done.returncode == 0, done.stderr


def test_a_redacted_value_is_asked_for_by_name(committed: Project) -> None:
    manifest = committed.train("recipe=mine", "+recipe.api_token=canary12345")
    refused = committed.reproduce(manifest)
    assert refused.returncode == 2
    assert "recipe.api_token" in refused.stderr
    done = committed.reproduce(manifest, "+recipe.api_token='${oc.env:TOKEN}'", TOKEN="canary12345")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(900)  # it installs all packages of the lock file
def test_the_environment_is_rebuilt_from_the_lock(committed: Project) -> None:
    manifest = committed.train("recipe=mine")
    done = committed.reproduce(manifest, "--rebuild")
    assert "building the recorded environment" in done.stderr
    assert done.returncode == 0, done.stderr


def test_no_planted_secret_is_in_anything_that_a_run_writes(committed: Project) -> None:
    places = ("variable", "config", "netrc", "override", "url", "other")
    canaries = {place: f"canary{place}0123456789" for place in places}
    (committed.home / ".netrc").write_text(f"machine api.wandb.ai login user password {canaries['netrc']}\n")
    conf = committed.folder / "recipes" / "mine" / "conf" / "recipe" / "mine.yaml"
    conf.write_text(f'{CONF}  extra: {{password: {canaries["config"]}, urls: ["s3://u:{canaries["url"]}@h/x"]}}\n')
    (committed.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in canaries.items()))
    committed.git("remote", "add", "origin", f"https://user:{canaries['url']}@example.org/x.git")
    variables = {"WANDB_API_KEY": canaries["variable"], "MY_SECRET": canaries["other"], "WANDB_MODE": "offline"}
    arguments = ("recipe=mine", "logger=wandb", f"+recipe.api_token={canaries['override']}")
    run = committed.train(*arguments, **variables).parent
    written = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert len(written) > 8
    assert any(path.suffix == ".wandb" for path in written)
    assert [
        (path.name, place) for path in written for place in places if canaries[place].encode() in written[path]
    ] == []
