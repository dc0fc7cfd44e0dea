"""A loss over the features of all logical ranks has the gradient of one graph of the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plugins.parameter_server.strategy import ParameterServer
from worldsize.collectives.gather_full import gather_full_tensor
from worldsize.core import ConfigError, Features, MicroBatch, Numerics, RunContext, Strategy, World
from worldsize.plan.construction import check_construction, check_trainable
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.testing.loss_loops import Contrast
from worldsize.testing.worlds import run_in_worlds

CPU = torch.device("cpu")


class Chosen(Contrast):
    """Compares only the inputs with positive sums, with a summed loss and its weight; encoders drop values.

    The loss also updates statistics, because it normalizes the features of all ranks.
    """

    def build_net(self) -> nn.Module:
        model: Any = super().build_net()
        model.inputs = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        model.head = nn.BatchNorm1d(3)
        net: nn.Module = model
        return net

    def features(self, model: nn.Module, batch: Any) -> Sequence[Tensor]:
        encoded, targets, places = super().features(model, batch)
        chosen = batch[0].sum(1) > 0
        return encoded[chosen], targets[chosen], places[chosen]

    def feature_loss(self, model: nn.Module, features: Features, batch: Any) -> Any:
        weight = torch.tensor(float(features.own[0].stop - features.own[0].start))
        kept = nn.functional.dropout(model.head(features.everyone[0]), 0.2)  # type: ignore[operator]
        everyone = (kept, *features.everyone[1:])
        return super().feature_loss(model, Features(everyone, features.own), batch) * weight, weight


def batches_of(recipe: Chosen) -> list[MicroBatch]:
    data: Any = recipe.data("train")
    return [MicroBatch(data[rank * 7 : rank * 7 + 7], 10 + rank, 1, rank) for rank in range(3)]


def plain(recipe: Chosen) -> tuple[nn.Module, float]:
    """Take a step with one graph for the features of all logical ranks."""
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    parts, first, changes = [], {name: each.clone() for name, each in model.named_buffers()}, []
    for batch in batches_of(recipe):
        torch.manual_seed(batch.seed)
        parts.append(recipe.features(model, batch.data))
        changes.append({name: each.clone() for name, each in model.named_buffers()})
        for name, each in model.named_buffers():
            each.data.copy_(first[name])
    ends = torch.tensor([len(part[0]) for part in parts]).cumsum(0).tolist()
    everyone = [torch.cat(each) for each in zip(*parts, strict=True)]
    sums: Any = []
    for batch, part, end, change in zip(batches_of(recipe), parts, ends, changes, strict=True):
        torch.manual_seed(batch.seed + 1)
        total, weight = recipe.feature_loss(model, Features(everyone, [slice(end - len(part[0]), end)] * 3), batch.data)
        sums.append((total, weight))
        for name, each in model.named_buffers():
            if name.startswith("head."):
                change[name] = each.clone()
                each.data.copy_(first[name])
    loss: Any = sum(total for total, _ in sums) / sum(weight for _, weight in sums)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, each in model.named_buffers():
            if each.is_floating_point():
                each.copy_(torch.stack([change[name] for change in changes]).mean(0))
            else:
                each.copy_(changes[0][name])
    return model, float(loss.detach())


def test_uneven_features_with_random_numbers_have_the_gradient_of_one_graph() -> None:
    recipe = Chosen()
    expected, loss = plain(recipe)
    replica = Single(reduce="ordered").replica(recipe, RunContext(World.create_single(CPU), logical_ranks=3))
    result = replica.step(batches_of(recipe))
    torch.testing.assert_close(sum(result.losses) / 3, torch.tensor(loss), check_dtype=False)
    state: Any = replica.state()["model"]
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)


def test_uneven_numbers_of_logical_ranks_have_the_bits_of_one_process() -> None:
    def trained(world: World, strategy: Strategy) -> Mapping[str, Tensor]:
        replica = strategy.replica(Chosen(), RunContext(world, logical_ranks=3))
        replica.step(batches_of(Chosen())[world.rank :: world.size])
        state = replica.state()["model"].items()
        return {
            name: gather_full_tensor(value) if isinstance(value, DTensor) else value.clone() for name, value in state
        }

    alone = trained(World.create_single(CPU), Single(reduce="ordered"))
    for strategy in (FSDP(reduce="ordered", on_failure="heal"), DDP(reduce="ordered", on_failure="heal")):
        for weights in run_in_worlds(partial(trained, strategy=strategy), 2):
            assert [name for name, value in alone.items() if not torch.equal(weights[name], value)] == []


class Alone(Contrast):
    def feature_loss(self, model: nn.Module, features: Features, batch: Any) -> Any:
        return features.everyone[0].detach().sum()


def test_a_loss_without_the_features_is_refused() -> None:
    replica = Single().replica(Alone(), RunContext(World.create_single(CPU), logical_ranks=2))
    with pytest.raises(ConfigError, match="Alone.feature_loss does not depend on the features of the step. Compute it"):
        replica.step(batches_of(Chosen())[:2])


def test_what_cannot_gather_features_is_refused_before_the_start() -> None:
    for strategy in (ParameterServer(), Mesh(pipeline=2)):
        with pytest.raises(ConfigError, match="requires the features of all logical ranks"):
            check_trainable(Contrast(), strategy)
    with pytest.raises(ConfigError, match="precision=fp16 is not supported with a FeatureRecipe: feature gradients"):
        check_construction(Contrast(), DDP(), Numerics(precision="fp16"))
