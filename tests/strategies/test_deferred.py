"""A model that is described first and made a tensor at a time has the bits of one that is made at once."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from worldsize.core import World
from worldsize.strategies.deferred.model import DeferredModel
from worldsize.testing.worlds import run_in_worlds

HOST = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.c_proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(200, 200)).view(1, 1, 200, 200))
        self.positions = torch.arange(40_000).float() / 7  # no buffer


class Scaled(nn.Module):
    """Initialised as GPT-2 is: a rule for all modules, then some again by their names, and tied weights."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, width, padding_idx=3), nn.Linear(width, 500, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.embedding.weight = self.head.weight
        self.apply(self._begin)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
        self.places = nn.Parameter(torch.randn(1, 30, width) * 0.02)
        self.scale = float(torch.rand(1))
        self.register_buffer("chance", torch.rand(5))
        for each in self.blocks:
            cast("Block", each).inner.weight.data.mul_(0.5)
        with torch.no_grad():
            self.head.weight[5].fill_(7)
            self.head.weight[:, 3] = self.head.weight[:, 4]

    def _begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def every_initialisation() -> nn.Module:
    begin = nn.init
    rules: list[Callable[[Tensor], Tensor]] = [
        begin.uniform_,
        begin.ones_,
        begin.eye_,
        begin.xavier_normal_,
        begin.kaiming_normal_,
        begin.trunc_normal_,  # draws again what is cut off
        begin.orthogonal_,
        lambda tensor: begin.sparse_(tensor, 0.1),
        lambda tensor: tensor.exponential_(),
        lambda tensor: tensor.bernoulli_(0.3),
        lambda tensor: tensor.copy_(torch.randperm(3000).view(60, 50)),
    ]
    model = nn.ModuleList(nn.Linear(50, 60) for _ in rules)
    for rule, module in zip(rules, model, strict=True):
        with torch.no_grad():
            rule(cast("nn.Linear", module).weight)
    return model


def reseeded() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 30))
    torch.manual_seed(7)
    return model.append(nn.Linear(30, 20)).append(nn.Linear(20, random.randint(5, 9)))


def forked() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 30))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model.append(nn.Linear(30, 20))
    return model.append(nn.Linear(20, 10))


def generator_of_its_own() -> nn.Module:
    generator, model = torch.Generator().manual_seed(3), nn.Linear(20, 30)
    nn.init.normal_(model.weight, generator=generator)
    nn.init.normal_(model.bias, generator=generator)
    return model


def in_double() -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(20, 30)
        model.register_buffer("long", torch.zeros(20_000))
        return model
    finally:
        torch.set_default_dtype(default)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)  # copies its layer


def reparametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(20, 30)), spectral_norm(nn.Linear(30, 20)), nn.LSTM(20, 10))


def marked() -> nn.Module:
    model = nn.Linear(20, 30)
    model.bias.no_decay = True  # type: ignore[attr-defined]
    return model.requires_grad_(requires_grad=False)


def converted() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30).half(), nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)).bfloat16()


def assigned() -> nn.Module:
    """Fakes become ordinary parameters, and the other way round."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(20, 30), nn.LayerNorm(20))
    first, second, norm = (cast("nn.Linear", module) for module in model)
    first.weight.data = torch.ones(30, 20)
    first.weight.data.mul_(3)
    second.weight.data = torch.randn(20, 30).mul_(0.1).t().contiguous()
    norm.weight.data = torch.rand_like(norm.weight)
    return model


def averaged() -> nn.Module:
    model = nn.ModuleDict({"trained": nn.Linear(20, 30)})
    model["average"] = copy.deepcopy(model["trained"]).requires_grad_(requires_grad=False)
    return model


def read_back() -> nn.Module:
    """The constructor goes on as the numbers say that it has drawn."""
    model = nn.Linear(20, 30)
    if float(model.weight.detach().std()) > 0.1:
        nn.init.uniform_(model.weight)
    with torch.no_grad():
        model.weight[model.weight > 0.5] = torch.tensor(model.bias.tolist()).max()
        left, _, right = torch.linalg.svd(model.weight, full_matrices=False)
        model.weight.copy_(left @ right)
    return model


def on_a_graph() -> nn.Module:
    """A sparse buffer, as a graph's adjacency is."""
    model, indices = nn.Linear(20, 30), torch.tensor([[0, 1], [1, 0]])
    model.register_buffer("adjacency", torch.sparse_coo_tensor(indices, torch.ones(2), (9, 9), check_invariants=True))
    return model


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


def llama() -> nn.Module:
    return cast("nn.Module", LlamaForCausalLM(LlamaConfig(**SIZES)))


def bert() -> nn.Module:
    return cast("nn.Module", BertForSequenceClassification(BertConfig(**SIZES)))


def t5() -> nn.Module:
    return cast("nn.Module", T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=32, num_layers=1)))


MODELS = (
    *(Scaled, every_initialisation, reseeded, forked, generator_of_its_own, in_double),
    *(encoder, reparametrized, marked, converted, assigned, averaged, read_back, on_a_graph, llama, bert, t5),
)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all tensors that are attributes of modules, tied ones under each name."""
    yield from chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", each) for name, each in vars(module).items() if isinstance(each, Tensor))


def seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, list[float]]:
    """Make a model, and say what the generators give next."""
    torch.manual_seed(5)
    random.seed(5)
    model = make()
    return model, [random.random(), *torch.rand(3).tolist()]


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    described = DeferredModel.build(make)
    waiting = [parameter.is_meta for parameter in described.model.parameters()]
    assert sum(waiting) >= len(waiting) / 2  # small ones that are not drawn are there already
    described.fill(HOST)
    return described.model


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_its_tensors_are_those_of_a_model_made_at_once(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    (whole, then), (model, now) = seeded(make), seeded(lambda: deferred(make))
    assert caplog.records == []
    assert now == then
    pairs = list(zip(tensors(whole), tensors(model), strict=True))
    for (name, expected), (own_name, tensor) in pairs:
        assert own_name == name
        assert type(tensor) is type(expected)
        assert (tensor.dtype, tensor.layout, tensor.requires_grad) == (
            expected.dtype,
            expected.layout,
            expected.requires_grad,
        )
        assert vars(tensor) == vars(expected)
        if expected.layout is torch.strided:
            assert tensor.stride() == expected.stride()
        assert torch.equal(tensor.to_dense(), expected.to_dense()), name
    ties = [[id(tensor) for _, tensor in side] for side in zip(*pairs, strict=True)]
    assert [ids.index(each) for ids in ties[:1] for each in ids] == [
        ids.index(each) for ids in ties[1:] for each in ids
    ]
    assert getattr(model, "scale", None) == getattr(whole, "scale", None)


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 30)
        self.initial = [self.inner.weight.detach().clone()]


def hooked() -> nn.Module:
    model = nn.Linear(20, 30)
    model.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return model


def drawn_by_probabilities() -> nn.Module:
    model = nn.Linear(20, 30)
    model.register_buffer("kept", torch.bernoulli(torch.full((20_000,), 0.5)))
    return model


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 30)
        self.register_buffer("first", self.inner.weight.data[:2])


def sparse() -> nn.Module:
    model = nn.Linear(20, 30)
    model.register_buffer("adjacency", torch.ones(300, 300).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (sparse, "makes a sparse tensor of weights"),
        (Window, "lets tensors that differ share memory"),
        (Collector, "keeps a tensor elsewhere than as an attribute of a module"),
        (hooked, "gives a hook to a parameter"),
        (drawn_by_probabilities, "draws random numbers by aten.bernoulli"),
    ],
)
def test_what_cannot_be_described_is_made_at_once_with_a_warning(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (whole, then), (model, now) = seeded(make), seeded(lambda: DeferredModel.build(make).model)
    assert now == then
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), model.parameters(), strict=True))
    assert "each process makes the whole model, 0.00 GiB" in caplog.text
    assert reason in caplog.text


def test_parameters_and_buffers_go_to_the_device_and_other_tensors_stay() -> None:
    described = DeferredModel.build(lambda: Block(64))
    described.fill(torch.device("meta"))  # any device but the host
    block = cast("Block", described.model)
    assert block.inner.weight.is_meta
    assert block.get_buffer("mask").is_meta
    assert torch.equal(block.positions, torch.arange(40_000).float() / 7)


def test_an_error_of_the_constructor_is_its_own() -> None:
    with pytest.raises(ValueError, match="no such width"):
        DeferredModel.build(lambda: _failing())


def _failing() -> nn.Module:
    nn.Linear(20, 30)
    raise ValueError("no such width")


def test_one_tensor_is_made_at_a_time() -> None:
    """Weights of 216 MiB that are initialised twice, as GPT-2's are, take the memory of one of 36 MiB."""

    def make() -> None:
        described = DeferredModel.build(_large)
        for tensor in described.tape.in_order(described.tensors.values()):
            described.tape.value(tensor)

    make()  # imports what it uses
    assert _peak_of(make) - _peak_of(lambda: None) < 1.5 * _LARGE**2 * 4


_LARGE = 3072  # 36 MiB in a weight: more than malloc keeps of what was freed


def _large() -> nn.Module:
    model = nn.ModuleList(nn.Linear(_LARGE, _LARGE) for _ in range(6))
    for module in model:
        nn.init.normal_(cast("nn.Linear", module).weight)
    return model


def _peak_of(task: Callable[[], object]) -> int:
    """Return the largest resident size of this process, in bytes, while ``task`` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    task()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) * 1024


def test_each_rank_keeps_its_shards() -> None:
    """Rows that do not divide evenly, and more ranks than rows, with copies across nodes."""

    def body(world: World) -> list[tuple[str, list[int], bool]]:
        torch.manual_seed(5)
        described = DeferredModel.build(_uneven)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for module in (*described.model.children(), described.model):
            fully_shard(module, mesh=mesh)
        described.fill(world.device)
        torch.manual_seed(5)
        whole = dict(_uneven().named_parameters())
        described.model(torch.ones(3, 5)).sum().backward()
        found = []
        for name, parameter in described.model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.grad is not None
            found.append((name, list(parameter.to_local().shape), torch.equal(parameter.full_tensor(), whole[name])))
        return found

    for rank, found in enumerate(run_in_worlds(body, 4)):
        assert all(equal for *_, equal in found)
        assert {name: shape[0] for name, shape, _ in found} == ROWS[rank % 2]


ROWS = (
    {"0.weight": 4, "0.bias": 4, "1.weight": 1, "1.bias": 1},
    {"0.weight": 3, "0.bias": 3, "1.weight": 0, "1.bias": 0},
)


def _uneven() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
