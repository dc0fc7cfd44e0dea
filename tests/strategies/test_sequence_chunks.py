"""Sequences in chunks have the attention of whole sequences; models that cannot be cut are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.core import Cluster, ConfigError, LossOutput, MicroBatch, Numerics, RunContext, Strategy, World
from worldsize.strategies.chunk_tensor import ChunkLayout, Chunks
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.sequence_chunks import document_mask, gather_sequence, sequence_positions
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds

HEADS, TIME = 4, 32
ALONE = World.create_single(torch.device("cpu"))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DOCUMENTS_BT = (torch.arange(TIME) >= torch.tensor([[5], [20]])).long()


def mask_documents(documents_bt: Tensor) -> Tensor:
    """Return the causal mask of whole documents, bool (batch, 1, time, time)."""
    same = documents_bt[:, :, None] == documents_bt[:, None, :]
    return (same & torch.ones(TIME, TIME, dtype=torch.bool).tril())[:, None]


CASES: dict[str, Any] = {  # heads of keys, features of values, options of chunks, options of the whole sequence
    "causal": (HEADS, 8, lambda _: {"is_causal": True}, lambda _: {"is_causal": True}),
    "full": (HEADS, 8, lambda _: {}, lambda _: {}),
    "scaled": (HEADS, 8, lambda _: {"is_causal": True, "scale": 0.7}, lambda _: {"is_causal": True, "scale": 0.7}),
    "shared heads": (2, 8, *[lambda _: {"is_causal": True, "enable_gqa": True}] * 2),
    "other values": (HEADS, 12, lambda _: {"is_causal": True}, lambda _: {"is_causal": True}),
    "documents": (
        HEADS,
        8,
        lambda documents_bt: {"attn_mask": document_mask(documents_bt)},
        lambda documents_bt: {"attn_mask": mask_documents(documents_bt)},
    ),
    "padding": (
        2,
        8,
        *[lambda _: {"attn_mask": (torch.arange(TIME) < 20)[None, None, None], "enable_gqa": True}] * 2,
    ),
}


def attend(layout: ChunkLayout, name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the output, and gradients of queries, keys and values, of the whole sequences."""
    heads, features, create_options, _ = CASES[name]
    wholes = [draw(2, HEADS, TIME, 8), draw(2, heads, TIME, 8, seed=1), draw(2, heads, TIME, features, seed=2)]
    chunks = [layout.cut(each.to(dtype), -2) for each in wholes]
    for each in chunks:
        for part in each.parts:
            part.requires_grad_()
    options = create_options(layout.cut(DOCUMENTS_BT, 1))
    output: Any = F.scaled_dot_product_attention(chunks[0], chunks[1], chunks[2], **options)
    weights: Any = layout.cut(draw(2, HEADS, TIME, features, seed=3).to(dtype), -2)
    torch.autograd.backward([(own * weight).sum() for own, weight in zip(output.parts, weights.parts, strict=True)])
    gradients = [Chunks([part.grad for part in each.parts if part.grad is not None], layout) for each in chunks]
    return [gather_sequence(each, -2) for each in (output, *gradients)]


def attend_whole(name: str) -> list[Tensor]:
    heads, features, _, create_options = CASES[name]
    leaves = [draw(2, HEADS, TIME, 8), draw(2, heads, TIME, 8, seed=1), draw(2, heads, TIME, features, seed=2)]
    for each in leaves:
        each.requires_grad_()
    output = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], **create_options(DOCUMENTS_BT))
    (output * draw(2, HEADS, TIME, features, seed=3)).sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach(), *(each.grad for each in leaves if each.grad is not None)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_ordered", [True, False])
def test_attention_over_chunks_equals_that_of_whole_sequences(name: str, is_ordered: bool) -> None:
    layout = ChunkLayout(8, is_ordered=is_ordered)
    for found, expected in zip(attend(layout, name, torch.float64), attend_whole(name), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # kernels take exponentials in float32


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_ranks_has_the_bits_of_one(dtype: torch.dtype) -> None:
    for name in CASES:
        alone = attend(ChunkLayout(8), name, dtype)
        for size in (2, 4):

            def divided(world: World, name: str = name) -> list[Tensor]:
                return attend(ChunkLayout(8, world.size, world.rank, world.group), name, dtype)

            for ended in run_in_worlds(divided, size):
                assert all(torch.equal(*pair) for pair in zip(ended, alone, strict=True)), name


@pytest.mark.parametrize(("chunks", "size"), [(1, 1), (4, 1), (4, 2), (8, 2), (8, 8)])
def test_each_rank_has_chunks_from_both_ends(chunks: int, size: int) -> None:
    layouts = [ChunkLayout(chunks, size, rank) for rank in range(size)]
    parts = [[place for part in layout.parts for place in part] for layout in layouts]
    assert sorted(place for part in parts for place in part) == list(range(chunks))
    assert {len(part) for part in parts} == {chunks // size}
    if chunks > size:  # otherwise a rank has one chunk
        assert {sum(part) for part in parts} == {(chunks - 1) * chunks // (2 * size)}


def test_chunks_are_used_like_tensors() -> None:
    layout = ChunkLayout(4)
    whole = draw(2, 8, 6)
    chunks: Any = layout.cut(whole, 1)
    weight = draw(6, 6, seed=1).requires_grad_()
    assert chunks.shape == (2, 2, 6)
    assert (chunks.dtype, chunks.ndim, len(chunks)) == (torch.float64, 3, 2)
    first, second = chunks.chunk(2, dim=-1)
    largest = chunks.max(dim=-1)
    outputs: Any = torch.cat((first, second), -1) @ weight + largest.values[..., None]
    outputs[..., 0] = 0.0
    expected = whole @ weight + whole.max(dim=-1).values[..., None]
    expected = expected.index_fill(-1, torch.tensor([0]), 0.0)
    torch.testing.assert_close(gather_sequence(outputs), expected)
    assert gather_sequence(sequence_positions(chunks), 0).tolist() == list(range(8))
    torch.autograd.backward([part.sum() for part in outputs.parts])
    own, weight.grad = weight.grad, None
    assert own is not None
    expected.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(own, weight.grad)


def test_a_tensor_without_chunks_is_the_whole_sequence() -> None:
    tokens = torch.zeros(2, 5)
    assert sequence_positions(tokens).tolist() == list(range(5))
    assert gather_sequence(tokens) is tokens
    documents = torch.tensor([[0, 0, 1]])
    assert document_mask(documents).tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


def test_each_chunk_draws_its_own_numbers_and_the_stream_goes_on_as_with_one_draw() -> None:
    def draw_twice(layout: ChunkLayout) -> tuple[Any, float]:
        torch.manual_seed(3)
        chunks = layout.cut(torch.ones(1, 64, 4), 1)
        return F.dropout(chunks, 0.5), float(torch.rand(()))

    (alone, last) = draw_twice(ChunkLayout(4))
    assert len({part.numpy().tobytes() for part in alone.parts}) == 4
    for rank in range(2):
        found, number = draw_twice(ChunkLayout(4, 2, rank))
        assert number == last
        places = [place for (place,) in ChunkLayout(4).parts]
        for (place,), part in zip(found.chunk_layout.parts, found.parts, strict=True):
            assert torch.equal(part, alone.parts[places.index(place)])


class Layers(nn.Module):
    """A model of bytes whose operation between embedding and head is ``combine``."""

    def __init__(self, combine: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.query, self.norm, self.conv = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Conv1d(16, 16, 3, padding=1)
        self.recurrent, self.heads = nn.LSTM(16, 16, batch_first=True), nn.MultiheadAttention(16, 2, batch_first=True)
        self.combine = combine

    def forward(self, tokens_bt: Tensor) -> Tensor:
        hidden_btw = self.embedding(tokens_bt)
        logits: Tensor = self.head(hidden_btw + self.combine(self, hidden_btw))
        return logits


class Combined(StdlibLM):
    """Trains :class:`Layers`."""

    combine: Callable[[Layers, Tensor], Tensor]

    def model(self) -> nn.Module:
        return Layers(type(self).combine)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return []

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        return []


def combined(combine: Callable[[Layers, Tensor], Tensor]) -> Combined:
    kind = type("Combined", (Combined,), {"combine": staticmethod(combine)})
    made: Combined = kind(16, 1, 1, TIME, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    return made


def train(own: StdlibLM, numerics: Numerics = Numerics(logical_context=4), steps: int = 1) -> Any:  # noqa: B008
    torch.manual_seed(1)
    replica = Single(reduce="ordered").replica(own, RunContext(ALONE, numerics))
    rows = torch.randint(256, (2, TIME + 1), generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        replica.step([MicroBatch((rows[:, :-1], rows[:, 1:]), seed=step)])
    return replica


def attend_by_hand(model: Layers, hidden_btw: Tensor) -> Tensor:
    scores: Tensor = model.query(hidden_btw) @ hidden_btw.mT
    return scores.softmax(-1) @ hidden_btw


def number_positions(model: Layers, hidden_btw: Tensor) -> Tensor:
    found: Tensor = model.query(hidden_btw + torch.arange(hidden_btw.shape[1])[:, None] / 10)
    return found


def attend_by_hand_behind_zeros(model: Layers, hidden_btw: Tensor) -> Tensor:
    """The model's outputs do not depend on attention before the first update."""
    nn.init.zeros_(model.head.weight)
    return attend_by_hand(model, hidden_btw)


def write_into_zeros(model: Layers, hidden_btw: Tensor) -> Tensor:
    written = torch.zeros(hidden_btw.shape)
    written[...] = model.query(hidden_btw)
    return written


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def attend_with_dropout(model: Layers, hidden_btw: Tensor) -> Tensor:
    hidden = hidden_btw[:, None]
    return F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.1, is_causal=True)[:, 0]


def attend_within_chunk(model: Layers, hidden_btw: Tensor) -> Tensor:
    hidden = hidden_btw[:, None]
    mask = torch.ones(hidden_btw.shape[1], hidden_btw.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)[:, 0]


@pytest.mark.parametrize(
    ("combine", "message"),
    [
        (attend_by_hand, "the input of head differs if the sequence is cut into chunks.*scaled_dot_product_attention"),
        (number_positions, "the input of query differs if the sequence is cut.*Use.*sequence_positions"),
        (lambda model, hidden: model.recurrent(hidden)[0], "combines the tokens"),
        (lambda model, hidden: model.conv(hidden.mT).mT, "combines the tokens"),
        (lambda model, hidden: model.norm(hidden.mT).mT, "combines the tokens"),
        (lambda model, hidden: model.heads(hidden, hidden, hidden)[0], "combines the tokens"),
        (lambda model, hidden: hidden.cumsum(1), "combines the tokens"),
        (lambda model, hidden: hidden.roll(1, dims=1), "the input of head differs"),
        (attend_by_hand_behind_zeros, "the input of head differs"),
        (lambda model, hidden: model.query(hidden.mean(1, keepdim=True)), "the input of query has no token dimension"),
        (lambda model, hidden: hidden * len(torch.nonzero(hidden > 0)), "reads a shape that depends on values"),
        (lambda model, hidden: hidden * float(f"{hidden.mean():.3f}"), "reads values"),
        (write_into_zeros, "__setitem__ writes chunks of a sequence into a tensor that is not cut"),
        (lambda model, hidden: Doubled.apply(model.query(hidden)), "custom autograd function"),
        (lambda model, hidden: hidden * float(hidden.mean().item()), "reads values"),
        (attend_with_dropout, "dropout_p=0.1"),
        (attend_within_chunk, r"an attention mask of shape \[.*32 tokens of the sequence"),
    ],
)
def test_a_model_that_combines_tokens_in_another_way_is_refused(
    combine: Callable[[Layers, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(combined(combine))


def test_stages_of_a_pipeline_are_tried_too() -> None:
    class Staged(Combined):
        def layers(self, model: Any) -> Sequence[nn.Module]:
            return [model.embedding, Attending(model), model.head]

        def model(self) -> nn.Module:
            return Layers(attend_by_hand)

    class Attending(nn.Module):
        def __init__(self, model: Layers) -> None:
            super().__init__()
            self.query = model.query

        def forward(self, hidden_btw: Tensor) -> Tensor:
            return hidden_btw + attend_by_hand(self, hidden_btw)  # type: ignore[arg-type]

    own = Staged(16, 1, 1, TIME, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))

    def refused(world: World) -> str:
        strategy = Mesh(pipeline=2, reduce="ordered")
        replica = strategy.replica(own, RunContext(world, Numerics(logical_context=4), logical_ranks=2))
        rows = torch.randint(256, (2, TIME + 1), generator=torch.Generator().manual_seed(1))
        with pytest.raises((ConfigError, RuntimeError)) as raised:  # or the other rank's connection ends
            replica.step([MicroBatch((each[:, :-1], each[:, 1:]), seed=1) for each in (rows, rows)])
        return str(raised.value)

    assert any("differs if the sequence is cut into chunks" in each for each in run_in_worlds(refused, 2))


class Folded(Combined):
    """Computes on tokens of all sequences together, registers a hook, and has ignored targets."""

    def model(self) -> nn.Module:
        def fold(model: Layers, hidden_btw: Tensor) -> Tensor:
            output: Tensor = model.query(hidden_btw.flatten(0, 1)).view(hidden_btw.shape)
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
            return output

        return Layers(fold)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        targets_bt = batch[1].where(batch[1] < 200, -100)
        is_known = targets_bt != -100
        logits = model(batch[0])[is_known]
        return F.cross_entropy(logits, targets_bt[is_known], reduction="sum"), is_known.sum()


def test_tokens_of_all_sequences_may_be_folded_into_one_dimension() -> None:
    own = Folded(16, 1, 1, TIME, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    whole, chunks = (train(own, numerics) for numerics in (Numerics(), Numerics(logical_context=4)))
    for expected, found in zip(whole.model.parameters(), chunks.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_query_may_attend_to_more_keys_than_there_are_queries() -> None:
    layout = ChunkLayout(4)
    query, key = draw(2, 2, 16, 8), draw(2, 2, 32, 8, seed=1)
    chunks = [layout.cut(each, -2) for each in (query, key, key)]
    found = F.scaled_dot_product_attention(chunks[0], chunks[1], chunks[2])
    expected = F.scaled_dot_product_attention(query, key, key)
    torch.testing.assert_close(gather_sequence(found, -2), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="causal attention from 4 queries to 8 keys"):
        F.scaled_dot_product_attention(chunks[0], chunks[1], chunks[2], is_causal=True)


def test_a_loss_that_is_not_a_mean_over_tokens_is_refused() -> None:
    class Shifting(StdlibLM):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            logits = model(batch[0])[:, :-1].flatten(0, 1)
            targets = batch[0][:, 1:].flatten()
            return F.cross_entropy(logits, targets, reduction="sum"), torch.tensor(len(targets))

    own = Shifting(16, 1, 1, TIME, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ConfigError, match=r"the loss of whole sequences .* in chunks.*shift targets"):
        train(own)


class Averaged(StdlibLM):
    """Returns a mean, with a metric."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, count = super().loss(model, batch)
        return LossOutput(total / count, {"nats": (total.detach(), count), "chunks": (torch.ones(()), torch.ones(()))})


def test_means_and_metrics_are_those_of_whole_sequences() -> None:
    own = Averaged(16, 1, 1, TIME, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    rows = torch.randint(256, (2, TIME + 1), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch((rows[:, :-1], rows[:, 1:]), seed=0)
    torch.manual_seed(1)
    model = own.model()
    whole = own.loss(model, batch.data)
    found: Any = ChunkLayout(8).compute_loss(own, model, batch)
    torch.testing.assert_close(found.loss, whole.loss)
    torch.testing.assert_close(found.metrics["nats"], whole.metrics["nats"])
    assert found.metrics["chunks"] == (8, 8)


def test_nothing_of_a_step_is_kept_after_it() -> None:
    replica = train(StdlibLM(16, 1, 1, TIME, 0.1, test_bytes=1000, make_optimizer=partial(torch.optim.SGD, lr=0.1)))
    import gc

    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Chunks]
    assert replica is not None


def losses(own: StdlibLM, strategy: Strategy, world: World) -> tuple[list[float], dict[str, float]]:
    """Return the mean loss of each step, and the metrics, with two logical ranks of two rows each."""
    torch.manual_seed(5)
    replica = strategy.replica(own, RunContext(world, Numerics(clip_norm=0.5), logical_ranks=2))
    size, rank = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo")), strategy.data_rank(world)
    means = []
    for step in range(3):
        rows = torch.randint(256, (4, TIME + 1), generator=torch.Generator().manual_seed(step))
        targets = rows[:, 1:].clone()
        targets[:3, :20] = -100  # chunks have different numbers of targets
        batches = [MicroBatch(pair, seed=step) for pair in zip(rows[:, :-1].chunk(2), targets.chunk(2), strict=True)]
        result = replica.step(batches[rank::size])
        own_losses = torch.stack([each.double() for each in result.losses]).mean()[None]
        if world.group is not None:
            torch.distributed.all_reduce(own_losses, group=world.group)
        means.append(float(own_losses) / world.size)
    rows = torch.randint(256, (4, TIME + 1), generator=torch.Generator().manual_seed(9))
    from worldsize.core import EvaluationBatch, EvaluationBatches

    parts = list(zip(rows[:, :-1].chunk(2), rows[:, 1:].chunk(2), strict=True))
    tests = [EvaluationBatch(place, part) for place, part in enumerate(parts)]
    return means, dict(replica.evaluate(EvaluationBatches(lambda: iter(tests[rank::size]))))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (Mesh(context=2), 2),
        (Mesh(context=4), 4),
        (Mesh(context=2, data=2), 4),
        (Mesh(context=2, tensor=2), 4),
        (Mesh(context=2, pipeline=2), 4),
        (Mesh(context=2, data=2, on_failure="heal"), 4),
        (Mesh(context=2, data=2, order=["tensor", "data", "context", "pipeline"]), 4),
    ],
    ids=str,
)
def test_context_parallelism_without_elastic_has_the_losses_of_one_process(strategy: Strategy, size: int) -> None:
    own = StdlibLM(32, 2, 4, TIME, 0.0, test_bytes=1000, make_optimizer=partial(torch.optim.AdamW, lr=0.003))
    (expected,) = run_in_worlds(partial(losses, own, Single()), 1)
    for means, metrics in run_in_worlds(partial(losses, own, strategy), size):
        assert means == pytest.approx(expected[0], rel=1e-5)
        assert metrics == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("strategy=mesh", "strategy.context=2"), "Set logical_context=2"),
        (("strategy=mesh", "strategy.context=2", "logical_context=3"), "must be a power of two.*Set 2 or 4"),
        (("logical_context=2", "reproducibility=seeded"), "requires reproducibility=elastic"),
        (("logical_context=2", "recipe=digits"), "does not cut its sequences.*cut_sequences, or set logical_context=1"),
        (("logical_context=2", "compile=true"), "compile=true is not supported"),
        (("logical_context=1024",), "a sequence of 128 tokens cannot be cut into 1024 chunks"),
        (
            ("strategy=mesh", "strategy.context=2", "reproducibility=seeded", "recipe.context=130"),
            "a sequence of 130 tokens cannot be cut into 4 chunks.*or set strategy.context to a smaller number",
        ),
        (
            ("strategy=mesh", "strategy.context=2", "reproducibility=seeded", "compile=true"),
            "compile=true is not supported with strategy.context=2",
        ),
    ],
)
def test_what_chunks_cannot_keep_is_refused_before_the_start(
    request: pytest.FixtureRequest, options: Sequence[str], said: str
) -> None:
    run = request.getfixturevalue("train")(
        "recipe=stdlib_lm", "reproducibility=elastic", "cluster.processes=2", *options
    )
    assert run.code == 2
    assert run.folder is None
    assert re.search(said, run.error.replace("\n", " ")), run.error
