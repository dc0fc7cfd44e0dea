"""A new run starts from weights in files, bit for bit under every strategy, and refuses mismatches."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.support.runs import Train
from worldsize.checkpoint.weights import open_weights
from worldsize.collectives.gather_full import gather_full
from worldsize.core import ConfigError, Recipe, RunContext, Strategy, World
from worldsize.core.sections import WeightAverage
from worldsize.launch.record import check_initial
from worldsize.launch.recorded_run import check_typed
from worldsize.loop.averaging import AveragedReplica
from worldsize.loop.initial_weights import InitialWeights
from worldsize.record.inputs import fingerprint
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

STRATEGIES: dict[str, Strategy] = {
    "ddp": DDP(),
    "zero": ZeRO(),
    "fsdp": FSDP(),
    "pipeline": Mesh(pipeline=2),
    "tensor": Mesh(tensor=2),
}


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Write weights that differ from any seed's, as two safetensors files."""
    state = {name: tensor + 0.25 for name, tensor in Chain().model().state_dict().items()}
    names = list(state)
    safetensors.torch.save_file({name: state[name] for name in names[:7]}, folder / "a.safetensors")
    safetensors.torch.save_file({name: state[name] for name in names[7:]}, folder / "b.safetensors")
    return state


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_begins_from_the_bits_in_the_files(name: str, tmp_path: Path) -> None:
    expected, recipe = weights_in(tmp_path), Chain()

    def body(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        replica = STRATEGIES[name].replica(recipe, RunContext(world))
        replica.load(InitialWeights(tmp_path, strict=True).load_into(recipe, replica.state()))
        state = replica.state()
        return dict(gather_full(state["model"], world)), {}

    (model, _), _ = run_in_worlds(body, 2)
    assert model.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(model[key], expected[key])] == []


def test_an_average_begins_from_them_too(tmp_path: Path) -> None:
    expected, recipe, world = weights_in(tmp_path), Chain(), World.create_single(torch.device("cpu"))
    replica = AveragedReplica(DDP().replica(recipe, RunContext(world)), WeightAverage(0.9))
    replica.load(InitialWeights(tmp_path, strict=True).load_into(recipe, replica.state()))
    weights = replica.state()["ema"]["weights"]
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


class _TiedRecipe(Chain):
    def model(self) -> nn.Module:
        return _Tied()


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_weight_may_have_either_of_its_names(name: str, tmp_path: Path) -> None:
    value = torch.arange(15.0).reshape(5, 3).to(torch.bfloat16)
    safetensors.torch.save_file({name: value}, tmp_path / "model.safetensors")
    recipe, world = _TiedRecipe(), World.create_single(torch.device("cpu"))
    initial = InitialWeights(tmp_path / "model.safetensors", strict=True)
    initial.check_recipe(recipe, makes_rows=False)
    replica = DDP().replica(recipe, RunContext(world))
    replica.load(initial.load_into(recipe, replica.state()))
    model = replica.state()["model"]
    assert all(torch.equal(model[each], value.float()) for each in ("embedding.weight", "head.weight"))


def refused(recipe: Recipe, state: dict[str, Any], folder: Path, **options: Any) -> str:
    torch.save(state, folder / "model.pt")
    with pytest.raises(ConfigError) as caught:
        InitialWeights(folder / "model.pt", strict=True).check_recipe(recipe, **{"makes_rows": False, **options})
    return str(caught.value)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = Chain().model().state_dict()
    renamed = {name.replace("0.bias", "0.biases"): tensor for name, tensor in state.items()}
    told = refused(Chain(), renamed, tmp_path)
    assert "is missing the weight '0.bias'; did you mean '0.biases'?" in told
    assert "the weight 'more' is not in the model" in refused(Chain(), {**state, "more": state["0.bias"]}, tmp_path)
    assert "has [3], the model [16]" in refused(Chain(), {**state, "0.bias": torch.ones(3)}, tmp_path)
    torch.save(renamed, tmp_path / "model.pt")
    with caplog.at_level(logging.WARNING, "worldsize"):
        InitialWeights(tmp_path / "model.pt", strict=False).check_recipe(Chain(), makes_rows=False)
    assert "no weights for 0.bias; keeping the random initialization" in caplog.text
    assert "unused weights 0.biases in" in caplog.text


def test_a_run_that_has_begun_takes_no_other_weights() -> None:
    for word in ("init_from=other", "+init_from=other", "~init_from"):
        with pytest.raises(ConfigError, match="keeps its initial weights"):
            check_typed(["lr=0.1", word])
    check_typed(["lr=0.1", "steps=3"])


def test_weights_that_were_changed_since_the_launch_are_refused(tmp_path: Path) -> None:
    weights_in(tmp_path)
    initial = InitialWeights(tmp_path, strict=True)
    recorded = fingerprint(open_weights(tmp_path).list_files())
    check_initial(initial, recorded)
    safetensors.torch.save_file({"other": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(
        ConfigError, match=r"the initial weights in .* have changed since the run started: their digest differs"
    ):
        check_initial(initial, recorded)


class _Sparse(Chain):
    def model(self) -> nn.Module:
        return nn.EmbeddingBag(5, 3, sparse=True, mode="sum")


def test_rows_that_servers_make_are_refused(tmp_path: Path) -> None:
    told = refused(_Sparse(), _Sparse().model().state_dict(), tmp_path, makes_rows=True)
    assert "init_from is not supported with this strategy for sparse=True embeddings" in told


def test_a_run_begins_from_another_and_is_reproduced_from_the_same_weights(train: Train, tmp_path: Path) -> None:
    first = train("steps=2", "run.name=first", "cluster.processes=1")
    assert first.code == 0, first.error
    begun = ("lr=0", "steps=1", "init_from=runs/digits/first", "seed=5")
    second = train(*begun, "run.name=second", "cluster.processes=2")
    assert second.code == 0, second.error
    served = train(*begun, "run.name=served", "cluster.processes=2", "strategy=parameter_server")
    assert served.code == 0, served.error
    results = [
        json.loads((tmp_path / "runs" / "digits" / name / "result.json").read_text())
        for name in ("first", "second", "served")
    ]
    assert len({result["state_digest"] for result in results}) == 1
    manifest = json.loads((tmp_path / "runs" / "digits" / "second" / "run_manifest.json").read_text())
    assert manifest["config"]["init_from"].endswith("runs/digits/first/checkpoints/step_0000002")
    assert list(manifest["init_from"]["files"]) == ["manifest.json"]
    absent = train("steps=1", "init_from=nowhere", "run.name=third")
    assert (absent.code, absent.folder) == (2, None)
    assert "nowhere not found" in absent.error
