"""Detaches DTensors without asking torch how the result is sharded, which is as the tensor itself is.

Torch determines that anew for each shape, which takes it more than a millisecond. It detaches each parameter that it
shards, so that this is most of the time in which a model of many shapes is sharded, and the members of a gang that
changes shard theirs again and again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor


def detach_shards() -> None:
    """Let the DTensors of this process be detached by detaching their shards, from now on."""
    with suppress(AttributeError):  # another version of torch does it in another place
        DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.detach.default] = _detached


def _detached(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> DTensor:
    tensor = cast("DTensor", args[0])
    return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)
