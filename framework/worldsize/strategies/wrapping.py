"""Chooses the units of a model that are sharded, gathered and freed at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

from torch import nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, Recipe, Reduction
from worldsize.optimizers.muon import needs_matrices

Wrap = Literal["auto", "blocks", "size"]
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict)


def units(recipe: Recipe, model: nn.Module, wrap: Wrap, least: int) -> list[nn.Module]:
    """Return the recipe's blocks, or modules of at least ``least`` parameters; children come before their parents.

    Raises:
        ConfigError: ``wrap="blocks"``, and the recipe defines no blocks.
    """
    blocks = list(recipe.blocks(model))
    if wrap == "blocks" and not blocks:
        raise ConfigError(f"{type(recipe).__name__} names no blocks. Define Recipe.blocks, or set strategy.wrap=size.")
    return blocks if blocks and wrap != "size" else by_size(model, least)


def by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return the smallest modules in ``model`` with at least ``least`` parameters outside of inner units."""
    chosen: list[nn.Module] = []
    for child in model.children():
        _collect(child, least, chosen)
    return chosen


def _collect(module: nn.Module, least: int, chosen: list[nn.Module]) -> int:
    """Count the parameters of ``module`` that are in no unit yet, and append units to ``chosen``."""
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    left = own + sum(_collect(child, least, chosen) for child in module.children())
    if left < least or isinstance(module, _NO_FORWARD) or module in chosen:
        return left
    chosen.append(module)
    return 0


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise ConfigError if a gradient will be a sparse tensor, which cannot be sharded."""
    for name, module in sparse_embeddings(model).items():
        raise ConfigError(
            f"{name} is an {type(module).__name__} with sparse=True, whose gradients cannot be sharded. Make it "
            "dense, or use strategy=parameter_server, which deals its rows to servers, or strategy=ddp."
        )


def refuse_divided_matrices(optimizer: Optimizer) -> None:
    """Raise ConfigError if an update needs whole matrices, of which ranks would have parts."""
    if needs_matrices(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} makes an update of a whole matrix, and this strategy divides matrices over "
            "ranks. Use strategy=ddp, zero (one rank updates each matrix) or parameter_server, or optimizer=adamw."
        )


def refuse_fused(optimizer: Optimizer, reduce: Reduction) -> None:
    """Raise ConfigError if shards would have other bits than the whole, though sums are the same at any world size."""
    if reduce == "ordered" and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer.fused=true: the fused {type(optimizer).__name__} may round the last numbers of a tensor in "
            "another way than the others, and this strategy divides tensors at other places on any number of "
            "processes. Set optimizer.fused=false (TrainingArguments(optim='adamw_torch')), or use strategy=ddp or "
            "zero, or reproducibility=seeded."
        )


def sparse_embeddings(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings of ``model`` with ``sparse=True`` by name, in its order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


@final
class CallingRoot(nn.Module):
    """Holds a model, and calls any function inside the hooks of its own forward pass.

    It is needed because a recipe with several updates calls parts of its model directly, in any order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, action: Callable[[], Any]) -> Any:
        """Call ``action``, which computes with the model or parts of it."""
        return action()
