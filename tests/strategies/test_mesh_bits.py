"""With logical slices and chunks, a mesh of any shape ends with the bits of one process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from recipes.stdlib_lm.gpt import Block
from recipes.stdlib_lm.recipe import StdlibLM
from tests.strategies.test_mesh import save
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.collectives.gather_full import gather_full, gather_full_tensor
from worldsize.collectives.slice_sums import sum_slices
from worldsize.core import (
    Cluster,
    ConfigError,
    EvaluationBatch,
    EvaluationBatches,
    MicroBatch,
    Numerics,
    Recipe,
    RunContext,
    Strategy,
    TensorStyle,
    World,
)
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.seeds import draw_from
from worldsize.strategies.deferred_weights import allow_deferring, deferring_weights
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.tensor_layers import Draws, divide_forward
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

LOGICAL, CHUNKS, STEPS, CONTEXT = 8, 4, 2, 16
ROWS = torch.randint(256, (STEPS, 2 * LOGICAL, CONTEXT + 1), generator=torch.Generator().manual_seed(1))

ALONE = World.create_single(torch.device("cpu"))


def recipe(dropout: float = 0.1) -> StdlibLM:
    """Return a model whose embedding is tied to its head, with eight blocks and eight heads."""
    optimizer = partial(torch.optim.AdamW, lr=0.003)
    return StdlibLM(64, 8, 8, CONTEXT, dropout, test_bytes=1000, make_optimizer=optimizer)


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1], rows[:, 1:]


Figures = tuple[str, list[float], float]


def end(
    own: Recipe,
    strategy: Strategy,
    numerics: Numerics,
    world: World,
    steps: range = range(STEPS),
    folder: Path | None = None,
) -> Figures:
    """Train; return the digest of the weights (on rank 0), the norms and local losses of all steps, and a metric.

    ``folder``: where to load the newest checkpoint before the steps, if there is one, and to save afterwards.
    """
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    replica = strategy.replica(own, RunContext(world, numerics, logical_ranks=LOGICAL))
    if folder is not None and (checkpoint := find_newest(folder, world)):
        replica.load(load_checkpoint(checkpoint, replica.state()))
    size = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    rank, figures = strategy.data_rank(world), []
    for step in steps:
        parts = ROWS[step % STEPS].chunk(LOGICAL)
        batches = [MicroBatch(split(each), seed=100 * step + place) for place, each in enumerate(parts)]
        result = replica.step(batches[rank::size])
        figures += [float(result.grad_norm or 0), *(map(float, result.losses) if size == 1 else ())]
    tests = [EvaluationBatch(place, split(rows)) for place, rows in enumerate(torch.split(ROWS[0], 4))]
    padding = [EvaluationBatch(0, tests[0].data, counted=False)] * (-len(tests) % size)
    metrics = replica.evaluate(EvaluationBatches(lambda: iter([*tests, *padding][rank::size])))
    if folder is not None:
        save(folder, replica, world, steps.stop)
    weights = {name: tensor.clone() for name, tensor in gather_full(replica.state()["model"], world).items()}
    return state_digest(tensor_digests(weights)), figures, next(iter(metrics.values()))


ORDERED = partial(Mesh, reduce="ordered")
SHAPES = {
    "tensor8": (ORDERED(tensor=8), 8),
    "pipeline8": (ORDERED(pipeline=8), 8),
    "context4": (ORDERED(context=4), 4),
    "data2-context4": (ORDERED(data=2, context=4), 8),
    "context2-tensor2": (ORDERED(context=2, tensor=2), 4),
    "tensor2-pipeline4": (ORDERED(tensor=2, pipeline=4), 8),
    "data2-pipeline2-interleaved": (ORDERED(data=2, pipeline=2, schedule="interleaved"), 4),
    "context2-tensor2-pipeline2": (ORDERED(context=2, tensor=2, pipeline=2), 8),
    "data4-gpipe2": (ORDERED(data=4, pipeline=2, schedule="gpipe", order=["data", "pipeline", "tensor"]), 8),
    "fsdp4": (FSDP(reduce="ordered"), 4),
}


@cache
def end_alone(precision: Any) -> Figures:
    return run_in_worlds(partial(end, recipe(), Single(reduce="ordered"), numerics_of(precision)), 1)[0]


def numerics_of(precision: Any) -> Numerics:
    return Numerics(precision=precision, clip_norm=0.3, logical_tensor=LOGICAL, logical_context=CHUNKS)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("context4", "fp32"),
        ("context2-tensor2-pipeline2", "fp32"),
        ("tensor8", "bf16"),  # the slowest by far: not with each vector width
        *(pytest.param(name, "bf16", marks=pytest.mark.bits) for name in SHAPES if name != "tensor8"),
    ],
)
def test_each_elastic_mesh_ends_with_the_bits_of_one_process(name: str, precision: Any) -> None:
    strategy, size = SHAPES[name]
    digest, figures, metric = end_alone(precision)
    ends = run_in_worlds(partial(end, recipe(), strategy, numerics_of(precision)), size)
    assert ends[0][0] == digest
    for _, seen, value in ends:
        assert value == metric
        assert seen == (figures if len(seen) == len(figures) else figures[:: 1 + LOGICAL])


class Untied(StdlibLM):
    """A chain of layers whose head is not tied."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        return nn.Sequential(model.embedding, *model.blocks, nn.RMSNorm(self.width), nn.Linear(self.width, 256))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return [layer for layer in model if isinstance(layer, Block)]

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return list(model)


def list_passes(*parts: str) -> str:
    """Return a row of passes, such as "0F", of all micro-batches in turn."""
    return ",".join(f"{part}{number}" for part in parts for number in range(LOGICAL))


# uneven: rank 0 has the first and the last stage, and only rank 1 computes gradients of weights apart
TABLE = "\n".join((list_passes("0F", "2F", "2B", "0B"), list_passes("1F", "1I", "1W")))


def untied(kind: type[Untied] = Untied) -> Untied:
    return kind(32, 6, 4, CONTEXT, 0.1, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (ORDERED(data=2, pipeline=2, schedule="zbv"), 4),
        (ORDERED(pipeline=4, schedule="dualpipev"), 4),
        (ORDERED(tensor=2, pipeline=2, schedule="dualpipev"), 4),
        (ORDERED(context=2, pipeline=2, schedule="zero_bubble", stages_per_rank=3), 4),
        (ORDERED(data=2, pipeline=3, schedule="zero_bubble", stages_per_rank=1), 6),
        (ORDERED(pipeline=2, schedule_csv=TABLE), 2),
    ],
    ids=lambda each: (
        f"{'csv' if each.schedule_csv else each.schedule}-{each.data or 1}x{each.pipeline}"
        if isinstance(each, Mesh)
        else ""
    ),
)
def test_gradients_of_weights_computed_apart_have_the_same_bits(strategy: Mesh, size: int) -> None:
    numerics = Numerics(precision="bf16", clip_norm=0.3, logical_tensor=2, logical_context=2)
    (alone,) = run_in_worlds(partial(end, untied(), Single(reduce="ordered"), numerics), 1)
    digest, _, metric = run_in_worlds(partial(end, untied(), strategy, numerics), size)[0]
    assert (digest, metric) == (alone[0], alone[2])


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (ORDERED(data=4, replicate=2, order=["data", "tensor", "pipeline"], tensor=2), 8),
        (ORDERED(data=4, replicate=2, pipeline=2, schedule="zero_bubble"), 8),
    ],
    ids=["tensor", "pipeline"],
)
def test_copies_of_shards_have_the_same_bits(strategy: Mesh, size: int) -> None:
    numerics = Numerics(clip_norm=0.3, logical_tensor=2)
    (alone,) = run_in_worlds(partial(end, recipe(), Single(reduce="ordered"), numerics), 1)
    digest, _, metric = run_in_worlds(partial(end, recipe(), strategy, numerics), size)[0]
    assert (digest, metric) == (alone[0], alone[2])


class Halved(torch.autograd.Function):
    """Has no gradient for its weight in some micro-batches, and frees its tensors in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = hidden
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, ctx.kept = ctx.kept, None
        of_weight = (gradients[0] * hidden).sum((0, 1)) if hidden[0, 0, 0] > 0 else None
        return gradients[0] * 0.5, of_weight


class Odd(nn.Module):
    """Uses a layer three times, shares parameters, scales a gradient in a hook, and calls :class:`Halved`.

    It also has layers with a replaced forward method, with a computed bias, and in a transform of torch.func.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width), nn.Linear(width, width)
        self.first, self.second, self.shared = (nn.Parameter(torch.zeros(width)) for _ in range(3))
        self.scale, self.weight = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.patched, self.computed, self.mapped = (nn.Linear(width, width) for _ in range(3))
        forward = self.patched.forward
        self.patched.forward = lambda input: forward(input) * self.scale  # type: ignore[method-assign]
        register_parametrization(self.computed, "bias", nn.Softplus())

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = hidden + torch.tanh(self.linear(self.norm(hidden)))
        hidden = hidden + self.patched(hidden) + torch.vmap(self.mapped)(self.computed(hidden))
        hidden = (hidden + (self.first + self.shared)) + (self.second + self.shared)
        scaled = hidden * self.scale
        if scaled.requires_grad:
            scaled.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        weighted: Tensor = Halved.apply(hidden + scaled, self.weight)
        return weighted


class OddLayers(Untied):
    """Has frozen layers in the first stage, and an :class:`Odd` layer in the last one."""

    def model(self) -> nn.Module:
        *layers, norm, head = super().model().children()
        for layer in layers[:3]:
            layer.requires_grad_(False)
        return nn.Sequential(*layers, Odd(self.width), norm, head)


@pytest.mark.parametrize(
    "options", [{"schedule": "zero_bubble"}, {"schedule": "zbv", "data": 2, "reshard_after_forward": True}]
)
def test_weights_of_any_layers_have_the_same_gradients_later(options: dict[str, Any]) -> None:
    (alone,) = run_in_worlds(partial(end, untied(OddLayers), Single(reduce="ordered"), Numerics()), 1)
    strategy = ORDERED(pipeline=2, **options)
    assert (
        run_in_worlds(partial(end, untied(OddLayers), strategy, Numerics()), 2 * (strategy.data or 1))[0][0] == alone[0]
    )


def test_a_gradient_within_the_backward_pass_is_not_deferred() -> None:
    """Only the pass of the stage adds to ``.grad``."""
    layer = nn.Linear(4, 4)
    allow_deferring(layer)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            with torch.enable_grad():
                output = layer(inner := torch.ones(1, 4, requires_grad=True)).sum()
            of_inner, of_weight = torch.autograd.grad(output, [inner, layer.weight])
            assert torch.equal(of_inner, layer.weight.sum(0, keepdim=True))
            assert torch.equal(of_weight, torch.ones(4, 4))
            return gradients[0]

    inputs = torch.full((1, 4), 2.0, requires_grad=True)
    with deferring_weights() as deferred:
        Nested.apply(layer(inputs)).sum().backward()
    deferred.add_gradients()
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 4), 2.0))


def test_a_layer_frees_its_inputs_once_its_gradients_are_added() -> None:
    """The schedule keeps the losses, and so the nodes of the graph, until the end of a step."""
    layer = nn.Linear(4, 4)
    allow_deferring(layer)
    hidden = torch.ones(1, 4, requires_grad=True) * 1
    loss, kept = layer(hidden).sum(), ref(hidden.untyped_storage())
    del hidden
    with deferring_weights() as deferred:
        loss.backward()
    assert kept() is not None
    deferred.add_gradients()
    assert kept() is None


def test_a_second_derivative_is_refused_where_gradients_of_weights_come_later() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    allow_deferring(stage)
    (first,) = torch.autograd.grad(stage(hidden := torch.ones(1, 4, requires_grad=True)).sum(), hidden)
    assert not first.requires_grad
    with pytest.raises(ConfigError, match="double backward.*Set strategy.schedule=interleaved"):
        torch.autograd.grad(stage(hidden).sum(), hidden, create_graph=True)


@pytest.mark.parametrize("style", ["column", "row"])
def test_each_part_of_a_backward_pass_computes_only_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, style: TensorStyle
) -> None:
    """Else, ranks would sum the gradients of inputs twice."""
    layer, inputs = nn.Linear(64, 64), torch.randn(8, 64, requires_grad=True)
    layer(inputs * 2).square().sum().backward()
    expected = [inputs.grad, layer.weight.grad, layer.bias.grad]
    inputs.grad = layer.weight.grad = layer.bias.grad = None
    divide_forward("layer", layer, style, slices=2, draws=Draws())
    allow_deferring(layer)
    output, products = layer(inputs * 2).square().sum(), list[object]()
    multiply = Tensor.__matmul__

    def count(*pair: Tensor) -> Tensor:
        products.append(pair)
        return multiply(*pair)

    monkeypatch.setattr(Tensor, "__matmul__", count)
    with deferring_weights() as deferred:
        output.backward()
    assert len(products) == 2
    assert layer.weight.grad is None
    deferred.add_gradients()
    assert len(products) == 4
    torch.testing.assert_close([inputs.grad, layer.weight.grad, layer.bias.grad], expected)


def test_a_run_resumed_in_five_shapes_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    numerics = Numerics(clip_norm=0.3, logical_tensor=LOGICAL, logical_context=2)
    last = partial(end, recipe(), Single(reduce="ordered"), numerics, steps=range(6))
    (undisturbed,) = run_in_worlds(last, 1)
    shapes = [SHAPES[name] for name in ("context2-tensor2", "data2-pipeline2-interleaved", "fsdp4")]
    shapes.append((ORDERED(data=2, context=2, pipeline=2), 8))
    for step, (strategy, size) in enumerate([(Single(reduce="ordered"), 1), *shapes, (ORDERED(pipeline=2), 2)]):
        resumed = partial(end, recipe(), strategy, numerics, steps=range(step, step + 1), folder=tmp_path)
        digest, _, metric = run_in_worlds(resumed, size)[0]
    assert (digest, metric) == (undisturbed[0], undisturbed[2])


def test_whole_layers_and_sequences_have_other_bits_than_their_parts() -> None:
    """Without this difference, the tests above would prove nothing."""
    runs = [Numerics(logical_tensor=slices) for slices in (1, 2, LOGICAL)]
    runs += [Numerics(logical_context=chunks) for chunks in (2, CHUNKS)]
    ends = [run_in_worlds(partial(end, recipe(0.0), Single(reduce="ordered"), each), 1)[0] for each in runs]
    assert len({digest for digest, _, _ in ends}) == len(runs)
    for _, losses, _ in ends[1:]:
        assert losses == pytest.approx(ends[0][1], rel=1e-4)


class Sliced(nn.Module):
    """Covers all styles of division: a vocabulary, biases on all layers, and a head whose outputs are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32, padding_idx=3)
        self.up, self.gate, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.head = nn.Linear(32, 64)
        self.noise = 0.0

    def forward(self, tokens_bt: Tensor) -> Tensor:
        hidden = self.table(tokens_bt)
        inner = F.dropout(F.gelu(self.gate(hidden)), self.noise, self.training) * self.up(hidden)
        logits: Tensor = self.head(hidden + self.down(inner))
        return logits


class SlicedRecipe(StdlibLM):
    """Trains :class:`Sliced` on bytes below 64."""

    def model(self) -> nn.Module:
        return Sliced()

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return []

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        return [model]

    def tensor_units(self, model: nn.Module) -> Mapping[str, int]:
        return {}

    def model_inputs(self, batch: Any) -> tuple[Tensor]:
        return (batch[0] % 64,)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, (batch[0], batch[1] % 64))

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return super().evaluate(model, (batch[0], batch[1] % 64))

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        return {"table": "row", "up": "column", "gate": "column", "down": "row", "head": "gathered"}


def sliced_recipe() -> SlicedRecipe:
    return SlicedRecipe(8, 1, 1, CONTEXT, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_vocabularies_biases_and_heads_are_divided_with_the_same_bits(precision: Any) -> None:
    numerics = Numerics(precision=precision, clip_norm=0.3, logical_tensor=4)
    (alone,) = run_in_worlds(partial(end, sliced_recipe(), Single(reduce="ordered"), numerics), 1)
    for strategy, size in ((ORDERED(tensor=4), 4), (ORDERED(tensor=2, data=2), 4)):
        ended = run_in_worlds(partial(end, sliced_recipe(), strategy, numerics), size)[0]
        assert (ended[0], ended[2]) == (alone[0], alone[2])


def test_flat_sums_train_to_the_losses_of_plain_layers() -> None:
    """Without slices, each rank computes one product, and the backend sums them."""
    (alone,) = run_in_worlds(partial(end, sliced_recipe(), Single(), Numerics(clip_norm=0.3)), 1)
    for _, figures, value in run_in_worlds(partial(end, sliced_recipe(), Mesh(tensor=2), Numerics(clip_norm=0.3)), 2):
        assert figures == pytest.approx(alone[1], rel=1e-5)
        assert value == pytest.approx(alone[2], rel=1e-5)


def gradients(own: StdlibLM, strategy: Strategy, numerics: Numerics, world: World) -> dict[str, Tensor]:
    """Return the gradients of one step, without the update."""
    torch.manual_seed(5)
    replica: Any = strategy.replica(own, RunContext(world, numerics, logical_ranks=LOGICAL))
    rows = ROWS[0].chunk(LOGICAL)
    size = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    batches = [MicroBatch(split(each), seed=place) for place, each in enumerate(rows)]
    inner = getattr(replica, "_inner", replica)
    inner._compute_gradient(batches[strategy.data_rank(world) :: size])
    named = [(name, each.grad) for name, each in inner.model.named_parameters() if each.grad is not None]
    return {
        name: (gather_full_tensor(grad) if hasattr(grad, "full_tensor") else grad).clone().double()
        for name, grad in named
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_slices_are_as_exact_as_those_of_whole_layers(precision: Any) -> None:
    """Compared with float64, the error of each layer is at most 1.5 times that of plain training."""

    def exact(_: World) -> dict[str, Tensor]:
        torch.manual_seed(5)
        own = recipe(0.0)
        model = own.model().double()
        total, count = own.loss(model, split(ROWS[0]))
        (total / count).backward()  # type: ignore[no-untyped-call]
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    (expected,) = run_in_worlds(exact, 1)
    plain = Numerics(precision=precision)
    (whole,) = run_in_worlds(partial(gradients, recipe(0.0), Single(reduce="ordered"), plain), 1)
    sliced = Numerics(precision=precision, logical_tensor=LOGICAL, logical_context=CHUNKS)
    found = run_in_worlds(partial(gradients, recipe(0.0), ORDERED(context=2, tensor=2), sliced), 4)[0]
    assert found.keys() == expected.keys()
    for layer in {name.rsplit(".", 2)[0] for name in expected}:
        errors = [
            torch.stack([(each[name] - own).norm() for name, own in expected.items() if name.startswith(layer)]).norm()
            for each in (found, whole)
        ]
        assert errors[0] <= 1.5 * errors[1], layer


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_are_summed_neighbor_by_neighbor(size: int) -> None:
    """In float32 even for bfloat16, rounded once."""
    parts = torch.randn(8, 5, 7, generator=torch.Generator().manual_seed(3)).bfloat16()
    a, b, c, d, e, f, g, h = parts.float()
    expected = (((a + b) + (c + d)) + ((e + f) + (g + h))).bfloat16()

    def total(world: World) -> Tensor:
        own = parts.chunk(size)[world.rank].unbind()
        return sum_slices(own, len(own), world.group, is_ordered=True).clone()

    assert all(torch.equal(each, expected) for each in run_in_worlds(total, size))


def test_draws_between_divided_layers_are_refused() -> None:
    class Noisy(SlicedRecipe):
        def model(self) -> nn.Module:
            model = Sliced()
            model.noise = 0.1
            return model

    noisy = Noisy(8, 1, 1, CONTEXT, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))
    replica = Single(reduce="ordered").replica(noisy, RunContext(ALONE, Numerics(logical_tensor=2)))
    with pytest.raises(ConfigError, match="random numbers are drawn .* before down.*Set that dropout to 0"):
        replica.step([MicroBatch(split(ROWS[0]), seed=1)])


def test_slices_that_end_within_a_vector_are_refused() -> None:
    replica = Single(reduce="ordered").replica(sliced_recipe(), RunContext(ALONE, Numerics(logical_tensor=8)))
    with pytest.raises(ConfigError, match="3 × 6 outputs, not a multiple of 64.*multiple of 32 tokens"):
        replica.step([MicroBatch((torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)), seed=1)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("strategy=mesh", "strategy.tensor=2"), "Set logical_tensor=2"),
        (("strategy=mesh", "strategy.tensor=2", "logical_tensor=3"), "must be a power of two.*Set 2 or 4"),
        (("logical_tensor=2", "reproducibility=seeded"), "requires reproducibility=elastic"),
        (("logical_tensor=2", "recipe=digits"), "does not define a tensor-parallel plan.*logical_tensor=1"),
        (("logical_tensor=2", "compile=true"), "compile=true is not supported"),
        (("logical_tensor=1024",), "not divisible by logical_tensor=1024"),
    ],
)
def test_what_slices_cannot_keep_is_refused_before_the_start(train: Any, options: Sequence[str], said: str) -> None:
    run = train("recipe=stdlib_lm", "reproducibility=elastic", "cluster.processes=2", *options)
    assert run.code == 2
    assert run.folder is None
    assert re.search(said, run.error.replace("\n", " ")), run.error


class Frozen(StdlibLM):
    """Freezes the embedding, which is tied to the head."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_parameter("embedding.weight").requires_grad_(False)
        return model


def test_a_frozen_weight_that_stages_share_does_not_decay() -> None:
    decaying = partial(torch.optim.AdamW, lr=0.003, weight_decay=0.5)
    frozen = Frozen(64, 2, 8, CONTEXT, 0.0, test_bytes=1000, make_optimizer=decaying)
    (alone,) = run_in_worlds(partial(end, frozen, Single(reduce="ordered"), Numerics()), 1)
    assert run_in_worlds(partial(end, frozen, ORDERED(pipeline=2), Numerics()), 2)[0][0] == alone[0]


class Chained(StdlibLM):
    """A chain of two dropout layers, of which the first comes again at the end."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return [model[0], model[1], model[0]]


def test_calls_of_a_layer_and_of_a_model_draw_different_numbers() -> None:
    chained = Chained(8, 1, 1, CONTEXT, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))
    model: Any = chained.model()
    streams = LayerStreams(chained, model, torch.device("cpu"), by_layer=True)
    ones = torch.ones(64)

    def draw(seed: int) -> list[Tensor]:
        streams.begin(seed)
        return [layer(ones) for layer in (model[0], model[1], model[0], model[0], model[1], model[0])]

    drawn = draw(1)
    assert len({each.numpy().tobytes() for each in drawn}) == 6
    assert all(torch.equal(*pair) for pair in zip(drawn, draw(1), strict=True))
    streams.begin(1)
    streams.expect(2)  # a stage that begins at the third layer
    assert torch.equal(model[0](ones), drawn[2])


def test_a_recomputed_layer_draws_what_it_drew_although_another_batch_has_begun() -> None:
    chained = Chained(8, 1, 1, CONTEXT, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))
    model: Any = chained.model()
    streams = LayerStreams(chained, model, torch.device("cpu"), by_layer=True)
    inputs = torch.ones(64, requires_grad=True)
    streams.begin(1)
    outputs = checkpoint(model[0], inputs, use_reentrant=False)
    streams.begin(2)
    outputs.sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, outputs.detach())


def test_a_layer_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    """The stream of a layer is that of its place, so a stage need not know what earlier stages drew."""
    own = recipe(0.5)
    torch.manual_seed(5)
    replica: Any = Single(reduce="ordered").replica(own, RunContext(ALONE, logical_ranks=LOGICAL))
    drawn: list[Tensor] = []
    replica.model.blocks[3].register_forward_hook(lambda *_: drawn.append(torch.rand(1)))
    batch = MicroBatch(split(ROWS[0][:2]), seed=7)
    replica.step([batch])
    replica.model.blocks[1].dropout = 0.0
    replica.step([batch])
    assert drawn[0] == drawn[1]
    with draw_from("test"):
        replica.step([MicroBatch(batch.data, seed=8)])
    assert drawn[2] != drawn[0]
