"""Selection of a model's units: modules that are sharded, gathered and freed together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, Recipe, Reduction
from worldsize.optimizers.muon import needs_matrices

Wrap = Literal["auto", "blocks", "size", "none"]
_READ_PARTS = (nn.MultiheadAttention,)  # read parameters of submodules without calling their forward


def find_units(recipe: Recipe, model: nn.Module, wrap: Wrap, least: int) -> list[nn.Module]:
    """Return the units: the recipe's blocks, or modules with at least ``least`` parameters.

    Children come first. With ``wrap="none"`` there are no units: the model is gathered as a whole. A module that shares
    parameters with others, as with tied weights, is not a unit, since it would be freed while it is needed.

    Raises:
        ConfigError: ``wrap="blocks"``, but the recipe does not define blocks.
    """
    if wrap == "none":
        return []
    blocks = list(dict.fromkeys(recipe.blocks(model)))
    if wrap == "blocks" and not blocks:
        raise ConfigError(
            f"strategy.wrap=blocks requires Recipe.blocks, which {type(recipe).__name__} does not define. Define "
            "Recipe.blocks, or set strategy.wrap=size."
        )
    return _filter_unshared(blocks if blocks and wrap != "size" else find_units_by_size(model, least), model)


def find_units_by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return the smallest modules with at least ``least`` parameters outside of other units."""
    chosen: list[nn.Module] = []
    for child in model.children():
        _collect_units(child, least, chosen)
    return chosen


def _collect_units(module: nn.Module, least: int, chosen: list[nn.Module]) -> int:
    """Append units of ``module`` to ``chosen``; return the number of parameters outside units."""
    own = sum(parameter.numel() for parameter in module.parameters(recurse=isinstance(module, _READ_PARTS)))
    parts: Iterable[nn.Module] = () if isinstance(module, _READ_PARTS) else module.children()
    left = own + sum(_collect_units(child, least, chosen) for child in parts)
    has_forward = type(module).forward is not nn.Module.forward  # false for a ModuleList or ParameterDict
    if left < least or not has_forward or module in chosen:
        return left
    chosen.append(module)
    return 0


def _filter_unshared(chosen: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``chosen`` that do not share parameters with the rest of ``model``."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    shared = {parameter: own for parameter, own in owners.items() if len(own) > 1}

    def is_apart(unit: nn.Module) -> bool:
        parts = set(unit.modules()) if shared else set()
        return all(owner in parts for parameter in unit.parameters() for owner in shared.get(parameter, ()))

    return [unit for unit in chosen if is_apart(unit)]


def find_scalars(model: nn.Module) -> set[nn.Parameter]:
    """Return the scalar parameters, which cannot be sharded and are on every rank."""
    return {parameter for parameter in model.parameters() if parameter.ndim == 0}


def refuse_mixed_dtypes(recipe: Recipe, model: nn.Module, wrap: Wrap, least: int) -> None:
    """Raise ConfigError if trained parameters of a unit, or of the rest, have several dtypes."""
    taken = find_scalars(model)
    for unit in (*find_units(recipe, model, wrap, least), model):
        trained = [pair for pair in unit.named_parameters() if pair[1].requires_grad and pair[1] not in taken]
        taken.update(parameter for _, parameter in trained)
        for name, other in trained[1:]:
            first, parameter = trained[0]
            if other.dtype != parameter.dtype:
                raise ConfigError(
                    f"parameters of a sharded unit require one dtype, but {first} is {_format_dtype(parameter)} and "
                    f"{name} is {_format_dtype(other)}. Use one dtype, put each dtype into a separate block in "
                    "Recipe.blocks, or use strategy=ddp."
                )


def _format_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def refuse_complex(model: nn.Module, *, because: str) -> None:
    """Raise ConfigError if a parameter is complex; ``because``: the reason for the message."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is complex, but {because}. Keep nn.Parameter(torch.view_as_real(...)) and call "
                "torch.view_as_complex in forward, or use strategy=ddp."
            )


def refuse_scalars(model: nn.Module) -> None:
    """Raise ConfigError for a scalar parameter; it cannot be sharded over the data axis."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(
                f"{name} is a scalar and cannot be sharded over data-parallel ranks. Make it "
                "nn.Parameter(torch.ones(1)), or set strategy.pipeline=1 or strategy.data=1."
            )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise ConfigError if a gradient would be sparse, which cannot be sharded."""
    for name, module in sparse_embeddings(model).items():
        raise ConfigError(
            f"sparse gradients cannot be sharded: {name} is an {type(module).__name__} with sparse=True. Set "
            "sparse=False, or use strategy=parameter_server (servers share the rows) or strategy=ddp."
        )


def refuse_divided_matrices(optimizer: Optimizer) -> None:
    """Raise ConfigError if an update needs whole matrices, but ranks would hold shards."""
    if needs_matrices(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} requires whole matrices, but this strategy shards them. Use strategy=ddp, "
            "zero (one rank updates each matrix) or parameter_server, or optimizer=adamw."
        )


def refuse_fused(optimizer: Optimizer, reduce: Reduction) -> None:
    """Raise ConfigError if fused updates of shards would break bitwise equality."""
    if reduce == "ordered" and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(
            "optimizer.fused=true is not supported with reproducibility=elastic on this strategy: the fused "
            f"{type(optimizer).__name__} may round the last elements of a shard differently, and shards depend on the "
            "number of processes. Set optimizer.fused=false (TrainingArguments(optim='adamw_torch')), or use "
            "strategy=ddp or zero, or reproducibility=seeded."
        )


def sparse_embeddings(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings of ``model`` with ``sparse=True``, keyed by name, in module order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
