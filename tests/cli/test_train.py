"""Run train.py as a user does: results, folders, records and refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.test_malformed import called
from tests.support.own_recipe import write_recipe
from tests.support.small_disk import mounted
from worldsize import cli

REPOSITORY = Path(__file__).parents[2]
QUICK = ("recipe=digits", "steps=3", "recipe.width=4")


def test_an_uneven_data_set_is_evaluated_to_the_same_metrics_at_every_world_size(train: Any) -> None:
    """lr=0 keeps the initial weights at all world sizes; 360 test images in batches of 7 divide over none of them."""
    options = (*QUICK, "lr=0", "evaluate_batch_size=7", "cluster.threads=1")
    runs = [train(*options, f"cluster.processes={size}") for size in (1, 2, 3, 4)]
    first, *others = [run.json("result.json")["metrics"] for run in runs]
    assert others == [first] * 3


def test_logged_losses_are_global_means(train: Any) -> None:
    losses = [
        [line["loss"] for line in train(*QUICK, "lr=0", "recipe.dropout=0", f"cluster.processes={size}").steps()]
        for size in (1, 3)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_run_leaves_its_record(train: Any) -> None:
    run = train(*QUICK, "cluster.processes=2", "profile.steps=[2,3]", "seed=7")
    assert run.code == 0, run.error
    manifest, result = run.json("run_manifest.json"), run.json("result.json")
    assert manifest["attempts"][0]["exit_reason"] == "completed"
    assert manifest["results"]["state_digest"] == result["state_digest"]
    assert manifest["determinism"]["seed"] == 7
    assert manifest["cluster"]["roles"] == [{"role": "worker", "processes": 2}]
    assert len(manifest["data"]["files"]["digits.csv.gz"]["sha256"]) == 64
    assert manifest["environment"]["packages"]["torch"]
    assert manifest["overrides"][-1] == "seed=7"
    assert (run.folder / "environment" / "uv.lock").exists()
    timings = [(run.folder / "timing" / f"worker_0000{rank}.jsonl").read_text() for rank in (0, 1)]
    for rank in (0, 1):
        events = run.json(f"profile/worker_0000{rank}.json")["traceEvents"]
        assert {"step 2", "step 3"} <= {event["name"] for event in events}
    for line in (json.loads(text.splitlines()[0]) for text in timings):
        parts = [line[f"{part}_seconds"] for part in ("compute", "communication", "update")]
        assert min(parts) > 0
        assert sum(parts) <= line["step_seconds"]
    assert "accuracy" in run.output
    assert run.folder.name in re.sub(r"\s", "", run.output)


LONG = """\
import time
from types import SimpleNamespace

from recipes.digits.recipe import Digits
from worldsize.loop import window

late = [0.0]
window.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])


class Long(Digits):
    def evaluate(self, *arguments):
        late[0] += 1e6  # seconds
        return super().evaluate(*arguments)
"""


def test_time_spent_on_an_evaluation_or_a_save_counts_in_no_step_and_shortens_none(train: Any, tmp_path: Path) -> None:
    target = "defaults: [digits, _self_]\nrecipe: {_target_: recipes.long.recipe.Long}\n"
    write_recipe(tmp_path, "long", LONG, long=f"# @package _global_\n{target}")
    slow = "faults=[{action: sleep, seconds: 0.1}]"
    words = ("recipe=long", "recipe.width=4", "steps=6", "log_every=3", "evaluate_every=2", "checkpoint.every=4", slow)
    run = train(*words)
    assert run.code == 0, run.error
    assert all(96 / 1e4 < step["samples_per_second"] < 96 / 0.1 for step in run.steps()[1:])


def test_equal_seeds_give_equal_bits_and_others_do_not(train: Any) -> None:
    options = (*QUICK, "cluster.processes=2", "reproducibility=deterministic")
    first, second, other = (train(*options, f"seed={seed}").json("result.json") for seed in (1, 1, 2))
    assert first["state_digest"] == second["state_digest"] != other["state_digest"]
    assert first["metrics_digest"] == second["metrics_digest"] != other["metrics_digest"]


def test_config_groups_may_be_chosen_with_or_without_a_plus(train: Any) -> None:
    for sign in ("+", ""):
        run = train(*QUICK, f"{sign}cluster=laptop", f"{sign}strategy=single", "cluster.processes=1", "launch=show")
        assert run.code == 0, run.error


@pytest.mark.parametrize("steps", ["???", "null"])  # ???: as a recipe without steps
def test_epochs_decide_the_number_of_steps(train: Any, steps: str) -> None:
    run = train(*QUICK, f"steps={steps}", "epochs=2", "batch_size=480", "cluster.processes=1")
    assert run.code == 0, run.error
    assert run.json("result.json")["steps"] == 6  # 2 × 1,437 images / 480, rounded up


def test_steps_that_are_typed_beside_epochs_are_refused(train: Any) -> None:
    run = train("recipe=digits", "steps=50", "epochs=2", "launch=show")
    assert (run.code, run.folder) == (2, None)
    assert "Set epochs=null steps=50, or remove steps=50." in run.error


def test_typed_steps_take_the_place_of_the_epochs_of_a_file(train: Any, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "long.yaml").write_text("# @package _global_\nepochs: 9\n")
    run = train(*QUICK, "+experiment=long", "steps=3", "cluster.processes=1")
    assert run.code == 0, run.error
    config = run.json("run_manifest.json")["config"]
    assert (config["steps"], config["epochs"]) == (3, None)
    assert [line["step"] for line in run.steps()][-1] == 3


def test_epochs_take_the_place_of_the_steps_of_a_recipe(train: Any) -> None:
    run = train("recipe=digits", "epochs=2", "batch_size=480", "cluster.processes=1", "recipe.width=4")
    assert (run.code, run.error) == (0, "")
    assert run.json("result.json")["steps"] == 6


@pytest.mark.parametrize("steps", ["???", "null"])
def test_a_run_whose_length_nothing_says_is_refused(train: Any, steps: str) -> None:
    run = train("recipe=digits", f"steps={steps}", "launch=show")
    assert (run.code, run.folder) == (2, None)
    assert "Set e.g. steps=100 or epochs=1" in run.error


@pytest.mark.parametrize("key", ["evaluate_batch_size", "checkpoint.at_end", "seed"])
def test_a_value_that_must_not_be_null_is_refused_in_our_words(train: Any, key: str) -> None:
    run = train(*QUICK, f"{key}=null", "launch=show")
    assert run.code == 2
    assert run.error.strip().endswith(f"{key} must not be null. Set {key}=VALUE, or remove the override.")


def test_a_batch_size_that_is_missing_is_refused(train: Any) -> None:
    run = train(*QUICK, "batch_size=???", "launch=show")
    assert run.code == 2
    assert "Set e.g. batch_size=64, or batch_size=null if the dataset yields batches" in run.error


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_with_clipping_and_accumulation(train: Any, precision: str) -> None:
    options = ("steps=30", f"precision={precision}", "clip_norm=1.0", "logical_ranks=4", "recipe.width=4")
    run = train("recipe=digits", *options)
    assert run.code == 0, run.error
    losses = [line["loss"] for line in run.steps()]
    assert losses[-1] < losses[0]
    assert run.steps()[-1]["grad_norm"] > 0


def test_a_loss_that_is_not_finite_ends_the_run(train: Any) -> None:
    run = train(*QUICK, "optimizer=sgd", "schedule=constant", "lr=1e30", "steps=20", "cluster.processes=2")
    assert run.code == 1
    assert "Lower lr" in run.error
    assert run.json("run_manifest.json")["attempts"][0]["exit_reason"] == "failed"


def test_steps_that_are_not_finite_can_be_skipped(train: Any) -> None:
    options = ("optimizer=sgd", "schedule=constant", "lr=1e30", "steps=20", "cluster.processes=2")
    run = train(*QUICK, *options, "nonfinite=skip")
    assert run.code == 0, run.error
    assert sum(line["skipped"] for line in run.steps()) > 0


def test_a_sweep_makes_a_folder_for_each_run(train: Any, tmp_path: Path) -> None:
    run = train(*QUICK, "--multirun", "seed=1,2,3")
    assert run.code == 0, run.error
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "digits").rglob("run_manifest.json")]
    assert sorted(manifest["determinism"]["seed"] for manifest in manifests) == [1, 2, 3]
    groups = {manifest["config"]["run"]["group"] for manifest in manifests}
    assert len(groups) == 1
    assert groups != {None}


def test_launches_in_the_same_second_get_folders_of_their_own(train: Any) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: train(*QUICK, "cluster.processes=1"), range(3)))
    last = train(*QUICK, "cluster.processes=1")
    assert len(list(last.folder.parent.iterdir())) == 4


def test_show_starts_nothing_and_write_leaves_a_folder_that_a_worker_can_run(
    train: Any, tmp_path: Path, warm_python: Path
) -> None:
    shown = train(*QUICK, "cluster.processes=2", "launch=show")
    assert "[worker 1] RANK=1 python -m worldsize.worker" in shown.output
    assert not (tmp_path / "runs").exists()
    written = train(*QUICK, "cluster.processes=1", "launch=write")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    subprocess.run([warm_python, "-m", "worldsize.worker", str(written.folder)], env=environment, check=True)
    assert written.json("result.json")["exit_reason"] == "completed"


REFUSALS = {
    "unknown option": (
        ["strategy=dpd"],
        "unknown strategy 'dpd'; did you mean 'ddp'? Available: ddp,",
    ),
    "unknown option with a plus": (["+recipe=digit"], "unknown recipe 'digit'; did you mean 'digits'?"),
    "no retention": (
        ["checkpoint.keep=null"],
        "checkpoint.keep=null must be a mapping with a _target_. Remove the override.",
    ),
    "a key of Hydra's": (["optimizer._partial_=null"], "_partial_ flag must be a bool"),
    "unknown key": (["steqs=3"], "unknown key 'steqs'; did you mean 'steps'?"),
    "unknown nested key": (["cluster.procesess=3"], "unknown key 'cluster.procesess'; did you mean 'processes'?"),
    "unknown key of a strategy": (["strategy.bucket=3"], "unknown key 'strategy.bucket'; did you mean 'bucket_mb'?"),
    "unknown added key": (["+strategy.bucket=3"], "unknown key 'strategy.bucket'; did you mean 'bucket_mb'?"),
    "unknown added top-level key": (["+stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
    "unknown added key of the cluster": (
        ["+cluster.device_type=3"],
        "unknown key 'cluster.device_type'; did you mean 'device'?",
    ),
    "key of other clusters": (
        ["cluster.partition=gpu"],
        "cluster.partition requires cluster=slurm. Set e.g. +cluster=slurm, or remove cluster.partition.",
    ),
    "option of the scheduler": (
        ["+cluster=slurm", "+cluster.mail_type=END"],
        "unknown key 'cluster.mail_type'. If the scheduler has such an option, set +cluster.options.mail-type=VALUE.",
    ),
    "option of the scheduler that has a key": (
        ["+cluster=slurm", "+cluster.ntasks_per_node=8"],
        "unknown key 'cluster.ntasks_per_node'. Set cluster.processes_per_node instead.",
    ),
    "the same without a plus": (
        ["+cluster=slurm", "cluster.signal=B:USR1@300"],
        "unknown key 'cluster.signal'. Set launcher.signal_before instead.",
    ),
    "option of the scheduler that the job script sets": (
        ["+cluster=slurm", "+cluster.options.signal=B:USR1@300", "launch=show"],
        "cluster.options={'signal': 'B:USR1@300'} is not supported: signal conflicts with the job script's own "
        "settings. Set launcher.signal_before instead.",
    ),
    "misspelt key of a scheduler": (
        ["+cluster=slurm", "cluster.partion=gpu"],
        "unknown key 'cluster.partion'; did you mean 'partition'?",
    ),
    "wrong type": (["steps=many"], "steps='many' has the wrong type: expected an integer."),
    "no number": (["clip_norm=much"], "clip_norm='much' has the wrong type: expected a number."),
    "neither true nor false": (["compile=maybe"], "compile='maybe' has the wrong type: expected true or false."),
    "wrong type in a strategy": (
        ["strategy.bucket_mb=big"],
        "strategy.bucket_mb='big' has the wrong type: expected float.",
    ),
    "no processes": (["cluster.processes=0"], "cluster.processes=0 must be 1 or more."),
    "batch smaller than ranks": (["batch_size=2", "cluster.processes=3"], "batch_size=2 is not divisible by 3"),
    "logical ranks": (["logical_ranks=3"], "3 logical ranks are not divisible by 2 data-parallel workers."),
    "sums by node": (
        ["strategy=zero", "strategy.reduce=hierarchical"],
        "strategy.reduce='hierarchical' is not supported with ZeRO. Available: flat, ordered.",
    ),
    "sums that the level wants": (
        ["strategy=easgd", "cluster.processes=3", "reproducibility=elastic"],
        "Available: flat. reproducibility=elastic requires strategy.reduce=ordered. Set a different level, or e.g. "
        "strategy=ddp.",
    ),
    "single on two": (["strategy=single"], "strategy=single requires cluster.processes=1, got 2."),
    "a mesh whose recipe does not say how layers divide": (
        ["strategy=mesh", "strategy.tensor=2"],
        "Digits does not define a tensor-parallel plan for its model. Define Recipe.tensor_plan, or set "
        "strategy.tensor=1.",
    ),
    "a pipeline whose recipe has no layers": (
        ["strategy=mesh", "strategy.pipeline=2"],
        "Digits does not define the layers of its model. Define Recipe.layers, or set strategy.pipeline=1.",
    ),
    "a folder of Hydra's": (
        ["hydra.run.dir=here"],
        "hydra.run.dir is not supported: worldsize creates the run folder",
    ),
    "a folder of a sweep's run": (["-m", "hydra.sweep.subdir=a"], "hydra.sweep.subdir is not supported"),
    "another working directory": (["hydra.job.chdir=true"], "hydra.job.chdir is not supported"),
    "a folder for Hydra's files": (["hydra.output_subdir=.hydra"], "hydra.output_subdir is not supported"),
    "another configuration": (["--config-path=conf"], "--config-path is not supported: it would replace"),
    "a pickled configuration": (
        ["--experimental-rerun=config.pickle"],
        "--experimental-rerun is not supported: unpickling",
    ),
    "nothing to resolve": (["--resolve"], "--resolve requires --cfg or --help."),
    "two modes": (["--run", "--multirun"], "--run and --multirun are mutually exclusive; pass one of them."),
    "unknown argument of an optimizer": (
        ["optimizer.amsgrad=true"],
        "If its _target_ accepts 'amsgrad', add it with +optimizer.amsgrad=VALUE.",
    ),
    "no steps": (["steps=0"], "steps=0 must be 1 or more."),
    "unknown precision": (
        ["precision=fp7"],
        "precision='fp7' is unknown; did you mean 'fp8'?",
    ),
    "two nodes on one machine": (
        ["cluster.nodes=2", "cluster.processes=2"],
        "the local launcher requires cluster.nodes=1",
    ),
    "a node without GPUs": (["cluster=node"], "torch found no GPU on this machine"),
    "no hosts": (["cluster=ssh"], "cluster.hosts is missing, and has no default. Set cluster.hosts=[a,b]."),
    "target that does not exist": (
        ["strategy._target_=worldsize.strategies.ddp.DPD"],
        "did you mean 'worldsize.strategies.ddp.DDP'?",
    ),
    "target outside": (["strategy._target_=os.system"], "'os.system' is outside the allow-list."),
    "not an override": (["steps"], "steps"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_configuration_that_cannot_run_is_refused_before_anything_is_made(
    train: Any, tmp_path: Path, name: str
) -> None:
    arguments, message = REFUSALS[name]
    run = train(*arguments)
    assert run.code == 2
    assert message in run.error
    assert "Traceback" not in run.error
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_a_mesh_cannot_divide_is_refused_at_a_resume_too(
    train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    run = train(*QUICK, "cluster.processes=1", "cluster.threads=1")
    before = run.json("run_manifest.json")
    words = ("resume", str(run.folder), "steps=5", "cluster.processes=2", "strategy=mesh", "strategy.tensor=2")
    done = command(*words, cwd=run.folder.parents[2], environment=environment_without_wandb)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "Define Recipe.tensor_plan" in done.stderr
    assert run.json("run_manifest.json") == before


@pytest.mark.parametrize("words", [("resume", "steps=5"), ("evaluate", "cluster.processes=1"), ("reproduce",)])
def test_a_run_whose_groups_came_from_a_folder_of_the_command_line_has_them_again(
    train: Any, command: Any, tmp_path: Path, environment_without_wandb: dict[str, str], words: tuple[str, ...]
) -> None:
    (tmp_path / "mine" / "trial").mkdir(parents=True)
    (tmp_path / "mine" / "trial" / "short.yaml").write_text("# @package _global_\nseed: 11\n")
    run = train("--config-dir=mine", "trial=short", *QUICK, "cluster.processes=1")
    assert run.json("run_manifest.json")["config_dir"] == str(tmp_path / "mine")
    name, *more = words
    done = command(name, str(run.folder), *more, cwd=Path("/"), environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert run.json("run_manifest.json")["config"]["seed"] == 11


def test_what_killed_processes_left_is_looked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looked: list[str] = []

    def no_leftovers() -> list[Path]:
        looked.append("looked")
        return []

    monkeypatch.setattr(cli, "leftovers", no_leftovers)
    assert called(["train", "launch=show", "logger=none", "cluster.processes=1"], tmp_path)[0] == 0
    assert called(["list"], tmp_path)[0] == 0
    assert len(looked) == 2


def test_a_recipe_whose_import_fails_shows_its_own_traceback(train: Any, tmp_path: Path) -> None:
    folder = tmp_path / "recipes" / "broken"
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "recipe.py").write_text("import torch\n\nraise RuntimeError('the third line')\n")
    yaml = "# @package _global_\nsteps: 1\nbatch_size: 4\nlr: 0.1\nrecipe: {_target_: recipes.broken.recipe.R}\n"
    (folder / "conf" / "recipe" / "broken.yaml").write_text(yaml)
    run = train("recipe=broken")
    assert run.code == 1
    assert "RuntimeError: the third line" in run.error
    assert 'recipe.py", line 3' in run.error
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB at runs/."""
    with mounted(tmp_path / "runs", "64k") as folder:
        yield folder


def test_a_full_disk_is_refused_and_leaves_nothing(train: Any, tmpfs: Path) -> None:
    (tmpfs / "ballast").write_bytes(bytes(48 * 1024))
    run = train(*QUICK)
    assert run.code == 2
    assert ": No space left on device. Set run.root to a writable folder" in run.error
    assert [path.name for path in tmpfs.iterdir()] == ["ballast"]


def test_a_read_only_folder_is_refused_and_leaves_nothing(train: Any, tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    run = train(*QUICK)
    assert run.code == 2
    assert ": Read-only file system. Set run.root to a writable folder" in run.error
    assert list(tmpfs.iterdir()) == []


def test_a_file_in_place_of_the_run_root_is_refused(train: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    run = train(*QUICK)
    assert run.code == 2
    assert "failed to write to the run folder" in run.error


def test_a_run_name_cannot_be_taken_twice(train: Any) -> None:
    train(*QUICK, "run.name=mine", "cluster.processes=1")
    again = train(*QUICK, "run.name=mine", "cluster.processes=1")
    assert again.code == 2
    assert "exists. Choose a different run.name" in again.error


def test_help_lists_groups_and_their_options(train: Any) -> None:
    run = train("--help")
    assert run.code == 0
    shown = dict(line.split(": ", 1) for line in run.output.splitlines() if re.match(r"(strategy|recipe): ", line))
    assert {"ddp", "fsdp", "hybrid_parameter_server", "single"} <= set(shown["strategy"].split(", "))
    assert {"click_through", "digits", "stdlib_lm"} <= set(shown["recipe"].split(", "))
    assert "_schema" not in run.output
    composed = OmegaConf.create(train("--cfg", "job").output)
    _, _, keys = run.output.partition("Keys: set one with key=value")
    described = re.findall(r"^  (\S+(?:, \S+)*)  ", keys.partition("Examples")[0], re.MULTILINE)
    assert len(described) == 15
    for key in ", ".join(described).split(", "):
        assert OmegaConf.select(composed, key, default="absent") != "absent", key
    assert "interrupt_grace: " in train("--help", "all").output


def test_help_on_hydra_is_hydras_own(train: Any) -> None:
    run = train("--hydra-help", "steps=3")
    assert (run.code, run.error) == (0, "")
    assert "Hydra is the framework that powers this app" in run.output or "hydra/sweeper" in run.output


@pytest.mark.parametrize("module", ["omegaconf", "hydra", "torch"])
@pytest.mark.parametrize(
    "program", [(str(REPOSITORY / "train.py"),), ("-m", "worldsize", "train")], ids=["file", "module"]
)
def test_an_interrupt_while_it_imports_ends_it_quietly(tmp_path: Path, program: tuple[str, ...], module: str) -> None:
    """A module of the same name, first on the path, simulates Ctrl-C during its import."""
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError('nothing was interrupted')\n"
    (tmp_path / f"{module}.py").write_text(interrupt)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = (sys.executable, *program, "launch=show", "logger=none")
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
