"""transformers models divide into tensor slices and pipeline stages, and train to the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.hf_causal_lm.recipe import HFCausalLM
from recipes.hf_causal_lm.samples import language_batch
from tests.recipes.test_hf_causal_lm import tokens
from worldsize.collectives.gather_full import gather_full
from worldsize.core import (
    Cluster,
    ConfigError,
    EvaluationBatch,
    EvaluationBatches,
    MicroBatch,
    Numerics,
    RunContext,
    Strategy,
    World,
)
from worldsize.data.order import assign_logical_ranks
from worldsize.data.sources.documents import DocumentWindows
from worldsize.data.sources.tokens import TokenWindows
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.strategies.chunk_tensor import ChunkLayout
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.mesh.schedule import split_stages
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.tensor_layers import get_tensor_plan
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

STEPS, CONTEXT, CLIP = 3, 16, 0.5
DATA = torch.randint(64, (STEPS, 8, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "vocab_size": 64}
Result = tuple[str, float, list[float]]


def recipe(**config: Any) -> HFCausalLM:
    optimizer = partial(torch.optim.AdamW, lr=0.003)
    return HFCausalLM(make_optimizer=optimizer, context=CONTEXT, config={**LLAMA, **config}, text=__file__)


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import transformers' modules here, so that no forked process has to."""
    with torch.device("meta"):
        recipe().model()


def trained(strategy: Strategy, own: HFCausalLM, numerics: Numerics, world: World) -> Result:
    """Train with four logical ranks; return the digest of the weights, nats per token, and this rank's losses."""
    rank, size = strategy.data_rank(world), strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    torch.manual_seed(5)
    replica = strategy.replica(own, RunContext(world, numerics, logical_ranks=4))
    losses, mine = [], assign_logical_ranks(rank, size, 4, replica.dealing)
    for step, rows in enumerate(DATA):
        parts = torch.split(rows, 2)
        result = replica.step([MicroBatch(parts[number], seed=4 * step + number) for number in mine])
        losses.append(float(torch.stack(list(result.losses)).mean()))
    model = gather_full(replica.state()["model"], world)
    digest = state_digest(tensor_digests(model)) if world.rank == 0 else ""
    batches = [EvaluationBatch(number, part) for number, part in enumerate(torch.split(DATA[0], 4))]
    metrics = replica.evaluate(EvaluationBatches(lambda: iter(batches[rank::size])))
    return digest, metrics["nats_per_token"], losses


def check_equal(own: HFCausalLM, numerics: Numerics, *strategies: tuple[int, Strategy]) -> list[float]:
    """Check that strategies have the bits of one process; return its losses."""
    ((*expected, losses),) = run_in_worlds(partial(trained, Single(reduce="ordered"), own, numerics), 1)
    for size, strategy in strategies:
        found = run_in_worlds(partial(trained, strategy, own, numerics), size)[0][:2]
        assert list(found) == expected, strategy
    return losses


def by_hand() -> list[float]:
    """Train on whole batches with transformers' own loss."""
    own = recipe()
    torch.manual_seed(5)
    model: Any = own.model()
    optimizer, losses = own.optimizer(model), []
    for rows in DATA:
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_llama_ends_with_the_same_bits_however_it_is_divided() -> None:
    losses = check_equal(
        recipe(),
        Numerics(clip_norm=CLIP, logical_tensor=2, logical_context=2),
        (2, Mesh(tensor=2, reduce="ordered")),
        (2, Mesh(pipeline=2, reduce="ordered")),
        (2, Mesh(context=2, reduce="ordered")),
        (2, FSDP(reduce="ordered")),
        (4, Mesh(tensor=2, pipeline=2, reduce="ordered")),
        (4, Mesh(context=2, tensor=2, reduce="ordered")),
    )
    assert losses == pytest.approx(by_hand(), rel=1e-5)


def test_a_llama_with_tied_embeddings_ends_with_the_same_bits() -> None:
    tied = recipe(tie_word_embeddings=True, num_key_value_heads=4, num_hidden_layers=2)
    numerics = Numerics("bf16", clip_norm=CLIP, logical_tensor=4)
    check_equal(tied, numerics, (4, Mesh(tensor=2, pipeline=2, reduce="ordered")))


def test_dropout_in_attention_does_not_depend_on_the_stages() -> None:
    own = recipe(attention_dropout=0.5, num_hidden_layers=2)
    check_equal(own, Numerics(), (2, Mesh(pipeline=2, split=[2], reduce="ordered")))


@pytest.mark.parametrize("kind", ["llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"])
def test_layers_compute_the_logits_of_the_model(kind: str) -> None:
    own = recipe(model_type=kind, head_dim=8, pad_token_id=0)
    model, tokens_bt = own.model(), DATA[0]
    for parameter in model.parameters():  # biases and norms are zeros and ones at first
        nn.init.normal_(parameter, std=0.3)
    (hidden,) = own.model_inputs(tokens_bt)
    for layer in own.layers(model):
        hidden = layer(hidden)
    assert torch.equal(hidden, model(tokens_bt[:, :-1], use_cache=False).logits)


def test_documents_in_chunks_have_the_loss_of_whole_windows(tmp_path: Path) -> None:
    """Attention stays within each document, whose positions begin at 0."""
    own = replace(recipe(), source=DocumentWindows(str(tokens(tmp_path)), length=CONTEXT))
    data = own.data("train")
    batch = MicroBatch(own.collate([data[index] for index in range(4)]), seed=1)
    torch.manual_seed(5)
    model = own.model()
    expected, found = own.loss(model, batch.data), ChunkLayout(4).compute_loss(own, model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    other = own.loss(model, language_batch(batch.data)[:2])  # without documents
    assert abs(float((other[0] - expected[0]).detach())) > 1e-4


def test_models_of_another_structure_are_refused_in_chunks() -> None:
    batch = MicroBatch(DATA[0], seed=1)
    for config, message in (
        ({"model_type": "gpt2"}, "model_type=gpt2 is not supported with sequences in chunks"),
        ({"model_type": "mistral", "sliding_window": 8}, "a sliding window is not supported"),
    ):
        own = recipe(**config)
        with pytest.raises(ConfigError, match=message):
            ChunkLayout(4).compute_loss(own, own.model(), batch)


def build_meta(own: HFCausalLM) -> nn.Module:
    with torch.device("meta"):
        return own.model()


def test_a_tensor_plan_is_transformers_own_without_tied_embeddings() -> None:
    own, tied = recipe(), recipe(tie_word_embeddings=True)
    plan = own.tensor_plan(build_meta(own))
    layers = {name: style for name, style in plan.items() if name.startswith("model.layers.")}
    assert len(layers) == 3 * 7
    assert layers["model.layers.2.self_attn.v_proj"] == layers["model.layers.0.mlp.gate_proj"] == "column"
    assert layers["model.layers.2.self_attn.o_proj"] == layers["model.layers.0.mlp.down_proj"] == "row"
    assert plan == {**layers, "model.embed_tokens": "row", "lm_head": "gathered"}
    assert tied.tensor_plan(build_meta(tied)) == layers
    unplanned = recipe(model_type="gpt2")
    assert unplanned.tensor_plan(build_meta(unplanned)) == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3"}, r"layers.0.self_attn.q_norm of model_type=qwen3 by replicated_with_grad_allreduce"),
        ({"model_type": "mixtral"}, r"layers.0.mlp.experts of model_type=mixtral by moe_tp_experts"),
        ({"model_type": "cohere", "use_qk_norm": True}, r"cohere does not divide model.layers.0.self_attn.q_norm.weig"),
        ({}, r"the model has 2 key-value heads, not divisible by strategy.tensor=4"),
        ({"num_attention_heads": 2}, r"the model has 2 attention heads, not divisible by strategy.tensor=4"),
        ({"num_key_value_heads": 4, "vocab_size": 50}, r"embed_tokens has 50 features, not divisible by strategy.te"),
    ],
)
def test_a_model_that_cannot_be_sliced_is_refused(config: dict[str, Any], message: str) -> None:
    own = recipe(**config)
    with pytest.raises(ConfigError, match=message):
        get_tensor_plan(own, build_meta(own), slices=4, key="strategy.tensor")


def test_a_model_or_data_without_stages_is_refused_only_in_pipelines(tmp_path: Path) -> None:
    gpt2, sliding = recipe(model_type="gpt2"), recipe(model_type="mistral", sliding_window=CONTEXT)
    packed = replace(recipe(), source=DocumentWindows(str(tokens(tmp_path)), length=CONTEXT))
    for own, message in (
        (gpt2, r"model_type=gpt2 is not supported in a pipeline; supported: llama, mistral"),
        (sliding, r"sliding_window=16 is not supported in a pipeline with recipe.context=16"),
        (packed, r"data with documents is not supported in a pipeline"),
    ):
        model = build_meta(own)
        with pytest.raises(ConfigError, match=message):
            split_stages(own, model, 2, None)
        assert not LayerStreams(own, model, torch.device("cpu"), by_layer=True).by_layer
    whole = replace(packed, source=TokenWindows(str(tmp_path), length=CONTEXT))
    assert LayerStreams(whole, build_meta(whole), torch.device("cpu"), by_layer=True).by_layer
