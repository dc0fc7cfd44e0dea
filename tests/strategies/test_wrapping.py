"""Modules are grouped into the units of sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from worldsize.core import Cluster, ConfigError
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.wrapping import find_units, find_units_by_size, refuse_mixed_dtypes
from worldsize.testing.recipes import Chain

pytestmark = pytest.mark.heavy

STDLIB = ("recipe=stdlib_lm", "steps=4", "recipe.width=32", "recipe.depth=2", "recipe.test_bytes=20000")


def test_units_are_the_smallest_modules_that_are_large_enough() -> None:
    inner = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(5, 5, bias=False))
    model = nn.Sequential(inner, nn.Linear(20, 20, bias=False), nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)]))
    assert find_units_by_size(model, 100) == [inner[0], model[1]]
    assert find_units_by_size(model, 120) == [inner, model[1]]
    assert find_units_by_size(model, 10_000) == []


def test_blocks_come_from_the_recipe() -> None:
    recipe = Chain(depth=3)
    model = recipe.model()
    assert find_units(recipe, model, "auto", 1) == list(recipe.blocks(model)) == list(model.children())[1:4]


def test_a_module_is_no_unit_whose_parameters_others_use() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)
    embed, head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, layer, nn.ParameterList([nn.Parameter(torch.ones(50))]), head)
    expected: list[nn.Module] = [layer.self_attn, layer.linear1, layer.linear2]
    assert find_units(Chain(), model, "size", 60) == expected
    assert find_units(Chain(), model, "none", 60) == []


def test_dtypes_of_one_unit_that_differ_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    refuse_mixed_dtypes(Chain(), model, "size", 1)
    with pytest.raises(ConfigError, match=r"0\.weight is float32 and 1\.weight is bfloat16.*Use one dtype"):
        refuse_mixed_dtypes(Chain(), model, "none", 1)


class _Plain(Chain):
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return []


def test_a_recipe_without_blocks_is_sharded_by_size_unless_blocks_are_wanted() -> None:
    recipe = _Plain()
    model = recipe.model()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert find_units(recipe, model, "auto", 100) == linear[:-1]  # the last module has only 51 parameters
    with pytest.raises(ConfigError, match="requires Recipe.blocks, which _Plain does not define"):
        find_units(recipe, model, "blocks", 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": "rack"}, "strategy.shard must be all, node, or a number of ranks, got 'rack'"),
        ({"param_dtype": "fp8"}, "strategy.param_dtype='fp8' is unknown"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FSDP(**options)


def test_shards_on_the_host_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="cpu_offload"):
        FSDP(cpu_offload=True).roles(Cluster("test", 1, 2, "cpu", "gloo"))
    for backend in ("nccl", "cuda:gloo"):
        with pytest.raises(
            ConfigError,
            match=rf"gloo for CPU tensors, got cluster.backend={backend}. Set 'cluster.backend=\"cpu:gloo,cuda:nccl\"'",
        ):
            FSDP(cpu_offload=True).roles(Cluster("test", 1, 2, "cuda", backend))
    assert FSDP(cpu_offload=True).roles(Cluster("test", 1, 2, "cuda", "cpu:gloo,cuda:nccl"))["worker"].processes == 2


def test_a_run_resumes_under_other_strategies(
    train: Any, command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]
) -> None:
    """The data are files with names like secrets.py; the run's record must keep them."""
    options = ("reproducibility=elastic", *STDLIB, "cluster.processes=2")
    expected = train(*options).json("result.json")["state_digest"]
    run = train(*options, "strategy=fsdp", "checkpoint.every=2", "faults=[{action: kill, rank: 1, step: 3}]")
    assert run.code == 1
    resumed = command(
        *("resume", str(run.folder), "strategy=zero", "cluster.processes=4"),
        cwd=tmp_path,
        environment=environment_without_wandb,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert run.json("result.json")["state_digest"] == expected
