"""Trees of tensors of which every worker has its own, as a checkpoint can hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from worldsize.collectives import per_rank
from worldsize.core import World


def spread(tree: Any, world: World) -> Any:
    """Each tensor of ``tree`` as this worker's row of [workers, *shape]; in the same memory."""
    return tree_map(lambda leaf: per_rank.stacked(leaf.detach(), world) if isinstance(leaf, Tensor) else leaf, tree)


def own(tree: Any) -> Any:
    """What :func:`spread` was given, on this worker."""
    return tree_map(lambda leaf: per_rank.own(leaf) if isinstance(leaf, Tensor) else leaf, tree)
