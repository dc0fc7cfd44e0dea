"""Reads the weights of a checkpoint of Lightning, without running code that it holds."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldsize.core import ConfigError


def load_weights(module: nn.Module, path: Path) -> None:
    """Load the weights of a ``.ckpt`` of Lightning, or of a state_dict that was saved by itself, into ``module``.

    Raises:
        ConfigError: there is no such file, it holds objects that only code could make, or other weights.
    """
    state = _read(path)
    weights = state.get("state_dict", state)
    own = module.state_dict()
    if missing := sorted(own.keys() - weights.keys()):
        raise ConfigError(
            f"recipe.checkpoint={path} has no weights for {', '.join(missing[:3])}. Name a checkpoint of this module."
        )
    if others := sorted(weights.keys() - own.keys()):
        raise ConfigError(
            f"recipe.checkpoint={path} has weights that the module has not: {', '.join(others[:3])}. Name a checkpoint "
            "of this module."
        )
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise ConfigError(
                f"recipe.checkpoint={path}: {name} is of shape {list(weights[name].shape)}, in the module of "
                f"{list(tensor.shape)}. Set recipe.module_args as for the checkpoint."
            )
    module.load_state_dict(dict(weights))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"recipe.checkpoint={path}: there is no such file. Name a .ckpt of Lightning.") from None
    except pickle.UnpicklingError:
        raise ConfigError(
            f"recipe.checkpoint={path} holds objects beside tensors and plain values, or is no checkpoint; reading it "
            "would run code. Save the weights alone: torch.save(module.state_dict(), path)."
        ) from None
    return state
