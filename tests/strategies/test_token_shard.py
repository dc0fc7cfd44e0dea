"""Between tensor-parallel layers, a rank has a part of the tokens; the results are those of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.hf_causal_lm.recipe import HFCausalLM
from recipes.stdlib_lm.recipe import StdlibLM
from tests.strategies.test_mesh_bits import CONTEXT, ORDERED, SlicedRecipe, end, gradients, recipe, sliced_recipe
from worldsize.core import ConfigError, MicroBatch, Numerics, Recipe, RunContext, Strategy, TensorStyle, World
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

SHARDED = partial(ORDERED, sequence_parallel=True, loss_parallel=True)


class Scaled(nn.Module):
    """A norm by hand, whose sum over features, power and activation have many kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(CONTEXT, width))

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(hidden.dtype) + self.shift


class OddBlock(nn.Module):
    """Layers with biases, norms, dropout, and operations that need whole tensors, between the divided layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.scaled, self.drop = nn.LayerNorm(width), Scaled(width), nn.Dropout(0.2, inplace=True)
        self.up, self.gate, self.down = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width)
        self.mix = nn.Linear(width, width)

    def forward(self, mask: Tensor | None, *, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden)
        inner = F.gelu(self.gate(inner)) * self.up(inner)
        inner = self.down(inner)
        inner *= 0.5
        hidden = hidden + self.drop(inner)
        hidden = self.scaled(hidden)
        hidden -= hidden.cumsum(1) / CONTEXT  # of earlier tokens
        mixed: Tensor = F.silu(self.mix(hidden))  # a layer that is not divided
        assert hidden.shape == mixed.shape
        return mixed + hidden


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(64, 32), nn.ModuleList(OddBlock(32) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        hidden = self.table(tokens_bt)
        for block in self.blocks:
            hidden = block(None, hidden=hidden)
        logits: Tensor = self.head(hidden)
        return logits


class OddRecipe(SlicedRecipe):
    def model(self) -> nn.Module:
        return OddModel()

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return list(model.blocks)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        styles: dict[str, TensorStyle] = {"up": "column", "gate": "column", "down": "row"}
        inner = {f"blocks.{place}.{name}": style for place in range(2) for name, style in styles.items()}
        return {"table": "row", **inner, "head": "gathered"}


def odd_recipe() -> OddRecipe:
    return OddRecipe(8, 1, 1, CONTEXT, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.bits)])
def test_operations_of_any_kind_have_the_bits_of_one_process(precision: Any) -> None:
    numerics = Numerics(precision=precision, clip_norm=0.3, logical_tensor=4)
    (alone,) = run_in_worlds(partial(end, odd_recipe(), Single(reduce="ordered"), numerics), 1)
    for strategy, size in ((SHARDED(tensor=4), 4), (SHARDED(tensor=2, data=2), 4)):
        ended = run_in_worlds(partial(end, odd_recipe(), strategy, numerics), size)[0]
        assert (ended[0], ended[2]) == (alone[0], alone[2])


def test_without_a_fixed_order_gradients_are_those_of_one_process() -> None:
    (alone,) = run_in_worlds(partial(gradients, odd_recipe(), Single(), Numerics()), 1)
    for strategy, size in (
        (Mesh(tensor=2, sequence_parallel=True, loss_parallel=True), 2),
        (Mesh(tensor=4, sequence_parallel=True, loss_parallel=True), 4),
    ):
        found = run_in_worlds(partial(gradients, odd_recipe(), strategy, Numerics()), size)[0]
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"tensor": 2, "context": 2}], ids=str)
def test_a_llama_has_the_bits_of_one_process(tmp_path: Path, options: dict[str, int]) -> None:
    (tmp_path / "words.txt").write_text("Same bits at any world size. " * 40)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", **sizes, "intermediate_size": 64, "tie_word_embeddings": False}
    optimizer = partial(torch.optim.AdamW, lr=0.003)
    own = HFCausalLM(config=config, text=str(tmp_path / "words.txt"), context=CONTEXT, make_optimizer=optimizer)
    numerics = Numerics(clip_norm=0.3, logical_tensor=2, logical_context=options.get("context", 1))
    (alone,) = run_in_worlds(partial(end, own, Single(reduce="ordered"), numerics), 1)
    size = 2 * options.get("pipeline", 1) * options.get("context", 1)
    ended = run_in_worlds(partial(end, own, SHARDED(**options), numerics), size)[0]
    assert (ended[0], ended[2]) == (alone[0], alone[2])


def saved_bytes(own: Recipe, strategy: Strategy, world: World) -> int:
    """Return the bytes that autograd keeps from the forward pass of one micro-batch."""
    torch.manual_seed(5)
    replica = strategy.replica(own, RunContext(world, Numerics(), logical_ranks=1))
    rows, kept = torch.randint(64, (8, CONTEXT + 1)), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        replica.step([MicroBatch((rows[:, :-1], rows[:, 1:]), seed=3)])
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}.values())


def test_a_rank_keeps_only_its_part_of_the_tokens() -> None:
    tokens, width, size = 8 * CONTEXT, 64, 4
    own = partial(StdlibLM, width, 2, 4, CONTEXT, 0.1, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    whole, divided = (
        run_in_worlds(partial(saved_bytes, own(), Mesh(tensor=size, sequence_parallel=each)), size)[0]
        for each in (False, True)
    )
    repeated = 2 * 6 * 4 * tokens * width  # inputs of norms and of column layers, and dropout, in two blocks
    assert whole - divided >= 0.9 * repeated * (1 - 1 / size)

    whole, divided = (
        run_in_worlds(partial(saved_bytes, odd_recipe(), Mesh(tensor=size, loss_parallel=each)), size)[0]
        for each in (False, True)
    )
    logits = 4 * tokens * 64
    assert whole - divided >= 0.9 * logits * (1 - 1 / size)


class OtherBlock(OddBlock):
    """Applies a function to its hidden states, which may use the block's parameters."""

    change: Callable[[Any, Tensor], Tensor]

    def forward(self, mask: Tensor | None, *, hidden: Tensor) -> Tensor:
        return type(self).change(self, self.norm(hidden))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * hidden).sum((0, 1))


def write(block: Any, hidden: Tensor) -> Tensor:
    hidden[:, 0] = 0.0
    return hidden


def write_to_view(block: Any, hidden: Tensor) -> Tensor:
    hidden[:, 0] += 1.0
    return hidden


def attend(block: Any, hidden: Tensor) -> Tensor:
    turned = hidden.transpose(1, 2)
    return hidden + (turned @ turned.transpose(1, 2) @ turned).transpose(1, 2)


def use_twice(block: Any, hidden: Tensor) -> Tensor:
    return torch.addcmul(hidden, hidden, block.scaled.weight) + hidden


def use_hooks(block: Any, hidden: Tensor) -> Tensor:
    hidden = hidden * 2
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / (gradient.norm() + 1))  # type: ignore[no-untyped-call]
    return hidden


def convert(block: Any, hidden: Tensor) -> Tensor:
    weight: Tensor = block.scaled.weight
    return weight.type_as(hidden) * (hidden.type_as(weight).square() + 1) ** weight


def root_in_half(block: Any, hidden: Tensor) -> Tensor:
    half = hidden.bfloat16()
    return (half * (half.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).float()


class OtherRecipe(OddRecipe):
    change: Callable[[Any, Tensor], Tensor]

    def model(self) -> nn.Module:
        model, kind = OddModel(), type("Block", (OtherBlock,), {"change": staticmethod(self.change)})
        model.blocks = nn.ModuleList(kind(32) for _ in range(2))
        return model


def other_recipe(change: Callable[[Any, Tensor], Tensor]) -> OtherRecipe:
    kind = type("Recipe", (OtherRecipe,), {"change": staticmethod(change)})
    made: OtherRecipe = kind(8, 1, 1, CONTEXT, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    return made


@pytest.mark.parametrize("change", [use_twice, use_hooks, convert, root_in_half])
def test_uses_of_divided_tokens_have_the_bits_of_one_process(change: Any) -> None:
    own, numerics = other_recipe(change), Numerics(logical_tensor=2)
    (alone,) = run_in_worlds(partial(end, own, Single(reduce="ordered"), numerics), 1)
    ended = run_in_worlds(partial(end, own, SHARDED(tensor=2), numerics), 2)[0]
    assert (ended[0], ended[2]) == (alone[0], alone[2])


@pytest.mark.parametrize(
    ("change", "tokens", "said"),
    [
        (use_hooks, 15, "a sequence of 15 tokens cannot be divided over strategy.tensor=2 ranks. Use sequences with a"),
        (lambda block, hidden: hidden.data, 16, "calls __get__ on a tensor whose tokens are divided over ranks"),
        (write, 16, "calls __setitem__ on a tensor whose tokens are divided over ranks, which is not supported"),
        (write_to_view, 16, "is a view and is being modified inplace"),
        (attend, 16, "is transposed, so its gradient has different strides, and sums over tokens would be computed"),
        (
            lambda block, hidden: hidden.mean(1),
            16,
            r"the input of Block has shape \(2, 32\), but strategy.sequence_par",
        ),
        (
            lambda block, hidden: Product.apply(hidden, block.scaled.weight),
            16,
            "a custom autograd function, or registers",
        ),
        (lambda block, hidden: torch.vmap(block.mix)(hidden), 16, "a transform such as torch.vmap on a tensor whose"),
    ],
)
def test_uses_that_cannot_be_divided_are_refused(change: Any, tokens: int, said: str) -> None:
    def step(world: World) -> None:
        context = RunContext(world, Numerics(logical_tensor=2), logical_ranks=1)
        replica = SHARDED(tensor=2).replica(other_recipe(change), context)
        rows = torch.zeros(2, tokens + 1, dtype=torch.int64)
        replica.step([MicroBatch((rows[:, :-1], rows[:, 1:]), seed=3)])

    with pytest.raises(RuntimeError, match=said):
        run_in_worlds(step, 2)


@pytest.mark.parametrize(
    ("options", "own", "said"),
    [
        (
            {"sequence_parallel": True},
            sliced_recipe(),
            "SlicedRecipe does not define Recipe.blocks. Define Recipe.blocks",
        ),
        (
            {"loss_parallel": True},
            recipe(),
            'requires a head with the style "gathered" in Recipe.tensor_plan, but StdlibLM',
        ),
    ],
)
def test_a_recipe_that_cannot_be_divided_is_refused_before_the_start(options: Any, own: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Mesh(tensor=2, **options).check_built(own, model := own.model(), own.optimizer(model))
    Mesh(tensor=1, **options).check_built(own, model, own.optimizer(model))


def test_compiled_code_cannot_divide_tokens() -> None:
    Mesh(sequence_parallel=True).check_numerics(Numerics(compile=True))
    for key in ("sequence_parallel", "loss_parallel"):
        with pytest.raises(ConfigError, match=f"compile=true is not supported with strategy.{key}=true. Set compile=f"):
            Mesh(tensor=2, **{key: True}).check_numerics(Numerics(compile=True))  # type: ignore[arg-type]
