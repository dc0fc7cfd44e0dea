"""Train any causal language model from Hugging Face transformers on text files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes.hf_causal_lm.division import count_heads, list_layers, plan_tensors, run_layers
from recipes.hf_causal_lm.samples import (
    LanguageBatch,
    check_source,
    find_vocabulary_size,
    has_documents,
    language_batch,
    source_split,
)
from recipes.hf_causal_lm.text import Bytes, Tokenizer, find_text_files, read_tokens
from recipes.stdlib_lm.corpus import Windows
from worldsize.core import ConfigError, FilePath, PretrainedWeights, Range, Recipe, TensorStyle
from worldsize.data.source import Source
from worldsize.data.sources.documents import IGNORED
from worldsize.errors import require
from worldsize.strategies.chunk_tensor import Chunks
from worldsize.strategies.sequence_chunks import document_mask, sequence_positions

_OPTIONS = {"dtype": torch.float32, "attn_implementation": "sdpa"}


def _read_tensor_names(file: Path) -> Collection[str]:
    from safetensors import safe_open

    opened: Any = safe_open(file, "pt")
    names: Collection[str] = opened.keys()
    return names


def _build_model(recipe: HFCausalLM) -> nn.Module:
    """Build the model with random weights, or with zeros if the recipe is ``empty``."""
    transformers = _transformers()
    from transformers.initialization import no_init_weights  # slow import (seconds)

    if recipe.pretrained is not None:
        config = transformers.AutoConfig.from_pretrained(recipe.pretrained)
    else:
        given = {"vocab_size": _vocabulary(recipe), "max_position_embeddings": recipe.context, **recipe.config}
        config = transformers.AutoConfig.for_model(**given)
    with no_init_weights() if recipe.empty else nullcontext():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, **_OPTIONS)
    if recipe.empty:
        model.tie_weights()  # normally done by weight initialization, which is skipped
        for parameter in model.parameters():
            parameter.detach().zero_()
    trained: nn.Module = model.train()
    return trained


def _vocabulary(recipe: HFCausalLM) -> int:
    tokens = recipe.config.get("vocab_size")
    if tokens is None and (recipe.source is None or recipe.tokenizer or recipe.pretrained):
        tokens = _tokenizer(recipe).size
    return int(tokens or 0) if recipe.source is None else find_vocabulary_size(recipe.source, tokens)


def _tokenizer(recipe: HFCausalLM) -> Tokenizer:
    name = recipe.tokenizer or recipe.pretrained
    return _load_tokenizer(name) if name else Bytes()


@lru_cache(1)
def _load_tokenizer(name: str) -> Tokenizer:
    return Tokenizer(_transformers().AutoTokenizer.from_pretrained(name))


def _transformers() -> Any:
    require("recipe=hf_causal_lm", "transformers", extra="recipes")
    import transformers

    return transformers


@final
@dataclass(frozen=True)
class HFCausalLM(Recipe):
    """Train a transformers model from given or random weights, without remote code.

    Args:
        text: a text file, or a folder; its ``*.txt`` files are read in order of their names. Default: the source code
            of the standard library.
        context: tokens per window.
        pretrained: folder or hub name of the initial weights (safetensors). None for random weights.
        tokenizer: folder or hub name. None for the tokenizer of ``pretrained``, or bytes without ``pretrained``.
        config: arguments for ``transformers.AutoConfig.for_model``, used without ``pretrained``.
        source: token source to train on instead of ``text``, selected by ``data=``. With documents, attention and
            prediction stay within each document.
        test_share: fraction held out for testing: the end of the text's tokens, or a source's samples selected by hash.
        test_tokens: maximum number of tokens to test on. None for the whole test split.
        empty: build the model of ``pretrained`` with zero weights, for loading the weights in shards later.

    Raises:
        ConfigError: transformers is not installed, the text is missing or shorter than two windows, or the samples of a
            source are not windows of ``context`` tokens.
    """

    make_optimizer: Callable[..., Optimizer]
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None
    text: Annotated[str | None, FilePath()] = None
    context: Annotated[int, Range(least=1)] = 128
    pretrained: str | None = None
    tokenizer: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    test_share: Annotated[float, Range(above=0, below=1)] = 0.1
    test_tokens: Annotated[int | None, Range(least=1)] = None
    empty: bool = False

    def __post_init__(self) -> None:
        _transformers()
        if self.pretrained is None and "model_type" not in self.config:
            raise ConfigError(
                "recipe.config requires a model_type, e.g. llama. Set recipe.config.model_type or recipe.pretrained."
            )
        if self.source is None:
            self.files()
        else:
            check_source(self.source, self.context)
            _vocabulary(self)

    def model(self) -> nn.Module:
        if self.pretrained is None or self.empty:
            return _build_model(self)
        auto = _transformers().AutoModelForCausalLM
        model: nn.Module = auto.from_pretrained(self.pretrained, use_safetensors=True, **_OPTIONS)
        return model.train()

    def pretrained_weights(self) -> PretrainedWeights | None:
        """Return the :attr:`pretrained` folder if its safetensors match the model's names."""
        files = sorted(Path(self.pretrained).glob("*.safetensors")) if self.pretrained else []
        if self.empty or not files:
            return None
        names = {name for file in files for name in _read_tensor_names(file)}
        apart = replace(self, empty=True)
        with torch.device("meta"):
            tensors = apart.model().state_dict(keep_vars=True)
        read = {id(tensors[name]) for name in names & tensors.keys()}  # one name is enough for tied weights
        fits = names <= tensors.keys() and read == {id(tensor) for tensor in tensors.values()}
        return PretrainedWeights(Path(str(self.pretrained)), apart) if fits else None

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer) if self.make_schedule else None

    def tokens_per_sample(self) -> int:
        return self.context

    def data(self, split: str) -> Any:
        """Return windows of ``context`` tokens, for :func:`language_batch`."""
        if self.source is not None:
            return source_split(
                self.source, split, share=self.test_share, tokens=self.test_tokens, context=self.context
            )
        tokens = read_tokens(self.files().values(), _tokenizer(self))
        first = int(len(tokens) * (1 - self.test_share))
        if min(first, len(tokens) - first) < self.context:
            raise ConfigError(
                f"recipe.context={self.context} is too large for a text of {len(tokens)} tokens. "
                "Use more text, or decrease recipe.context."
            )
        if split == "test":
            return Windows(tokens[first:][: self.test_tokens], self.context)
        return Windows(tokens[: first // self.context * self.context], self.context)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the summed cross entropy in nats and the number of predicted tokens, two scalars.

        A batch of token ids has shape (batch, sequence), its logits (batch, sequence, vocabulary).
        """
        asked = language_batch(batch)
        logits, targets = _compute_logits(model, asked), asked.targets_bt.flatten()
        nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return nats, (targets != IGNORED).sum()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return the cross entropy in nats per token as (sum, count); its exponential is the perplexity."""
        asked = language_batch(batch)
        logits, targets = _compute_logits(model, asked).float(), asked.targets_bt.flatten()
        nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none").double().sum()
        return {"nats_per_token": (nats, (targets != IGNORED).sum())}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers that transformers never splits across devices."""
        names = getattr(model, "_no_split_modules", None) or ()
        return [module for module in model.modules() if type(module).__name__ in names]

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers of a Llama-like model. Documents are not supported: stages do not pass on positions."""
        if self.source is not None and has_documents(self.source):
            raise ConfigError(
                "data with documents is not supported in a pipeline: its stages do not pass positions in documents. "
                "Set data=tokens, or strategy.pipeline=1."
            )
        return list_layers(model, context=self.context)

    def model_inputs(self, batch: Any) -> tuple[Tensor]:
        return (language_batch(batch).inputs_bt,)

    def cut_sequences(self, batch: Any, cut: Callable[[Tensor, int], Tensor]) -> LanguageBatch:
        asked = language_batch(batch)
        inputs_bt, targets_bt = cut(asked.inputs_bt, 1), cut(asked.targets_bt, 1)
        if asked.positions_bt is None:
            return LanguageBatch(inputs_bt, targets_bt, sequence_positions(inputs_bt)[None])
        documents_bt = cut((asked.positions_bt == 0).cumsum(1), 1)
        return LanguageBatch(inputs_bt, targets_bt, cut(asked.positions_bt, 1), document_mask(documents_bt))

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        return plan_tensors(model)

    def tensor_units(self, model: nn.Module) -> Mapping[str, int]:
        return count_heads(model)

    def save_assets(self, folder: Path) -> None:
        _tokenizer(self).save(folder)

    def files(self) -> Mapping[str, Path]:
        return {} if self.source is not None else find_text_files(self.text)

    def fingerprints(self) -> Mapping[str, Mapping[str, Any]]:
        return {} if self.source is None else {"source": self.source.fingerprint()}


def _compute_logits(model: nn.Module, asked: LanguageBatch) -> Tensor:
    """Return logits (batch * time, vocabulary)."""
    if isinstance(asked.inputs_bt, Chunks) and isinstance(model, _transformers().PreTrainedModel):
        return run_layers(model, asked.inputs_bt, asked.positions_bt, asked.mask).flatten(0, 1)
    positions = {} if asked.positions_bt is None else {"position_ids": asked.positions_bt}
    output = model(input_ids=asked.inputs_bt, use_cache=False, **positions)
    logits_btv: Tensor = output if isinstance(output, Tensor) else output.logits  # a pipeline returns only the logits
    return logits_btv.flatten(0, 1)
