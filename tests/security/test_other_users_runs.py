"""A run folder written by a different user runs none of its code until its reader has seen it and agreed."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.runs import Command, Train
from worldsize.cli.cancel import cancel
from worldsize.config.recorded import read_launcher
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.kubernetes import Kubernetes
from worldsize.launch.recorded_run import check_before_start, read_recorded_overrides
from worldsize.launch.skypilot import SkyPilot
from worldsize.messages import ask_for_consent
from worldsize.record.manifest import is_own, read_manifest, write_manifest
from worldsize.record.run_directory import RunDirectory, run_lock
from worldsize.record.run_record import open_record, read_run, refresh_run

EVIL = """
import os
from pathlib import Path
Path(os.environ["MARK"]).touch()
from worldsize.launch.slurm import Slurm as Mine
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, train_in: Callable[[Path], Train]) -> Path:
    """The folder of a completed run of this user."""
    done = train_in(tmp_path_factory.mktemp("trained"))("steps=2", "recipe=digits")
    assert done.folder, done.error
    return done.folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, as a different user might have put it under a shared root."""
    shutil.copytree(trained, tmp_path / "runs" / "digits" / "theirs")
    return tmp_path / "runs" / "digits" / "theirs"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that appears if code from the record runs."""
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


def forge(run: Path, **changes: Any) -> None:
    """Write the run's manifest as a different user would: with a valid digest, and without our signature."""
    path = run / "run_manifest.json"
    write_manifest(path, {**read_manifest(path), **changes}, own=False)


def with_launcher(run: Path, launcher: dict[str, Any], folder: Path) -> None:
    config = read_manifest(run / "run_manifest.json")["config"]
    config = {**config, "launcher": launcher, "run": {**config["run"], "import_path": [str(folder)]}}
    forge(run, config=config, jobs=[{"id": "7", "submitted": "today"}], attempts=[])


@pytest.mark.parametrize("command_name", ["status", "logs", "cancel", "watch"])
def test_looking_at_a_run_imports_nothing_that_it_names(
    run: Path,
    mark: Path,
    command: Command,
    command_name: str,
    tmp_path: Path,
    environment_without_wandb: dict[str, str],
) -> None:
    plugin = tmp_path / "theirs" / "plugins" / "evil"
    plugin.mkdir(parents=True)
    (plugin / "launcher.py").write_text(EVIL)
    with_launcher(run, {"_target_": "plugins.evil.launcher.Mine"}, tmp_path / "theirs")
    done = command(command_name, str(run), cwd=tmp_path, environment={**environment_without_wandb, "MARK": str(mark)})
    assert not mark.exists()
    assert "Traceback" not in done.stderr
    assert "are imported" in "".join((done.stdout + done.stderr).split("\n")).replace("│", "") or done.returncode


def test_another_users_record_gives_a_scheduler_names_but_no_command(run: Path, mark: Path, tmp_path: Path) -> None:
    evil = [sys.executable, "-c", "import os, pathlib; pathlib.Path(os.environ['MARK']).touch()"]
    with_launcher(
        run, {"_target_": "worldsize.launch.kubernetes.Kubernetes", "kubectl": evil, "namespace": "team"}, tmp_path
    )
    launcher = read_launcher(read_run(run))
    assert isinstance(launcher, Kubernetes)
    assert (launcher.namespace, launcher.kubectl) == ("team", ("kubectl",))
    with_launcher(run, {"_target_": "worldsize.launch.skypilot.SkyPilot", "sky": evil, "managed": False}, tmp_path)
    assert read_launcher(read_run(run)) == SkyPilot(managed=False)
    assert not mark.exists()


def test_a_launcher_that_submits_no_jobs_is_not_built_to_ask_about_them(run: Path, tmp_path: Path) -> None:
    with_launcher(run, {"_target_": "worldsize.launch.ssh.Ssh"}, tmp_path)  # which needs hosts
    assert read_launcher(read_run(run)) is None


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "worldsize.launch.kubernetes.Kubernetes", "namespace": "--kubeconfig=/tmp/evil"},
        {"_target_": "worldsize.launch.control.send_request"},
        {"_target_": "worldsize.launch.slurm.subprocess.run", "args": ["touch", "mark"]},
        {"_target_": "os.system"},
        {},
    ],
)
def test_a_launcher_of_another_user_that_is_none_of_ours_is_refused(run: Path, tmp_path: Path, node: Any) -> None:
    with_launcher(run, node, tmp_path)
    with pytest.raises(ConfigError):
        read_launcher(read_run(run))


def test_a_job_whose_name_is_an_option_of_the_scheduler_is_refused(run: Path) -> None:
    forge(run, jobs=[{"id": "--user=root", "submitted": "today"}])
    with pytest.raises(WorldsizeError, match="the invalid job name"):
        _ = read_run(run).job


def test_cancel_ends_the_process_that_holds_the_lock_and_not_the_one_that_is_written_down(run: Path) -> None:
    code = "import sys, time; from pathlib import Path; from worldsize.record.run_directory import run_lock\n"
    code += "with run_lock(Path(sys.argv[1])): print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        last = {**read_run(run).attempts[-1], "exit_reason": "running", "pid": os.getpid()}
        forge(run, attempts=[last])
        assert str(holder.pid) in cancel(RunDirectory(run))
        assert holder.wait() == -15


def test_looking_at_another_users_run_does_not_make_it_ones_own(run: Path) -> None:
    forge(run, attempts=[{**read_run(run).attempts[-1], "exit_reason": "running"}])
    assert refresh_run(RunDirectory(run)).exit_reason == "killed"
    assert not is_own(read_manifest(run / "run_manifest.json"))
    with open_record(RunDirectory(run)) as record:
        assert not record.is_own
        record.begin_attempt([], world_size=1)
    assert not is_own(read_manifest(run / "run_manifest.json"))


def test_another_users_run_is_resumed_only_if_that_was_agreed_to(
    run: Path, command: Command, environment_without_wandb: dict[str, str], tmp_path: Path
) -> None:
    forge(run)
    words = ("resume", str(run), "steps=4")
    refused = command(*words, cwd=tmp_path, environment=environment_without_wandb)
    assert refused.returncode == 2
    assert "written by another user" in refused.stderr
    assert "recipes.digits" in refused.stderr, "what would be run is shown"
    done = command(*words, "--yes", cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert is_own(read_manifest(run / "run_manifest.json")), "who agreed has taken it over"


def test_another_users_run_is_evaluated_only_if_that_was_agreed_to(
    run: Path, command: Command, environment_without_wandb: dict[str, str], tmp_path: Path
) -> None:
    forge(run)
    refused = command("evaluate", str(run), cwd=tmp_path, environment=environment_without_wandb)
    assert refused.returncode == 2
    assert "written by another user" in refused.stderr
    assert "recipes.digits" in refused.stderr, "what would be run is shown"
    done = command("evaluate", str(run), "--yes", cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert not is_own(read_manifest(run / "run_manifest.json")), "it is no more than looked at"
    (evaluation,) = (run / "evaluations").glob("*/evaluation.json")
    assert json.loads(evaluation.read_text())["metrics"] == json.loads((run / "result.json").read_text())["metrics"]


MARKING = "import os, pathlib; pathlib.Path(os.environ['MARK']).touch()\n"


def test_another_users_recipe_is_trained_from_a_copy_and_what_lies_around_it_is_not_run(
    mark: Path,
    train_in: Callable[[Path], Train],
    command: Command,
    environment_without_wandb: dict[str, str],
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "theirs"
    recipe = theirs / "recipes" / "mine"
    (recipe / "conf" / "recipe").mkdir(parents=True)
    (recipe / "conf" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [digits]\nrecipe: {_target_: recipes.mine.recipe.Mine}\n"
    )
    (recipe / "recipe.py").write_text("from recipes.digits.recipe import Digits as Mine\n")
    trained = train_in(theirs)("steps=2", "recipe=mine")
    assert trained.folder, trained.error
    forge(trained.folder)
    (theirs / "recipes" / "__init__.py").write_text(MARKING)
    (theirs / "sitecustomize.py").write_text(MARKING)
    (theirs / "evil.py").write_text(MARKING)
    compiled = Path(cache_from_source(str(recipe / "recipe.py")))
    compiled.parent.mkdir(exist_ok=True)
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(theirs / "evil.py"), str(compiled), invalidation_mode=unchecked)
    environment = {**environment_without_wandb, "MARK": str(mark)}
    for steps, words in ((4, ["--yes"]), (6, [])):
        done = command("resume", str(trained.folder), f"steps={steps}", *words, cwd=theirs, environment=environment)
        assert done.returncode == 0, done.stderr
        assert not mark.exists()
    assert read_manifest(trained.folder / "run_manifest.json")["config"]["run"]["import_path"][0] == str(
        trained.folder / "project"
    )


def test_code_of_another_user_that_is_not_the_recorded_one_is_not_imported(
    run: Path, mark: Path, command: Command, environment_without_wandb: dict[str, str], tmp_path: Path
) -> None:
    plugin = tmp_path / "theirs" / "plugins" / "diloco_too"
    (plugin / "conf" / "strategy").mkdir(parents=True)
    (plugin / "conf" / "strategy" / "diloco_too.yaml").write_text("_target_: plugins.diloco_too.strategy.Mine\n")
    (plugin / "strategy.py").write_text(EVIL)
    manifest = read_manifest(run / "run_manifest.json")
    config = {**manifest["config"], "run": {**manifest["config"]["run"], "import_path": [str(tmp_path / "theirs")]}}
    forge(run, config=config, overrides=[*manifest["overrides"], "strategy=diloco_too"])
    environment = {**environment_without_wandb, "MARK": str(mark)}
    done = command("resume", str(run), "steps=4", "--yes", cwd=tmp_path, environment=environment)
    assert (done.returncode, mark.exists()) == (2, False)
    assert "the plugin plugins.diloco_too in " in done.stderr
    assert "is not in the record" in done.stderr


WIDENING = """# @package _global_
steps: 4
batch_size: 8
lr: 0.1
allow_targets: [os]
recipe: {_target_: os.system, command: "touch $MARK"}
"""
CALLING = """# @package _global_
defaults: [digits]
hydra: {callbacks: {theirs: {_target_: plugins.evil.callback.Mine}}}
"""
OUTSIDE = """# @package _global_
steps: 4
batch_size: 8
lr: 0.1
recipe: {_target_: os.system, command: "touch $MARK"}
"""


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        (WIDENING, "extends the allow-list by os"),
        (CALLING, "changing hydra.callbacks is not supported"),
        (OUTSIDE, "'os.system' is outside the allow-list"),
    ],
)
def test_configuration_files_of_another_user_widen_nothing_and_call_nothing(
    run: Path,
    mark: Path,
    command: Command,
    environment_without_wandb: dict[str, str],
    tmp_path: Path,
    yaml: str,
    message: str,
) -> None:
    recipes, evil = tmp_path / "theirs" / "conf" / "recipe", tmp_path / "theirs" / "plugins" / "evil"
    for folder in (recipes, evil):
        folder.mkdir(parents=True)
    (recipes / "theirs.yaml").write_text(yaml)
    (evil / "callback.py").write_text(EVIL)
    manifest = read_manifest(run / "run_manifest.json")
    config = {**manifest["config"], "run": {**manifest["config"]["run"], "import_path": [str(tmp_path / "theirs")]}}
    words = [word for word in manifest["overrides"] if not word.startswith("recipe=")]
    forge(run, config=config, overrides=[*words, "recipe=theirs"])
    environment = {**environment_without_wandb, "MARK": str(mark)}
    done = command("resume", str(run), "steps=4", "--yes", cwd=tmp_path, environment=environment)
    assert (done.returncode, mark.exists()) == (2, False), done.stderr
    assert message in done.stderr
    assert not is_own(read_manifest(run / "run_manifest.json"))


def test_a_target_that_was_not_shown_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"allow_targets": [], "run": {}, "recipe": {"_target_": "recipes.digits.recipe.Digits"}}
    with (
        patch("worldsize.launch.recorded_run.read_group_choices", return_value={}),
        pytest.raises(WorldsizeError, match="--yes"),
    ):
        check_before_start({"config": {}, "plugins": []}, config, [], yes=False)
    assert "recipes.digits.recipe.Digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word",
    [
        *("--experimental-rerun=job.pickle", "-m", "hydra.run.dir=/tmp", "+hydra.x=1", "hydra/launcher=theirs"),
        *("+logger@hydra.callbacks.x=theirs", "+logger@ hydra.callbacks=theirs", "logger@_global_.hydra:x=theirs"),
        "logger@_global_:hydra.callbacks.x=theirs",
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_recorded_overrides_are_overrides_only(word: str, own: bool) -> None:
    with pytest.raises(WorldsizeError, match="not a configuration key"):
        read_recorded_overrides({"overrides": ["steps=3", word]}, own=own)


def test_another_users_record_cannot_widen_the_allow_list() -> None:
    manifest = {"overrides": ["allow_targets=[os]", "+allow_targets.0=os", "steps=3"]}
    assert read_recorded_overrides(manifest, own=False) == ["steps=3"]
    assert read_recorded_overrides(manifest, own=True) == manifest["overrides"]


@pytest.mark.parametrize("command_name", ["resume", "evaluate", "reproduce"])
def test_a_file_among_the_plugins_that_no_record_lists_is_not_imported(
    run: Path, command: Command, command_name: str, environment_without_wandb: dict[str, str], tmp_path: Path
) -> None:
    (run / "plugins" / "plugins" / "extra").mkdir(parents=True)
    (run / "plugins" / "plugins" / "extra" / "strategy.py").touch()
    forge(run)
    done = command(command_name, str(run), "steps=4", "--yes", cwd=tmp_path, environment=environment_without_wandb)
    assert done.returncode == 2
    assert "is not in the run's record" in done.stderr


def test_what_is_asked_about_cannot_forge_lines(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"run": ["harmless\ndata  none\x1b[2K\u202e"], "options": ["a=1", "b=2"]}
    ask_for_consent(facts, yes=True, deed="Run it?")
    shown = capsys.readouterr().err
    assert shown.splitlines() == [
        "run      harmless\\ndata  none\\x1b[2K\\u202e",
        "options  a=1",
        "         b=2",
    ]
    assert "\x1b" not in shown


def test_a_lock_knows_its_holder(tmp_path: Path) -> None:
    from worldsize.record.run_directory import find_lock_holder

    assert find_lock_holder(tmp_path) is None
    with run_lock(tmp_path):
        assert find_lock_holder(tmp_path) == os.getpid()
        assert find_lock_holder(tmp_path) == os.getpid(), "to ask does not end the lock"
    assert find_lock_holder(tmp_path) is None
