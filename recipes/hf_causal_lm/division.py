"""Division of transformers models into tensor-parallel slices and pipeline layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from worldsize.core import ConfigError, TensorStyle
from worldsize.strategies.layer_streams import AdaptedLayer
from worldsize.strategies.sequence_chunks import sequence_positions

_STYLES: Mapping[str, TensorStyle] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "embedding_rowwise": "row",
}
_LAYERED = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")  # forward passes as in list_layers


def plan_tensors(model: Any) -> dict[str, TensorStyle]:
    """Return transformers' own plan for tensor parallelism, without tied embeddings.

    Raises:
        ConfigError: the plan has an unsupported style, or leaves parameters beside divided layers undivided.
    """
    tied = _find_tied_embeddings(model)
    styles = {name: style for name, style in _match_patterns(model).items() if name not in tied}
    modules, kind = dict(model.named_modules()), model.config.model_type
    for name, style in styles.items():
        if style not in _STYLES or name not in modules:
            raise ConfigError(
                f"transformers divides {name} of model_type={kind} by {style}, which is not supported with tensor "
                f"parallelism; supported: {', '.join(_STYLES)}. Set strategy.tensor=1 and logical_tensor=1."
            )
    plan = {name: _STYLES[style] for name, style in styles.items()}
    for name in _find_undivided(model, plan):
        raise ConfigError(
            f"transformers' plan for model_type={kind} does not divide {name}, which is used on divided features. Set "
            "strategy.tensor=1 and logical_tensor=1."
        )
    return plan


def _match_patterns(model: Any) -> dict[str, str]:
    """Return the style of each module and parameter that transformers' plan matches."""
    plan = getattr(model, "_tp_plan", None) or {}
    patterns = [(re.compile(re.escape(each).replace(r"\*", r"\d+")), style) for each, style in plan.items()]
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return {name: style for name in names for pattern, style in patterns if pattern.fullmatch(name)}


def _find_tied_embeddings(model: Any) -> list[str]:
    """Return the names of the input and output embeddings if they share a weight, otherwise []."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if None in ends or ends[0].weight is not ends[1].weight:
        return []
    return [name for name, module in model.named_modules() if module in ends]


def _find_undivided(model: nn.Module, plan: Mapping[str, TensorStyle]) -> Iterator[str]:
    """Yield undivided parameters next to column-parallel layers, such as norms of attention heads."""
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == "column"):
        for name, _ in model.get_submodule(parent).named_parameters(prefix=parent):
            if name.rpartition(".")[0] not in plan:
                yield name


def count_heads(model: Any) -> dict[str, int]:
    """Return the numbers of attention heads and of key-value heads."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    counts = {"attention heads": heads, "key-value heads": getattr(config, "num_key_value_heads", None) or heads}
    return {name: count for name, count in counts.items() if count}


def list_layers(model: Any, *, context: int) -> Sequence[nn.Module]:
    """Return the layers of a Llama-like model for windows of ``context`` tokens; the last one returns logits.

    Raises:
        ConfigError: the model has a different structure, or a sliding window.
    """
    _check_layered(model, "in a pipeline", "strategy.pipeline=1")
    config = model.config
    window = getattr(config, "sliding_window", None)
    if window is not None and window <= context:
        raise ConfigError(
            f"sliding_window={window} is not supported in a pipeline with recipe.context={context}: layers attend to "
            "all earlier tokens. Set a larger recipe.config.sliding_window, or strategy.pipeline=1."
        )
    inner = model.model
    decoders = [_Decoder(layer, inner.rotary_emb) for layer in inner.layers]
    return [inner.embed_tokens, *decoders, inner.norm, model.lm_head]


def run_layers(model: Any, tokens_bt: Tensor, positions_bt: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the logits (batch, time, vocabulary) of a Llama-like model for chunks of sequences.

    ``mask``: the mask of attention, for documents, with all tokens of the sequence as keys; None: causal attention.

    Raises:
        ConfigError: the model has a different structure, or a sliding window.
    """
    _check_layered(model, "with sequences in chunks", "strategy.context=1 and logical_context=1")
    if getattr(model.config, "sliding_window", None) is not None:
        raise ConfigError(
            "a sliding window is not supported with sequences in chunks. Set recipe.config.sliding_window=null, or "
            "strategy.context=1 and logical_context=1."
        )
    inner = model.model
    hidden = inner.embed_tokens(tokens_bt)
    rotations = inner.rotary_emb(hidden, position_ids=positions_bt)
    for layer in inner.layers:
        hidden = layer(hidden, attention_mask=mask, position_ids=positions_bt, position_embeddings=rotations)
    logits: Tensor = model.lm_head(inner.norm(hidden))
    return logits


def _check_layered(model: Any, where: str, remedy: str) -> None:
    kind = model.config.model_type
    if kind not in _LAYERED:
        raise ConfigError(
            f"model_type={kind} is not supported {where}; supported: {', '.join(_LAYERED)}. Set {remedy}."
        )


@final
class _Decoder(AdaptedLayer):
    """A decoder layer that computes the rotary embeddings for the positions of its inputs."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__(layer)
        self.rotary = rotary

    def create_arguments(self, hidden: Tensor) -> Mapping[str, Any]:
        positions_1t = sequence_positions(hidden)[None]
        rotations = self.rotary(hidden, position_ids=positions_1t)
        return {"position_ids": positions_1t, "position_embeddings": rotations}  # sdpa is causal without a mask
