"""Hugging Face transformers models train like any other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.hf_causal_lm.recipe import HFCausalLM
from worldsize.core import ConfigError, MicroBatch, RunContext, Strategy, World
from worldsize.data.mixture import Mixture, Part
from worldsize.data.preparation import Preparation
from worldsize.data.sources.documents import DocumentWindows, PackedDocuments
from worldsize.data.sources.json_lines import JsonLines
from worldsize.data.sources.tokens import TokenWindows
from worldsize.data.storage.cache import Cache
from worldsize.data.texts import Tokenizer
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
KNOWN = {"model_type": "llama", **TINY, "vocab_size": 50}
STEPS = 5


def recipe(text: Path, **options: Any) -> HFCausalLM:
    given = {"config": {"model_type": "llama", **TINY}, "context": 16, "text": str(text), **options}
    return HFCausalLM(make_optimizer=partial(torch.optim.AdamW, lr=1e-3), **given)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return file


def by_hand(own: HFCausalLM) -> list[float]:
    """Train with transformers' own loss on one process; it shifts labels itself, so windows overlap by a token."""
    torch.manual_seed(0)
    model, data, losses = own.model(), own.data("train"), []
    optimizer = own.optimizer(model)
    for step in range(STEPS):
        inputs_bt, targets_bt = data.load_batch(torch.arange(4) + 4 * step)
        whole = torch.cat([inputs_bt, targets_bt[:, -1:]], dim=1)
        loss = model(input_ids=whole, labels=whole).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses_of(strategy: Strategy, own: HFCausalLM, world: World) -> list[float]:
    torch.manual_seed(0)
    replica, data, share = strategy.replica(own, RunContext(world)), own.data("train"), 4 // world.size
    losses = []
    for step in range(STEPS):
        rows = torch.arange(share) + 4 * step + share * world.rank
        (loss,) = replica.step([MicroBatch(data.load_batch(rows), seed=1)]).losses
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("strategy", [DDP(), FSDP()], ids=["ddp", "fsdp"])
def test_every_step_has_the_loss_that_transformers_computes(text: Path, strategy: Strategy) -> None:
    own = recipe(text)
    ranks = run_in_worlds(partial(losses_of, strategy, own), 2)
    means = [sum(losses) / 2 for losses in zip(*ranks, strict=True)]
    assert means == pytest.approx(by_hand(own), rel=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox"])
def test_blocks_are_the_decoder_layers(text: Path, model_type: str) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2}
    own = recipe(text, config={**config, "intermediate_size": 64})
    assert len(own.blocks(own.model())) == 3


def kept(model: Any, folder: Path) -> None:
    """Save a model in files of at most 20 kB, and a tokenizer of four words."""
    model.save_pretrained(folder, max_shard_size="20KB")
    words = {"[UNK]": 0, "the": 1, "fox": 2, "dog": 3, "<end>": 4}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=plain, eos_token="<end>").save_pretrained(folder)


def tied_gpt2(text: Path) -> nn.Module:
    """Make a GPT-2 whose last layer is its embedding."""
    return recipe(text, config={"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}).model()


def test_weights_and_tokenizer_come_from_a_folder(text: Path, tmp_path: Path) -> None:
    model, folder = recipe(text).model(), tmp_path / "kept"
    kept(model, folder)
    own = recipe(text, pretrained=str(folder), config={})
    state = own.model().state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    data = own.data("train")
    assert data.text[1:10].tolist() == [1, 0, 0, 2, 0, 0, 1, 0, 3]


def test_weights_of_a_folder_are_read_in_parts_where_their_names_are_the_models(text: Path, tmp_path: Path) -> None:
    model, folder = tied_gpt2(text), tmp_path / "kept"
    kept(model, folder)
    own = recipe(text, pretrained=str(folder), config={})
    apart = own.pretrained_weights()
    assert apart is not None
    assert apart.path == folder
    empty = apart.recipe.model()
    assert not any(parameter.any() for parameter in empty.parameters())
    assert empty.state_dict().keys() == model.state_dict().keys()
    assert (recipe(text).pretrained_weights(), apart.recipe.pretrained_weights()) == (None, None)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name.removeprefix("transformer."): each for name, each in tensors.items()}, file, {"format": "pt"})
    assert own.pretrained_weights() is None


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_run_begins_from_the_weights_of_a_folder(train: Any, text: Path, strategy: str, processes: int) -> None:
    model, folder = tied_gpt2(text), text.parent / "kept"
    kept(model, folder)
    options = ("recipe=hf_causal_lm", f"recipe.text={text}", f"recipe.pretrained={folder}", "recipe.context=16")
    run = train(*options, "steps=1", "lr=0", f"strategy={strategy}", f"cluster.processes={processes}")
    assert run.code == 0, run.error
    assert run.json("result.json")["state_digest"] == state_digest(tensor_digests(model.state_dict()))
    assert {*run.json("run_manifest.json")["init_from"]["files"]} >= {path.name for path in folder.glob("model-*")}
    assert "whole" not in run.error


def test_what_cannot_train_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires a model_type"):
        recipe(text, config={})
    with pytest.raises(ConfigError, match="file not found"):
        recipe(tmp_path / "absent")
    with pytest.raises(ConfigError, match="too large for a text of"):
        recipe(text, context=1000).data("train")


def tokens(folder: Path) -> Path:
    """Prepare documents of 5 to 40 tokens."""
    lengths = numpy.random.default_rng(0).integers(5, 41, 300)
    numpy.save(folder / "documents_00000.npy", numpy.concatenate([[0], numpy.cumsum(lengths)]))
    numpy.save(folder / "tokens_00000.npy", numpy.random.default_rng(1).integers(0, 50, lengths.sum(), numpy.uint8))
    return folder


@pytest.mark.parametrize("kind", [TokenWindows, DocumentWindows, PackedDocuments])
def test_a_source_of_tokens_is_learned_and_tested(text: Path, tmp_path: Path, kind: Any) -> None:
    """A batch's loss matches transformers' on each document separately, where documents are known."""
    source = kind(str(tokens(tmp_path)), length=16, cache=Cache(str(tmp_path / "cache")))
    own = recipe(text, source=source, test_share=0.25, config=KNOWN)
    assert own.files() == {}
    assert own.fingerprints()["source"]["size"] >= source.files[0].size
    train, test = own.data("train"), own.data("test")
    assert len(train) + len(test) == len(source)
    assert len(test) == round(0.25 * len(source))
    torch.manual_seed(0)
    model = own.model()
    batch = own.collate(train.__getitems__([0, 3, 5]))
    total, count = own.loss(model, batch)
    expected, predicted = 0.0, 0
    for row in range(3):
        for document in documents_of(batch, row):
            if len(document) > 1:
                expected += float(model(input_ids=document[None], labels=document[None]).loss.detach()) * (
                    len(document) - 1
                )
                predicted += len(document) - 1
    assert int(count) == predicted
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)


def test_a_mixture_is_tested_in_its_shares(text: Path, tmp_path: Path) -> None:
    first = TokenWindows(str(tokens(tmp_path)), length=16)
    data = Mixture({"few": Part(first, weight=0.25), "many": Part(first, weight=0.75)})
    own = recipe(text, source=data, config=KNOWN, test_share=0.5, test_tokens=16 * 40)
    side = round(0.5 * len(first))
    chosen = own.data("test").indices
    assert [sum(index < side for index in chosen), sum(index >= side for index in chosen)] == [10, 30]
    assert len({*chosen}) == 40


def documents_of(batch: Any, row: int) -> list[Tensor]:
    """Split a sample at its document boundaries; a plain window of tokens is one document."""
    if isinstance(batch, Tensor):
        return [batch[row]]
    owners = batch["documents"][row]
    return [batch["tokens"][row][owners == owner] for owner in owners[owners >= 0].unique()]


def test_a_source_that_does_not_fit_is_refused(text: Path, tmp_path: Path) -> None:
    folder = str(tokens(tmp_path))
    with pytest.raises(ConfigError, match=r"recipe.context=16 does not match length=7"):
        recipe(text, source=TokenWindows(folder, length=7), config=KNOWN)
    with pytest.raises(ConfigError, match="a language model requires token data, got JsonLines"):
        recipe(text, source=JsonLines(folder), config=KNOWN)
    file = tmp_path / "words.txt"
    file.write_text("a text of bytes")
    Preparation([file], Tokenizer("bytes")).write_shards(tmp_path / "bytes", processes=1)
    source = TokenWindows(str(tmp_path / "bytes"), length=16)
    with pytest.raises(ConfigError, match="the model has 50 tokens, the data 256"):
        recipe(text, source=source, config=KNOWN)
    assert recipe(text, source=source).model().get_input_embeddings().num_embeddings == 256  # type: ignore[operator]
    with pytest.raises(ConfigError, match="the vocabulary size of the data is unknown"):
        recipe(text, source=TokenWindows(folder, length=16))


def test_a_run_with_fsdp_ends_with_the_bits_of_ddp(train: Any, text: Path) -> None:
    options = (
        *("recipe=hf_causal_lm", f"recipe.text={text}", "recipe.context=16", "steps=4", "reproducibility=elastic"),
        *("recipe.config.hidden_size=32", "recipe.config.num_hidden_layers=2"),
    )
    digests = set()
    for strategy in ("ddp", "fsdp"):
        run = train(*options, f"strategy={strategy}", "cluster.processes=2")
        assert run.code == 0, run.error
        digests.add(run.json("result.json")["state_digest"])
    assert len(digests) == 1
