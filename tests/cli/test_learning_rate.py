"""A learning rate is required only where something uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worldsize.config.compose import compose_and_call, resolve_config
from worldsize.core import ConfigError

RECIPE = '''"""A line is learned by an optimizer whose steps have one length."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from worldsize.core import Recipe


class Stride(torch.optim.Optimizer):
    """Goes a fixed way against the sign of the gradient; it has no learning rate."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("count", torch.zeros(()))
                self.state[parameter]["count"] += 1
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad.sign()


class Line(Recipe):
    def __init__(self, make_optimizer=Stride):
        self.make_optimizer = make_optimizer

    def model(self):
        return nn.Linear(1, 1)

    def optimizer(self, model):
        return self.make_optimizer(model.parameters())

    def data(self, split):
        x = torch.linspace(-1, 1, 48).unsqueeze(1)
        return TensorDataset(x, 2 * x + 1)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"error": ((model(batch[0]) - batch[1]).square().sum(), torch.tensor(len(batch[0])))}
'''
YAML = """# @package _global_
# A line
steps: 6
batch_size: 48
recipe:
  _target_: recipes.line.recipe.Line
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two recipes: ``line`` defines an optimizer, ``taking`` takes the configured one."""
    conf = tmp_path / "recipes" / "line" / "conf" / "recipe"
    conf.mkdir(parents=True)
    (conf.parents[1] / "recipe.py").write_text(RECIPE)
    (conf / "line.yaml").write_text(YAML)
    (conf / "taking.yaml").write_text(f"{YAML}  make_optimizer: ${{optimizer}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def composed(*words: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    compose_and_call(lambda cfg: found.append(resolve_config(cfg)), words)
    return found[0]


def test_an_optimizer_without_a_learning_rate_trains_is_resumed_and_needs_none(
    project: Path, train: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    options = ("recipe=line", "cluster.processes=2", "cluster.threads=1", "reproducibility=deterministic")
    whole = train(*options, "log_every=1")
    assert whole.code == 0, whole.error
    assert [line["lr"] for line in whole.steps()] == [None] * 6
    assert whole.steps()[-1]["loss"] < whole.steps()[0]["loss"]
    half = train(*options, "log_every=1", "steps=3")
    words = ("resume", str(half.folder), "steps=6")
    done = command(*words, cwd=project, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert half.json("result.json")["state_digest"] == whole.json("result.json")["state_digest"]


def test_servers_refuse_an_optimizer_without_a_learning_rate(project: Path, train: Any) -> None:
    run = train("recipe=line", "strategy=parameter_server", "cluster.processes=2")
    assert (run.code, run.folder) == (2, None)
    assert "Stride requires a learning rate (lr)" in run.error


@pytest.mark.parametrize("words", [(), ("lr=null",)])
def test_a_learning_rate_that_the_optimizer_takes_is_asked_for(project: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^lr is missing, but optimizer.lr requires it. Set e.g. lr="):
        composed("recipe=taking", *words)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        (("recipe=line",), None),
        (("recipe=taking", "lr=0.5"), 0.5),
        (("recipe=taking", "optimizer.lr=0.25"), 0.25),
        (("recipe=line", "+recipe.make_optimizer={_target_: torch.optim.SGD, _partial_: true, lr: 0.1}"), 0.1),
    ],
)
def test_no_learning_rate_is_asked_for_where_nothing_takes_it(
    project: Path, words: tuple[str, ...], rate: float | None
) -> None:
    config = composed(*words)
    assert config["recipe"].get("make_optimizer", {}).get("lr") == rate
    assert config["lr"] == (0.5 if "lr=0.5" in words else None)


def test_any_key_that_takes_the_learning_rate_asks_for_it(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"lr is missing, but clip_norm requires it"):
        composed("recipe=line", "clip_norm=${lr}")
    with pytest.raises(ConfigError, match=r"lr is missing, but optimizer.lr requires it"):
        composed("recipe=line", "+recipe.make_optimizer=${optimizer}")
