"""Refuses recipes that parameter servers cannot train, before the start."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, MultiUpdateRecipe, Recipe, saves_state
from worldsize.strategies.parameter_changes import refuse_gradient_hooks
from worldsize.strategies.step_hooks import refuse_step_hooks
from worldsize.strategies.wrapping import refuse_complex, sparse_embeddings


def check_served(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse models and optimizers that change weights that no server owns.

    Raises:
        ConfigError: the model has batch statistics, complex parameters or hooks on gradients, or the optimizer has
            step hooks or no learning rate.
    """
    refuse_gradient_hooks(model)
    refuse_step_hooks(
        optimizer,
        because="which no server can run: each has a part of the parameters. Use strategy=ddp, or remove the hook.",
    )
    if any(not isinstance(group.get("lr"), float | int | Tensor) for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} has no learning rate (lr), by which servers scale an update. Set its lr, or "
            "use strategy=ddp."
        )
    refuse_complex(model, because="servers hold real numbers")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"{name} is a {type(module).__name__}, whose statistics no server owns. Use LayerNorm or GroupNorm, "
                "or strategy=ddp."
            )


def refuse_remembering(recipe: Recipe) -> None:
    """Raise ConfigError for a recipe that keeps values from step to step, in processes that come and go."""
    if recipe.remembers or saves_state(recipe):
        raise ConfigError(
            f"{type(recipe).__name__} keeps values from step to step in each process, and workers of a parameter "
            "server come and go. Use strategy=ddp, zero or single."
        )


def check_updates(recipe: MultiUpdateRecipe, *, consistency: str, replicas: int, compression: str) -> None:
    """Refuse options with which several updates per step are not exact.

    Args:
        recipe: The recipe with several updates.
        consistency: The effective consistency of the strategy.
        replicas: Number of standbys of each server.
        compression: The format of pushed gradients.

    Raises:
        ConfigError: steps overlap, servers have standbys, or gradients are compressed.
    """
    kind = type(recipe).__name__
    if consistency != "sync":
        raise ConfigError(
            f"{kind} takes several updates a step, which do not overlap with those of other steps. "
            "Set strategy.consistency=sync, or strategy=ddp."
        )
    if replicas:
        raise ConfigError(
            f"{kind} takes several updates a step, in the middle of which no standby can take over. "
            "Set strategy.replicas=0; with launcher.max_restarts a run goes on from its last checkpoint."
        )
    if compression != "none":
        raise ConfigError(
            f"{kind} takes several updates a step, whose gradients are not compressed. Set strategy.compression=none."
        )


def check_no_tables(recipe: MultiUpdateRecipe, model: nn.Module) -> None:
    """Refuse tables of rows for a recipe with several updates a step.

    Raises:
        ConfigError: the model has a sparse embedding.
    """
    for name in sparse_embeddings(model):
        raise ConfigError(
            f"{name} has sparse=True, and {type(recipe).__name__} takes several updates a step, which servers make of "
            "dense parameters alone. Set sparse=False."
        )
