"""Fake tensors without memory or values, to rehearse ranks of models that do not fit on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from worldsize.core import ConfigError, StateDict, Strategy
from worldsize.data.batches import map_tensors
from worldsize.dist.per_rank import local


@final
class FakeTensors:
    """Creates fake tensors inside the context :meth:`made`, without memory or values; ``item()`` returns 1."""

    def __init__(self) -> None:
        self.mode = _Mode(allow_non_fake_inputs=True)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Create fake tensors inside the context."""
        with self.mode, _Numbers():  # type: ignore[no-untyped-call]
            yield

    def check(self, state: StateDict, strategy: Strategy) -> None:
        """Raise ConfigError if the model's tensors are real, which cannot be mixed with fakes.

        Raises:
            ConfigError: ``strategy`` does not shard the model, or the recipe's constructor cannot be deferred.
        """
        tensors = [local(each) for each in state["model"].values() if isinstance(each, Tensor)]
        if not any(isinstance(each, FakeTensor) for each in tensors):  # a buffer may already have been computed
            raise ConfigError(
                f"{type(strategy).__name__} has made the model with real tensors. Leave --fake out, or choose a "
                "strategy that shards it, such as fsdp; what its constructor may do: docs/strategies.md."
            )

    def owns(self, tensor: FakeTensor) -> bool:
        """Return whether the rank owns ``tensor``, which is not one of DTensor's for global shapes."""
        return tensor.fake_mode is self.mode and self.mode.depth < 2

    def of(self, data: Any) -> Any:
        """Return ``data`` with fakes in place of its tensors."""
        return map_tensors(data, self.mode.from_tensor, lambda own: own)


@final
class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that counts its nesting, since DTensor enters the mode of its tensors again."""

    depth = 0

    def __enter__(self) -> Self:
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        super().__exit__(*error)


@final
class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns 1 for every number that a program reads from a fake tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **kwargs or {})
