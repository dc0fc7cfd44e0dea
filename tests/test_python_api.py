"""The Python API: train, load and compose."""

from __future__ import annotations

import ast
import html
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import worldsize as ws
from tests.support.runs import environment
from tests.support.waiting import wait_until
from worldsize.api.class_recipe import _allow_target
from worldsize.cli import compare
from worldsize.record.run_record import RunView

FEW = ("steps=20", "logger=none", "checkpoint.every=10", "evaluate_every=10", "cluster.threads=1")
CELL = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
import worldsize as ws

torch.set_num_threads(2)
torch.ones(400, 400) @ torch.ones(400, 400)  # makes a pool of threads, which a fork must not wait for

class Line(ws.Recipe):
    def __init__(self, make_optimizer, hidden=16): self.make_optimizer, self.hidden = make_optimizer, hidden
    def model(self): return nn.Linear(4, 1)
    def optimizer(self, model): return self.make_optimizer(model.parameters())
    def data(self, split): return TensorDataset(torch.eye(4), torch.ones(4, 1))
    def loss(self, model, batch): return nn.functional.mse_loss(model(batch[0]), batch[1])
    def evaluate(self, model, batch): return {"count": (batch[0].sum(), 4)}

words = ("batch_size=4", "lr=0.1", "logger=none", "cluster.threads=2", "cluster.processes=2", "strategy=ddp")
run = ws.train(*words, "recipe.hidden=3", recipe=Line, steps=2)
assert run.config["recipe"]["hidden"] == 3 and run.exit_reason == "completed"
try:
    run.resume("steps=4")
except ws.WorldsizeError as error:
    assert "is defined in __main__" in str(error), error
assert isinstance(run.model(), nn.Linear)
wrong = {"allow_targets=foo": "must be a list", "allow_targets=[foo": "failed to parse 'allow_targets=[foo'"}
wrong |= {"recipe.hiden=3": "did you mean 'hidden'", "cluster=slurm": "worldsize new recipe NAME"}
for word, why in wrong.items():
    try:
        ws.train(*words, word, recipe=Line, steps=2)
    except ws.ConfigError as error:
        assert why in str(error), error
    else:
        raise AssertionError(word)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ws.Run]:
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in environment().items():
            patch.setenv(name, value)
        yield ws.train("recipe=digits", "recipe.width=4", "cluster.processes=2", "strategy=ddp", *FEW)


def test_importing_worldsize_imports_nothing_heavy_and_has_the_names_that_it_promises() -> None:
    program = "import sys, worldsize; print(sorted({'torch', 'hydra', 'numpy', 'rich'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"
    tree = ast.parse(Path(ws.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {name.name for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert sorted(told) == sorted(ws.__all__)
    for name in ws.__all__:
        assert getattr(ws, name) is not None
    assert set(ws.__all__) <= set(dir(ws))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        ws.trian  # noqa: B018


def test_a_configuration_is_composed_and_a_misspelt_key_is_refused() -> None:
    assert ws.compose("recipe=digits", "lr=0.5").optimizer.lr == 0.5
    with pytest.raises(ws.ConfigError, match="did you mean 'steps'"):
        ws.compose("recipe=digits", "step=1")


def test_keyword_arguments_are_overrides_with_the_type_of_their_value() -> None:
    config = ws.compose(
        recipe="digits",
        strategy="fsdp",
        steps=40,
        lr=1e-5,
        init_from_strict=False,
        epochs=None,
        allow_targets=["a", "b, c"],
        init_from="it's 1 = ${lr}, [x]",
        ema={"decay": 0.5},
        **{"run.root": Path("a b")},
    )
    assert (config.steps, config.lr, config.init_from_strict, config.epochs) == (40, 1e-5, False, None)
    assert config.strategy._target_ == ws.compose("recipe=digits", "strategy=fsdp").strategy._target_
    assert (config.allow_targets, config.init_from) == (["a", "b, c"], "it's 1 = ${lr}, [x]")
    assert (config.ema.decay, config.run.root) == (0.5, "a b")
    with pytest.raises(ws.ConfigError, match="did you mean 'steps'"):
        ws.train(recipe="digits", step=1)
    with pytest.raises(ws.ConfigError, match="lr: a value of type object is not supported. Pass a number"):
        ws.train(recipe="digits", lr=object())


@pytest.mark.heavy
def test_a_run_has_its_record_and_its_model_the_accuracy_that_was_logged(trained: ws.Run) -> None:
    assert trained.exit_reason == "completed"
    assert trained.failure is None
    assert trained.config["recipe"]["width"] == 4
    assert trained.results["state_digest"] == json.loads((trained.folder / "result.json").read_text())["state_digest"]
    assert [*evaluated(trained)] == [10, 20]
    assert trained.metrics()["metrics.accuracy"].dropna().iloc[-1] == trained.results["metrics"]["accuracy"]
    assert ws.load("last").folder == ws.load(trained.folder / "run_manifest.json").folder == trained.folder
    assert [*trained.metrics("evaluation")["step"]] == [10, 20]
    steps = trained.metrics("step")
    assert [*steps["step"]] == [row["step"] for row in trained.rows() if row["event"] == "step"]
    assert not steps["loss"].isna().any()
    with pytest.raises(ws.WorldsizeError, match="event='steps' is not logged .* did you mean 'step'"):
        trained.metrics("steps")  # type: ignore[arg-type]
    assert repr(trained) == f"<Run {trained.folder}: completed>"
    for checkpoint, step in (("last", 20), (10, 10)):
        model = trained.model(checkpoint)
        assert not model.training
        right = _right_by_hand(model)
        assert right == evaluated(trained)[step]["accuracy"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["allow_targets=[m.Line]"]),
        (["allow_targets=[]"], ["allow_targets=[m.Line]"]),
        (["lr=1", "allow_targets=[a, 'b,c']"], ["lr=1", "allow_targets=[a, 'b,c',m.Line]"]),
        (["+allow_targets=[a]"], ["allow_targets=[a,m.Line]"]),
        (["allow_targets=[a"], ["allow_targets=[a"]),  # Hydra reports these three
        (["allow_targets=a"], ["allow_targets=a"]),
        (["~allow_targets"], ["~allow_targets"]),
    ],
)
def test_the_class_joins_the_targets_that_the_user_allows(words: list[str], expected: list[str]) -> None:
    assert _allow_target(words, "m.Line") == expected


def evaluated(run: ws.Run) -> dict[int, dict[str, float]]:
    """Return the metrics of each evaluation, by step."""
    return {row["step"]: row["metrics"] for row in run.rows() if row["event"] == "evaluation"}


def _right_by_hand(model: nn.Module) -> float:
    """Return ``model``'s accuracy on the test images."""
    from functools import partial

    from recipes.digits.recipe import Digits

    images, labels = Digits(4, 0.2, partial(torch.optim.SGD, lr=0.1)).data("test").tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).sum()) / len(labels)


@pytest.mark.heavy
def test_a_run_is_evaluated_exported_reported_and_resumed(trained: ws.Run) -> None:
    from safetensors.torch import load_file

    assert trained.evaluate("cluster.processes=1", checkpoint=10) == evaluated(trained)[10]
    exported = load_file(trained.export() / "model.safetensors")
    assert all(torch.equal(exported[name], each) for name, each in trained.model().state_dict().items())
    assert "digits" in trained.report().read_text()
    assert trained.resume("steps=22").results["steps"] == 22
    with pytest.raises(ws.RunFailedError, match="not found; available"):
        trained.evaluate(checkpoint=3)


@pytest.mark.heavy
def test_a_run_lists_its_checkpoints_with_their_metrics(trained: ws.Run) -> None:
    assert not any(each.is_best for each in trained.checkpoints), "the run has no checkpoint.keep.best"
    words = ("recipe=digits", "recipe.width=4", "checkpoint.keep.best=accuracy", "checkpoint.keep.last=9", *FEW)
    run = ws.train(*words, lr=0.02)
    saved = {each.step: each for each in run.checkpoints}
    assert {10, 20} <= saved.keys()
    assert all(each.path.name == f"step_{step:07d}" for step, each in saved.items())
    assert {step: dict(each.metrics) for step, each in saved.items() if each.metrics} == evaluated(run)
    assert [each.is_last for each in run.checkpoints] == [False] * (len(saved) - 1) + [True]
    (best,) = [each for each in run.checkpoints if each.is_best]
    assert best.metrics["accuracy"] == max(metrics["accuracy"] for metrics in evaluated(run).values())


@pytest.mark.heavy
def test_runs_are_compared_and_reported_as_on_the_command_line(
    trained: ws.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ws.train("recipe=digits", "recipe.width=4", "cluster.processes=1", "strategy=ddp", *FEW, lr=0.02)
    assert trained.compare(trained).verdict == "bitwise identical"
    comparison = trained.compare(other.folder)
    assert comparison.verdict == "different"
    (lr,) = [each for each in comparison.metrics if each.name == "lr"]
    assert (lr.first_step, lr.relative) == (1, 0.75)
    assert inspect.signature(ws.Run.compare).parameters["tolerance"].default == compare.TOLERANCE
    with pytest.raises(ws.WorldsizeError, match="must be at least 0"):
        trained.compare(other, tolerance=-1)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["worldsize compare", str(trained.folder), str(other.folder)])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        compare.main()
    assert repr(comparison).split() == capsys.readouterr().out.split()
    shown = comparison._repr_html_()
    assert "font-weight: bold" in shown
    assert html.unescape(re.sub("<.*?>", "", shown)).split() == repr(comparison).split()

    page = ws.report([trained, other.folder], tmp_path / "both.html")
    assert page == tmp_path / "both.html"
    assert all(run.folder.name in page.read_text() for run in (trained, other))
    with pytest.raises(ws.WorldsizeError, match="at least one run"):
        ws.report([])


@pytest.mark.heavy
def test_what_cannot_start_and_what_fails_are_errors_of_their_own(trained: ws.Run) -> None:
    with pytest.raises(ws.ConfigError, match="did you mean 'digits'"):
        ws.train("recipe=digit")
    with pytest.raises(ws.ConfigError, match="only overrides"):
        ws.train("--multirun", "recipe=digits")
    with pytest.raises(ws.ConfigError, match="does not start a run"):
        ws.train("recipe=digits", "launch=show")
    with pytest.raises(ws.ConfigError, match="start a sweep"):
        ws.train("recipe=digits", "hydra.mode=MULTIRUN", "lr=0.1,0.2")
    with pytest.raises(ws.RunFailedError, match="SIGKILL") as failed:
        ws.train("recipe=digits", *FEW, "faults=[{action: kill, rank: 0, step: 3}]")
    assert ws.load(failed.value.folder).exit_reason == "failed"
    os.chdir("runs")
    with pytest.raises(ws.WorldsizeError, match="no runs found in"):
        ws.load("last")
    os.chdir("..")


@pytest.mark.heavy
def test_code_of_a_strangers_run_runs_only_with_trust(
    trained: ws.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunView, "is_own", property(lambda _: False))
    assert trained.rows()
    assert trained.config["steps"]
    for call in (trained.model, trained.evaluate, trained.resume):
        with pytest.raises(ws.WorldsizeError, match="pass trust=True"):
            call()
    before = Path.cwd(), [*sys.path], os.environ.get("WORLDSIZE_PLUGINS"), sys.modules.get("recipes.digits.recipe")
    assert isinstance(trained.model(trust=True), nn.Module)
    assert "recipes.digits.recipe.Digits" in capsys.readouterr().err
    after = Path.cwd(), [*sys.path], os.environ.get("WORLDSIZE_PLUGINS"), sys.modules.get("recipes.digits.recipe")
    assert after == before


@pytest.mark.heavy
def test_an_interrupt_lets_the_run_save_once(tmp_path: Path) -> None:
    words = ["recipe=digits", "recipe.width=4", "steps=1000000", "log_every=1", "logger=none", "cluster.threads=1"]
    words += ["launcher.interrupt_grace=120"]  # a busy machine saves slowly
    program = f"import worldsize as ws\ntry: ws.train(*{words})"
    program += "\nexcept ws.RunFailedError as error: print('ended', error.folder)"
    command = [sys.executable, "-u", "-c", program]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    text = (tmp_path / "output").read_text
    try:
        wait_until(lambda: "step 1/" in text(), text)
        os.killpg(process.pid, signal.SIGINT)  # like a terminal
        assert process.wait(timeout=180) == 0, text()
    finally:
        process.kill()
    run = ws.load(text().splitlines()[-1].removeprefix("ended "))
    assert run.exit_reason == "preempted"
    assert list((run.folder / "checkpoints").iterdir())


@pytest.mark.heavy
def test_a_class_of_the_running_program_is_trained_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(CELL)
    done = subprocess.run(
        [sys.executable, "cell.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
