"""With ``precision=fp8``, linear layers round to eight bits, and everything else is unchanged."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.test_compile import trained
from tests.strategies.test_recomputed import ALONE, Blocks, batches
from worldsize.core import ConfigError, Numerics, RunContext
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.model_passes import check_fp8, use_fp8
from worldsize.strategies.synchronous import create_local_replica
from worldsize.testing.recipes import Chain


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` (any shape) rounded to ``dtype``, scaled by its largest number."""
    scale = torch.finfo(dtype).max / tensor.abs().max()
    return (tensor * scale).to(dtype).float() / scale


class Narrow(Chain):
    """A model with too narrow layers."""

    def model(self) -> nn.Module:
        return nn.Linear(7, 3)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Ignore torchao's warnings during its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8  # noqa: F401

        yield


def test_products_and_their_gradients_are_those_of_rounded_factors() -> None:
    torch.manual_seed(3)
    recipe, model = Blocks(dropout=0.0), nn.Sequential(nn.Linear(32, 48))
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    use_fp8(recipe, model, torch.device("cpu"))
    inputs, gradient = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    output = model(inputs)
    output.backward(gradient)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    sent, held, back = rounded(inputs.detach(), e4m3), rounded(weight, e4m3), rounded(gradient, e5m2)
    torch.testing.assert_close(output, sent @ held.T + bias)
    torch.testing.assert_close(inputs.grad, back @ held)
    torch.testing.assert_close(layer.weight.grad, back.T @ sent)
    assert not torch.allclose(output, inputs @ weight.T + bias, rtol=1e-3)


def test_the_state_of_a_run_is_that_of_one_in_float32() -> None:
    recipe, batch = Blocks(dropout=0.0), batches(1)
    eight, plain = (
        create_local_replica(recipe, recipe.model(), RunContext(ALONE, Numerics(precision=precision)))
        for precision in ("fp8", "fp32")
    )
    loss, expected = (replica.step(batch).losses[0] for replica in (eight, plain))
    assert loss != expected
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0)
    state = eight.state()
    assert {name: tensor.dtype for name, tensor in state["model"].items()} == {
        name: tensor.dtype for name, tensor in plain.state()["model"].items()
    }
    plain.load(state)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in plain.state()["model"].items())


def test_what_would_not_compute_in_eight_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires a linear layer with in_features and out_features divisible by 16"):
        check_fp8(Narrow(), Narrow().model())
    with pytest.raises(ConfigError, match=r"strategy\.tensor=1"):
        Mesh(tensor=2).check_numerics(Numerics(precision="fp8"))


@pytest.mark.heavy
def test_elastic_runs_in_eight_bits_end_with_the_same_bits_on_one_and_two_processes(train: Any) -> None:
    options = ("reproducibility=elastic", "precision=fp8", "recipe.width=32")
    one = trained(train, *options, "strategy=single", "cluster.processes=1")
    two = trained(train, *options, "strategy=fsdp", "cluster.processes=2", "activation_checkpointing=full")
    assert one["state_digest"] == two["state_digest"]
