"""State of which this rank holds a part: everything else stands as tensors on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from worldsize.core import Recipe, StateDict
from worldsize.strategies.learning import Learning


def outline(recipe: Recipe, model: nn.Module) -> StateDict:
    """The state of training ``model`` whole, all of its tensors on the meta device."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    state = Learning.of(recipe, copy.deepcopy(model, memo)).state()
    found: StateDict = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, state)
    return found


def overlaid(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """``whole`` with what ``part`` has in its place, at any depth."""
    return {
        key: overlaid(child, part[key]) if isinstance(child, Mapping) and key in part else part.get(key, child)
        for key, child in whole.items()
    }
