"""A model described first and then materialized tensor by tensor has the bits of one built at once."""

from __future__ import annotations

import copy
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
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

from worldsize.core import Recipe, RunContext, Strategy, World
from worldsize.loop.initial_weights import build_empty_model, tied_names
from worldsize.strategies.deferred.model import DeferredModel, state_follows
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.worlds import run_in_worlds

HOST = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.c_proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(200, 200)).view(1, 1, 200, 200))
        self.positions = torch.arange(40_000).float() / 7  # no buffer


class Scaled(nn.Module):
    """Initialised like GPT-2: a rule for all modules, then some again by name, and tied weights."""

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
        begin.trunc_normal_,  # redraws the values that it cuts off
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


def sequences_in_double() -> nn.Module:
    """The default dtype decides operators without an explicit dtype."""
    default, model = torch.get_default_dtype(), nn.Linear(20, 30)
    torch.set_default_dtype(torch.float64)
    try:
        model.register_buffer("places", torch.arange(40_000) / 7)
        model.register_buffer("angles", torch.sin(torch.arange(40_000) * 0.001))
        return model
    finally:
        torch.set_default_dtype(default)


def seeded_alike() -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(20, 30))
    torch.manual_seed(7)
    return model.append(nn.Linear(20, 30))


def forked_without_seed() -> nn.Module:
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(20, 30))
    return model.append(nn.Linear(20, 30))


def set_back() -> nn.Module:
    state, model = torch.get_rng_state(), nn.Sequential(nn.Linear(20, 30))
    torch.set_rng_state(state)
    return model.append(nn.Linear(20, 30))


def set_back_half_way() -> nn.Module:
    model, state = nn.Sequential(nn.Linear(20, 30)), torch.get_rng_state()
    model.append(nn.Linear(20, 30))
    torch.set_rng_state(state)
    return model.append(nn.Linear(20, 30))


def set_back_at_the_end() -> nn.Module:
    state, model = torch.get_rng_state(), nn.Linear(20, 30)
    torch.set_rng_state(state)
    return model


def generator_seeded_again() -> nn.Module:
    generator, model = torch.Generator(), nn.ModuleList(nn.Linear(20, 30) for _ in range(2))
    for each in model:
        nn.init.normal_(cast("nn.Linear", each).weight, generator=generator.manual_seed(3))
    return model


def generator_that_goes_on() -> nn.Module:
    """A second generator starts from the state of the process's generator."""
    model, generator = nn.Linear(20, 30), torch.Generator()
    generator.set_state(torch.get_rng_state())
    nn.init.normal_(model.weight, generator=generator)
    return model


class Hidden(nn.Module):
    """A weight that belongs to a different module, and must not be saved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 30)
        vars(self)["tied"] = self.inner.weight


def with_gradients() -> nn.Module:
    model = nn.Linear(20, 30)
    model.noise = torch.randn(5, requires_grad=True)
    model.register_buffer("gain", torch.randn(5, requires_grad=True))
    return model


def conjugated() -> nn.Module:
    """Tensors whose values differ from the bytes in memory."""
    model, numbers = nn.Linear(20, 30), torch.randn(50, 50, dtype=torch.complex64)
    model.register_buffer("product", numbers.conj() @ numbers.mH)
    model.register_buffer("negative", torch.randn(50, dtype=torch.complex64).conj().imag)
    model.register_buffer("conjugate", torch.randn(50, dtype=torch.complex64).conj())
    return model


def with_a_state() -> nn.Module:
    """Keeps the state of the generator it draws from."""
    model = nn.Linear(20, 30)
    model.register_buffer("state", torch.get_rng_state())
    return model


def tried() -> nn.Module:
    """Is called by its constructor, as if to find its output size, and so changes running means."""
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30))
    with torch.no_grad():
        return model.append(nn.Linear(model(torch.randn(64, 20)).shape[1], 10))


def scaled_by_its_spectrum() -> nn.Module:
    model = nn.Linear(50, 50)
    with torch.no_grad():
        model.weight.div_(torch.linalg.matrix_norm(model.weight, 2))
    symmetric = model.weight.detach() + model.weight.detach().T
    model.register_buffer("values", torch.linalg.eigvalsh(symmetric))
    model.register_buffer("singular", torch.linalg.svdvals(model.weight.detach()))
    model.register_buffer("nuclear", torch.norm(model.weight.detach(), "nuc"))
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(20, 30)
        with torch.no_grad():
            self.register_buffer("first", self.inner(torch.randn(5, 4, 20))[0])


def under_two_names() -> nn.Module:
    """Two buffers that share memory, as two tensors."""
    model, numbers = nn.Linear(20, 30), torch.randn(50)
    model.register_buffer("first", numbers)
    model.register_buffer("second", numbers.detach())
    return model


def shuffled() -> nn.Module:
    """Large tensors that draw a different number of random numbers than their size."""
    model = nn.Linear(20, 30)
    model.register_buffer("order", torch.randperm(20_000))
    model.register_buffer("signs", torch.randint(0, 2, (20_000,)))
    return nn.Sequential(model, nn.Linear(9, 9))


def marked_and_copied() -> nn.Module:
    """A copy of a parameter lacks its attributes; a copy of any other tensor has them."""
    model = nn.Linear(20, 30)
    model.weight.no_decay = True  # type: ignore[attr-defined]
    model.register_buffer("kept", nn.Buffer(torch.randn(20)))
    vars(model.get_buffer("kept"))["no_decay"] = True
    return nn.ModuleList([model, copy.deepcopy(model)])


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
    """Fakes become ordinary parameters, and vice versa."""
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
    """The constructor depends on the numbers it has drawn."""
    model = nn.Linear(20, 30)
    if float(model.weight.detach().std()) > 0.1:
        nn.init.uniform_(model.weight)
    with torch.no_grad():
        model.weight[model.weight > 0.5] = torch.tensor(model.bias.tolist()).max()
        left, _, right = torch.linalg.svd(model.weight, full_matrices=False)
        model.weight.copy_(left @ right)
    return model


def on_a_graph() -> nn.Module:
    """A sparse buffer, like a graph's adjacency."""
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
    *(sequences_in_double, seeded_alike, forked_without_seed, set_back, set_back_half_way, set_back_at_the_end),
    *(
        generator_seeded_again,
        generator_that_goes_on,
        Hidden,
        with_gradients,
        under_two_names,
        shuffled,
        conjugated,
        with_a_state,
    ),
    *(
        marked_and_copied,
        encoder,
        reparametrized,
        marked,
        converted,
        assigned,
        averaged,
        read_back,
        on_a_graph,
        llama,
        bert,
        t5,
    ),
)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all tensors that are attributes of modules, tied ones under each name."""
    yield from chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", each) for name, each in vars(module).items() if isinstance(each, Tensor))


def seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, list[float]]:
    """Make a model, and return it with the next numbers of the generators."""
    torch.manual_seed(5)
    random.seed(5)
    model = make()
    return model, [random.random(), *torch.rand(3).tolist()]


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    described = DeferredModel.from_factory(make)
    waiting = [parameter.is_meta for parameter in described.model.parameters()]
    assert sum(waiting) >= len(waiting) / 2  # small tensors that are not drawn already exist
    described.fill_tensors(HOST)
    return described.model


def compared(whole: nn.Module, model: nn.Module) -> list[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Compare all tensors of two models, and return them in pairs."""
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
    return pairs


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_its_tensors_are_those_of_a_model_made_at_once(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    (whole, then), (model, now) = seeded(make), seeded(lambda: deferred(make))
    assert caplog.records == []
    assert now == then
    pairs = compared(whole, model)
    ties = [[id(tensor) for _, tensor in side] for side in zip(*pairs, strict=True)]
    assert [ids.index(each) for ids in ties[:1] for each in ids] == [
        ids.index(each) for ids in ties[1:] for each in ids
    ]
    assert getattr(model, "scale", None) == getattr(whole, "scale", None)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_has_all_its_values_once_the_state_is_loaded_that_follows(make: Callable[[], nn.Module]) -> None:
    def followed() -> nn.Module:
        with state_follows():
            return deferred(make)

    (whole, _), (model, _) = seeded(make), seeded(followed)
    model.load_state_dict(whole.state_dict())
    compared(whole, model)


def test_nothing_is_drawn_for_a_model_whose_state_follows() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with state_follows():
        described = DeferredModel.from_factory(lambda: nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)))
        described.fill_tensors(HOST)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(parameter.is_meta for parameter in described.model.parameters())


def test_weights_that_follow_are_no_numbers_until_then() -> None:
    """For example, an optimizer that copies them when it is constructed ends in a visible NaN."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).bfloat16())

    with state_follows():
        described = DeferredModel.from_factory(make)
        described.fill_tensors(HOST)
    assert all(parameter.isnan().all() for parameter in described.model.parameters())


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


def told_apart_by(address: Callable[[Tensor], int]) -> nn.Module:
    model, seen = nn.ModuleList(nn.Linear(20, 30) for _ in range(3)), set[int]()
    for parameter in model.parameters():
        if address(parameter) not in seen:
            nn.init.constant_(parameter, 3)
        seen.add(address(parameter))
    return model


def by_address() -> nn.Module:
    return told_apart_by(lambda tensor: tensor.data_ptr())


def by_address_in_double() -> nn.Module:
    """Sets global state, and does not restore it if interrupted."""
    default, weight = torch.get_default_dtype(), nn.Parameter(torch.randn(30, 20))
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    weight.add_(torch.rand(30, 20) if weight.data_ptr() else 0)
    torch.set_default_dtype(default)
    torch.set_grad_enabled(True)
    model = nn.Linear(20, 30)
    model.weight = weight
    return model


def by_address_of_storage() -> nn.Module:
    return told_apart_by(lambda tensor: tensor.untyped_storage().data_ptr())


def tolerant() -> nn.Module:
    """Continues after operations that fakes do not support."""
    model = nn.Linear(20, 30)
    with suppress(Exception):
        nn.init.constant_(model.weight, len(torch.nonzero(model.weight > 0)))
    return model


def tolerant_of_numpy() -> nn.Module:
    model = nn.Linear(20, 30)
    with suppress(Exception):
        nn.init.constant_(model.weight, float(model.weight.detach().numpy().sum()))
    return model


def from_one_array() -> nn.Module:
    array, model = np.zeros((200, 200), np.float32), nn.ModuleList(nn.Linear(200, 200) for _ in range(2))
    for index, module in enumerate(model):
        array[:] = index + 1
        with torch.no_grad():
            cast("nn.Linear", module).weight.copy_(torch.from_numpy(array))
    return model


def from_an_array_of_a_tensor() -> nn.Module:
    model, ones = nn.Linear(200, 200), torch.tensor([[1.0] * 200] * 200)
    with torch.no_grad():
        model.weight.copy_(ones)
    ones.numpy()[:] = 2
    return model


class Special(nn.Parameter):
    pass


def of_a_class_of_its_own() -> nn.Module:
    model = nn.Linear(20, 30)
    model.weight = Special(torch.randn(30, 20))
    return model


def with_a_gradient() -> nn.Module:
    model = nn.Linear(20, 30)
    model.weight.grad = torch.ones(30, 20)
    return model


outer = torch.Generator()


def generator_from_outside() -> nn.Module:
    model = nn.Linear(20, 30)
    nn.init.normal_(model.weight, generator=outer)
    return nn.Sequential(model, hooked())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (sparse, "creates a sparse weight tensor. Create it from separate tensors"),
        (Window, "creates different tensors that share memory. Clone views"),
        (Collector, "stores a tensor outside of module attributes. Register weights"),
        (hooked, "registers a hook on a parameter. Register it in the first call of forward"),
        (drawn_by_probabilities, "draws random numbers with aten.bernoulli.default. Initialize weights"),
        (by_address, "reads memory addresses of weights"),
        (by_address_in_double, "reads memory addresses of weights"),
        (by_address_of_storage, "reads memory addresses of weights"),
        (tolerant, "caught DynamicOutputShapeException"),
        (tolerant_of_numpy, "reads memory addresses of weights"),
        (from_one_array, "modifies a tensor after creating weights from it. Read each"),
        (from_an_array_of_a_tensor, "modifies a tensor after creating weights from it. Read each"),
        (of_a_class_of_its_own, "creates parameters of class Special. Use nn.Parameter"),
        (with_a_gradient, "computes gradients. Compute gradients only during training"),
        (generator_from_outside, "registers a hook on a parameter"),
    ],
)
def test_what_cannot_be_described_is_made_at_once_with_a_warning(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    outer.manual_seed(3)
    whole, then = seeded(make)
    outer.manual_seed(3)
    model, now = seeded(lambda: DeferredModel.from_factory(make).model)
    assert now == then
    for expected, parameter in zip(whole.parameters(), model.parameters(), strict=True):
        assert type(parameter) is type(expected)
        assert parameter.dtype == expected.dtype
        assert torch.equal(parameter, expected)
    assert "each process creates the full model (at least 0.00 GiB) before sharding, because" in caplog.text
    assert reason in caplog.text


def test_the_warning_comes_with_the_size_before_the_whole_model_is_made(caplog: pytest.LogCaptureFixture) -> None:
    warned: list[int] = []

    def make() -> nn.Module:
        warned.append(len(caplog.records))
        return nn.Sequential(nn.Linear(2048, 2048), hooked())

    DeferredModel.from_factory(make)
    assert "at least 0.02 GiB" in caplog.text  # of 4 bytes * 2048 * 2049
    assert warned == [0, 1]


def test_only_one_process_warns(caplog: pytest.LogCaptureFixture) -> None:
    DeferredModel.from_factory(hooked, warns=False)
    assert caplog.records == []


def test_what_was_made_in_vain_is_freed_first() -> None:
    def make() -> nn.Module:
        model = nn.ModuleList(nn.Module() for _ in range(6))
        for module in model:
            module.weight = nn.Parameter(torch.from_numpy(np.ones((_LARGE, _LARGE), np.float32)))
        return model.append(hooked())

    DeferredModel.from_factory(hooked)  # imports its dependencies
    assert _peak_of(lambda: DeferredModel.from_factory(make)) - _peak_of(lambda: None) < 1.5 * 6 * _LARGE**2 * 4


WIDTH, DEPTH = 1024, 20  # 80 MiB


def layers(*, device: str = "cpu") -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(DEPTH))


def loaded() -> nn.Module:
    model = layers()
    for module in model:
        module.load_state_dict({"weight": torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32))})
    return model


def given() -> nn.Module:
    model = layers()
    for module in model:
        module.weight = nn.Parameter(torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32)))
    return model


def from_meta() -> nn.Module:
    model = layers(device="meta").to_empty(device="cpu")
    for module in model:
        nn.init.normal_(cast("nn.Linear", module).weight)
    return model


def scaled_together() -> nn.Module:
    model = layers()
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.5)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (loaded, "creates weights outside torch.nn.init"),
        (given, "creates weights outside torch.nn.init"),
        (from_meta, "creates weights outside torch.nn.init"),
        (scaled_together, "computes weights from other weights"),
    ],
)
def test_a_warning_says_how_much_of_the_model_is_whole_nevertheless(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    DeferredModel.from_factory(make)
    assert "each process allocates 0.08 GiB of the model's 0.08 GiB before sharding" in caplog.text
    assert reason in caplog.text


def test_a_large_model_that_is_made_a_tensor_at_a_time_is_no_cause_for_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    DeferredModel.from_factory(lambda: layers().bfloat16())
    assert caplog.records == []


def test_memory_that_nothing_is_written_to_is_as_torch_fills_it_by_its_type() -> None:
    def make() -> nn.Module:
        model = nn.Linear(20, 30)
        model.register_buffer("cache", torch.empty(50))
        model.register_buffer("indices", torch.empty(50, dtype=torch.int64))
        model.register_buffer("scales", torch.empty(50, dtype=torch.float16))
        with torch.no_grad():
            model.get_buffer("scales")[:7] = 1
        return model

    torch.use_deterministic_algorithms(True)
    try:
        (whole, _), (model, _) = seeded(make), seeded(lambda: deferred(make))
    finally:
        torch.use_deterministic_algorithms(False)
    for (name, expected), (_, tensor) in zip(whole.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), name


def test_a_non_leaf_is_made_with_its_need_of_a_gradient() -> None:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.utils.weight_norm(nn.Linear(20, 30))

    (whole, _), (model, _) = seeded(make), seeded(lambda: deferred(make))
    assert vars(model)["weight"].requires_grad
    assert torch.equal(vars(model)["weight"], vars(whole)["weight"])


def test_what_is_drawn_before_it_is_filled_changes_nothing() -> None:
    def make() -> nn.Module:
        described = DeferredModel.from_factory(lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20)))
        torch.rand(7)
        described.fill_tensors(HOST)
        return described.model

    (whole, then), (model, now) = seeded(lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))), seeded(make)
    assert now == then
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), model.parameters(), strict=True))


class Drawing(Recipe):
    """Draws random numbers whenever a strategy calls it."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        torch.rand(3)
        return list(cast("nn.Sequential", model))

    def layers(self, model: nn.Module) -> list[nn.Module]:
        torch.rand(5)
        return list(cast("nn.Sequential", model))

    def model_inputs(self, batch: Any) -> Any:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        torch.rand(7)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split: str) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, ...]]:
        raise NotImplementedError


@pytest.mark.parametrize("strategy", [FSDP(), Mesh(data=2), Mesh(pipeline=2)], ids=lambda strategy: repr(strategy)[:20])
def test_a_recipe_that_draws_while_its_model_is_sharded_has_the_weights_of_one_rank(strategy: Strategy) -> None:
    def body(world: World) -> dict[str, list[float]]:
        torch.manual_seed(3)
        weights = strategy.replica(Drawing(), RunContext(world)).state()["model"]
        held = {name: each for name, each in weights.items() if not each.is_meta}
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in held.items()}
        return {name: tensor.detach().flatten().tolist() for name, tensor in whole.items()}

    torch.manual_seed(3)
    expected = {name: each.detach().flatten().tolist() for name, each in Drawing().model().named_parameters()}
    first, second = run_in_worlds(body, 2)
    assert first | second == expected


class ReadsNumbers(Drawing):
    """Cannot be built on the meta device."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        cast("nn.Linear", model[0]).weight = cast("nn.Linear", model[1]).weight
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        return model


def test_the_names_of_a_model_that_reads_numbers_cost_no_memory() -> None:
    before = torch.get_rng_state()
    model = build_empty_model(ReadsNumbers())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert tied_names(model)["1.weight"] == "0.weight"
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_and_buffers_go_to_the_device_and_other_tensors_stay() -> None:
    described = DeferredModel.from_factory(lambda: Block(64))
    described.fill_tensors(torch.device("meta"))  # any device but the host
    block = cast("Block", described.model)
    assert block.inner.weight.is_meta
    assert block.get_buffer("mask").is_meta
    assert torch.equal(block.positions, torch.arange(40_000).float() / 7)


def test_shards_may_stay_on_the_host_while_other_tensors_move() -> None:
    def body(world: World) -> tuple[bool, bool]:
        described = DeferredModel.from_factory(lambda: Block(64))
        fully_shard(described.model, mesh=init_device_mesh("cpu", (world.size,)))
        described.fill_tensors(torch.device("meta"), shards=HOST)  # any device but the host
        block = cast("Block", described.model)
        assert isinstance(block.inner.weight, DTensor)
        return block.inner.weight.to_local().is_meta, block.get_buffer("mask").is_meta

    assert run_in_worlds(body, 2) == [(False, True)] * 2


def test_an_error_of_the_constructor_is_its_own() -> None:
    with pytest.raises(ValueError, match="no such width"):
        DeferredModel.from_factory(lambda: _failing())


def _failing() -> nn.Module:
    nn.Linear(20, 30)
    raise ValueError("no such width")


def test_one_tensor_is_made_at_a_time() -> None:
    """Weights of 216 MiB, initialised twice like GPT-2's, take as much memory as a single weight of 36 MiB."""

    def make() -> None:
        described = DeferredModel.from_factory(_large)
        for tensor in described.tape.sort_tensors(described.tensors.values()):
            described.tape.create_tensor(tensor)

    make()  # imports its dependencies
    assert _peak_of(make) - _peak_of(lambda: None) < 1.5 * _LARGE**2 * 4


_LARGE = 3072  # 36 MiB in a weight: more freed memory than malloc keeps


def _large() -> nn.Module:
    model = nn.ModuleList(nn.Linear(_LARGE, _LARGE) for _ in range(6))
    for module in model:
        nn.init.normal_(cast("nn.Linear", module).weight)
    return model


def _peak_of(task: Callable[[], object]) -> int:
    """Return the peak resident size of this process, in bytes, while ``task`` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    task()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) * 1024


def test_each_rank_keeps_its_shards() -> None:
    """Rows that do not divide evenly, and more ranks than rows, with copies across nodes."""

    def body(world: World) -> list[tuple[str, list[int], bool]]:
        torch.manual_seed(5)
        described = DeferredModel.from_factory(_uneven)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for module in (*described.model.children(), described.model):
            fully_shard(module, mesh=mesh)
        described.fill_tensors(world.device)
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
